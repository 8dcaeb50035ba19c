"""Prints the table of README.md of a finished sweep whose arms are methods of search.

python -m experiments.search_methods sweeps/methods_digits [SWEEP ...]
"""

import argparse
import math
from pathlib import Path

import numpy as np

from trainer.report.results import Workload, point_values
from trainer.report.statistics.estimates import mean_interval
from trainer.report.sweep_results import read_sweep_results

AFTER = (8, 16, 32)  # trials
BASELINE = "sobol"
HEAD = (
    "method",
    *(f"after {n}" for n in AFTER),
    "median trial",
    "winner, fresh seed",
    "difference",
)


def table(workload: Workload) -> str:
    """Returns a row for each method, in Markdown; all are means over searches.

    The columns: the best value of the goal on the split of the search after some trials; the median
    of the trials after the first eight; the value of the winners on fresh seeds, on the same split;
    and its difference from that of `BASELINE`, with a 95% t interval over pairs of searches.

    Args:
        workload: a finished sweep.
    """
    goal = workload.goal
    finals: dict[str, dict[int, float]] = {
        arm: {
            run.search: math.nan if (x := run.value(goal.selected)) is None else x
            for run in workload.finals_of(arm)
        }
        for arm in workload.arms
    }
    lines = [f"| {' | '.join(HEAD)} |", f"|---{'|---:' * (len(HEAD) - 1)}|"]
    for arm in workload.arms:
        values = point_values(workload, arm)
        runs = np.array([values[place] for place in sorted(values)])
        runs = goal.sign * runs.reshape(workload.searches, -1)
        best = np.minimum.accumulate(runs, axis=1)
        cells = [goal.sign * best[:, n - 1].mean() for n in AFTER]
        cells += [goal.sign * np.median(runs[:, AFTER[0] :])]
        cells += [np.mean([finals[arm][search] for search in range(workload.searches)])]
        pairs = [finals[arm][x] - finals[BASELINE][x] for x in range(workload.searches)]
        found = mean_interval(pairs)
        half = math.nan if found.high is None else found.high - found.value
        last = "" if arm == BASELINE else f"{found.value:.3f} ± {half:.3f}"
        texts = [f"{x:.3f}" if math.isfinite(x) else "-" for x in cells]
        lines.append(f"| `method.{arm}` | {' | '.join(texts)} | {last} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table of each sweep."""
    parser = argparse.ArgumentParser(prog="python -m experiments.search_methods")
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP")
    print(
        "\n".join(table(read_sweep_results(sweep)) for sweep in parser.parse_args().sweeps), end=""
    )


if __name__ == "__main__":
    main()
