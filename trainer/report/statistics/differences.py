"""The difference between two samples of runs that share no seeds.

Runs that share their seeds are compared by `decide`.
"""

import math
from dataclasses import dataclass

from numpy.typing import ArrayLike

from trainer.report.statistics.estimates import sample, spread


@dataclass(frozen=True)
class Unpaired:
    """The interval of a difference of means, and the two-sided p of Welch's t test."""

    low: float
    high: float
    p: float


def welch(a: ArrayLike, b: ArrayLike, level: float = 0.05) -> Unpaired | None:
    """Compares two samples of different seeds, with unequal variances allowed (Welch 1947).

    It is None if a sample has a single number, or neither has any spread.

    >>> result = welch([1.0, 2.0, 3.0], [1.5, 2.3, 3.9])
    >>> round(result.p, 4), round(result.low, 3), round(result.high, 3)
    (0.5691, -3.137, 2.004)
    """
    from scipy.special import stdtr, stdtrit

    first, second = sample(a), sample(b)
    if min(len(first), len(second)) < 2 or not math.hypot(spread(first), spread(second)):
        return None
    # Not scipy's test, which warns about an arm without spread; this one allows it.
    variances = [spread(each) ** 2 / len(each) for each in (first, second)]  # of the means
    error, difference = math.sqrt(sum(variances)), float(first.mean() - second.mean())
    shares = zip(variances, (first, second), strict=True)
    degrees = sum(variances) ** 2 / sum(v**2 / (len(each) - 1) for v, each in shares)
    margin = float(stdtrit(degrees, 1 - level / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(difference) / error))
    return Unpaired(difference - margin, difference + margin, p)
