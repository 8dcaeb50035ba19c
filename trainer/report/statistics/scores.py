"""Steps and times to a target, and AlgoPerf's scores of them over several workloads.

`times` are the times to the targets, [arm, workload], positive: seconds, or steps; `inf` where the
arm missed the target. A function raises ValueError if they are anything else. A score over
workloads depends on which arms take part, so the report shows it with each arm left out in turn.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.statistics.estimates import direction, row_of_numbers

_DRAWS = 2000  # of a bootstrap


class Speedup(NamedTuple):
    """How much faster one arm reaches targets than another."""

    # the geometric mean of the other's time over this arm's, over the workloads where both reach
    # the target: 2.0 is twice as fast. None if there is none
    factor: float | None
    both: int  # the number of those workloads
    only_first: int  # where only this arm reaches the target; not in `factor`
    only_second: int  # where only the other does; not in `factor`
    neither: int  # where both miss it


def steps_to_target(
    steps: ArrayLike, values: ArrayLike, target: float, better: str = "min"
) -> float:
    """Returns the step, or second, of the first evaluation that reaches a target, or `inf`.

    >>> steps_to_target([10, 20, 30], [0.5, 0.2, 0.1], target=0.2)
    20.0
    """
    at, metric = np.asarray(steps, float), np.asarray(values, float)
    if at.shape != metric.shape:
        raise ValueError(f"Got {at.size} steps and {metric.size} values.")
    sign = direction(better)
    reached = at[sign * metric <= sign * target]
    return float(reached[0]) if reached.size else float("inf")


def performance_profile(times: ArrayLike, taus: ArrayLike) -> NDArray[np.float64]:
    """Returns the share of workloads where an arm is within tau of the fastest one, [arm, T]."""
    # The factors `taus`, [T], are at least 1.
    factors = np.asarray(taus, float)
    return (_ratios(times)[:, None, :] <= factors[:, None]).mean(axis=2)


def algoperf_score(
    times: ArrayLike, r_max: float = 4.0, points: int | None = 100
) -> NDArray[np.float64]:
    """Returns AlgoPerf's scores, [arm], 0 to 1: means of performance profiles over 1 to r_max."""
    # From the factor `r_max`, which must be over 1, an arm counts as having missed the target.
    # `points` are those of the trapezoidal rule, 100 in AlgoPerf's scorer (arXiv:2306.07179); None
    # for the exact integral.
    if not r_max > 1.0:
        raise ValueError(f"r_max must be over 1, got {r_max}.")
    if points is None:
        return (np.clip(r_max - _ratios(times), 0.0, None) / (r_max - 1.0)).mean(axis=1)
    taus = np.linspace(1.0, r_max, points)
    return np.asarray(np.trapezoid(performance_profile(times, taus), taus)) / (r_max - 1.0)


def score_intervals(
    runs: Sequence[Sequence[ArrayLike]], r_max: float = 4.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the ends, [arm] and [arm], of 95% bootstrap intervals of the scores."""
    # `runs` are the times to the targets, [arm][workload]. The runs of each arm on each workload
    # are drawn again; the workloads stay, so that an interval says nothing about other workloads.
    # With few runs percentile intervals are too narrow: of the mean of five values they cover 85%.
    rng = np.random.default_rng(0)

    def medians(times: ArrayLike) -> NDArray:  # [_DRAWS]
        row = row_of_numbers(times)
        return np.median(rng.choice(row, (_DRAWS, len(row))), axis=1)

    of_arms = [np.stack([medians(each) for each in of_arm], axis=-1) for of_arm in runs]
    times = np.stack(of_arms, axis=1)  # [_DRAWS, arm, workload]
    scores = np.stack([algoperf_score(each, r_max) for each in times])
    tail = (1 - 0.95) / 2
    low, high = np.quantile(scores, [tail, 1 - tail], axis=0)
    return low, high


def leave_one_out(
    times: ArrayLike, r_max: float = 4.0, points: int | None = 100
) -> dict[int, NDArray[np.float64]]:
    """Returns the arm left out -> the scores of the others without it, [arm], NaN for that arm."""
    # It is empty with a single arm. For `r_max` and `points` see `algoperf_score`.
    table = _table(times)
    if len(table) < 2:
        return {}
    without = {arm: np.delete(table, arm, axis=0) for arm in range(len(table))}
    scores = {arm: algoperf_score(rest, r_max, points) for arm, rest in without.items()}
    return {arm: np.insert(rest, arm, np.nan) for arm, rest in scores.items()}


def speedups(times: ArrayLike) -> dict[tuple[int, int], Speedup]:
    """Returns the geometric mean speedup of each arm over each other one, by (arm, other arm)."""
    table = _table(times)
    met = np.isfinite(table)
    result = {}
    for arm, other in itertools.permutations(range(len(table)), 2):
        both = met[arm] & met[other]
        logs = np.log(table[other, both]) - np.log(table[arm, both])
        result[arm, other] = Speedup(
            factor=float(np.exp(logs.mean())) if both.any() else None,
            both=int(both.sum()),
            only_first=int((met[arm] & ~met[other]).sum()),
            only_second=int((~met[arm] & met[other]).sum()),
            neither=int((~met[arm] & ~met[other]).sum()),
        )
    return result


def _table(times: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(times, float)
    if table.ndim != 2 or not table.size or not (table > 0).all():  # NaN is not over 0
        raise ValueError(
            "Times to targets must be a table [arm, workload] of positive numbers, inf where an arm"
            f" missed the target; got one of shape {table.shape} with NaN, 0 or less, or empty."
        )
    return table


def _ratios(times: ArrayLike) -> NDArray[np.float64]:
    """Returns the times over the shortest of their workload; inf where the arm missed it."""
    table = _table(times)
    best = table.min(axis=0)
    met = np.isfinite(table)
    return np.divide(table, best, out=np.full(table.shape, np.inf), where=met)
