"""Draws curves with characters, for a terminal or a log."""

import itertools
import string
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from trainer.report.curves import Curve

# One for each curve; with more curves they repeat.
_MARKS = "*o+x#@%&" + string.ascii_letters.replace("o", "").replace("x", "")
_NAMED = 24  # names below the drawing


def draw_in_terminal(
    curves: Mapping[str, Curve],
    title: str,
    width: int = 60,
    height: int = 10,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Draws curves with characters, with another character for each curve.

    Both axes fit what is drawn: points that are finite, and positive on a logarithmic axis. Between
    the points of a curve, values are interpolated.

    Args:
        curves: name -> (x, y), arrays of equal length; at least one.
        title: the text above the drawing.
        width: columns of the drawing, without the labels.
        height: rows of the drawing.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic.

    Returns:
        Lines of plain text; the last ends with a newline.

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
    if low == high:  # the middle of an axis around it
        low, high = low - (0.05 * abs(low) or 0.05), high + (0.05 * abs(high) or 0.05)
    grid = [[" "] * width for _ in range(height)]  # [row from the top][column]
    # The first curve last, so that it hides the others where they meet.
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
    """Returns a curve as it lies on the axes; values that cannot be drawn are NaN."""
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
    if not len(x) or columns[0] == columns[-1]:  # in one point, the first column is enough
        return y[np.isfinite(y)][:1]
    values = np.interp(columns, x, y, left=np.nan, right=np.nan)
    # A point between values that are not finite is nowhere on an interpolated line.
    for at, value in zip(x, y, strict=True):
        nearest = int(np.abs(columns - at).argmin())
        if np.isfinite(value) and not np.isfinite(values[nearest]):
            values[nearest] = value
    return values


def _labels(values: np.ndarray, log: bool) -> list[str]:
    """Returns numbers with as many digits as it takes to tell them apart, 3 to 8."""
    size = np.abs(values).max()
    values = 10**values if log else np.where(np.abs(values) < 1e-9 * size, 0.0, values)
    texts: list[str] = []
    for digits in range(3, 9):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(set(values.tolist())):
            break
    return texts


def _legend(names: Sequence[str]) -> list[str]:
    """Returns lines with the mark of each curve, or of the first of many."""
    shown = [f"{mark} {name}" for mark, name in zip(itertools.cycle(_MARKS), names, strict=False)][
        : _NAMED if len(names) > _NAMED else None
    ]
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    # Names contain spaces, at which their lines must not be broken.
    joined = "   ".join(each.replace(" ", "\0") for each in shown)
    lines = textwrap.wrap(joined, 78, break_long_words=False, break_on_hyphens=False)
    return [f"  {line}".replace("\0", " ") for line in lines]
