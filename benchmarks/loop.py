"""Measures a run as a user starts it over the bare compiled step in a tight loop.

    python -m benchmarks.loop [--rounds=3]

A run reads batches, logs, evaluates and saves checkpoints, all by its defaults; the other side
calls the compiled step with one batch again and again, and waits at the end. Both are timed
alternately in one process, after everything is compiled and the first block is computed.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.interleave import report
from trainer import config
from trainer.engine.loading import load
from trainer.train import runtime
from trainer.train.run import Run
from trainer.train.signals import StopSignals

PERCEPTRON = """
model: !models.mlp {width: 64, depth: 2}
data: !data.digits {batch_size: 128}
loss: !losses.softmax_cross_entropy {}
optimizer: !optax.adamw {learning_rate: 3.0e-3}
metrics: {accuracy: !metrics.accuracy {}}
steps: 1
"""


class Side:
    """A config, run by the trainer and by a tight loop.

    Args:
        name: for the report.
        file: the config.
        sets: edits of the config.
        rounds: how many times both sides are timed.
    """

    def __init__(self, name: str, file: str, sets: Sequence[str], rounds: int):
        self.name, self.rounds = name, rounds
        read = config.load([file], [], sets)
        program = load(read)
        self.program = program
        self.steps = program.experiment.steps
        self.run = Run(read, program, StopSignals(), lambda line: None)
        self.batch = program.feed.to_devices(next(program.feed.batches(0)))

    def ours(self, folder: str) -> float:
        """Runs the trainer, and returns the seconds per step after the first block."""
        began: list[tuple[int, float]] = []

        def observe(step: int, batches: Any, state: Any) -> None:
            if not began:
                jax.block_until_ready(state)
                began.append((step, time.perf_counter()))

        with contextlib.redirect_stdout(io.StringIO()):
            code = self.run.start(folder, observe=observe)
        (step, start) = began[0]
        assert code == 0, code
        return (time.perf_counter() - start) / (self.steps - step)

    def bare(self) -> float:
        """Calls the compiled step again and again, and returns the seconds per step."""
        state, metrics = self.program.step(self.program.init(), self.batch)
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(self.steps):
            state, metrics = self.program.step(state, self.batch)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - start) / self.steps

    def measure(self, target: float) -> None:
        """Times both sides and prints the ratio."""
        ours, bare = [], []
        for number in range(self.rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                one = self.ours(str(Path(folder) / "run"))
            other = self.bare()
            if number:  # the first round warms up
                ours.append(1e6 * one)
                bare.append(1e6 * other)
        report(self.name, ours, bare, target=target, unit="us a step", other="the bare step")


def main() -> None:
    """Times both configs and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vit_steps", type=int, default=1000)
    parser.add_argument("--mlp_steps", type=int, default=10_000)
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        perceptron = Path(folder) / "mlp.yaml"
        perceptron.write_text(PERCEPTRON)
        sets = [f"steps={arguments.mlp_steps}"]
        Side("perceptron of 9k parameters", str(perceptron), sets, arguments.rounds).measure(0.5)
        sets = [f"steps={arguments.vit_steps}"]
        Side("configs/muon_vit.gin", "configs/muon_vit.gin", sets, arguments.rounds).measure(1.03)


if __name__ == "__main__":
    main()
