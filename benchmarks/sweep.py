"""Measures a sweep of 16 trials over 16 runs, and what a trial costs besides its steps.

    python -m benchmarks.sweep [--rounds=3] [--only=mlp]

The CPU time of whole processes is compared: `python -m trainer sweep` once, and `python -m trainer`
with the config of every trial. Both write metrics.jsonl only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.interleave import report
from benchmarks.loop import PERCEPTRON

TRIALS = 16
CASES = {
    # name -> config, the path of its learning rate, its largest value, target
    "mlp": ("mlp.yaml", "optimizer.learning_rate", 1e-2, 0.25),
    "vit": (
        "configs/muon_vit.yaml",
        "optimizer.groups.matrices.optimizer.learning_rate.peak_value",
        0.04,
        0.97,
    ),
    "convnet": ("configs/sgd_convnet.gin", "optimizer.learning_rate.peak_value", 0.2, 0.85),
}


def cpu_seconds(arguments: Sequence[str], cache: Path) -> float:
    """Runs the trainer once, and returns the CPU time of its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)},
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}: {said}")
    return usage.ru_utime + usage.ru_stime


class Case:
    """A sweep over a learning rate, and the runs of its trials.

    Args:
        folder: for files.
        config: of a run.
        path: of its learning rate.
        high: the largest learning rate.
        steps: of a trial.
        trials: number of trials.
    """

    def __init__(
        self, folder: Path, config: str, path: str, high: float, steps: int, trials: int = TRIALS
    ):
        self.folder = folder
        folder.mkdir(parents=True)
        base = Path(config).absolute()
        if config == "mlp.yaml":
            base = folder / config
            base.write_text(PERCEPTRON)
        self.file = folder / "sweep.yaml"
        self.file.write_text(
            f"base: {base}\n"
            f"set: {{steps: {steps}, writers: [], data.validation: 0.1}}\n"
            f"space: {{{path}: !space.log_uniform {{low: {high / 100}, high: {high}}}}}\n"
            f"trials: {trials}\nmethod: !method.sobol {{seed: 0}}\nfinal: null\n"
        )
        self._count = 0

    def sweep(self, cache: Path, *more: str) -> float:
        """Computes the sweep, and returns its CPU seconds."""
        self._count += 1
        workdir = self.folder / f"sweep{self._count}"
        return cpu_seconds(["sweep", f"--config={self.file}", f"--workdir={workdir}", *more], cache)

    def runs(self, cache: Callable[[], Path], count: int = TRIALS) -> float:
        """Computes trials as runs of their own, and returns the CPU seconds for 16 of them."""
        self._count += 1
        configs = sorted((self.folder / "sweep1").glob("trials/*/*/*/config.yaml"))
        total = 0.0
        for number, config in enumerate(configs[:count]):
            workdir = self.folder / f"run{self._count}-{number}"
            total += cpu_seconds([f"--config={config}", f"--workdir={workdir}"], cache())
        return total * TRIALS / count


def over_runs(name: str, folder: Path, steps: int, rounds: int) -> None:
    """Compares a sweep with runs that find their programs compiled."""
    config, path, high, target = CASES[name]
    case, cache = Case(folder / name, config, path, high, steps), folder / f"cache-{name}"
    case.sweep(cache)  # fills the cache, and has the configs of the runs
    case.runs(lambda: cache, 1)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(case.sweep(cache))
        theirs.append(case.runs(lambda: cache))
    label = f"{name}, {TRIALS} trials of {steps} steps, warm caches"
    report(label, ours, theirs, target, "CPU s", f"{TRIALS} runs")


def over_cold_runs(folder: Path, steps: int, rounds: int, count: int = 4) -> None:
    """Compares a sweep without compiled programs with such runs, of which a few are timed."""
    config, path, high, _ = CASES["mlp"]
    case = Case(folder / "cold", config, path, high, steps)
    numbers = iter(range(10**6))

    def fresh() -> Path:
        return folder / f"cache-cold-{next(numbers)}"

    case.sweep(fresh())
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(case.sweep(fresh()))
        theirs.append(case.runs(fresh, count))
    label = f"mlp, {TRIALS} trials of {steps} steps, no compiled programs"
    report(label, ours, theirs, 0.15, "CPU s", f"{TRIALS} runs ({count} timed)")


def blocks_over_steps(name: str, folder: Path, steps: int, rounds: int, target: float) -> None:
    """Compares blocks of steps of each trial in turn with single steps of each in turn."""
    config, path, high, _ = CASES[name]
    cache = folder / f"cache-blocks-{name}"
    one = Case(folder / f"one-{name}", config, path, high, 1)
    case = Case(folder / f"blocks-{name}", config, path, high, steps)
    single = "--set=set={steps: %d, writers: [], data.validation: 0.1, steps_per_call: 1}"
    for warm in ([], [single % steps]):
        case.sweep(cache, *warm)
        one.sweep(cache, *([single % 1] if warm else []))
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(case.sweep(cache) - one.sweep(cache))
        theirs.append(case.sweep(cache, single % steps) - one.sweep(cache, single % 1))
    label = f"{name}, {TRIALS} trials of {steps} steps, without the start"
    report(label, ours, theirs, target, "CPU s", "single steps")


def cost_of_a_trial(folder: Path, rounds: int) -> None:
    """Prints the time of a trial of two steps, from sweeps of 1000 and of 100."""
    config, path, high, _ = CASES["mlp"]
    cache = folder / "cache-trials"
    few = Case(folder / "few", config, path, high, 2, trials=100)
    many = Case(folder / "many", config, path, high, 2, trials=1000)
    few.sweep(cache)
    times = [1000 * (many.sweep(cache) - few.sweep(cache)) / 900 for _ in range(rounds)]
    print(
        f"a trial of 2 steps and one evaluation: {sorted(times)[len(times) // 2]:.2f} CPU ms"
        f" ({min(times):.2f} to {max(times):.2f}, {rounds} rounds; target 10)"
    )


def main() -> None:
    """Measures all cases, or one, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="mlp, cold, vit, convnet, blocks, blocks_vit or trials")
    parser.add_argument("--steps", type=int, default=1000, help="of a trial of the perceptron")
    parser.add_argument("--vit_steps", type=int, default=100, help="of the ViT and the convnet")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, rounds, long = Path(name), given.rounds, given.vit_steps
        cases = {
            "mlp": lambda: over_runs("mlp", folder, given.steps, rounds),
            "cold": lambda: over_cold_runs(folder, given.steps, rounds),
            "vit": lambda: over_runs("vit", folder, long, rounds),
            "convnet": lambda: over_runs("convnet", folder, long, rounds),
            "blocks": lambda: blocks_over_steps("mlp", folder, 4 * given.steps, rounds, 0.3),
            "blocks_vit": lambda: blocks_over_steps("vit", folder, long // 2, rounds, 0.9),
            "trials": lambda: cost_of_a_trial(folder, rounds),
        }
        for each, measure in cases.items():
            if given.only in (None, each):
                measure()


if __name__ == "__main__":
    main()
