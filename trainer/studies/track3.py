"""Reads the published logs of modded-nanogpt's optimizer track, and computes its verdicts again.

The track is a folder with README.md, whose table has a row for each result, and logs of the runs. A
log has lines such as "step:3250/3350 val_loss:3.28360 train_time:477.794s", below the program that
wrote it. Start with `read_track`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.messages import UserError, joined, plural, table
from trainer.sweep.target_rule import EARLIEST, TargetRule, reached
from trainer.writers.files import read_regular

RULE = TargetRule(3.28, 0.0013, "min", EARLIEST)  # the track's
# The loss of the weights, and in some logs that of an average of them, as val_ema_loss.
_PLAIN = "val_loss"
_LINE = re.compile(r"^step:(\d+)/\d+ (val_loss:(?:[\d.]+|nan|inf)\b.*)$", re.MULTILINE)
_LOSS = re.compile(r"\b(val_\w*loss):([\d.]+|nan|inf)\b")
_ROW = re.compile(
    r"^\| (?P<number>\d+) \| (?P<step>\d+)\S* \| (?P<mean>[\d.]+) \(n=(?P<runs>\d+)\)\S* \|.*"
    r"\[log\]\((?P<log>[^)]+)\)",
    re.MULTILINE,
)
_Run = dict[int, dict[str, float]]  # evaluated step -> name -> loss


@dataclass(frozen=True)
class PublishedRow:
    """What the table says of a result."""

    number: int
    step: int  # after which the target is reached
    mean: float  # at that step
    runs: int
    log: str  # the path of one of its logs, from the folder of the track


@dataclass(frozen=True)
class TrackRow:
    """A result, computed from its logs."""

    published: PublishedRow
    runs: int  # how many logs evaluate the loss at the published step
    mean: float | None  # at the published step; None without such a log
    statistic: float | None  # (target - mean) * sqrt(runs) there
    earliest: int | None  # the earliest step that passes, of those that all these runs evaluate
    faults: tuple[str, ...]  # what differs from the table, as sentences

    @property
    def passes(self) -> bool:
        """Whether the mean at the published step passes the rule."""
        return self.statistic is not None and self.statistic >= RULE.margin * (1 - 1e-9)


def read_track(folder: Path) -> list[TrackRow]:
    """Computes the verdicts of all rows of a track; raises UserError if it is not the track."""
    file = folder / "README.md"
    text = read_regular(file).decode(errors="replace") if file.is_file() else ""
    rows = [
        PublishedRow(int(x["number"]), int(x["step"]), float(x["mean"]), int(x["runs"]), x["log"])
        for x in _ROW.finditer(text)
    ]
    if not rows:
        raise UserError(
            f"{folder} is not the folder of the track: it needs README.md with the table of results"
            " and the logs that it links, as records/track_3_optimization of modded-nanogpt has."
        )
    return [_judged(folder, row) for row in rows]


def _judged(folder: Path, row: PublishedRow) -> TrackRow:
    """Computes the verdict of a row from the runs in the folder of its log."""
    place = (folder / row.log).parent
    # Logs of single results lie beside each other; those of others have folders of their own.
    alone = place == folder / "results"
    files = [folder / row.log] if alone else sorted(x for x in place.rglob("*") if x.is_file())
    runs = list[_Run]()
    for run in itertools.chain.from_iterable(map(_runs_in, files)):
        if not any(_same(run, each) for each in runs):
            runs.append(run)
    at = [run for run in runs if row.step in run]
    faults = []
    if len(at) != row.runs:
        faults.append(
            f"The table has {plural(row.runs, 'run')}, and there are logs of {len(at)} with the"
            f" loss after {row.step:,} steps."
        )
    if not at:
        return TrackRow(row, 0, None, None, None, tuple(faults))
    names = set.intersection(*({*run[row.step]} for run in at))
    means = {name: math.fsum(run[row.step][name] for run in at) / len(at) for name in names}
    name = min(sorted(names), key=lambda x: (abs(means[x] - row.mean), x != _PLAIN))
    mean = means[name]
    if name != _PLAIN:
        faults.append(f"The mean of the table is that of {name}; {_PLAIN} is {means[_PLAIN]:.5f}.")
    if abs(mean - row.mean) > 0.5e-4 + 1e-9:  # the table has four decimals
        faults.append(f"The table has the mean {row.mean:.4f}, and that of the logs is {mean:.5f}.")
    steps = sorted(set.intersection(*({*run} for run in at)) - {0})
    values = [[run[step].get(name, math.inf) for step in steps] for run in at]
    found, statistic = reached(RULE, steps, values, len(at)), float(RULE.statistic(mean, len(at)))
    return TrackRow(row, len(at), mean, statistic, found.step, tuple(faults))


def _runs_in(file: Path) -> Iterator[_Run]:
    """Yields the runs whose losses a file has; a step that is not later begins another run."""
    run: dict[int, dict[str, float]] = {}
    for found in _LINE.finditer(read_regular(file).decode(errors="replace")):
        step = int(found[1])
        if run and step <= [*run][-1]:
            yield run
            run = {}
        values = ((name, float(text)) for name, text in _LOSS.findall(found[2]))
        run[step] = {name: x if math.isfinite(x) else math.inf for name, x in values}
    if run:
        yield run


def _same(a: _Run, b: _Run) -> bool:
    """Returns whether two logs are of one run: they agree wherever both have losses."""
    common = [step for step in a if step in b and step > 0]
    return len(common) > 1 and all(a[step][_PLAIN] == b[step][_PLAIN] for step in common)


def track_lines(rows: Sequence[TrackRow]) -> list[str]:
    """Returns a table of the rows, what differs in each, and how many agree."""
    head = ("row", "steps", "runs", "mean", "published", "statistic", "earliest", "verdict")
    cells = [head, *(_cells(row) for row in rows)]
    lines = [*table(cells, right=range(7)), ""]
    for row in rows:
        lines += [f"Row {row.published.number}: {fault}" for fault in row.faults]
    passed = [row for row in rows if row.passes]
    agree = [row for row in passed if not row.faults]
    single = [str(row.published.number) for row in passed if row.runs == 1]
    lines.append(
        f"{len(passed)} of {plural(len(rows), 'result')} pass by their logs: {RULE.formula} is at"
        f" least {RULE.margin:.4f} after the published steps. {len(agree)} of them have the runs"
        " and the mean of the table."
    )
    if single:
        lines.append(f"Of a single run, whose seed may be the best of several: {joined(single)}.")
    return lines


def _cells(row: TrackRow) -> tuple[str, ...]:
    published = row.published
    numbers: Mapping[str, float | None] = {".5f": row.mean, ".4f": row.statistic}
    mean, statistic = ("-" if x is None else format(x, how) for how, x in numbers.items())
    verdict = "passes" if row.passes else "no logs" if row.mean is None else "does not pass"
    return (
        *(str(x) for x in (published.number, published.step, row.runs)),
        *(mean, f"{published.mean:.4f} ({published.runs})", statistic),
        *("-" if row.earliest is None else str(row.earliest), verdict),
    )
