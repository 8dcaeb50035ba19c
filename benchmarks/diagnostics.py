"""Measures what all diagnostics cost a run that logs every 50 steps.

    python -m benchmarks.diagnostics [--rounds=6] [--only=ViT] [--ratio]

A run with all diagnostics is timed over the same run without, alternately in one process, from the
end of the first block to the last step, in CPU time. That is one computation of them, and one more
block, every 50 steps. Their computation alone is timed over a step as well, with the host waiting
for each of both: a fiftieth of that ratio, which depends less on what else the machine does, is
their share of a long run. With --ratio, only that is measured.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

from benchmarks.interleave import interleave, report
from benchmarks.loop import PERCEPTRON, Side, alternate
from trainer.engine.program import Program
from trainer.train import runtime

EVERY = 50
# Steps of a run, settings besides, and the most rounds. Without its texts and most of its
# evaluation, a run of the GPT takes half a minute.
CASES = {
    "perceptron": (5_000, [], 12),
    "ViT": (150, [], 12),
    "GPT": (100, ["hooks=[]", "data.eval_tokens=2048"], 3),
}
FILES = {"ViT": "configs/muon_vit.gin", "GPT": "configs/muon_gpt.gin"}


def compare(name: str, file: str, rounds: int, only_ratio: bool) -> None:
    """Times runs with and without diagnostics, and their computation over a step.

    Args:
        name: the case.
        file: its config.
        rounds: how many times both sides are timed.
        only_ratio: no runs.
    """
    steps, sets, most = CASES[name]
    every = [f"{each}={steps}" for each in ("steps", "eval_every", "save_every")]
    sets = [*sets, *every, f"log_every={EVERY}", "writers=[]"]
    asked = ([], ["diagnostics=all"])[only_ratio:]
    sides = [Side(name, file, [*sets, *more], rounds) for more in asked]
    if not only_ratio:
        compare_runs(name, sides[::-1], min(rounds, most))
    compare_steps(name, sides[-1].program, max(1, steps // 20), rounds)


def compare_runs(name: str, sides: list[Side], rounds: int) -> None:
    """Times runs of two sides, with diagnostics and without, and prints the ratio."""
    print(f"{name}: {rounds + 1} rounds of two runs of {sides[0].steps:,} steps", flush=True)
    times = alternate([partial(side.ours, time.process_time) for side in sides], rounds, 1e3)
    report(f"a run, {name}", *times, target=1.02, unit="ms of CPU a step", other="without")


def compare_steps(name: str, program: Program, count: int, rounds: int) -> None:
    """Times the computation of all diagnostics over a step, and prints the ratio.

    Args:
        name: the case.
        program: a compiled program with diagnostics.
        count: how often both are computed in a round.
        rounds: how many times both are timed.
    """
    batch = next(program.feed.batches(0))
    held = {"state": program.init()}

    def diagnose() -> None:
        for _ in range(count):
            jax.block_until_ready(program.diagnose(held["state"], batch).arrays)

    def step() -> None:
        for _ in range(count):
            sent = program.feed.to_devices(batch)
            held["state"], metrics = program.step(held["state"], sent)
            jax.block_until_ready(metrics.arrays)

    sides: list[Callable[[], None]] = [diagnose, step]
    interleave(sides, 1)  # warms up
    seconds = interleave(sides, rounds, time.process_time)
    ours, steps = ([1e3 * x / count for x in side] for side in seconds)
    ratio = report(f"diagnostics, {name}", ours, steps, 1.0, unit="ms of CPU", other="a step")
    print(f"every {EVERY} steps, {ratio / EVERY:.2%} of the time of the steps")


def main() -> None:
    """Measures each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--ratio", action="store_true", help="only over a step, without runs")
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        perceptron = Path(folder) / "perceptron.yaml"
        perceptron.write_text(PERCEPTRON)
        for name in [arguments.only] if arguments.only else CASES:
            compare(name, FILES.get(name, str(perceptron)), arguments.rounds, arguments.ratio)


if __name__ == "__main__":
    main()
