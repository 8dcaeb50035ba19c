"""How many seeds a comparison needs."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trainer.report.statistics.decide import limit_of_e, limit_of_t
from trainer.report.statistics.estimates import sample, spread

# An effect that needs more seeds than this is called undecidable.
MOST_SEEDS = 10_000


def seeds_for_power(effect: float, power: float = 0.8, alpha: float = 0.05) -> int | None:
    """Returns at how many pairs a two-sided paired t test has a power; None if over 10,000.

    The effect is the mean of the differences over their standard deviation (Cohen's d).

    >>> [seeds_for_power(effect) for effect in (0.5, 0.8, 1.0, 1.5, 2.0)]
    [34, 15, 10, 6, 5]
    """
    return _smallest(lambda n: _power_of_t(n - 1, effect * math.sqrt(n), alpha), power)


def detectable_effect(
    n: int, power: float = 0.8, alpha: float = 0.05, later: bool = False
) -> float | None:
    """Returns the effect, as of `seeds_for_power`, that a t test of n pairs finds with a power.

    If `later`, as at every look but the planned one, an e-value is compared with 1 / alpha instead.
    It is None where no differences of so few pairs are large enough.

    >>> [round(detectable_effect(n, alpha=0.04), 2) for n in (5, 8)]
    [1.79, 1.21]
    >>> [round(detectable_effect(n, alpha=0.01, later=True), 2) for n in (8, 10, 16)]
    [2.46, 1.98, 1.38]
    """
    if n < 2 or math.isinf(limit := (limit_of_e if later else limit_of_t)(n, alpha)):
        return None
    from scipy.optimize import brentq
    from scipy.special import nctdtr

    def missed(effect: float) -> float:
        center = effect * math.sqrt(n)
        tails = nctdtr(n - 1, center, np.array([limit, -limit]))
        tails = np.nan_to_num(tails)  # scipy returns NaN for some probabilities near 0
        return float(tails[0] - tails[1]) - (1 - power)

    root: Any = brentq(missed, 0.0, 2 * limit)
    return float(root)


def needed(differences: ArrayLike, size: float, alpha: float = 0.05) -> int | None:
    """Returns at how many pairs in all a t test finds a mean difference of some size, or None."""
    # The size is the true one. For the observed one, the number says nothing that the p value does
    # not. It is None if the size is 0, needs more than 10,000, or cannot be told (one pair, no
    # spread, values that are not finite).
    values = sample(differences)
    if len(values) < 2 or not np.isfinite(values).all() or not (deviation := spread(values)):
        return None
    return seeds_for_power(size / deviation, alpha=alpha)


def needed_range(number: int, degrees: int) -> tuple[int, int]:
    """Returns the 80% interval of a number from `needed` or `needed_unpaired`.

    The number is proportional to the variance of the differences, of which an estimate with few
    degrees of freedom says little. For heavy tails the interval is too narrow: it holds for 49% to
    71% of samples from Student's t with 3 degrees of freedom or a lognormal distribution.

    >>> needed_range(100, 4), needed_range(100, 7), needed_range(100, 15)
    ((51, 377), (58, 248), (67, 176))
    """
    from scipy.special import chdtri

    low, high = (number * degrees / float(chdtri(degrees, p)) for p in (0.1, 0.9))
    return max(2, math.floor(low)), max(2, math.ceil(high))


def needed_unpaired(a: ArrayLike, b: ArrayLike, size: float, alpha: float = 0.05) -> int | None:
    """Returns as `needed` at how many runs in each arm a two-sample t test finds a difference."""
    first, second = sample(a), sample(b)
    if min(len(first), len(second)) < 2 or not np.isfinite(np.concatenate([first, second])).all():
        return None
    pooled = math.hypot(spread(first), spread(second)) / math.sqrt(2)
    if not pooled:
        return None
    effect = size / pooled
    return _smallest(lambda n: _power_of_t(2 * n - 2, effect * math.sqrt(n / 2), alpha), 0.8)


def noether(threshold: float = 0.75) -> int:
    """Returns how many pairs detect a P(A > B), by Noether's formula (arXiv:2103.03098, C).

    A one-sided test of P(A > B) = .5 finds a difference by chance, or misses this one, with 5%.

    >>> noether()
    29
    """
    from scipy.special import ndtri

    if threshold == 0.5:
        raise ValueError("No number of pairs tells P(A > B) = .5 from .5: give another threshold.")
    return math.ceil((2 * ndtri(0.95) / (math.sqrt(6) * (threshold - 0.5))) ** 2)


def _power_of_t(degrees: int, center: float, alpha: float) -> float:
    """Returns the power of a two-sided t test whose t is noncentral, with this center."""
    from scipy.special import nctdtr, stdtrit

    limit = float(stdtrit(degrees, 1 - alpha / 2))
    return float(1 - nctdtr(degrees, center, limit) + nctdtr(degrees, center, -limit))


def _smallest(power_of: Callable[[int], float], power: float) -> int | None:
    """Returns the smallest n with a power, by bisection over 2 to MOST_SEEDS."""

    def reached(n: int) -> bool:
        # scipy's noncentral t is NaN at some points where the power is 1.
        return not power_of(n) < power

    if not reached(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
