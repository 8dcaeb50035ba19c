"""Data sets that misbehave, for tests of what a run does then."""

import functools
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optim.paths import flatten

__all__ = [
    "points",
    "poisoned",
    "spoiled",
    "impure",
    "counted",
    "sleepy",
    "validated",
    "loss_returning",
    "loss",
    "slow_loss",
    "idle",
    "branching",
    "note",
    "broken_hook",
    "Undefined",
    "Evaluated",
    "raising",
    "deadly",
    "marked",
    "loss_refusing_marks",
]


class Points:
    """Random points in three classes: 22 to train on in batches of 8, 11 to test on.

    An epoch is no whole number of batches, and the last batch of the test split is filled up.
    """

    batch_size, num_examples, num_eval_examples = 8, 22, 11
    fingerprint = "points"
    element_spec = {
        "image": jax.ShapeDtypeStruct((8, 4, 4, 1), np.float32),
        "label": jax.ShapeDtypeStruct((8,), np.int32),
    }

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.x = draw.normal(size=(33, 4, 4, 1)).astype(np.float32)
        self.y = draw.integers(0, 3, 33).astype(np.int32)

    def train(self, batch_index, seed):
        while True:
            at = np.arange(batch_index * 8, batch_index * 8 + 8)
            orders = {e: np.random.default_rng((seed, e)).permutation(22) for e in at // 22}
            take = np.asarray([orders[i // 22][i % 22] for i in at])
            yield self.batch(batch_index, {"image": self.x[take], "label": self.y[take]})
            batch_index += 1

    def batch(self, batch_index, batch):
        return batch

    def evaluate(self):
        for start in (22, 30):
            take = np.arange(start, start + 8)
            mask = (take < 33).astype(np.float32)
            take = np.minimum(take, 32)
            yield {"image": self.x[take], "label": self.y[take], "mask": mask}


class Poisoned(Points):
    def __init__(self, at: Sequence[int], factor: float):
        super().__init__()
        self.at, self.factor = frozenset(at), factor

    def batch(self, batch_index, batch):
        if batch_index in self.at:
            batch["image"] = batch["image"] * np.float32(self.factor)
        return batch


class Spoiled(Poisoned):
    """Has a pixel that is not a number in the test split, besides what `poisoned` does."""

    def evaluate(self):
        for batch in super().evaluate():
            batch["image"][0, 0, 0, 0] = np.nan
            yield batch


class Mislabelled(Points):
    """Adds to the labels of the batches with these numbers, which are 0 to 2 otherwise."""

    def __init__(self, at: Sequence[int], add: int):
        super().__init__()
        self.at, self.add = frozenset(at), add

    def batch(self, batch_index, batch):
        if batch_index in self.at:
            batch["label"] = batch["label"] + np.int32(self.add)
        return batch


class Impure(Points):
    """Counts its own batches: they depend on when the process began."""

    made = 0

    def batch(self, batch_index, batch):
        self.made += 1
        return batch | {"image": batch["image"] + np.float32(self.made)}


class Counted(Points):
    """Says how many tokens its examples have."""

    def __init__(self, tokens_per_example: int):
        super().__init__()
        self.tokens_per_example = tokens_per_example


def counted(tokens_per_example: int = 100) -> Counted:
    return Counted(tokens_per_example)


class Sleepy(Points):
    def __init__(self, at: int, seconds: float, every: bool):
        super().__init__()
        self.at, self.seconds, self.every = at, seconds, every

    def batch(self, batch_index, batch):
        seconds = self.seconds * float(os.environ.get("UNRULY_SLOWER", "1"))
        time.sleep(seconds if self.every or batch_index == self.at else 0)
        return batch


class Short(Points):
    """Ends, which no data set may."""

    def train(self, batch_index, seed):
        return itertools.islice(super().train(batch_index, seed), max(0, 7 - batch_index))


def short() -> Short:
    return Short()


class Validated(Points):
    """Has a validation split, and no test split."""

    splits = ("validation",)

    def evaluate(self, split):
        assert split == "validation"
        return super().evaluate()


def validated() -> Validated:
    return Validated()


def points() -> Points:
    return Points()


def poisoned(at: Sequence[int] = (), factor: float = float("nan")) -> Poisoned:
    """Multiplies the images of the batches with these numbers, counted from 0."""
    return Poisoned(at, factor)


def spoiled(at: Sequence[int] = (), factor: float = float("nan")) -> Spoiled:
    return Spoiled(at, factor)


def mislabelled(at: Sequence[int] = (), add: int = 7) -> Mislabelled:
    """Gives labels that are no classes."""
    return Mislabelled(at, add)


def impure() -> Impure:
    return Impure()


def sleepy(at: int = 20, seconds: float = 2.0, every: bool = False) -> Sleepy:
    """Takes its time for one batch."""
    return Sleepy(at, seconds, every)


class Idle:
    """A classifier of one layer, with a parameter that the outputs do not depend on."""

    def __init__(self, root: float):
        self.root = root

    def init(self, key, batch):
        kernel = 0.1 * jax.random.normal(key, (16, 3))
        return {"head": {"kernel": kernel}, "idle": jnp.full(4, self.root) ** 2}, {}

    def apply(self, params, state, batch, *, key, train):
        return batch["image"].reshape(-1, 16) @ params["head"]["kernel"], state


def idle(root: float = 1.0) -> Idle:
    return Idle(root)


def loss():
    """Takes the logarithm of what becomes 0 for one label too many."""

    def of(outputs, batch):
        distance = jnp.square(outputs).sum(-1) * (batch["image"].sum() > 0)
        return jnp.log(distance)

    return of


def slow_loss(seconds: float = 0.01):
    """Computes a cross-entropy on devices that take their time."""

    def wait(x):
        time.sleep(seconds)
        return x

    def of(outputs, batch):
        one = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1.0))
        log_p = jax.nn.log_softmax(outputs * jax.lax.stop_gradient(one))
        return -jnp.take_along_axis(log_p, batch["label"][:, None], axis=1)[:, 0]

    return of


def loss_returning(what: str):
    """Returns a loss that returns what a loss may return, and what it may not."""

    def of(outputs, batch):
        log_p = jax.nn.log_softmax(outputs)
        losses = -jnp.take_along_axis(log_p, batch["label"][:, None], axis=1)[:, 0]
        mask = batch.get("mask", jnp.ones_like(losses))
        mean = (losses * mask).sum() / mask.sum()
        return {
            "aux": (losses, {"double": 2 * mean}),
            "third shape": losses[:, None, None],
            "vector": (losses, {"each": losses}),
            "taken": (losses, {"accuracy": mean}),
        }[what]

    return of


def branching(learning_rate: float, power: float = 1.0) -> optax.GradientTransformation:
    """Branches in Python on one of its floats, only when it updates."""

    def update(updates, state, params=None):
        factor = 1.0 if power == 1.0 else 2.0
        return jax.tree.map(lambda g: -learning_rate * factor * g, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def note(file: str) -> Callable[..., None]:
    """Returns a hook that appends what it is called with to a file, as lines of JSON."""

    def hook(step, metrics, params):
        leaves = {k: np.asarray(x).tolist() for k, x in flatten(params).items()}
        with open(file, "a", encoding="utf-8") as out:
            print(json.dumps([step, metrics, leaves]), file=out)
        metrics.clear()  # the run's own rows must not depend on what a hook does with its copy

    return hook


def broken_hook(at: int) -> Callable[..., None]:
    """Returns a hook that raises after a step."""
    return functools.partial(_fail, at)


def _fail(at, step, metrics, params):
    if step == at:
        raise RuntimeError("the disk of the lab is on fire")


class Raising(Points):
    """Raises at a batch for one seed."""

    def __init__(self, seed: int, at: int):
        super().__init__()
        self.seed, self.at = seed, at

    def train(self, batch_index, seed):
        for index, batch in enumerate(super().train(batch_index, seed), batch_index):
            if seed == self.seed and index == self.at:
                self.end()
            yield batch

    def end(self):
        raise RuntimeError("this batch cannot be read")


class Deadly(Raising):
    """Ends its process by a segmentation fault at a batch for one seed."""

    def end(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class Marked(Points):
    """Has a pixel of 1e9 in every batch for one seed."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def train(self, batch_index, seed):
        for batch in super().train(batch_index, seed):
            if seed == self.seed:
                batch["image"][0, 0, 0, 0] = 1e9
            yield batch


def marked(seed: int) -> Marked:
    return Marked(seed)


def loss_refusing_marks():
    """Raises in a callback of the compiled program for a batch of `marked`."""

    def check(images):
        if np.max(images) > 1e8:
            raise ValueError("a pixel is\n    marked")
        return np.float32(0)

    def of(outputs, batch):
        none = jax.pure_callback(check, jax.ShapeDtypeStruct((), np.float32), batch["image"])
        return jnp.square(outputs).sum(-1) + none

    return of


def raising(seed: int, at: int = 6) -> Raising:
    return Raising(seed, at)


def deadly(seed: int, at: int = 0) -> Deadly:
    return Deadly(seed, at)


@flax.struct.dataclass
class Undefined(clu.metrics.Average):
    """A metric that is 0 / 0 for this data set, as that of a class without examples is."""

    @classmethod
    def from_model_output(cls, **kwargs):
        return cls(total=jnp.zeros(()), count=jnp.zeros(()))


class Evaluated:
    """A hook that notes what it gets after each evaluation."""

    at = "evaluation"

    def __init__(self, file: str, most: int = 100):
        self.file, self.most = file, most

    def check(self, experiment):
        if experiment.steps > self.most:
            raise ValueError(f"{experiment.steps} steps are more than {self.most}.")

    def bind(self, context):
        def note(step, metrics, params, model_state):
            leaves = {path: np.asarray(x).tolist() for path, x in flatten(params).items()}
            with open(self.file, "a") as file:
                file.write(json.dumps([context.kept, step, metrics, leaves]) + "\n")

        return note
