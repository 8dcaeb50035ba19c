"""Points of series as compact data of SVG paths."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.report.document import Series

Pixels = NDArray[np.float64]  # [points], nan where a value has no place

_CAP = 7  # half the width of the ends of an interval
_MARKS = 9  # markers on a long line
_CUT_FRONT, _CUT_FAINT = 0.8, 1.5  # how far from a point that is left out the line may pass


def path(series: Series, x: Pixels, y: Pixels, high: Pixels, box: tuple[int, ...]) -> str:
    """Returns the data `d` of the path that draws a series, in integers.

    Points without a place are left out, and interrupt a line. Of lines, so are points that nobody
    could see, at most 0.4 pixels from the line in front and 1.5 in faint ones.

    Args:
        series: the series.
        x: places of its points, as many as the series has values of x.
        y: the same of y.
        high: the same of the upper ends; empty for other kinds than bands and intervals.
        box: left, top, right and bottom of the frame of the axes.
    """
    left, top, right, bottom = box
    if series.kind == "rule":
        if len(series.y):
            x = x[:0]
        across = [f"M{left} {round(at)}H{right}" for at in y if np.isfinite(at)]
        along = [f"M{round(at)} {top}V{bottom}" for at in x if np.isfinite(at)]
        return "".join(across or along)
    if series.kind == "interval":
        return "".join(
            f"M{round(a) - _CAP} {round(b)}h{2 * _CAP}m{-_CAP} 0V{round(c)}m{-_CAP} 0h{2 * _CAP}"
            for a, b, c in zip(x, y, high, strict=True)
            if np.isfinite([a, b, c]).all()
        )
    if series.kind == "points":
        inside = (x > left - 9) & (x < right + 9) & (y > top - 9) & (y < bottom + 9)
        return _relative(np.stack([x[inside], y[inside]], 1)) if inside.any() else ""
    away = 3 * (bottom - top)  # keeps lines that leave the frame from growing without bound
    y, high = np.clip(y, top - away, bottom + away), np.clip(high, top - away, bottom + away)
    if series.kind == "band":
        return "".join(_runs([x, y, high], _ribbon))
    tolerance = _CUT_FAINT if series.faint else _CUT_FRONT
    draw = _steps if series.kind == "steps" else lambda run: _relative(_simplify(run, tolerance))
    return "".join(_runs([x, y], draw))


def marks(x: Pixels, y: Pixels) -> str:
    """Returns the data of a path whose vertices are marked points of a line, at most nine.

    Args:
        x: places of the points of the line.
        y: the same of y.
    """
    points = np.stack([x, y], 1)[np.isfinite(x) & np.isfinite(y)]
    if len(points) > _MARKS:
        points = points[[round(i * (len(points) - 1) / (_MARKS - 1)) for i in range(_MARKS)]]
    return _relative(points) if len(points) else ""


def _runs(columns: list[Pixels], draw: Callable[[NDArray[np.float64]], str]) -> list[str]:
    """Draws each run of points that all have a place."""
    points = np.stack(columns, 1)
    placed = np.isfinite(points).all(1)
    cuts = np.flatnonzero(np.diff(placed)) + 1
    return [draw(run) for run in np.split(points, cuts) if len(run) and np.isfinite(run).all()]


def _relative(points: NDArray[np.float64]) -> str:
    whole = np.round(points).astype(int)
    (a, b), rest = whole[0], np.diff(whole, axis=0)
    return f"M{a} {b}" + (f"l{_join(rest.ravel().tolist())}" if len(rest) else "h0")


def _join(numbers: Sequence[int]) -> str:
    return "".join(
        str(n) if n < 0 or i == 0 else f" {n}" for i, n in enumerate(int(n) for n in numbers)
    )


def _steps(run: NDArray[np.float64]) -> str:
    whole = np.round(run).astype(int)
    (a, b), rest = whole[0], np.diff(whole, axis=0)
    return f"M{a} {b}" + ("".join(f"h{dx}v{dy}" for dx, dy in rest.tolist()) or "h0")


def _ribbon(run: NDArray[np.float64]) -> str:
    outline = np.concatenate([run[:, [0, 2]], run[::-1][:, [0, 1]]])
    return _relative(outline) + "z"


def _simplify(points: NDArray[np.float64], tolerance: float) -> NDArray[np.float64]:
    """Leaves out points that lie closer to the line through their neighbors than the tolerance.

    Douglas and Peucker's algorithm.
    """
    keep = np.zeros(len(points), bool)
    keep[[0, -1]] = True
    spans = [(0, len(points) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        way = points[last] - points[first]
        apart = points[first + 1 : last] - points[first]
        length = float(np.hypot(*way))
        if length:
            distance = np.abs(way[0] * apart[:, 1] - way[1] * apart[:, 0]) / length
        else:
            distance = np.hypot(apart[:, 0], apart[:, 1])
        far = int(distance.argmax())
        if distance[far] > tolerance:
            middle = first + 1 + far
            keep[middle] = True
            spans += [(first, middle), (middle, last)]
    return points[keep]
