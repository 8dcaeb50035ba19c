"""Compares the step time of a run that saves every 20 steps with one that never saves.

    python -m benchmarks.checkpointing [--rounds=15] [--width=1024]

The model has 20 million parameters and is trained by Adam, so a checkpoint has 240 MB. Both sides
use the trainer's own loop and run alternately in one process; a round is 20 steps and one save. The
time of the checksums is measured separately, on the same state.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax

from benchmarks.interleave import interleave, report
from trainer import losses, models
from trainer.checkpoint import Checkpoints, host_copy
from trainer.data.arrays import ArrayDataset
from trainer.engine.experiment import Experiment, as_optimizer
from trainer.engine.program import Program
from trainer.train import runtime

EVERY = 20


def make_program(width: int, batch_size: int) -> Program:
    """Compiles the program of a perceptron whose hidden layers have about 20 million parameters.

    Args:
        width: the width of the hidden layers, from which their number follows.
        batch_size: the number of examples in a batch, and in the data set.
    """
    draw = np.random.default_rng(0)
    shape = (batch_size, 8, 8, 1)
    split = {
        "image": draw.normal(size=shape).astype(np.float32),
        "label": draw.integers(0, 10, batch_size).astype(np.int32),
    }
    return Program(
        Experiment(
            model=models.mlp(width=width, depth=1 + round(20e6 / width**2)),
            data=ArrayDataset(split, split, batch_size=batch_size),
            loss=losses.softmax_cross_entropy(),
            optimizer=as_optimizer(optax.adam(1e-4)),
            steps=10**6,
            log_every=10**6,
            eval_every=10**6,
            save_every=EVERY,
        )
    )


class Side:
    """A loop over the program with a state of its own, with or without checkpoints.

    Attributes:
        seconds: the time of each step, with the start of a save if there is one.
        held_up: the time of each call that starts a save.
    """

    def __init__(self, program: Program, checkpoints: Checkpoints | None):
        self.program, self.checkpoints = program, checkpoints
        self.state, self.steps = program.init(), 0
        self.batch = program.feed.to_devices(next(program.experiment.data.train(0, 0)))
        self.seconds: list[float] = []
        self.held_up: list[float] = []

    def round(self) -> None:
        """Runs 20 steps and starts one save, which continues during the next steps."""
        last = time.perf_counter()
        for _ in range(EVERY):
            self.state, metrics = self.program.step(self.state, self.batch)
            # Each step is waited for, so that its time includes what a save in another thread
            # takes.
            jax.block_until_ready(metrics["train/loss"])
            self.steps += 1
            if self.checkpoints is not None and self.steps % EVERY == 0:
                start = time.perf_counter()
                self.checkpoints.save(self.steps, self.state)
                self.held_up.append(time.perf_counter() - start)
            now = time.perf_counter()
            self.seconds.append(now - last)
            last = now

    def whole_round(self) -> None:
        """Runs a round and waits for its save, so that the other side is not slowed."""
        self.round()
        if self.checkpoints is not None:
            self.checkpoints.wait()


def main() -> None:
    """Times rounds with and without a checkpoint and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=256)
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    program = make_program(arguments.width, arguments.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", keep_best=0)
        ours, theirs = Side(program, checkpoints), Side(program, None)
        size = sum(x.size for x in jax.tree.leaves(ours.state.params))
        print(f"{size:,} parameters, batch {arguments.batch_size}, {jax.devices()[0].device_kind}")
        # The first save imports orbax, and the first step compiles.
        for side in (ours, theirs):
            side.whole_round()
            side.seconds.clear()
            side.held_up.clear()
        # The steps of the next round run while the save before them is written.
        rounds = interleave(lambda: two(ours), lambda: two(theirs), arguments.rounds)
        checkpoints.wait()
        per_step = [[1e3 * x / (2 * EVERY) for x in side] for side in rounds]
        report("mean step, with its share of the saves", *per_step, target=1.05, unit="ms")
        count = len(rounds[0])
        medians = [
            [1e3 * statistics.median(part) for part in np.array_split(side.seconds, count)]
            for side in (ours, theirs)
        ]
        report("median step", *medians, target=1.05, unit="ms")
        held_up, sums = statistics.median(ours.held_up), seconds_of_checksums(ours)
        print(f"a save holds the steps up for {1e3 * held_up:.1f} ms")
        print(f"its checksums take {1e3 * sums:.1f} ms of one core, in a thread beside the steps")
        checkpoints.close()


def two(side: Side) -> None:
    """Runs two rounds: the steps of the second run while the save of the first is written.

    Args:
        side: one of the two sides.
    """
    side.round()
    side.whole_round()


def seconds_of_checksums(side: Side) -> float:
    """Times the checksums of a state, which a thread computes during the steps.

    Args:
        side: the side with the state.
    """
    leaves = host_copy.to_host(side.state)
    start = time.perf_counter()
    host_copy.entries(leaves)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
