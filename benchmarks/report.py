"""Measures how long `python -m trainer report` takes, its peak memory, and the size of its page.

    python -m benchmarks.report [--rounds=3] [--trials=256,1000] [--rows=100] [--examples=10000]

The drawings of its page are then written again, beside matplotlib's SVG of the same figures.

The sweeps are planned by Lockstep, and the folders of their trials are written by this program,
with made-up metrics: two arms, eight searches each, and for each winner a final run with its
results on single test examples. Beside each report runs a process that only imports scipy and
matplotlib and parses the same rows with the json module.
"""

import argparse
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.interleave import interleave, report
from trainer.engine.examples import Examples
from trainer.report.comparison import make_report, read_workloads
from trainer.report.figures.drawing import draw
from trainer.report.figures.svg import svg
from trainer.sweep.final import FINAL_FILE, choose_winners, final_trials
from trainer.sweep.ledger import LedgerWriter, trial_event
from trainer.sweep.per_example_file import PER_EXAMPLE_FILE, encode_examples
from trainer.sweep.plan_file import read_plan
from trainer.writers.summary import read_outcome

SWEEP = """base: {base}
arms:
  adamw:
    space:
      {path}: !space.log_uniform {{low: 3e-4, high: 3e-2}}
  muon:
    set:
      optimizer.groups.matrices.optimizer: !optim.muon
        learning_rate: !schedules.warmup_cosine {{peak_value: 0.02, warmup_steps: 10%}}
    space:
      {path}: !space.log_uniform {{low: 2e-3, high: 0.2}}
trials: {trials}
method: !method.sobol {{seed: 0}}
searches: 8
final: {{seeds: 1}}
"""
SEARCHES = 8
SECONDS = 10  # target of the whole command, with 1,000 trials
RATE = "optimizer.groups.matrices.optimizer.learning_rate.peak_value"
RECORD = {
    "format": 1,
    "fingerprint": {"jax": "0", "cpu": "a", "devices": "1 x cpu"},
    "lineage": [{"began": "2026-01-01T00:00:00+00:00", "host": "a", "pid": 1, "exit": "done"}],
}
PARSE = """import json, sys, pathlib, scipy.stats, matplotlib.figure
for file in pathlib.Path(sys.argv[1]).glob("*/*/*/*/metrics.jsonl"):
    for line in file.open():
        json.loads(line)
"""


def make_sweep(folder: Path, trials: int, rows: int, examples: int) -> Path:
    """Writes the folder of a finished sweep with two arms.

    Args:
        folder: an empty folder.
        trials: the number of trials of both arms together.
        rows: lines of metrics.jsonl of each trial, all of them evaluations.
        examples: test examples.
    """
    base = Path("experiments/muon_mlp/mlp.yaml").absolute()
    file, sweep = folder / "sweep.yaml", folder / "sweep"
    file.write_text(SWEEP.format(base=base, path=RATE, trials=trials // (2 * SEARCHES)))
    command = ["-m", "trainer", "sweep", f"--config={file}", f"--workdir={sweep}", "--plan_only"]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    plan, ledger = read_plan(sweep), LedgerWriter(sweep)
    for trial in plan.trials:
        _write_trial(sweep / trial.folder, rows)
    outcomes = {trial.folder: read_outcome(sweep / trial.folder) for trial in plan.trials}
    choose_winners(sweep, plan, outcomes, partial(ledger.add_file, FINAL_FILE))
    dice = np.random.default_rng(0)
    finals = final_trials(sweep, plan) or []
    for trial in finals:
        _write_trial(sweep / trial.folder, rows)
        values = {"loss": dice.gamma(0.5, size=examples), "accuracy": dice.random(examples) < 0.9}
        ones = {name: np.ones(examples) for name in values}
        kept = Examples({name: x.astype(float) for name, x in values.items()}, ones, 64 * "0", True)
        (sweep / trial.folder / PER_EXAMPLE_FILE).write_bytes(encode_examples(kept))
    names = [trial.folder for trial in (*plan.trials, *finals)]
    ledger.add_trials(trial_event(sweep / name, name) for name in names)
    return sweep


def _write_trial(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True)
    dice = random.Random(str(folder.name + folder.parent.name + folder.parent.parent.name))
    speed, metrics, lines = dice.uniform(1, 5), {}, []
    for row in range(1, rows + 1):
        loss = math.exp(-speed * row / rows) + dice.gauss(0, 0.01) + 0.05
        metrics = {
            "train/loss": loss,
            "grad_norm": dice.random(),
            "learning_rate/matrices": 0.01,
            "learning_rate/rest": 0.001,
            "validation/loss": loss + 0.02,
            "validation/accuracy": 1 - loss / 3,
            "eval/loss": loss + 0.03,
            "eval/accuracy": 1 - loss / 3,
        }
        clock = {"perf/seconds": 0.01 * row, "perf/steps_per_second": 500.0}
        lines.append(json.dumps({"step": 5 * row, **metrics, **clock}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    summary = {"end": "done", "step": 5 * rows, "metrics": metrics, "why": ""}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "run.json").write_text(json.dumps(RECORD))


class Process:
    """Runs a command repeatedly.

    Attributes:
        peak: for each run, its largest resident memory in MiB.
    """

    def __init__(self, command: list[str]):
        self.command = [sys.executable, *command]
        self.peak: list[float] = []

    def __call__(self) -> None:
        """Runs the command once."""
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(self.command)} ended with {process.returncode}.")
        self.peak.append(usage.ru_maxrss / 1024)


def compare_drawings(sweep: Path, rounds: int) -> None:
    """Prints the time and the size of the drawings of a page, beside those by matplotlib.

    Args:
        sweep: the folder of a finished sweep.
        rounds: how often each side draws them, after once that is not measured.
    """
    made = make_report(read_workloads([str(sweep)], None, None, None), sweep / "report")
    figures = [each for panel in made.panels for block in panel.blocks for each in block.figures]

    def by_matplotlib() -> int:
        size = 0
        for figure in figures:
            file = io.StringIO()
            draw(figure, made.arms).savefig(file, format="svg")
            size += len(file.getvalue())
        return size

    def ours() -> int:
        return sum(len(svg(each, made.arms, f"f{i}")) for i, each in enumerate(figures))

    sizes = ours(), by_matplotlib()
    times = interleave([ours, by_matplotlib], rounds)
    report(f"{len(figures)} drawings", *times, target=1, unit="s", other="matplotlib")
    print(f"  {sizes[0] / 1000:,.0f} kB; matplotlib {sizes[1] / sizes[0]:.1f} times as many bytes")


def main() -> None:
    """Prints duration, memory and page size for each number of trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", default="256,1000")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--examples", type=int, default=10_000)
    arguments = parser.parse_args()
    for trials in map(int, arguments.trials.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            sweep = make_sweep(Path(scratch), trials, arguments.rows, arguments.examples)
            ours = Process(["-m", "trainer", "report", str(sweep)])
            theirs = Process(["-c", PARSE, str(sweep)])
            times = interleave([ours, theirs], arguments.rounds)
            page = (sweep / "report" / "index.html").stat().st_size / 1000
            name = f"{trials:,} trials of {arguments.rows} rows"
            report(name, *times, target=10, unit="s", other="parsing the rows")
            print(f"  at most {max(times[0]):.1f} s (target {SECONDS} s),", end=" ")
            print(f"{max(ours.peak):,.0f} MiB, a page of {page:,.0f} kB")
            compare_drawings(sweep, arguments.rounds)


if __name__ == "__main__":
    main()
