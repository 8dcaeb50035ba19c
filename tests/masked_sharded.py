"""Prints two masked steps with microbatches, on one and on four simulated devices, as JSON."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import optax

from tests.engine import test_loss_contract as cases
from trainer import data, metrics


def steps(devices: int) -> dict[str, object]:
    """Runs two steps and an evaluation on a mesh of this many devices."""
    program = cases.program(
        mesh={"data": devices},
        microbatches=3,
        loss=cases.with_aux,
        optimizer=optax.sgd(0.5),
        train_metrics={"accuracy": metrics.accuracy()},
        data=data.ArrayDataset(cases.TRAIN, cases.TEST, batch_size=None, eval_batch_size=4),
    )
    state, batches = program.init(), program.feed.batches(0)
    for _ in range(2):
        state, values = program.step(state, program.feed.to_devices(next(batches)))
    return {
        "devices": program.mesh.size,
        "loss": float(values["train/loss"]),
        "bits": float(values["train/bits"]),
        "accuracy": float(values["train/accuracy"]),
        "kernel": np.asarray(state.params["kernel"]).tolist(),
        "eval": list(program.evaluation.run_splits(state).values()),
    }


if __name__ == "__main__":
    for count in (1, 4):
        print(json.dumps(steps(count)))
