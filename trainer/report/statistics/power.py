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
    """Returns the number of pairs at which a two-sided paired t test has a power.

    Args:
        effect: the mean of the differences over their standard deviation (Cohen's d).
        power: the probability that the test finds the effect.
        alpha: the level of the test.

    Returns:
        The smallest number of at least 2, or None if it is over 10,000.

    >>> [seeds_for_power(effect) for effect in (0.5, 0.8, 1.0, 1.5, 2.0)]
    [34, 15, 10, 6, 5]
    """
    return _smallest(lambda n: _power_of_t(n - 1, effect * math.sqrt(n), alpha), power)


def detectable_effect(
    n: int, power: float = 0.8, alpha: float = 0.05, later: bool = False
) -> float | None:
    """Returns the effect that a two-sided paired t test finds with a power.

    Args:
        n: the number of pairs.
        power: the probability that the test finds the effect.
        alpha: the level of the test.
        later: whether an e-value is compared with 1 / alpha in place of the t test, as at every
            look but the planned one.

    Returns:
        The mean of the differences over their standard deviation; None with fewer than two pairs,
        and where no differences of so few pairs are large enough.

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


def needed(
    differences: ArrayLike, size: float, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """Returns the number of pairs at which a paired t test finds a difference of some size.

    The standard deviation of the differences is itself uncertain: `needed_range` says how much.

    Args:
        differences: one number a pair.
        size: the true mean of the differences. Not the observed one: for that, the number says
            nothing that the p value does not.
        power: the probability that the test finds the difference.
        alpha: the level of the test.

    Returns:
        The number of pairs in all; None if the size is 0, needs more than 10,000, or cannot be told
        (one pair, no spread, values that are not finite).
    """
    values = sample(differences)
    if len(values) < 2 or not np.isfinite(values).all() or not (deviation := spread(values)):
        return None
    return seeds_for_power(size / deviation, power, alpha)


def needed_range(number: int, degrees: int) -> tuple[int, int]:
    """Returns the 80% interval of a number from `needed`, for normal differences.

    The number is proportional to the variance of the differences, of which an estimate with few
    degrees of freedom says little. Heavy tails make the interval too narrow: it holds for 49% to
    71% of samples from Student's t with 3 degrees of freedom or a lognormal distribution.

    Args:
        number: of pairs, from `needed`, or of runs in each arm, from `needed_unpaired`.
        degrees: of freedom of the estimated variance: one less than the number of differences.

    >>> needed_range(100, 4), needed_range(100, 7), needed_range(100, 15)
    ((51, 377), (58, 248), (67, 176))
    """
    from scipy.special import chdtri

    low, high = (number * degrees / float(chdtri(degrees, p)) for p in (0.1, 0.9))
    return max(2, math.floor(low)), max(2, math.ceil(high))


def needed_unpaired(
    a: ArrayLike, b: ArrayLike, size: float, power: float = 0.8, alpha: float = 0.05
) -> int | None:
    """Returns the number of runs in each arm that would decide with different seeds; see `needed`.

    Args:
        a: the numbers of one arm.
        b: the numbers of the other arm.
        size: the true difference of the means.
        power: the probability that a two-sample t test finds the difference.
        alpha: the level of the test.
    """
    first, second = sample(a), sample(b)
    if min(len(first), len(second)) < 2 or not np.isfinite(np.concatenate([first, second])).all():
        return None
    pooled = math.hypot(spread(first), spread(second)) / math.sqrt(2)
    if not pooled:
        return None
    effect = size / pooled
    return _smallest(lambda n: _power_of_t(2 * n - 2, effect * math.sqrt(n / 2), alpha), power)


def noether(threshold: float = 0.75, alpha: float = 0.05, beta: float = 0.05) -> int:
    """Returns the number of pairs for a test of P(A > B), by Noether's formula.

    Args:
        threshold: the P(A > B) that the test must detect; not .5.
        alpha: the probability that a one-sided test of P(A > B) = .5 finds a difference by chance.
        beta: the probability that it misses the threshold.

    Returns:
        ((z(1 - alpha) + z(1 - beta)) / (sqrt(6) (threshold - 1/2)))^2, rounded up
        (arXiv:2103.03098, appendix C).

    Raises:
        ValueError: the threshold is .5, which no number of pairs detects.

    >>> noether()
    29
    """
    from scipy.special import ndtri

    if threshold == 0.5:
        raise ValueError("No number of pairs tells P(A > B) = .5 from .5: give another threshold.")
    z = ndtri(1 - alpha) + ndtri(1 - beta)
    return math.ceil((z / (math.sqrt(6) * (threshold - 0.5))) ** 2)


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
