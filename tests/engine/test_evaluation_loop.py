"""An evaluation that computes many batches in a loop on the device."""

from collections.abc import Iterator
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics

from tests.engine.test_program import cross_entropy, experiment
from trainer import config
from trainer.config import ConfigError
from trainer.engine import evaluation
from trainer.engine.datasets import split_sizes
from trainer.engine.evaluation import Evaluation
from trainer.engine.plan import make_plan
from trainer.engine.program import Program, load_located

MORE = {
    "a perceptron": ["model=!models.mlp {width: 64, depth: 2}"],
    "bfloat16": ["model=!models.mlp {width: 64, depth: 2}", "precision=bfloat16"],
    "mixed": ["model=!models.mlp {width: 16, depth: 2}", "precision=mixed"],
    "averages": ["model=!models.mlp {width: 16, depth: 2}", "ema_decay=0.9"],
    "batches of 1": ["model=!models.mlp {width: 8}", "data.eval_batch_size=1"],
    "batches of 7": ["model=!models.mlp {width: 8}", "data.eval_batch_size=7"],
    "a small vit": ["model=!models.vit {width: 16, depth: 1, num_heads: 2, patch_size: 4}"],
}
DIGITS = """
model: !models.mlp {width: 4, depth: 1}
data: !data.digits {batch_size: 32, validation: 0.1}
loss: !losses.softmax_cross_entropy {label_smoothing: 0.1}
metrics: {accuracy: !metrics.accuracy , top: !metrics.top_k_accuracy {k: 3}}
optimizer: !optax.adamw {learning_rate: 3e-2}
steps: 64
log_every: 64
eval_every: 64
save_every: 64
"""


def states(program: Program) -> Iterator[Any]:
    """Yields the first state, and one after a few steps."""
    state = program.init()
    yield jax.tree.map(jnp.copy, state)
    batches = program.feed.batches(0)
    for _ in range(3):
        state, _ = program.step(state, program.feed.to_devices(next(batches)))
    yield state


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of batches of every loop that is computed."""
    found, real = [], Evaluation.__init__

    def noting(self: Evaluation, *arguments: Any) -> None:
        real(self, *arguments)
        inner = self._evaluate_all

        def note(total: Any, given: Any, batches: Any, count: Any, size: int) -> Any:
            found.append(int(count))
            return inner(total, given, batches, count, size=size)

        self._evaluate_all = note

    monkeypatch.setattr(Evaluation, "__init__", noting)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_an_evaluation_in_a_loop_has_the_values_of_one_batch_after_the_other(
    name, tmp_path, monkeypatch
):
    looped = calls(monkeypatch)
    (tmp_path / "run.yaml").write_text(DIGITS)
    program = load_located(config.load([tmp_path / "run.yaml"], sets=MORE[name]))
    one = load_located(config.load([tmp_path / "run.yaml"], sets=[*MORE[name], "steps_per_call=1"]))
    for state in states(program):
        found = program.evaluation.run_splits(state)
        assert looped
        # Blocks of any length have one form of evaluation, and so the same bits.
        assert one.evaluation.run_splits(state) == found
        looped.clear()
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "most_in_a_loop", lambda *_: 1)
            alone = Evaluation(program.experiment, program.mesh, program._insert)
            singly = alone.run_splits(state)
        assert not looped and singly.keys() == found.keys()
        np.testing.assert_allclose([*singly.values()], [*found.values()], rtol=1e-6)
    assert {name.partition("/")[0] for name in found} == {"validation", "eval"}


def test_aux_values_of_the_loss_are_added_in_a_loop_as_batch_by_batch(monkeypatch):
    def loss(outputs: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict]:
        return cross_entropy(outputs, batch), {"scale": jnp.mean(outputs**2)}

    looped = calls(monkeypatch)
    program = Program(experiment(loss=loss, log_every=64, eval_every=64, save_every=64))
    state = program.init()
    found = program.evaluation.run_splits(state)
    assert looped == [2] and found["eval/scale"] > 0
    monkeypatch.setattr(evaluation, "most_in_a_loop", lambda *_: 1)
    singly = Evaluation(program.experiment, program.mesh, program._insert).run_splits(state)
    assert looped == [2]
    np.testing.assert_allclose([*singly.values()], [*found.values()], rtol=1e-6)


def test_all_splits_have_one_program_and_only_the_last_batch_is_part_of_it(monkeypatch):
    looped = calls(monkeypatch)
    program = Program(experiment(log_every=64, eval_every=64, save_every=64))
    state = program.init()
    batches = [
        batch
        for split in split_sizes(program.experiment.data)
        for batch in program.evaluation.batches(split)
    ]
    shorter = {name: x[:-1] for name, x in batches[0].items()}
    whole = program.evaluation.run_split(state, "test", lambda _: iter(batches * 3))
    looped.clear()
    mixed = [*batches, shorter, *batches]
    assert program.evaluation.run_split(state, "test", lambda _: iter(mixed)) != whole
    assert looped == [len(batches), 1, len(batches)]


@flax.struct.dataclass
class Everything(clu_metrics.Metric):
    """Keeps all values, so that its state grows with every batch."""

    values: jax.Array

    @classmethod
    def empty(cls) -> "Everything":
        return cls(values=jnp.zeros(0))

    @classmethod
    def from_model_output(cls, loss: jax.Array, **_: Any) -> "Everything":
        return cls(values=loss)

    def merge(self, other: "Everything") -> "Everything":
        return type(self)(values=jnp.concatenate([self.values, other.values]))

    def compute(self) -> jax.Array:
        return jnp.median(self.values)


def test_a_metric_whose_state_grows_is_computed_batch_by_batch(monkeypatch):
    looped = calls(monkeypatch)
    every = {"log_every": 64, "eval_every": 64, "save_every": 64}
    program = Program(experiment(metrics={"median": Everything}, **every))
    found = program.evaluation.run_splits(program.init())
    assert not looped and np.isfinite(found["eval/median"])


@flax.struct.dataclass
class PerClass(Everything):
    """Computes four values, where a row has room for one."""

    def compute(self) -> jax.Array:
        return jnp.zeros(4) + super().compute()


@flax.struct.dataclass
class Forgetful(Everything):
    """Forgets to return what it merged."""

    def merge(self, other: Any) -> Any:
        super().merge(other)


@flax.struct.dataclass
class Widened(Everything):
    """Merges to the class above it, whose `compute` is another one."""

    def merge(self, other: Any) -> Any:
        return Everything(values=super().merge(other).values)

    def compute(self) -> jax.Array:
        return jnp.mean(self.values)


@flax.struct.dataclass
class Outside(Everything):
    """Computes its value outside of jax."""

    def compute(self) -> Any:
        return np.median(np.asarray(self.values))


class Bare(Everything):
    """Lacks the decorator, without which jax sees no arrays in it."""


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (Bare, "The metric 'mine' is of class Bare, which jax does not know as a tree of arrays"),
        (PerClass, "The metric 'mine' computes float32[4] ({place}), and must compute a scalar"),
        (Forgetful, "merge() of the metric 'mine' returned None ({place}). It must return"),
        (Widened, "merge() of the metric 'mine' returned an Everything ({place}). It must return"),
    ],
)
def test_a_metric_is_traced_whole_before_the_first_step(metric, words):
    with pytest.raises(ConfigError) as caught:
        make_plan(Program(experiment(metrics={"mine": metric})))
    method = metric.merge if "merge" in words else metric.compute
    line = method.__code__.co_firstlineno
    assert words.format(place=f"tests/engine/test_evaluation_loop.py:{line}") in str(caught.value)


def test_a_metric_that_is_computed_outside_of_jax_is_accepted():
    program = Program(experiment(metrics={"mine": Outside}))
    make_plan(program)
    assert np.isfinite(program.evaluation.run_splits(program.init())["eval/mine"])


@pytest.mark.long
def test_stacked_batches_stay_below_64_mib(monkeypatch):
    looped = calls(monkeypatch)
    monkeypatch.setattr("trainer.engine.evaluation.MOST_BYTES", 3 * 8 * (5 + 1 + 1) * 4)
    program = Program(experiment(log_every=64, eval_every=64, save_every=64))
    batches = list(program.experiment.data.evaluate())
    given = [*batches * 2, batches[0]]
    program.evaluation.run_split(program.init(), "test", lambda _: iter(given))
    assert looped == [2, 2, 1]
