"""Steps on two simulated devices for tests/engine/test_precision.py: `python -m ... FOLDER`.

Prints for each precision the dtypes in which the partitioner adds arrays over devices, and how far
the step is from one whose gradients are added by hand in float32.
"""

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

FLAGS = "--xla_force_host_platform_device_count=2 --xla_dump_hlo_as_text --xla_dump_to={folder} "
FLAGS += "--xla_dump_hlo_pass_re=spmd.*"


def main(folder: Path) -> None:
    """Compiles and runs the cases; XLA writes its programs into the folder."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from tests.engine import test_program as cases
    from trainer.engine.contracts import ComponentError
    from trainer.engine.precision import to_bfloat16
    from trainer.engine.program import Program

    def reduced() -> list[str]:
        """Returns the dtypes of the sums of arrays over devices, sorted, without repetitions."""
        [file] = folder.glob("**/*packed_step*after_spmd-partitioning*")
        found = re.findall(r"= (\w+)\[\d[\d,]*\]\S* all-reduce\(", file.read_text())
        return sorted(set(found))

    def loss(params: Any, batch: Any) -> Any:
        logits = cases.Net().apply({"params": to_bfloat16(params)}, to_bfloat16(batch["image"]))
        return cases.cross_entropy(logits, batch).mean()

    def by_hand(params: Any, batch: Any) -> Any:
        halves = [{name: x[part] for name, x in batch.items()} for part in (np.s_[:4], np.s_[4:])]
        grads = [jax.grad(loss)(params, half) for half in halves]
        return jax.tree.map(lambda p, a, b: p - 0.5 * (a + b) / 2, params, *grads)

    given = {
        "mixed": "mixed",
        "float32": {"compute": "bfloat16", "reductions": "float32"},
        "both": {"parameters": "bfloat16", "reductions": "float32", "master": "float32"},
    }
    for name, precision in given.items():
        sgd = partial(optax.sgd, 0.5)
        program = Program(cases.experiment(precision=precision, optimizer=sgd, metrics={}))
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
        print(json.dumps({"case": name, "reduced": reduced(), "distance": distance}), flush=True)
    for name, changes in {
        "statistics": {"model": cases.NetWithStatistics()},
        "mesh": {"mesh": {"fsdp": 2}},
    }.items():
        try:
            program = Program(cases.experiment(precision=given["float32"], **changes))
            program.trace(program.abstract_state())
        except ComponentError as error:
            print(json.dumps({"case": name, "refused": str(error)}), flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = FLAGS.format(folder=sys.argv[1])
    main(Path(sys.argv[1]))
