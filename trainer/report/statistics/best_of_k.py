"""Tuning curves: how good the best of k trials is, from N trials that were run.

All functions take `values`, the results [N] of the trials of one arm, of which there must be at
least one and no NaN, and return arrays [N] over k = 1 to N. They describe trials drawn
independently from one distribution, as random search draws them; for others they are a guide.

A diverged trial is infinitely bad: pass `inf` (`-inf` if larger is better).
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.statistics.estimates import direction, lower_is_better


def expected_best(values: ArrayLike, better: str = "min") -> NDArray[np.float64]:
    """Returns the mean best of k trials, drawn without replacement: the U-statistic.

    It is the mean over all subsets of k trials, and estimates the expected best of k new trials
    without bias (for maxima, sum over sorted v(i) of v(i) C(i-1, k-1) / C(N, k)). It is infinite
    where a subset may consist of diverged trials alone, which is for every k up to their number;
    see `median_best`.

    >>> expected_best([1, 2, 3, 4, 5], "max").round(3).tolist()
    [3.0, 4.0, 4.5, 4.8, 5.0]
    """
    ordered = np.sort(lower_is_better(values, better))
    size, ranks = len(ordered), np.arange(len(ordered))
    k = ranks[:, None] + 1.0
    # weights[k, i] = C(N - i - 1, k - 1) / C(N, k): k / N at the best, then ratios of neighbours.
    ratios = np.maximum(size - ranks[:-1] - k, 0.0) / (size - 1.0 - ranks[:-1])
    weights = np.cumprod(np.concatenate([k / size, ratios], axis=1), axis=1)
    return direction(better) * _mean(weights, ordered)


def expected_best_v(values: ArrayLike, better: str = "min") -> NDArray[np.float64]:
    """Returns the mean best of k trials, drawn with replacement: the V-statistic.

    It is the estimate of arXiv:1909.03004, and biased towards worse values. `expected_best` is not.
    It is infinite for every k if a trial diverged.

    >>> expected_best_v([1, 2, 3, 4, 5], "max").round(3).tolist()
    [3.0, 3.8, 4.2, 4.434, 4.584]
    """
    ordered = np.sort(lower_is_better(values, better))
    k = np.arange(1, len(ordered) + 1)[:, None]
    remaining = (len(ordered) - np.arange(len(ordered) + 1)) / len(ordered)
    return direction(better) * _mean(-np.diff(remaining**k, axis=1), ordered)


def median_best(values: ArrayLike, better: str = "min") -> NDArray[np.float64]:
    """Returns the median best of k trials, by the distribution of the N trials.

    It is one of the values; of two in the middle, the better one. It is infinite only where more
    than half of all draws of k trials (with replacement) consist of diverged trials alone.

    >>> median_best([1, 2, 3, 4, 5], "max").tolist()
    [3.0, 4.0, 4.0, 5.0, 5.0]
    """
    ordered = np.sort(lower_is_better(values, better))
    size = len(ordered)
    at = np.ceil(_shares(size) * size - 1e-9).astype(int) - 1
    return direction(better) * ordered[at]


def bands(
    values: ArrayLike, confidence: float = 0.95, better: str = "min"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the ends of a band, [N] and [N], that holds the true median best of k for all k."""
    # arXiv:2311.09480; the steps are opda's `ld_equal_tailed`, computed exactly where opda
    # simulates. Bootstrap bands are too narrow at large k, where they see no more than the best
    # trial.
    # `values` are [N]; ties and infinite ones make the band wider than it needs to be, never too
    # narrow. It is infinite for every k at which the N trials set no limit.
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")
    ordered = np.sort(lower_is_better(values, better))
    low, high = _steps(len(ordered), confidence)
    shares = _shares(len(ordered))
    # Up to the first value the distribution function may be high[0]; at the i-th it is at least
    # low[i], and before the next one at most high[i + 1].
    best = np.concatenate([[-np.inf], ordered])[np.searchsorted([*high, 1.0], shares)]
    worst = np.concatenate([ordered, [np.inf]])[np.searchsorted(low, shares)]
    return (best, worst) if better == "min" else (-worst, -best)


def _mean(weights: NDArray, ordered: NDArray) -> NDArray:
    """Returns weights [k, i] times values [i]; infinite where an infinite value has a weight."""
    finite = np.isfinite(ordered)
    means = weights[:, finite] @ ordered[finite]
    for value in np.unique(ordered[~finite]):
        means[(weights[:, ordered == value] > 0).any(axis=1)] = value
    return means


def _shares(size: int) -> NDArray:
    """Returns the share of single trials that are better than the median best of k, for each k."""
    return -np.expm1(math.log(0.5) / np.arange(1, size + 1))


@functools.cache
def _steps(size: int, confidence: float) -> tuple[NDArray, NDArray]:
    """Returns the limits [N], [N] that hold for the shares of all N order statistics at once."""
    from scipy.optimize import brentq
    from scipy.special import betaincinv

    ranks = np.arange(1, size + 1)

    def limits(log_tail: float) -> tuple[NDArray, NDArray]:
        tail = math.exp(log_tail)
        low = betaincinv(ranks, size + 1 - ranks, tail)
        return low, 1.0 - low[::-1]

    def excess(log_tail: float) -> float:
        return _coverage(*limits(log_tail)) - confidence

    tail = (1 - confidence) / 2  # for one order statistic; N at once need at least tail / N each
    root: Any = brentq(excess, math.log(tail / (2 * size)), math.log(tail) + 1e-9, xtol=1e-6)
    return limits(float(root))


def _coverage(low: NDArray, high: NDArray) -> float:
    """Returns the probability that N sorted uniform numbers lie each within its own limits."""
    # The points of a Poisson process of rate N that has N points in [0, 1] are such numbers. The
    # number of its points is followed through all limits: at low[i] it is at most i, at high[i]
    # more than i.
    size = len(low)
    times = np.concatenate([low, high])
    counts = np.arange(1, size + 1)
    least = most = 0  # the number of points that the limits so far allow
    probability, before = np.ones(1), 0.0  # of `least` points, of one more, to `most`
    for event in np.argsort(times, kind="stable"):
        rate = size * (times[event] - before)
        more = np.cumprod(np.concatenate([[math.exp(-rate)], rate / counts[: most - least]]))
        probability = np.convolve(probability, more)[: most - least + 1]
        before = times[event]
        if event < size:
            most += 1
        else:
            least, probability = least + 1, probability[1:]
    log_all = size * math.log(size) - math.lgamma(size + 1) - size
    return float(probability[0]) * math.exp(-size * (1 - before) - log_all)
