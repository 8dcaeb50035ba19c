"""The verdict of a coordinate check, its tables and its pictures."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainer.messages import joined, plural, table
from trainer.report.document import Axis, Block, Column, Figure, Panel, Report, Series, Table
from trainer.studies.coordinate_check import LEVEL, LIMIT, Found, Slope, fit

Kind = Literal["grows", "shrinks", "keeps", "not decided"]

_NOTE = (
    "A slope is the power of the width with which the root mean square grows; ± is half of its"
    f" interval, which holds with {1 - LEVEL:.0%} for all slopes of changes together. A module"
    f" grows or shrinks if an interval is beyond ±{LIMIT:g}, and keeps its size if all of them are"
    " within: theory knows the powers 0, 1/2 and 1. – is a size of 0, or a change of less than 1%"
    " of that until the last step."
)


@dataclass(frozen=True)
class Judged:
    """The slope of the changes of a module after some steps."""

    module: str  # its path
    step: int  # after how many steps
    slope: Slope
    half: float  # half the width of the interval of the slope

    @property
    def kind(self) -> Kind:
        """What the interval says: it is beyond the limit, within it, or across it."""
        low, high = self.slope.value - self.half, self.slope.value + self.half
        if low > LIMIT:
            return "grows"
        if high < -LIMIT:
            return "shrinks"
        return "keeps" if -LIMIT < low and high < LIMIT else "not decided"

    def __str__(self) -> str:
        return f"{self.slope.value:.2f} ± {self.half:.2f}"


def judge_slopes(found: Found) -> list[Judged]:
    """Returns the slopes of all changes, with intervals that hold together."""
    slopes = found.slopes()
    return [Judged(*at, slope, slope.half_width(len(slopes))) for at, slope in slopes.items()]


def changes_passed(found: Found) -> bool:
    """Returns whether each change was shown to keep its size."""
    judged = judge_slopes(found)
    return bool(judged) and not found.ended() and all(x.kind == "keeps" for x in judged)


def verdict_on_widths(found: Found) -> list[str]:
    """Returns the sentences of the verdict, which say no more than the intervals."""
    judged, sentences = judge_slopes(found), []
    if ended := found.ended():
        runs = joined([f"{width} (seed {seed})" for width, seed in ended], 4)
        sentences.append(f"Runs had a loss or gradient that is not finite, at the width {runs}.")
    if not judged:
        return [*sentences, "No change has a slope: it is 0 or not finite at some width."]
    for kind, words in (("grows", "grow"), ("shrinks", "shrink")):
        # Of each module the steepest slope, the steepest module first.
        of_kind = sorted((x for x in judged if x.kind == kind), key=lambda x: -abs(x.slope.value))
        steepest = {x.module: x for x in reversed(of_kind)}
        names = [
            f"{x.module} (slope {x} after {plural(x.step, 'step')})"
            for x in sorted(steepest.values(), key=lambda x: -abs(x.slope.value))
        ]
        if names:
            sentences.append(f"Changes {words} with the width in {joined(names, 4)}.")
    if open_ones := [x for x in judged if x.kind == "not decided"]:
        widest = max(open_ones, key=lambda x: x.half)
        modules = list(dict.fromkeys(x.module for x in open_ones))
        sentences.append(
            f"{plural(len(open_ones), 'slope')} of {len(judged)}"
            f" {'is' if len(open_ones) == 1 else 'are'} not decided, in {joined(modules, 4)}: the"
            f" intervals reach across ±{LIMIT:g}, as {widest} in {widest.module}. More"
            " seeds (--seeds) or widths make them narrower."
        )
    if all(x.kind == "keeps" for x in judged):
        most = max(judged, key=lambda x: abs(x.slope.value))
        sentences.append(
            f"No slope of the {len(judged)} is beyond ±{LIMIT:g}: the largest is {most}, in"
            f" {most.module} after {plural(most.step, 'step')}."
        )
    return sentences


def _slopes(found: Found) -> Table:
    """Returns the table of slopes, whose cells are text."""
    judged = {(x.module, x.step): x for x in judge_slopes(found)}
    rows: list[tuple[str, ...]] = []
    for module, sizes in found.sizes.items():
        start = fit(found.widths, sizes[0])
        kinds = [judged[key].kind for step in found.steps if (key := (module, step)) in judged]
        last = found.changes[module][-1].mean(0)  # [widths]
        with np.errstate(all="ignore"):
            ratio = last[-1] / last[0]
        rows.append(
            (
                module,
                "–" if start is None else f"{start.value:.2f}",
                *(str(judged.get((module, step), "–")) for step in found.steps),
                f"{ratio:.3g}" if np.isfinite(ratio) and ratio > 0 else "–",
                " and ".join(dict.fromkeys(kinds)) or "–",
            )
        )
    titles = (
        Column("module", "module"),
        Column("start", "at the start"),
        *(Column(f"after_{step}", f"change, {plural(step, 'step')}") for step in found.steps),
        Column("ratio", f"change {found.widths[-1]} / {found.widths[0]}"),
        Column("verdict", "verdict"),
    )
    return Table("slopes", "Slopes against the width", titles, tuple(rows), _NOTE)


def printed(found: Found) -> list[str]:
    """Returns the lines of the table of slopes for a terminal."""
    slopes = _slopes(found)
    titles = [each.title for each in slopes.columns]
    rows = [[str(cell) for cell in row] for row in slopes.rows]
    return table([titles, *rows], right=range(1, len(titles) - 1))


def notes_on_widths(found: Found) -> list[str]:
    """Returns what differs between the widths, and how it was measured."""
    seeds = joined([str(seed) for seed in found.seeds])
    lines = [
        f"{found.series.path} is {joined([str(width) for width in found.widths])}, with the seeds"
        f" {seeds}. Activations are those of {plural(found.examples, 'example')} of the batch after"
        " those of the steps.",
        *found.series.notes,
    ]
    if found.constants:
        rates = joined([f"{path} = {value:.4g}" for path, value in found.constants.items()], 4)
        lines.append(f"Schedules of learning rates are replaced by their largest value: {rates}.")
    if list(found.sizes) == ["outputs"]:
        lines.append(
            "Only the outputs of the model are compared: it is no flax linen module, and nothing"
            " says what its layers return."
        )
    return lines


def make_coordinate_report(found: Found, title: str) -> Report:
    """Makes the report of a coordinate check."""
    figures = tuple(_figure(found, index) for index in range(len(found.steps)))
    text, slopes = tuple(notes_on_widths(found)), (_slopes(found),)
    block = Block(text=text, warnings=found.warnings, figures=figures, tables=slopes)
    panel = Panel("slopes", "Changes of activations by width", "tests", (block,))
    return Report(title, tuple(verdict_on_widths(found)), tuple(found.sizes), (panel,))


def _figure(found: Found, index: int) -> Figure:
    """Draws the changes of each module after some steps: every seed, and the geometric mean."""
    after, widths = plural(found.steps[index], "step"), found.widths
    series: list[Series] = []
    rows: list[tuple[str | int | float, ...]] = []
    for module, changes in found.changes.items():
        of_seeds = changes[index]  # [seeds, widths]
        for j, width in enumerate(widths):
            for i, seed in enumerate(found.seeds):
                size = found.sizes[module][1 + index][i, j]
                rows.append((module, width, seed, float(of_seeds[i, j]), float(size)))
        if np.any(of_seeds > 0):
            points = np.tile(widths, len(of_seeds)).tolist(), of_seeds.ravel().tolist()
            series.append(Series("points", module, *points, faint=True))
            with np.errstate(all="ignore"):
                mean = np.exp(np.log(of_seeds).mean(0))
            series.append(Series("line", module, widths, mean.tolist()))
    return Figure(
        name=f"changes_after_{found.steps[index]}",
        title=f"Changes of activations after {after}",
        description=(
            f"The root mean square of the change of each module's activations after {after}, over"
            " the width; a level line is a change that does not depend on the width."
        ),
        x=Axis(found.series.path, log=True),
        y=Axis(f"RMS of the change after {after}", log=True),
        series=tuple(series),
        table=Table(
            f"changes_after_{found.steps[index]}",
            f"Changes after {after}",
            Column.named(
                module="text", width="integer", seed="integer", change="number", size="number"
            ),
            tuple(rows),
        ),
    )
