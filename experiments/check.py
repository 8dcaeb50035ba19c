"""Computes the short forms of the studies and compares their numbers with what is expected.

    python -m experiments.check [STUDY ...]             # as `make experiments` does
    python -m experiments.check --record [STUDY ...]    # writes experiments/STUDY/expected.json

The numbers of a short form are means over its seeds. Another machine rounds differently, so that
its numbers differ; they must lie within intervals. An interval is a two-sided 99% prediction
interval of Student's t for the mean over the seeds of the short form, from the RECORDED values in
expected.json, one for each of more seeds: mean +- t * s * sqrt(1 / RECORDED + 1 / seeds).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from scipy import stats

from trainer.report.statistics.estimates import sensitivity
from trainer.sweep.status import Status, SweepReader

FOLDER = Path(__file__).parent
# Study -> the path that sets the number of its seeds.
STUDIES = {
    "optimizers_vit": "final.seeds",
    "learning_rate_sensitivity": "seeds",
    "muon_gpt": "final.seeds",
    "horizon": "final.seeds",
    "ablation": "final.seeds",
    "contenders_gpt": "final.seeds",
    "race_gpt": "final.seeds",
    "epfl_124m": "final.seeds",
    "fantastic": "final.seeds",
    "convnets_fashion": "final.seeds",
}
RECORDED = 8
LEVEL = 0.99
CHANCE = math.log(10)  # the loss of equal probabilities of 10 classes


def compute(study: str, folder: Path, edits: Sequence[str] = ()) -> None:
    """Computes the short form of a study.

    Args:
        study: the name of its folder.
        folder: of the sweep; it is made.
        edits: path=value, over the file of the sweep.

    Raises:
        subprocess.CalledProcessError: the sweep failed.
    """
    command = [sys.executable, "-m", "trainer", "sweep", f"--workdir={folder}"]
    command += [f"--config={FOLDER / study / 'short.yaml'}", *(f"--set={edit}" for edit in edits)]
    subprocess.run(command, check=True, cwd=FOLDER.parent)


def numbers(folder: Path) -> dict[str, list[float]]:
    """Returns the values of each number of a finished sweep, one for each seed.

    Args:
        folder: of the sweep.

    Returns:
        "ARM eval/loss" and "ARM eval/accuracy" of the final runs; for a sweep without them, "ARM
        sensitivity" and "ARM best validation/loss".
    """
    reader = SweepReader(folder)
    status = reader.read()
    found: dict[str, list[float]] = {}
    if status.final:
        for trial in status.final:
            metrics = status.outcomes[trial.folder].metrics
            for name in ("eval/loss", "eval/accuracy"):
                found.setdefault(f"{trial.arm} {name}", []).append(metrics.get(name, math.nan))
        return found
    for (arm, _), points in sorted(_points(reader, status).items()):
        rates, losses = zip(*points, strict=True)
        number = sensitivity(rates, losses, CHANCE)
        found.setdefault(f"{arm} sensitivity", []).append(math.nan if number is None else number)
        found.setdefault(f"{arm} best {reader.plan.goal.row}", []).append(min(losses))
    return found


def _points(
    reader: SweepReader, status: Status
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Returns (arm, seed) -> (rate, goal) of each trial; infinity for one that diverged."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for trial in reader.plan.trials:
        (rate,) = trial.values.values()
        value = status.outcomes[trial.folder].value(reader.plan.goal.row)
        point = float(rate), math.inf if value is None else value  # type: ignore[arg-type]
        found.setdefault((trial.arm, trial.seed), []).append(point)
    return found


def interval(values: Sequence[float], seeds: int) -> tuple[float, float]:
    """Returns the interval in which the mean over other seeds is expected; see above.

    Args:
        values: one for each recorded seed, at least two.
        seeds: how many the mean is over.
    """
    count = len(values)
    error = statistics.stdev(values) * math.sqrt(1 / count + 1 / seeds)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half


def record(study: str, folder: Path) -> None:
    """Computes a study with more seeds and writes its expected.json.

    Args:
        study: the name of its folder.
        folder: for the sweep.
    """
    compute(study, folder, [f"{STUDIES[study]}={RECORDED}"])
    values = numbers(folder)
    without = [name for name, each in values.items() if not all(map(math.isfinite, each))]
    if without:
        raise SystemExit(f"{study} has runs without a finite value: {', '.join(without)}.")
    content = {
        "rule": f"two-sided {LEVEL:.0%} prediction interval of Student's t for the mean over the"
        f" seeds of short.yaml, from {RECORDED} seeds",
        "made_by": f"python -m experiments.check --record {study}",
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "values": {name: [round(x, 6) for x in xs] for name, xs in values.items()},
    }
    text = json.dumps(content, indent=1) + "\n"
    (FOLDER / study / "expected.json").write_text(text, encoding="utf-8")


def compare(
    found: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]]
) -> list[tuple[str, float, float, float, bool]]:
    """Compares the numbers of a study with what is expected.

    Args:
        found: name -> a value for each seed.
        expected: name -> a value for each recorded seed.

    Returns:
        For each expected number its name, the mean that was found, the ends of its interval, and
        whether it lies within. A number that was not found is NaN, and not within.
    """
    rows = []
    for name, recorded in expected.items():
        values = found.get(name, [math.nan])
        low, high = interval(recorded, len(values))
        mean = statistics.fmean(values)
        rows.append((name, mean, low, high, low <= mean <= high))
    return rows


def check(study: str, folder: Path) -> bool:
    """Computes the short form of a study, and prints its numbers as a table.

    Args:
        study: the name of its folder.
        folder: for the sweep.

    Returns:
        Whether all numbers lie within their intervals.
    """
    compute(study, folder)
    file = FOLDER / study / "expected.json"
    expected: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = compare(numbers(folder), expected["values"])
    width = max(len(row[0]) for row in rows)
    print(f"\n{study}\n{'number':{width}}  {'found':>8}  expected")
    for name, mean, low, high, within in rows:
        print(
            f"{name:{width}}  {mean:8.4f}  {low:.4f} to {high:.4f}{'' if within else '  OUTSIDE'}"
        )
    return all(row[-1] for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks or records studies.

    Args:
        arguments: of the command line; None for those of this process.

    Returns:
        0, or 1 if a number lies outside of its interval.
    """
    parser = argparse.ArgumentParser(prog="python -m experiments.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"default {' '.join(STUDIES)}")
    parser.add_argument("--record", action="store_true", help="write expected.json")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.studies) - set(STUDIES))
    if unknown:
        parser.error(f"there is no study {unknown[0]!r}; there are {', '.join(STUDIES)}.")
    within = True
    for study in options.studies or STUDIES:
        with tempfile.TemporaryDirectory() as folder:
            if options.record:
                record(study, Path(folder, study))
            else:
                within &= check(study, Path(folder, study))
    if not within:
        print("Numbers lie outside of what experiments/*/expected.json expects.")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
