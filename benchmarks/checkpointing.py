"""Measures what checkpoints cost: the steps beside a save, the save alone, and a restore.

    python -m benchmarks.checkpointing [--rounds=15] [--width=1024] [--small_rounds=60]
        [--restores=9]

The large model has 20 million parameters and is trained by Adam, so a checkpoint has 240 MB. A
round is 20 steps, with a save that is started after the first of them and waited for after the
last, over 20 steps without one: wall time, and CPU time of the whole process. The time of the
checksums is measured separately, on the same state.

The small model has 9 thousand parameters and is trained by AdamW. Two numbers are compared with a
save by hand, np.savez, a sync and a rename in the thread of the steps: for how long the call that
saves holds the steps up, and by how much 200 steps with a save take longer than 200 without one,
which includes what the threads of the save take from the steps. A save that is waited for, without
steps, is timed as well.

These sides use the trainer's own program and run alternately in one process. A restore of 240 MB to
the device, with its checksums, is compared with np.load of the arrays from one .npz file, each in
new processes that have imported everything.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.interleave import interleave, report
from trainer import losses, models
from trainer.checkpoint import Checkpoints, Retention, integrity
from trainer.data.arrays import ArrayDataset
from trainer.engine.experiment import Experiment, as_optimizer
from trainer.engine.program import Program
from trainer.train import runtime

EVERY, SMALL_EVERY = 20, 200


def make_program(
    width: int, depth: int, batch_size: int, optimizer: optax.GradientTransformation
) -> Program:
    """Compiles the program of a perceptron for images of 64 pixels.

    Args:
        width: the width of the hidden layers.
        depth: the number of hidden layers.
        batch_size: the number of examples in a batch, and in the data set.
        optimizer: updates all parameters.
    """
    draw = np.random.default_rng(0)
    shape = (batch_size, 8, 8, 1)
    split = {
        "image": draw.normal(size=shape).astype(np.float32),
        "label": draw.integers(0, 10, batch_size).astype(np.int32),
    }
    return Program(
        Experiment(
            model=models.mlp(width=width, depth=depth),
            data=ArrayDataset(split, split, batch_size=batch_size),
            loss=losses.softmax_cross_entropy(),
            optimizer=as_optimizer(optimizer),
            steps=10**6,
            log_every=10**6,
            eval_every=10**6,
            save_every=EVERY,
        )
    )


class Side:
    """Rounds of steps with a state of its own, with or without a save.

    Args:
        program: makes the steps.
        every: the number of steps of a round.
        save: takes the number of steps and the state; None saves nothing.
        wait: called at the end of a round.

    Attributes:
        steps_seconds: the time of each step, without the saves.
        held_up: the time of each call of `save`.
        cpu: the CPU time of each round, of all threads, with the wait for its save.
        wall: the time of the steps of each round and of the call of `save`, without the wait.
    """

    def __init__(
        self,
        program: Program,
        every: int,
        save: Callable[[int, Any], object] | None = None,
        wait: Callable[[], None] = lambda: None,
    ):
        self.program, self.every, self.save, self.wait = program, every, save, wait
        self.state, self.steps = program.init(), 0
        self.batch = program.feed.to_devices(next(program.experiment.data.train(0, 0)))
        self.forget()

    def forget(self) -> None:
        """Drops what was measured until now."""
        self.steps_seconds: list[float] = []
        self.held_up: list[float] = []
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def round(self) -> None:
        """Runs the steps of a round; the first is followed by a save, which the others share."""
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(self.every):
            start = time.perf_counter()
            self.state, metrics = self.program.step(self.state, self.batch)
            # Each step is waited for, so that its time includes what a save in another thread
            # takes.
            jax.block_until_ready(metrics["train/loss"])
            self.steps += 1
            self.steps_seconds.append(time.perf_counter() - start)
            if self.save is not None and number == 0:
                start = time.perf_counter()
                self.save(self.steps, self.state)
                self.held_up.append(time.perf_counter() - start)
        self.wall.append(time.perf_counter() - began)
        self.wait()
        self.cpu.append(time.process_time() - cpu)


def large(folder: Path, rounds: int, width: int, batch_size: int) -> None:
    """Prints the ratios of steps with a checkpoint every 20 steps to steps without.

    Args:
        folder: takes the checkpoints.
        rounds: the number of rounds of each side.
        width: the width of the hidden layers, from which their number follows.
        batch_size: the number of examples in a batch.
    """
    program = make_program(width, 1 + round(20e6 / width**2), batch_size, optax.adam(1e-4))
    checkpoints = Checkpoints(folder / "large", Retention(keep_best=0))
    ours, theirs = Side(program, EVERY, checkpoints.save, checkpoints.wait), Side(program, EVERY)
    _print_size(ours, batch_size)
    _warm_up(ours, theirs)
    seconds = interleave([ours.round, theirs.round], rounds)
    wall = [[1e3 * x / EVERY for x in side] for side in seconds]
    report(
        "wall time a step, with its share of a save", *wall, target=1.05, unit="ms", other="without"
    )
    cpu = [[1e3 * x / EVERY for x in side.cpu] for side in (ours, theirs)]
    report(
        "CPU time a step, with its share of a save", *cpu, target=1.05, unit="ms", other="without"
    )
    medians = [
        [1e3 * statistics.median(part) for part in np.array_split(side.steps_seconds, rounds)]
        for side in (ours, theirs)
    ]
    report("median step", *medians, target=1.05, unit="ms", other="without")
    print(f"a save holds the steps up for {_median_and_quartiles(ours.held_up)}")
    sums = 1e3 * seconds_of_checksums(ours)
    print(f"its checksums take {sums:.1f} ms of one core, in a thread beside the steps")
    checkpoints.close()


def small(folder: Path, rounds: int, batch_size: int) -> None:
    """Prints for how long a save of a small model delays its steps.

    Args:
        folder: takes the checkpoints.
        rounds: the number of rounds of each side.
        batch_size: the number of examples in a batch.
    """
    program = make_program(64, 2, batch_size, optax.adamw(1e-3))
    checkpoints = Checkpoints(folder / "small", Retention(keep_best=0))
    ours = Side(program, SMALL_EVERY, checkpoints.save, checkpoints.wait)
    by_hand = Side(program, SMALL_EVERY, lambda step, state: save_by_hand(folder, state))
    without = Side(program, SMALL_EVERY)
    _print_size(ours, batch_size)
    _warm_up(ours, by_hand, without)
    for _ in range(rounds):
        for side in (ours, without, by_hand):
            side.round()
    held_up = [[1e3 * x for x in side.held_up] for side in (ours, by_hand)]
    report("a save holds the steps up", *held_up, target=1.0, unit="ms", other="np.savez, synced")
    for name, side in (("a save", ours), ("np.savez, synced,", by_hand)):
        delays = [a - b for a, b in zip(side.wall, without.wall, strict=True)]
        print(f"{name} delays {SMALL_EVERY} steps by {_median_and_quartiles(delays)}")
        cpu = [a - b for a, b in zip(side.cpu, without.cpu, strict=True)]
        print(f"{name} takes {_median_and_quartiles(cpu)} of CPU")
    step = 1e3 * statistics.median(without.steps_seconds)
    print(f"a step without a save takes {step:.3f} ms")

    def save_and_wait() -> None:
        ours.steps += 1
        checkpoints.save(ours.steps, ours.state)
        checkpoints.wait()

    alone = [save_and_wait, lambda: save_by_hand(folder, ours.state)]
    for what, clock in (("CPU time", time.process_time), ("wall time", time.perf_counter)):
        times = [[1e3 * x for x in side] for side in interleave(alone, rounds, clock)]
        report(f"a save alone, {what}", *times, target=2.0, unit="ms", other="np.savez, synced")
    checkpoints.close()


def restores(folder: Path, rounds: int) -> None:
    """Prints the ratio of a restore of 240 MB to np.load of the same arrays.

    Args:
        folder: takes the checkpoint and the file.
        rounds: the number of processes of each side.
    """
    draw = np.random.default_rng(0)
    state = {f"w{i}": draw.normal(size=(1024, 1024)).astype(np.float32) for i in range(57)}
    with Checkpoints(folder / "restored") as checkpoints:
        checkpoints.save(1, state)
    np.savez(folder / "state.npz", **state)  # pyright: ignore[reportArgumentType]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, found in zip((RESTORE, LOAD), times, strict=True):
            command = [sys.executable, "-c", side, str(folder)]
            found.append(1e3 * float(subprocess.check_output(command, text=True)))
    report("a restore of 240 MB", *times, target=2.5, unit="ms", other="np.load")


RESTORE = """
import sys, time
import jax, numpy as np
from trainer.checkpoint import Checkpoints
from trainer.train import runtime
runtime.keep_freed_memory()
target = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), np.float32) for i in range(57)}
jax.block_until_ready(jax.numpy.zeros(1))
start = time.perf_counter()
jax.block_until_ready(Checkpoints(sys.argv[1] + "/restored").restore(target))
print(time.perf_counter() - start)
"""
LOAD = """
import sys, time
import jax, numpy as np
jax.block_until_ready(jax.numpy.zeros(1))
start = time.perf_counter()
loaded = dict(np.load(sys.argv[1] + "/state.npz"))
print(time.perf_counter() - start)
"""


def save_by_hand(folder: Path, state: Any) -> None:
    """Saves a state as a script does that has to survive a loss of power.

    Args:
        folder: takes the file.
        state: pytree of arrays and typed PRNG keys.
    """
    leaves = integrity.to_host(state)
    arrays: dict[str, Any] = {name: leaf.data for name, leaf in leaves.items()}
    with open(folder / "state.tmp", "wb") as file:
        np.savez(file, **{name.replace("/", "."): array for name, array in arrays.items()})
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "state.tmp", folder / "state.npz")


def seconds_of_checksums(side: Side) -> float:
    """Times the checksums of a state, which a thread computes during the steps.

    Args:
        side: the side with the state.
    """
    leaves = integrity.to_host(side.state)
    start = time.perf_counter()
    integrity.manifest_entries(leaves)
    return time.perf_counter() - start


def _warm_up(*sides: Side) -> None:
    """Runs a round of each side: the first step compiles, and the first save imports."""
    for side in sides:
        side.round()
        side.forget()


def _print_size(side: Side, batch_size: int) -> None:
    size = sum(x.size for x in jax.tree.leaves(side.state.params))
    print(f"{size:,} parameters, batch {batch_size}, {jax.devices()[0].device_kind}")


def _median_and_quartiles(seconds: list[float]) -> str:
    low, middle, high = (1e3 * x for x in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f} ms (quartiles {low:.2f} to {high:.2f}, {len(seconds)} rounds)"


def main() -> None:
    """Measures the large model, then the small one, and then a restore."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of the large model; 0 for none")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--small_rounds", type=int, default=60, help="of the small model")
    parser.add_argument("--restores", type=int, default=9, help="of 240 MB; 0 for none")
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.rounds:
            large(Path(folder), arguments.rounds, arguments.width, arguments.batch_size)
        if arguments.small_rounds:
            small(Path(folder), arguments.small_rounds, arguments.batch_size)
        if arguments.restores:
            restores(Path(folder), arguments.restores)


if __name__ == "__main__":
    main()
