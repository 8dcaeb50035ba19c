"""Prints how often the claims of a report are false, as tables in Markdown.

    python -m experiments.calibration                       # the tables of docs/statistics.md
    python -m experiments.calibration --table_of=SWEEP      # the runs that searches draw from

The tables have 20,000 draws a cell (the last one 2,000) and a fixed seed, and take four minutes of
one core.
"""

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.calibration.simulation import (
    DRAWS,
    OF_FAILURES,
    Rate,
    coverages,
    errors_at_every_look,
    errors_of_asked_searches,
    errors_of_configurations,
    errors_of_equal_arms,
    errors_of_searches,
    powers,
    rare_failures,
    read_runs,
    sentences,
)

RUNS = Path(__file__).parent / "runs.csv"


def tables(draws: int = DRAWS, runs: Path = RUNS) -> str:
    """Returns all tables in Markdown.

    Args:
        draws: of each cell.
        runs: the file of runs from which searches are drawn.
    """
    found = read_runs(runs)
    searches = [
        *errors_of_searches(found, draws),
        *errors_of_asked_searches(found, draws),
        *errors_of_configurations(found, draws),
    ]
    parts = [
        _wide("no difference between the arms", errors_of_equal_arms(draws)),
        _long("looked at after every unit", "false", "bound", errors_at_every_look(draws)),
        _long("drawn from runs", "false", "bound", searches),
        _rare_failures(draws),
        _long("true difference", "found", "floor", powers(draws)),
        _sentences(draws),
        _coverages(draws),
    ]
    return "\n".join(parts)


def _wide(head: str, rates: Iterable[Rate]) -> str:
    """Returns a table with a row for each cell, and a column for each number of units and arms."""
    rows: dict[str, dict[str, Rate]] = {}
    for rate in rates:
        column = f"{rate.units} units, {rate.arms} arms"
        rows.setdefault(rate.cell, {})[column] = rate
    columns = next(iter(rows.values()))
    lines = [_row([head, *columns, "bound"]), _row(["---", *["---:"] * (len(columns) + 1)])]
    for cell, of_cell in rows.items():
        bound = next(iter(of_cell.values())).bound
        lines.append(_row([cell, *(f"{x.value:.3f}" for x in of_cell.values()), f"{bound:.2f}"]))
    return "\n".join(lines) + "\n"


def _long(head: str, what: str, limit: str, rates: Iterable[Rate]) -> str:
    lines = [_row([head, "units", what, limit]), _row(["---", "---:", "---:", "---:"])]
    lines += [
        _row([rate.cell, f"{rate.units}", f"{rate.value:.3f}", f"{rate.bound:.2f}"])
        for rate in rates
    ]
    return "\n".join(lines) + "\n"


def _rare_failures(draws: int) -> str:
    head = ["one arm fails in", *(f"{units} units" for units in OF_FAILURES)]
    lines = [_row(head), _row(["---", *["---:"] * len(OF_FAILURES)])]
    for share, found in rare_failures(draws):
        lines.append(_row([f"{share:.0%} of its units", *(f"{each:.3f}" for each in found)]))
    return "\n".join(lines) + "\n"


_SAID = {
    "more": "better by more than d",
    "better": "better; whether it matters is open",
    "less": "better, by less than d",
    "equivalent": "equivalent",
    "open": "not decided",
    "worse": "the other one is better",
}


def _sentences(draws: int) -> str:
    lines = [_row(["true improvement", *_SAID.values()]), _row(["---", *["---:"] * len(_SAID)])]
    for true, shares in sentences(draws):
        text = "0" if not true else "d" if true == 1 else f"{true:g} d"
        lines.append(_row([text, *(f"{shares[kind]:.3f}" for kind in _SAID)]))
    return "\n".join(lines) + "\n"


def _coverages(draws: int) -> str:
    head = "differences on 360 test examples"
    lines = [_row([head, "units", "two-way interval", "over units alone", "floor of the former"])]
    lines.append(_row(["---", *["---:"] * 4]))
    for both, alone in coverages(draws):
        values = (f"{both.units}", f"{both.value:.3f}", f"{alone.value:.3f}", f"{both.bound:.2f}")
        lines.append(_row([both.cell, *values]))
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_runs(sweep: Path) -> None:
    """Prints the runs of a sweep over learning rates as CSV.

    Args:
        sweep: the folder of the sweep of sweep.yaml.
    """
    from trainer.report.sweep_results import read_sweep_results

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["learning_rate", "seed", "validation_loss", "test_loss"])
    for run in read_sweep_results(sweep).trials:
        (rate,) = run.values.values()
        losses = (run.summary.metrics["validation/loss"], run.summary.metrics["eval/loss"])
        writer.writerow([rate, run.seed, *(f"{loss:.6g}" for loss in losses)])


def main() -> None:
    """Prints the tables, or the runs of a sweep."""
    parser = argparse.ArgumentParser(prog="python -m experiments.calibration")
    parser.add_argument("--table_of", type=Path, metavar="SWEEP", help="print the runs of a sweep")
    sweep = parser.parse_args().table_of
    if sweep is None:
        print(tables(), end="")
    else:
        write_runs(sweep)


if __name__ == "__main__":
    main()
