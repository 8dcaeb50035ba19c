"""The rule by which a configuration is said to reach a target after so many steps.

The standard deviation sigma of a run is known beforehand. The n runs that were planned have reached
the target at an evaluated step if the mean of their values there is better by a margin,

    (target - mean) * sqrt(n) >= margin,    margin = sigma * z(1 - LEVEL)

which is the one-sided z test at LEVEL; for values of which the largest is the best, the difference
has the other sign. Start with `reached`.

The optimizer track of modded-nanogpt has this rule with sigma = .0013, so that its margin is .004.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.001
CONFIRMING = 0.05  # the level of runs by which somebody else confirms a result
RuleName = Literal["earliest_step", "earliest_lasting_step"]
EARLIEST: RuleName = "earliest_step"
LASTING: RuleName = "earliest_lasting_step"
_CONFIDENCE = 0.9  # that sigma is at most the bound of `sigma_bound`
_FEWEST_FOR_SIGMA = 20
# The effect that the e-value of `limit_of_added` expects has this standard deviation in sigmas.
_EXPECTED_EFFECT = 1.0


@dataclass(frozen=True)
class TargetRule:
    """What a mean has to be at a step."""

    # The lasting rule is wrong in at most LEVEL of cases whatever the curve is, because steps are
    # tested backwards until the first failure. The other is, too, where the curve falls by more
    # than the margin between evaluations; on a flat curve each one is another chance.

    target: float  # the value to be better than
    sigma: float  # standard deviation of the value of a run, known before the runs; above 0
    better: Literal["min", "max"] = "min"  # which value is the best
    # "earliest_step": the earliest evaluated step at which the mean passes;
    # "earliest_lasting_step": the earliest from which on it passes at every evaluated step
    rule: RuleName = LASTING

    @property
    def margin(self) -> float:
        """The smallest statistic that passes.

        >>> round(TargetRule(3.28, 0.0013).margin, 4)
        0.004
        """
        return self.sigma * limit_of_planned(LEVEL)

    def limit(self, runs: int, planned: int, level: float = LEVEL) -> float:
        """Returns the smallest statistic that passes of runs of which some were planned."""
        # See `reached`.
        added = runs != planned
        return self.sigma * (limit_of_added(runs, level) if added else limit_of_planned(level))

    @property
    def formula(self) -> str:
        """The statistic as a text.

        >>> TargetRule(0.9, 0.01, "max").formula
        '(mean - target) * sqrt(runs)'
        """
        return f"({'target - mean' if self.better == 'min' else 'mean - target'}) * sqrt(runs)"

    def statistic(self, mean: ArrayLike, runs: int) -> NDArray[np.float64]:
        """Returns the value of `formula`, positive if the mean is better, shaped like `mean`."""
        sign = 1 if self.better == "min" else -1
        return sign * (self.target - np.asarray(mean, np.float64)) * math.sqrt(runs)

    def p(self, mean: ArrayLike, runs: int) -> NDArray[np.float64]:
        """Returns the one-sided p of a mean over runs that were planned."""
        from scipy.special import ndtr

        return ndtr(-self.statistic(mean, runs) / self.sigma)


@dataclass(frozen=True)
class Reached:
    """Whether runs have reached a target."""

    step: int | None  # of the rule, the same for all runs; None if there is none
    mean: float  # at that step, or else at the step where the statistic is largest
    runs: int  # how many runs the mean is over
    statistic: float  # the value of `TargetRule.formula` there
    limit: float  # the smallest statistic that passes
    closest: int  # the step of `mean`


def reached(rule: TargetRule, steps: Sequence[int], values: ArrayLike, planned: int) -> Reached:
    """Finds the step after which runs have reached a target, by their values, [runs, steps].

    A run that diverged has `inf` there, or `-inf` if larger values are better. The runs that were
    planned before any result are judged by a z test, once; with more runs than these, all of them
    are judged by an e-value, which holds however often runs are added. The two together are wrong
    in at most 2 * LEVEL of cases. Raises ValueError for fewer runs, or no evaluated step.

    Example:
        >>> values = [[3.2812, 3.2785], [3.2808, 3.2771], [3.2800, 3.2780], [3.2811, 3.2765]]
        >>> found = reached(TargetRule(3.28, 0.0013), [3000, 3025], values, planned=4)
        >>> found.step, round(found.mean, 4), round(found.statistic, 4)
        (3025, 3.2775, 0.0049)
    """
    array = np.asarray(values, np.float64)
    runs = array.shape[0]
    if array.ndim != 2 or not array.shape[1] or array.shape[1] != len(steps):
        raise ValueError(f"Give values [runs, steps] for {len(steps)} steps: {array.shape}.")
    if runs < max(1, planned):
        raise ValueError(f"{planned} runs were planned, and {runs} are given.")
    mean = array.mean(0)
    statistic = rule.statistic(mean, runs)
    limit = rule.limit(runs, planned)
    found = int(earliest(rule.rule, statistic, limit))
    index = found if found >= 0 else int(np.argmax(statistic))
    return Reached(
        step=int(steps[index]) if found >= 0 else None,
        mean=float(mean[index]),
        runs=runs,
        statistic=float(statistic[index]),
        limit=limit,
        closest=int(steps[index]),
    )


def earliest(rule: RuleName, statistics: ArrayLike, limit: float) -> NDArray[np.int64]:
    """Finds the index of the earliest step of a rule, [...], by statistics of [..., steps].

    `limit` is the smallest statistic that passes; the index is -1 where none does.

    Example:
        >>> [int(earliest(rule, [1, 5, 1, 5, 5], 4)) for rule in (EARLIEST, LASTING)]
        [1, 3]
    """
    # Rounded means of a table, such as the track's, lie on the margin up to rounding errors.
    passes = np.asarray(statistics) >= limit * (1 - 1e-9)
    if rule == LASTING:
        passes = np.logical_and.accumulate(passes[..., ::-1], axis=-1)[..., ::-1]
    return np.where(passes.any(-1), passes.argmax(-1), -1)


def limit_of_planned(level: float) -> float:
    """Returns z(1 - level): the standard scores above which the planned test passes.

    >>> round(limit_of_planned(0.001), 2)
    3.09
    """
    from scipy.special import ndtri

    return float(-ndtri(level))


def limit_of_added(runs: int, level: float) -> float:
    """Returns the standard score above which runs pass that may be added after every look.

    It is where the e-value of the score z of n runs is 1 / level, against a mean that is not better
    than the target,

        e = 2 / sqrt(1 + n v) * exp(z^2 / 2 * a) * Phi(z * sqrt(a)),    a = n v / (1 + n v)

    the mixture of likelihood ratios over the positive half of a normal prior with variance v = 1
    for the effect, the difference over sigma. It ever exceeds 1 / level with a probability of at
    most level (Robbins 1970, Statistical methods related to the law of the iterated logarithm;
    arXiv:1810.08240).

    >>> round(limit_of_added(8, 0.001), 2), round(limit_of_added(30, 0.001), 2)
    (4.06, 4.05)
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    variance = runs * _EXPECTED_EFFECT**2
    a = variance / (1 + variance)

    def excess(z: float) -> float:
        log_e = math.log(2) - math.log1p(variance) / 2 + z * z / 2 * a
        return log_e + float(log_ndtr(z * math.sqrt(a))) + math.log(level)

    root: Any = brentq(excess, 0.0, 100.0)
    return float(root)


def sigma_bound(values: ArrayLike) -> float:
    """Returns a sigma for a rule, from runs of one configuration: an upper 90% confidence bound.

    The standard deviation of the runs themselves is too small in half of the cases, and a rule with
    it is wrong more often than it says: three times as often with 20 runs. The runs do not count
    for an entry. Raises ValueError for fewer than 20, or a value that is not finite.

    Example:
        >>> round(sigma_bound(np.linspace(-1, 1, 20)), 3)
        0.795
    """
    from scipy.special import chdtri

    array = np.asarray(values, np.float64)
    if array.size < _FEWEST_FOR_SIGMA:
        raise ValueError(
            f"sigma needs the values of at least {_FEWEST_FOR_SIGMA} runs, got {array.size}."
        )
    if not np.isfinite(array).all():
        raise ValueError("sigma needs runs with finite values, and a run diverged.")
    freedom = array.size - 1
    return float(array.std(ddof=1) * math.sqrt(freedom / chdtri(freedom, _CONFIDENCE)))


@dataclass(frozen=True)
class Exchange:
    """What fewer steps cost: by how much a run is worse that is scheduled for fewer steps.

    Attributes:
        loss: how much worse.
        steps: the number of steps that it has fewer.
        error: the standard error of `loss`, if it was estimated from runs; 0 takes it as exact.

    Example:
        >>> exchange = Exchange(loss=0.0045, steps=100)
        >>> round(156 * exchange.loss / exchange.steps, 3)  # the track's: 156 steps for .007
        0.007
    """

    loss: float
    steps: int = 100
    error: float = 0.0

    def __post_init__(self) -> None:
        if not (self.loss > 0 and self.steps >= 1 and self.error >= 0):
            raise ValueError(
                f"exchange is a loss above 0 for at least 1 step, with an error of at least 0; got"
                f" loss {self.loss:g}, steps {self.steps}, error {self.error:g}."
            )


@dataclass(frozen=True)
class Lead:
    """Whether an entry is better than an older one, at equal steps."""

    # by how much its mean is better, the steps exchanged, over sqrt(1 / n1 + 1 / n2) and the
    # error of the exchange; it passes if it is at least the rule's margin
    statistic: float
    p: float  # one-sided
    passes: bool  # whether p is at most LEVEL


def lead_of(rule: TargetRule, old: Reached, new: Reached, exchange: Exchange) -> Lead:
    """Compares two results that may have different numbers of steps.

    With the means m, the steps s, and n runs each, the statistic is

        (m_old - m_new + (s_old - s_new) * exchange) / sqrt(1 / n_old + 1 / n_new)

    where an estimated exchange adds (s_old - s_new)^2 * (error / sigma)^2 to the sum in the root.
    Raises ValueError if one of them has not reached the target.

    Example:
        >>> before = Reached(step=3375, mean=3.2788, runs=20, statistic=0, limit=0, closest=3375)
        >>> tuned = Reached(step=3325, mean=3.2790, runs=20, statistic=0, limit=0, closest=3325)
        >>> found = lead_of(TargetRule(3.28, 0.0013), before, tuned, Exchange(0.0045))
        >>> round(found.statistic, 5), found.passes
        (0.00648, True)
    """
    from scipy.special import ndtr

    if old.step is None or new.step is None:
        raise ValueError("A result that has not reached the target cannot be compared.")
    fewer = old.step - new.step
    better = old.mean - new.mean if rule.better == "min" else new.mean - old.mean
    spread = 1 / old.runs + 1 / new.runs
    spread += (fewer * exchange.error / exchange.steps / rule.sigma) ** 2
    statistic = (better + fewer * (exchange.loss / exchange.steps)) / math.sqrt(spread)
    passes = statistic >= rule.margin * (1 - 1e-9)
    return Lead(statistic, float(ndtr(-statistic / rule.sigma)), passes)
