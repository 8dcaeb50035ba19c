"""Runs on meshes with an axis "tensor", in one process or in several, for test_data_shards.py.

`python -m tests.shard_cases FOLDER MESH...` trains in FOLDER/MESH, and prints one line of JSON a
mesh, with what this process found. With JAX_NUM_PROCESSES in the environment it is one of several
processes; then the run stops once and is resumed.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before jax looks for devices.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from tests.runs import Signals
from trainer import config as configs
from trainer.engine.datasets import data_fingerprint, digest_batch
from trainer.engine.mesh import data_shard
from trainer.engine.program import load_located
from trainer.train import multihost
from trainer.train.run import Run

CONFIG = """
model: !models.gpt {vocab_size: 9, width: 16, depth: 1, num_heads: 2, max_length: 32}
data: !letters.uneven
loss: !partial:letters.loss {}
metrics: {accuracy: !metrics.accuracy }
optimizer: !optax.adamw {learning_rate: 0.02}
hooks: [!hooks.samples {length: 6, temperature: 0.5}]
steps: 8
log_every: 1
eval_every: 4
save_every: 3
ema_decay: 0.5
writers: []
"""

MESHES = {
    "one": "{data: 1}",
    "across": "{tensor: 2, data: 2}",  # in two processes, each has all examples
    "within": "{data: 2, tensor: 2}",  # in two processes, each has half of the examples
}
STOP = 5  # before the second evaluation, and two steps after a save


def case(folder: Path, name: str) -> dict[str, Any]:
    """Trains on one mesh; returns what this process found."""
    file = folder / "config.yaml"
    config = configs.load([str(file)], [], [f"mesh={MESHES[name]}"])
    program = load_located(config, ["letters"])
    batches, found = program.feed.batches(0), program.feed.batch(3)
    read = [digest_batch(next(batches)) for _ in range(8)]
    ends = []
    for until in [STOP, None] if jax.process_count() > 1 else [None]:
        run = Run(config, program, Signals(), lambda line: None, ["letters"])
        ends.append(run.start(folder / name, until=until))
    return {
        "mesh": name,
        "shard": list(data_shard(program.mesh)),
        "batches": read,
        "same": digest_batch(found) == read[3],
        "fingerprint": data_fingerprint(program.experiment.data),
        "ends": ends,
    }


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    several = "JAX_NUM_PROCESSES" in os.environ
    with multihost.joined_processes(120, 60) if several else contextlib.nullcontext() as leave:
        for name in names:
            print(json.dumps(case(Path(folder), name)), flush=True)
        if leave is not None:
            leave(0)
