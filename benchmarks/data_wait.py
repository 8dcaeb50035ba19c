"""Measures the share of a step that waits for data, which are read from shards on disk.

    python -m benchmarks.data_wait [--rounds=3] [--tokens=20_000_000] [--width=64] [--steps=100]

A decoder is trained on memory-mapped shards of random tokens, as a user starts it. The share is
perf/data_wait of its rows; the first row has the first batch, and is left out. The time in which a
batch is made alone, without steps, is printed beside the time of a step.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from trainer import config
from trainer.data.shards import write_shards
from trainer.engine.loading import load
from trainer.train import runtime
from trainer.train.run import Run
from trainer.train.signals import StopSignals
from trainer.writers import read_metrics

TARGET = 0.01
VOCABULARY = 4096
SHARDS = 4

CONFIG = """
model: !models.gpt {{vocab_size: {vocabulary}, width: {width}, depth: 2, num_heads: 2}}
data: !data.tokens
  train: {folder}/train_*.bin
  validation: {folder}/validation_*.bin
  length: {length}
  batch_size: {batch_size}
  vocab_size: {vocabulary}
  end_of_text: 0
loss: !losses.softmax_cross_entropy {{}}
optimizer: !optax.adamw {{learning_rate: 1.0e-3}}
steps: {steps}
log_every: 10%
eval_every: 100%
writers: []
"""


def measure(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Runs to the end in a new folder, and returns the rows of training."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = run.start(folder)
    assert code == 0, code
    return [row for row in read_metrics(folder) if "perf/data_wait" in row]


def main() -> None:
    """Prints the share of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), np.random.default_rng(0)
        for split, size in ("train", arguments.tokens), ("validation", 10_000):
            tokens = draw.integers(0, VOCABULARY, size, np.uint16)
            write_shards(folder, split, [tokens], tokens.dtype, arguments.tokens // SHARDS)
        sizes = {n: getattr(arguments, n) for n in ("width", "length", "batch_size", "steps")}
        file = folder / "data_wait.yaml"
        file.write_text(CONFIG.format(folder=folder, vocabulary=VOCABULARY, **sizes))
        read = config.load([file], [], [])
        program = load(read)
        run = Run(read, program, StopSignals(), lambda line: None)
        batches = program.feed.batches(0)
        next(batches)
        start = time.perf_counter()
        for _ in range(arguments.steps):
            next(batches)
        alone = 1e3 * (time.perf_counter() - start) / arguments.steps
        for number in range(arguments.rounds):
            rows = measure(run, folder / f"run_{number}")
            shares = [row["perf/data_wait"] for row in rows[1:]]
            speed = statistics.median(row["perf/steps_per_second"] for row in rows)
            print(
                f"share that waits for data: {statistics.mean(shares):.4f} (largest row "
                f"{max(shares):.4f}; target {TARGET}); a batch alone {alone:.3f} ms, a step "
                f"{1e3 / speed:.1f} ms"
            )


if __name__ == "__main__":
    main()
