"""Reads curves of metrics, and draws them into a PNG, PDF or SVG, or with characters."""

import contextlib
import itertools
import os
import string
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.config.wording import known_names
from trainer.messages import UserError, printable
from trainer.report.figures.style import Style, missing_glyphs_ignored, style
from trainer.writers import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    # Drop values that no run writes, such as text in a file that was edited.
    rows = [
        {key: value for key, value in row.items() if isinstance(value, int | float)}
        for row in read_metrics(file)
    ]
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

_NAMED = 47  # names in a legend, in two columns; other curves are grey
_ROWS = 24  # names in a column of a legend
_GREY = "#C8C8C8"
_MARKED = 14  # a curve of at most so many points has a marker at each

# No date, so that a figure that is drawn again has the same bytes.
_METADATA: Mapping[str, dict[str, Any]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
# Text stays text, which can be searched, and PDFs have no Type 3 fonts, which journals refuse.
_SETTINGS: Any = {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "pdf.fonttype": 42}


def save_figure(
    lines: Mapping[str, Line],
    file: str | os.PathLike[str],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draws curves into a file, with a legend if there are several; raises UserError."""
    # With more than 47 curves, the others are grey. On a logarithmic x axis, points that are not
    # positive are not drawn; on a logarithmic y axis, bands are cut to the reach of the curves.

    # pyplot would choose a backend for the display, and keep every figure in memory.
    from matplotlib.figure import Figure

    title = printable(title, keep="\n")
    with figure_file(file) as write:
        figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.set(title=title, xlabel=printable(x_label), ylabel=printable(y_label))
        axes.title.set_fontsize("medium")
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_parse_math(False)  # a "$" in the name of a folder does not begin a formula
        # Set scales before drawing curves: markers are spaced by their positions in the figure.
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        for index, line in reversed([*enumerate(lines.values())]):  # grey lines behind the others
            if index < _NAMED:
                _draw(axes, line, style(index), len(lines))
            else:
                axes.plot(*line.curve, color=_GREY, linewidth=0.6)
        if log_y:  # fit the axis to the curves, not to bands, whose ends may be close to 0
            curves: list[Curve] = [c for line in lines.values() for c in (line.curve, *line.faint)]
            values = np.concatenate([np.asarray(y, float) for _, y in curves])
            values = values[np.isfinite(values) & (values > 0)]
            if len(values):
                low, high = values.min(), values.max()
                margin = (high / low) ** 0.05 if high > low else 2.0
                axes.set_ylim(low / margin, high * margin)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            _add_legend(figure, list(lines))
        write(figure)


@contextlib.contextmanager
def figure_file(file: str | os.PathLike[str]) -> Iterator[Callable[["Figure"], None]]:
    """Yields a function that writes a figure into a file; raises UserError if that cannot be."""
    # The figure is drawn inside of the context. A suffix that is not in `_METADATA` is an error.
    if (suffix := Path(file).suffix.removeprefix(".").lower()) not in _METADATA:
        known = ", .".join(_METADATA)
        raise UserError(f"{file} cannot be written: its suffix is not one of .{known}.")
    from matplotlib import rc_context

    def write(figure: "Figure") -> None:
        try:
            figure.savefig(file, metadata=_METADATA[suffix])
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise UserError(f"{file} cannot be written: {reason}.") from error

    with rc_context(_SETTINGS), missing_glyphs_ignored():
        yield write


def _draw(axes: "Axes", line: Line, look: Style, lines: int) -> None:
    for curve in line.faint:
        axes.plot(*curve, color=look.color, linewidth=0.6, alpha=0.35)
    if line.low is not None and line.high is not None:
        band = {"color": look.color, "alpha": 0.15, "linewidth": 0}
        axes.fill_between(np.asarray(line.x), line.low, line.high, **band)
    few = np.size(line.y) <= _MARKED
    axes.plot(
        *line.curve,
        color=look.color,
        linestyle=(0, look.dash) if look.dash else "-",
        linewidth=1.5 if lines <= 10 else 1.1,
        marker=look.marker if few or lines > 1 else "",
        markersize=4,
        # Eight markers along the diagonal of the figure, from an offset that depends on the marker.
        markevery=None if few else ((ord(look.marker) % 10) / 80, 0.125),
    )


def _add_legend(figure: "Figure", names: list[str]) -> None:
    """Adds a legend to the right of the axes, and widens the figure by its width."""
    from matplotlib.lines import Line2D

    handles = []
    for index, name in enumerate(names[:_NAMED]):
        color, _, dash, marker = style(index)
        # Matplotlib hides labels that begin with an underscore.
        label = printable(f" {name}" if name.startswith("_") else name)
        line: dict[str, Any] = {"linestyle": (0, dash) if dash else "-", "markersize": 4}
        handles.append(Line2D([], [], color=color, marker=marker, label=label, **line))
    if len(names) > _NAMED:
        handles.append(Line2D([], [], color=_GREY, label=f"and {len(names) - _NAMED} more"))
    legend = figure.legend(
        handles=handles,
        frameon=False,
        loc="outside right upper",
        ncols=-(-len(handles) // _ROWS),
        fontsize=8 if len(handles) <= 12 else 7,
        handlelength=4,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    # Widen the figure; the constrained layout would take the width of the legend from the axes.
    figure.set_size_inches(7 + max(0.0, legend.get_window_extent().width / figure.dpi - 0.5), 4)


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
    texts: list[str] = []
    for digits in range(3, 9):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(set(values.tolist())):
            break
    return texts


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
