"""Measures the share of a step that waits for data, which are read from shards on disk.

    python -m benchmarks.data_wait [--rounds=5] [--tokens=400_000_000] [--width=64] [--steps=100]

A decoder is trained on shards of random tokens, as a user starts it, alternately with shards that
are in the system's file cache and with shards that are not. The share is perf/data_wait of the
rows; the first row has the first batch, and is left out. Then batches are made alone, without
steps, from shards that are not in the cache: by `data.tokens`, and by the same data set over
memory maps of the shards. A disk that has a cache of its own keeps it.
"""

import argparse
import contextlib
import io
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.interleave import interleave, report
from trainer import config
from trainer.data.shards import TokenStream, write_shards
from trainer.data.tokens import KnownTokens, Sizes, TokenDataset
from trainer.engine.program import load_located
from trainer.train import runtime
from trainer.train.run import Run
from trainer.train.signals import StopSignals
from trainer.writers import read_metrics

TARGET = 0.01
MAP_TARGET = 0.5
VOCABULARY = 4096
SHARDS = 4
_BLOCK = 10_000_000  # tokens that are drawn at a time

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


class Training:
    """Trains in a new folder each time that it is called.

    Attributes:
        shares: for each run, the mean share of its rows that waited for data.
        largest: the largest share of a row.
        steps: for each run, the milliseconds of a step.
    """

    def __init__(self, run: Run, folder: Path, before: Callable[[], object]):
        self.run, self.folder, self.before = run, folder, before
        self.shares: list[float] = []
        self.steps: list[float] = []
        self.largest = 0.0

    def __call__(self) -> None:
        """Runs to the end, and reads the rows of training."""
        self.before()
        folder = Path(f"{self.folder}_{len(self.shares)}")
        with contextlib.redirect_stdout(io.StringIO()):
            code = self.run.start(folder)
        assert code == 0, code
        rows = [row for row in read_metrics(folder) if "perf/data_wait" in row]
        shares = [row["perf/data_wait"] for row in rows[1:]]
        self.shares.append(statistics.mean(shares))
        self.largest = max(self.largest, *shares)
        speeds = [row["perf/steps_per_second"] for row in rows]
        self.steps.append(1e3 / statistics.median(speeds))


class Batches:
    """Makes batches from shards that are not in the system's file cache.

    Attributes:
        milliseconds: for each call, the time of a batch.
        resident: by how many MiB the resident memory grew in a call, the most.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], count: int, drop: Callable[[], object]):
        self.make, self.count, self.drop = make, count, drop
        self.milliseconds: list[float] = []
        self.resident = 0.0

    def __call__(self) -> None:
        """Makes the batches, others each time."""
        self.drop()
        batches, before = self.make(), _resident()
        start = time.perf_counter()
        for _ in range(self.count):
            next(batches)
        self.milliseconds.append(1e3 * (time.perf_counter() - start) / self.count)
        self.resident = max(self.resident, _resident() - before)


def drop(files: list[Path]) -> None:
    """Removes files from the system's file cache; they are on disk and not mapped."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _mapped(files: list[Path]) -> TokenStream:
    maps = [np.memmap(file, "<u2", "r", 1024) for file in files]
    return TokenStream.of_arrays([np.asarray(each) for each in maps])


def compare_reading(
    files: list[Path], length: int, batch_size: int, rounds: int, count: int
) -> None:
    """Prints the time of a batch from a cold disk, over that with memory maps."""
    indices = iter(range(0, 10**9, count))

    def batches(stream: Callable[[list[Path]], TokenStream]) -> Iterator[Any]:
        train = stream(files)
        dataset = TokenDataset(
            train,
            {"test": train},
            KnownTokens(VOCABULARY, end_of_text=0),
            Sizes(length, batch_size),
        )
        return dataset.train(next(indices), seed=1)

    def side(stream: Callable[[list[Path]], TokenStream]) -> Batches:
        return Batches(lambda: batches(stream), count, lambda: drop(files))

    ours, theirs = side(TokenStream.of_files), side(_mapped)
    interleave([ours, theirs], rounds)
    name = "a batch from a cold disk"
    report(name, ours.milliseconds, theirs.milliseconds, MAP_TARGET, "ms", "memory maps")
    size = count * batch_size * (length + 1) * 2 / 2**20
    print(
        f"resident memory for {size:.1f} MiB of tokens: ours {ours.resident:.1f} MiB, memory maps "
        f"{theirs.resident:.1f} MiB"
    )


def main() -> None:
    """Prints the shares, and the times of batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), np.random.default_rng(0)
        for split, size in ("train", arguments.tokens), ("validation", 10_000):
            blocks = (
                draw.integers(0, VOCABULARY, min(_BLOCK, size - start), np.uint16)
                for start in range(0, size, _BLOCK)
            )
            write_shards(folder, split, blocks, np.dtype("<u2"), -(-arguments.tokens // SHARDS))
        files = sorted(folder.glob("train_*.bin"))
        sizes = {n: getattr(arguments, n) for n in ("width", "length", "batch_size", "steps")}
        file = folder / "data_wait.yaml"
        file.write_text(CONFIG.format(folder=folder, vocabulary=VOCABULARY, **sizes))
        read = config.load([file], [], [])
        run = Run(read, load_located(read), StopSignals(), lambda line: None)
        warm = Training(run, folder / "warm", lambda: [each.read_bytes() for each in files])
        cold = Training(run, folder / "cold", lambda: drop(files))
        interleave([warm, cold], arguments.rounds)
        for which, side in ("warm", warm), ("cold", cold):
            print(
                f"share that waits for data, {which} cache: {statistics.mean(side.shares):.4f} "
                f"(largest row {side.largest:.4f}; target {TARGET}); a step "
                f"{statistics.median(side.steps):.1f} ms"
            )
        report("a step with a cold cache", cold.steps, warm.steps, 1.02, "ms", "warm cache")
        rounds, steps = arguments.rounds, arguments.steps
        compare_reading(files, arguments.length, arguments.batch_size, rounds, steps)


if __name__ == "__main__":
    main()
