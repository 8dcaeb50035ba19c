"""The probability that a run of one arm beats a run of another (arXiv:2103.03098)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.statistics.estimates import lower_is_better

# The probability from which an improvement matters, as the paper recommends.
MEANINGFUL = 0.75


@dataclass(frozen=True)
class Improvement:
    """The probability that a is better than b, where ties count half.

    `decision` is "not significant" if the interval reaches down to .5, "significant, not
    meaningful" if it is above .5 and nowhere above .75, and else "significant and meaningful". It
    asks whether a is better: exchange a and b to ask for the opposite.
    """

    value: float
    low: float
    high: float
    decision: str


def probability_of_improvement(
    a: ArrayLike, b: ArrayLike, paired: bool, confidence: float = 0.95, better: str = "min"
) -> Improvement:
    """Estimates P(A > B): how often a run of one arm is better than a run of the other.

    The paper takes a percentile bootstrap, whose 95% interval for pairs is a point if one arm
    always wins, and which covers P = .9 in 40%, 53%, 80% and 93% of samples at n = 5, 8, 16 and 29.
    Here it is

    - for pairs, Clopper and Pearson's interval for the number of wins, which covers at least as
      often as it says at every n and P, and decides where a sign test would;
    - for unpaired runs, Wilson's interval for the share of pairs won, with the number of
      independent pairs (between the smaller arm and both together) and degrees of freedom from the
      variances of the placements, as DeLong's and Brunner and Munzel's. Simulated with normal and
      tied values at n = 3 to 29 it covers 95% or more for equal spreads and for 1:3, and at
      least 92% for 1:10, where Brunner and Munzel's own interval falls to 50% and less near
      P = 1.

    Args:
        a: the numbers of one arm.
        b: the numbers of the other; in the order of the same seeds if paired.
        paired: whether the numbers are paired.
        confidence: the coverage of the interval.
        better: "min" if smaller numbers are better, or "max".

    Returns:
        The probability that a is better than b, its interval and the paper's decision.

    Raises:
        ValueError: an arm has no value, or a NaN, or paired arms have different lengths.

    >>> result = probability_of_improvement([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7], paired=True)
    >>> result.value, round(result.low, 4), result.high, result.decision
    (1.0, 0.5407, 1.0, 'significant and meaningful')
    """
    first, second = lower_is_better(a, better), lower_is_better(b, better)
    if paired:
        if len(first) != len(second):
            raise ValueError(
                f"Paired arms need the same seeds, got {len(first)} and {len(second)} values."
            )
        wins = _wins(first, second)
        value = float(wins.mean())
        low, high = _clopper_pearson(float(wins.sum()), len(wins), confidence)
    else:
        wins = _wins(first[:, None], second[None, :])
        value = float(wins.mean())
        low, high = _wilson(wins, confidence)
    decision = "not significant"
    if low > 0.5:
        meaningful = high > MEANINGFUL
        decision = "significant and meaningful" if meaningful else "significant, not meaningful"
    return Improvement(value, low, high, decision)


def _wins(first: NDArray, second: NDArray) -> NDArray[np.float64]:
    return (first < second) + 0.5 * (first == second)


def _clopper_pearson(wins: float, n: int, confidence: float) -> tuple[float, float]:
    """Returns the exact interval of a share; `wins` may be half a number, for ties."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(wins, n - wins + 1, tail)) if wins > 0 else 0.0
    high = float(betaincinv(wins + 1, n - wins, 1 - tail)) if wins < n else 1.0
    return low, high


def _wilson(wins: NDArray, confidence: float) -> tuple[float, float]:
    """Returns the interval of the mean of a table [n, m] of wins of each run over each other."""
    from scipy.special import stdtrit

    n, m = wins.shape
    value = float(wins.mean())
    pairs, freedom = float(min(n, m)), max(min(n, m) - 1, 1)
    if min(n, m) > 1:
        parts = [wins.mean(1).var(ddof=1) / n, wins.mean(0).var(ddof=1) / m]
        if variance := math.fsum(parts):
            pairs = min(max(value * (1 - value) / variance, pairs), n + m)
            welch = variance**2 / (parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (m - 1))
            freedom = min(max(welch, freedom), n + m - 2)
    t2 = float(stdtrit(freedom, (1 + confidence) / 2)) ** 2
    center = (value + t2 / 2 / pairs) / (1 + t2 / pairs)
    inner = value * (1 - value) / pairs + t2 / (4 * pairs**2)
    half = math.sqrt(t2 * inner) / (1 + t2 / pairs)
    return max(center - half, 0.0), min(center + half, 1.0)
