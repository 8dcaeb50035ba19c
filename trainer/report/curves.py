"""Curves of metrics: reads them from runs, smooths them, and combines those of several seeds."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trainer.config.wording import known_names
from trainer.writers import read_metrics

Curve = tuple[ArrayLike, ArrayLike]  # x values, y values

T_RUNS = 3  # the fewest runs with a t interval: that of two is about nine times their distance


class Points(NamedTuple):
    """A metric of a run.

    Attributes:
        steps: the steps at which it was written, [points], increasing.
        x: where it is drawn, [points]: the steps, or another value of the same rows.
        y: its values, [points].
    """

    steps: np.ndarray
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Line:
    """A curve of a figure, with what it was computed from.

    Attributes:
        x: where it is drawn, [points].
        y: its values, [points].
        low: the lower end of its band, [points]; None if it has no band.
        high: the upper end of its band, [points]; None if it has no band.
        faint: curves that are drawn faint behind it, as they are in metrics.jsonl.
        runs: of how many runs it is the mean.
    """

    x: ArrayLike
    y: ArrayLike
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    faint: Sequence[Curve] = ()
    runs: int = 1

    @property
    def curve(self) -> Curve:
        """Its x and y values."""
        return self.x, self.y


def read_points(workdir: str | os.PathLike[str], name: str, x: str = "step") -> Points:
    """Reads one metric of a run.

    Args:
        workdir: the run's folder.
        name: of the metric, such as "eval/accuracy".
        x: another name in the rows, such as "epochs"; rows that lack it are left out.

    Raises:
        ValueError: the folder has no metrics, or none of one of these names.
    """
    file = Path(workdir) / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{workdir} has no metrics.jsonl; name the folder of a run.")
    # Without what no run writes, such as text in a file that was edited.
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
    """Returns the debiased exponential moving mean of values.

    It is the mean of all values so far, with weights that fall by the factor `weight` from each to
    the one before: without a start value whose trace would have to fade.

    Args:
        values: the values, [points]. One that is not finite stays, and counts in no mean.
        weight: at least 0, where nothing changes, and below 1.

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
    """Returns the curve of a run, or the mean of several with a band.

    The band is the 95% t interval of the mean for three runs or more, and from the smallest to
    the largest value for two. There are points at the steps that all runs have; their x is the
    mean of those of the runs, which differ if they are clocked.

    Args:
        runs: at least one.
        smoothing: the weight with which every run is smoothed first; see `smooth`.
    """
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
        low, high = _band(y)
        return Line(x, y.mean(0), low, high, faint, len(runs))


def _band(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(y) < T_RUNS:
        return y.min(0), y.max(0)
    from scipy.special import stdtrit  # which takes less than scipy.stats to import

    half = stdtrit(len(y) - 1, 0.975) * y.std(0, ddof=1) / np.sqrt(len(y))
    return y.mean(0) - half, y.mean(0) + half


def describe_bands(lines: Iterable[Line]) -> str:
    """Returns what the bands of lines are, such as "band: 95% t interval of the mean".

    Args:
        lines: the lines; those without a band are ignored. Without any band, the text is "".
    """
    kinds = {
        "95% t interval of the mean"
        if line.runs >= T_RUNS
        else "from the smaller to the larger of 2"
        for line in lines
        if line.low is not None
    }
    return f"band: {', or '.join(sorted(kinds))}" if kinds else ""
