"""Reads curves of metrics, and draws them into a PNG, PDF or SVG, or with characters."""

import itertools
import os
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config.wording import known_names
from trainer.report.document import Axis, Figure, Series, Table
from trainer.report.figures.drawing import draw, save_as
from trainer.writers import read_metrics

Values = Sequence[float] | NDArray[Any]
Curve = tuple[Values, Values]  # x values, y values

T_RUNS = 3  # the fewest runs with a t interval; that of two runs is nine times their distance wide


# Curves: reading, smoothing, combining.


class Points(NamedTuple):
    """A metric of a run; each field is [points]."""

    steps: np.ndarray  # at which it was written, increasing
    x: np.ndarray  # where it is drawn: the steps, or another value of the same rows
    y: np.ndarray


@dataclass(frozen=True)
class Line:
    """A curve of a figure, with what it was computed from; its arrays are [points]."""

    x: Values
    y: Values
    low: np.ndarray | None = None  # the lower end of its band; None if it has no band
    high: np.ndarray | None = None  # the upper end of its band; None if it has no band
    faint: Sequence[Curve] = ()  # its runs, as metrics.jsonl has them, drawn pale behind it
    runs: int = 1  # of how many runs it is the mean

    @property
    def curve(self) -> Curve:
        """Its x and y values."""
        return self.x, self.y


def read_points(workdir: str | os.PathLike[str], name: str, x: str = "step") -> Points:
    """Reads a metric by steps or by `x`, such as "epochs"; raises ValueError if no row has both."""
    # Rows that lack one of the two are left out.
    file = Path(workdir) / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{workdir} has no metrics.jsonl; name the folder of a run.")
    rows = read_metrics(file)
    for key in (name, x):
        if not any(key in row for row in rows):
            names = sorted({key for row in rows for key in row} - {"step"})
            has = known_names(key, names, "It has") if names else "It has no rows."
            raise ValueError(f"{file} has no metric {key!r}. {has}")
    found = [(row["step"], row[x], row[name]) for row in rows if name in row and x in row]
    if not found:
        raise ValueError(f"{file} has no row with both {name!r} and {x!r}.")
    steps, at, values = zip(*found, strict=True)
    return Points(np.asarray(steps), np.asarray(at, float), np.asarray(values, float))


def smooth(values: ArrayLike, weight: float) -> np.ndarray:
    """Returns the debiased exponential moving mean of values, [points].

    It is the mean of all values so far, where a value counts `weight` times as much as the one
    after it; there is no starting value. A value that is not finite stays, and counts in no mean. A
    weight of 0 changes nothing; it must be below 1.

    Example:
        >>> smooth([1.0, 1.0, 4.0], 0.5).round(3).tolist()
        [1.0, 1.0, 2.714]
    """
    smoothed = np.array(values, float)
    total = count = 0.0
    for index in np.flatnonzero(np.isfinite(smoothed)):
        total = weight * total + (1 - weight) * smoothed[index]
        count = weight * count + (1 - weight)
        smoothed[index] = total / count
    return smoothed


def combine(runs: Sequence[Points], smoothing: float = 0.0) -> Line:
    """Returns the curve of a run, or the mean of several with a band."""
    # The band is the 95% t interval of the mean for three runs or more, and from the smallest to
    # the largest value for two. There are points at the steps that all runs have; their x is the
    # mean over the runs, in which times differ. Runs are smoothed first, by the weight `smoothing`.
    faint = [(run.x, run.y) for run in runs]
    smoothed = [run._replace(y=smooth(run.y, smoothing)) for run in runs]
    if len(runs) == 1:
        return Line(runs[0].x, smoothed[0].y, faint=faint if smoothing else ())
    shared = set(runs[0].steps.tolist()).intersection(*(run.steps.tolist() for run in runs[1:]))
    steps = np.array(sorted(shared), int)
    at = [np.searchsorted(run.steps, steps) for run in runs]
    x = np.mean([run.x[index] for run, index in zip(runs, at, strict=True)], axis=0)
    y = np.stack([run.y[index] for run, index in zip(smoothed, at, strict=True)])  # [runs, points]
    with np.errstate(invalid="ignore"):  # infinite values have no mean and no band
        mean, low, high = y.mean(0), y.min(0), y.max(0)
        if len(y) >= T_RUNS:
            from scipy.special import stdtrit  # imported faster than scipy.stats

            half = stdtrit(len(y) - 1, 0.975) * y.std(0, ddof=1) / np.sqrt(len(y))
            low, high = mean - half, mean + half
        return Line(x, mean, low, high, faint, len(runs))


def describe_bands(lines: Iterable[Line]) -> str:
    """Returns what the bands of lines are, such as "band: 95% t interval of the mean", or ""."""
    texts = ("from the smaller to the larger of 2", "95% t interval of the mean")
    kinds = {texts[line.runs >= T_RUNS] for line in lines if line.low is not None}
    return f"band: {', or '.join(sorted(kinds))}" if kinds else ""


# Figures in files.

_NAMED = 47  # curves with a name; others are grey


def save_figure(
    lines: Mapping[str, Line],
    file: str | os.PathLike[str],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draws curves into a file, as a report does; raises UserError."""
    # On a logarithmic axis, points that are not positive are not drawn.
    names, others = [*lines][:_NAMED], [*lines.values()][_NAMED:]
    if others:
        title += f"\nand {len(others)} more, in grey"

    def one(kind: Literal["line", "band"], name: str, *values: Values, faint: bool = False) -> None:
        series.append(Series(kind, name, *(np.asarray(x).tolist() for x in values), faint=faint))

    series: list[Series] = []
    for line in others:
        one("line", "", *line.curve, faint=True)
    for name in reversed(names):  # the first in front of the others
        line = lines[name]
        for curve in line.faint:
            one("line", name, *curve, faint=True)
        if line.low is not None and line.high is not None:
            one("band", name, line.x, line.low, line.high)
        one("line", name, *line.curve)
    axes = Axis(x_label, log_x), Axis(y_label, log_y)
    numbers = Table("curves", title, (), ())
    save_as(draw(Figure("curves", title, "", *axes, tuple(series), numbers), names, title), file)


# Drawings with characters.

# One for each curve; with more curves they repeat.
_MARKS = "*o+x#@%&" + string.ascii_letters.replace("o", "").replace("x", "")
_MOST_NAMES = 24  # names below the drawing


def draw_in_terminal(
    curves: Mapping[str, Curve],
    title: str,
    width: int = 60,
    height: int = 10,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Draws curves, of which there is one at least, with another character for each.

    Both axes fit what is drawn: points that are finite, and positive on a logarithmic axis. Between
    the points of a curve, values are interpolated. The width and height are without the labels.

    Example:
        >>> print(draw_in_terminal({"a": ([1, 2], [10, 20])}, "b", width=5, height=5), end="")
        b
                20 |    *
              17.5 |   *
                15 |  *
              12.5 | *
                10 |*
                   +-----
                    1   2
          * a
    """
    points = [_scaled(curve, log_x, log_y) for curve in curves.values()]
    left, right = _ends([x[np.isfinite(y)] for x, y in points])
    columns = np.linspace(left, right, width)
    drawn = [_interpolated(x, y, columns) for x, y in points]
    low, high = _ends(drawn)
    if low == high:  # draw a constant in the middle of the axis
        low, high = low - (0.05 * abs(low) or 0.05), high + (0.05 * abs(high) or 0.05)
    grid = [[" "] * width for _ in range(height)]  # [row from the top][column]
    # Draw the first curve last, so that it hides the others where they meet.
    for mark, values in reversed([*zip(itertools.cycle(_MARKS), drawn, strict=False)]):
        for column in np.flatnonzero(np.isfinite(values)):
            grid[round((high - values[column]) / (high - low) * (height - 1))][column] = mark
    labels = _labels(np.linspace(high, low, height), log_y)
    rows = [
        f"{label:>10} |{''.join(cells).rstrip()}" for label, cells in zip(labels, grid, strict=True)
    ]
    first, last = _labels(np.array([left, right]), log_x)
    foot = f"{first:<{width // 2}}{last:>{width - width // 2}}"
    lines = [title, *rows, " " * 11 + "+" + "-" * width, " " * 12 + foot, *_legend(list(curves))]
    return "\n".join(lines) + "\n"


def _scaled(curve: Curve, log_x: bool, log_y: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns a curve in units of the axes, sorted by x; values that cannot be drawn are NaN."""
    x, y = (np.array(values, float) for values in curve)
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = np.log10(x) if log_x else x, np.log10(y) if log_y else y
    y[~np.isfinite(y)] = np.nan
    kept = np.isfinite(x)
    order = np.argsort(x[kept], kind="stable")
    return x[kept][order], y[kept][order]


def _ends(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    values = np.concatenate(arrays)
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


def _interpolated(x: np.ndarray, y: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns the values of a curve at the columns, NaN where it has none."""
    if not len(x) or columns[0] == columns[-1]:  # all x are equal: draw one value, if there is any
        return y[np.isfinite(y)][:1]
    values = np.interp(columns, x, y, left=np.nan, right=np.nan)
    # Interpolation loses a finite point between values that are not finite: add it.
    for at, value in zip(x, y, strict=True):
        nearest = int(np.abs(columns - at).argmin())
        if not np.isfinite(values[nearest]):
            values[nearest] = value
    return values


def _labels(values: np.ndarray, log: bool) -> list[str]:
    """Returns numbers with as few digits as tell them apart, 3 to 8."""
    size = np.abs(values).max()
    values = 10**values if log else np.where(np.abs(values) < 1e-9 * size, 0.0, values)
    texts = [[f"{value:.{digits}g}" for value in values] for digits in range(3, 9)]
    different = len(set(values.tolist()))
    return next((each for each in texts if len(set(each)) == different), texts[-1])


def _legend(names: Sequence[str]) -> list[str]:
    """Returns lines with the mark and name of each curve, or of the first of many."""
    marked = zip(itertools.cycle(_MARKS), names[:_MOST_NAMES], strict=False)
    shown = [f"{mark} {name}" for mark, name in marked]
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    # Lines must not be broken at the spaces within names.
    joined = "   ".join(each.replace(" ", "\0") for each in shown)
    lines = textwrap.wrap(joined, 78, break_long_words=False, break_on_hyphens=False)
    return [f"  {line}".replace("\0", " ") for line in lines]
