"""Steps on simulated devices for tests/engine/test_precision.py: `python -m ... FOLDER`.

Prints for each case the dtypes in which the partitioner adds arrays over the devices that split a
batch, and how far the step is from one whose gradients are added by hand in float32.
"""

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests import compiled_programs

FLAGS = "--xla_dump_hlo_as_text --xla_dump_to={folder} --xla_dump_hlo_pass_re=spmd.*"


MESHES = {
    "data 2, fsdp 2": {"data": 2, "fsdp": 2},
    "fsdp 4": {"fsdp": 4},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}
REDUCTIONS = {"compute": "bfloat16", "reductions": "float32"}


def main(folder: Path) -> None:
    """Compiles and runs the cases; XLA writes its programs into the folder."""
    for row in (*two_devices(folder), *refused(), *terms(), *whole_steps(folder)):
        print(json.dumps(row), flush=True)


def reduced(folder: Path, mesh: Any) -> list[str]:
    """Returns the dtypes of the sums of arrays over devices, sorted, without repetitions.

    Sums over "tensor" alone, which are those of activations, are left out.
    """
    from trainer.engine.collectives import axes_of_devices, find_collectives

    [file] = folder.glob("**/*packed_step*after_spmd-partitioning*")
    found = set()
    for line in file.read_text().splitlines():
        summed = re.search(r"= \(?(\w+)\[\d[\d,]*\]\S* all-reduce\(", line)
        if summed and axes_of_devices(find_collectives(line)[0], mesh.shape) != ("tensor",):
            found.add(summed[1])
    return sorted(found)


def two_devices(folder: Path) -> Iterator[dict[str, Any]]:
    """Takes a step in each precision on a mesh of data alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from tests.engine import test_program as cases
    from trainer.engine.precision import to_bfloat16
    from trainer.engine.program import Program

    def loss(params: Any, batch: Any) -> Any:
        logits = cases.Net().apply({"params": to_bfloat16(params)}, to_bfloat16(batch["image"]))
        return cases.cross_entropy(logits, batch).mean()

    def by_hand(params: Any, batch: Any) -> Any:
        halves = [{name: x[part] for name, x in batch.items()} for part in (np.s_[:4], np.s_[4:])]
        grads = [jax.grad(loss)(params, half) for half in halves]
        return jax.tree.map(lambda p, a, b: p - 0.5 * (a + b) / 2, params, *grads)

    given = {
        "mixed": "mixed",
        "float32": REDUCTIONS,
        "both": {"parameters": "bfloat16", "reductions": "float32", "master": "float32"},
    }
    for name, precision in given.items():
        sgd = partial(optax.sgd, 0.5)
        changes = {"optimizer": sgd, "metrics": {}, "mesh": {"data": 2}}
        program = Program(cases.experiment(precision=precision, **changes))
        state = program.init()
        before = jax.device_get(state.opt_state.master or state.params)
        batch = next(program.experiment.data.train(0, 0))
        shutil.rmtree(folder, ignore_errors=True)
        state, _ = program.step(state, program.feed.to_devices(batch))
        after = jax.device_get(state.opt_state.master or state.params)
        distance = 0.0
        if name == "float32":
            wanted = by_hand(before, batch)
            apart = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), after, wanted)
            distance = max(jax.tree.leaves(apart))
        yield {"case": name, "reduced": reduced(folder, program.mesh), "distance": distance}


def refused() -> Iterator[dict[str, Any]]:
    """Traces a step whose batch statistics do not allow it."""
    from tests.engine import test_program as cases
    from trainer.engine.contracts import ComponentError
    from trainer.engine.program import Program

    try:
        given = {"model": cases.NetWithStatistics(), "mesh": {"data": 2}}
        program = Program(cases.experiment(precision=REDUCTIONS, **given))
        program.trace(program.abstract_state())
    except ComponentError as error:
        yield {"case": "statistics", "refused": str(error)}


class Repeated:
    """The same batch at every step, which is also that of the evaluation."""

    fingerprint = "repeated"

    def __init__(self, batch: dict[str, Any]):
        import jax

        self.batch = batch
        self.batch_size = self.num_examples = self.num_eval_examples = len(
            next(iter(batch.values()))
        )
        self.element_spec = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}

    def train(self, batch_index: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yields batches without end."""
        return itertools.repeat(self.batch)

    def evaluate(self) -> Iterator[dict[str, Any]]:
        """Yields one batch."""
        import numpy as np

        yield {"mask": np.ones(self.batch_size, np.float32), **self.batch}


def terms() -> Iterator[dict[str, Any]]:
    """Adds 256, 1, 1 and 1, the gradients of four parts of a batch, for each of 8 weights."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    from tests.engine import test_program as cases
    from trainer.engine.program import Program

    class Product:
        def init(self, key: Any, batch: Any) -> Any:
            return {"weights": jnp.zeros(8)}, {}

        def apply(self, params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
            return batch["x"] @ params["weights"], state

    x = np.asarray([256, 1, 1, 1], np.float32)[:, None] * np.ones(8, np.float32)
    for name, axes in MESHES.items():
        found = {}
        for role, precision in {"float32": REDUCTIONS, "mixed": "mixed"}.items():
            given = {"model": Product(), "data": Repeated({"x": x}), "mesh": axes, "metrics": {}}
            given |= {"loss": lambda outputs, batch: -outputs, "optimizer": partial(optax.sgd, 1.0)}
            program = Program(cases.experiment(precision=precision, **given))
            state, _ = program.step(program.init(), program.feed.to_devices({"x": x}))
            found[role] = np.asarray(state.params["weights"]).tolist()
        yield {"case": f"terms, {name}", **found}


def whole_steps(folder: Path) -> Iterator[dict[str, Any]]:
    """Takes a step of a GPT with all that a step may have, and the same by hand on one device.

    The model computes in float32 with parameters that were rounded to bfloat16, so that only the
    rounding of their gradients differs.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import optim
    from optim.dtypes import widen
    from tests.engine import test_program as cases
    from trainer import losses, models
    from trainer.engine.precision import describe_precision, to_bfloat16
    from trainer.engine.program import Program

    gpt = models.gpt(64, 16, 1, 4, dropout=0.2, loss_chunk=6)

    def apply(params: Any, state: Any, batch: Any, **more: Any) -> Any:
        return gpt.apply(widen(params), state, batch, **more)

    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 64, (8, 13), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "label": tokens[:, 1:]}
    batch["mask"] = draw.integers(0, 2, (8, 12)).astype(np.float32)
    loss_of = losses.softmax_cross_entropy()

    def by_hand(params: Any, seed: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), 1)

        def loss(params: Any) -> Any:
            total = 0.0
            for i in range(2):  # each of four devices has one example of a microbatch
                keys = jax.random.split(jax.random.fold_in(key, i), 4)
                for device in range(4):
                    own = {name: x[i::2][device : device + 1] for name, x in batch.items()}
                    more = {"key": keys[device], "train": True}
                    outputs, _ = apply(to_bfloat16(params), {}, own, **more)
                    values: Any = loss_of(outputs, own)
                    values = values[0] if isinstance(values, tuple) else values
                    total += (jnp.where(own["mask"] > 0, values, 0)).sum()
            return total / batch["mask"].sum()

        value, grads = jax.value_and_grad(loss)(params)
        norm = optax.tree.norm(grads)
        after = jax.tree.map(lambda p, g: p - 0.5 * g * jnp.minimum(1.0, 0.1 / norm), params, grads)
        ema = jax.tree.map(lambda p, q: 0.9 * p + 0.1 * q, params, after)
        return {"loss": value, "norm": norm, "params": after, "ema": ema}

    def distance(x: Any, y: Any, before: Any = None) -> float:
        """The distance of two values, or of two updates, as a part of the second."""
        away = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y), x, y)
        of = y if before is None else jax.tree.map(np.subtract, jax.device_get(y), before)
        return float(optax.tree.norm(away) / optax.tree.norm(of))

    for name, axes in MESHES.items():
        recipe = {"all": optim.group(".*", partial(optax.sgd, 0.5))}
        given = {"model": gpt._replace(apply=apply), "data": Repeated(batch), "mesh": axes}
        given |= {"loss": loss_of, "optimizer": optim.optimizer(recipe, clip_norm=0.1)}
        given |= {"metrics": {}, "microbatches": 2, "ema_decay": 0.9}
        program = Program(cases.experiment(precision=REDUCTIONS, **given))
        of, state = program.experiment, program.init()
        before, seed = jax.device_get((state.params, state.run_state["seed"]))
        wanted = jax.jit(by_hand)(before, seed)
        shutil.rmtree(folder, ignore_errors=True)
        state, row = program.step(state, program.feed.to_devices(batch))
        yield {
            "case": f"step, {name}",
            "reduced": reduced(folder, program.mesh),
            "loss": distance(row["train/loss"], wanted["loss"]),
            "norm": distance(row["grad_norm"], wanted["norm"]),
            "params": distance(jax.device_get(state.params), wanted["params"], before),
            "ema": distance(jax.device_get(state.ema), wanted["ema"], before),
            "plan": describe_precision(of.roles, of.optimizer, state, program.mesh),
        }


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{compiled_programs.xla_flags(8)} {FLAGS.format(folder=sys.argv[1])}"
    main(Path(sys.argv[1]))
