"""The rule that decides whether two arms with the same units differ, and how many units it needs.

Start with `decide`. The sentences of a report call it, and so does `experiments.calibration`, which
simulates how often those sentences are false. docs/statistics.md has the rule with its reasons:
5% of error for all pairs and all looks, of which a paired t test of the planned units has 4%, and
e-values of the units that were added after results had been seen have 1%. The intervals have the
same levels, and hold at the same time for all pairs and all looks.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.statistics.estimates import direction, row_of_numbers, spread

LEVEL = 0.05  # of all claims of a report together
PLANNED_LEVEL, _LATER = 0.04, 0.01  # the parts of LEVEL for the planned look and for later ones
# A planned t test of moderately skewed differences is wrong in 6% of cases at .05, in 5% here.
_SKEWED = 0.034
_FEWEST_LOOKED_AT = 3  # units at the first look, if the file allows a look at any time
_PRIOR = 0.25  # c of the e-value: a priori the effect has a standard deviation of 1 / sqrt(c) = 2
_FEWEST_SIGNS = 6  # with five signs no p is below 2 / 2^5 = .06
MOST_SEEDS = 10_000  # an effect that needs more is called undecidable
# So many pairs detect P(A > B) = .75 with errors of 5%: Noether's formula (arXiv:2103.03098, C).
NOETHER = 29


@dataclass(frozen=True)
class Looks:
    """When the units of a comparison are judged, and at which level."""

    # the number of units that were planned, which are judged once by a t test; None if none were
    planned: int | None = None
    later: tuple[int, ...] = ()  # numbers of units, at least 2, after which an e-value is computed
    planned_level: float = PLANNED_LEVEL  # of the t test over all pairs
    later_level: float = _LATER  # of the e-values over all pairs

    @property
    def last(self) -> int:
        """The largest number of units at which there is a look; 0 if there is none."""
        return max(self.planned or 0, *self.later, 0)

    @property
    def level(self) -> float:
        """The level of the last look, over all pairs."""
        is_planned = self.planned is not None and not self.later
        return self.planned_level if is_planned else self.later_level

    def earlier(self) -> list[Self]:
        """Returns the looks until each one but the last, in order."""
        found = [replace(self, later=self.later[:number]) for number in range(len(self.later))]
        return found if self.planned is not None else found[1:]

    def deciding(self, comparisons: int) -> Self:
        """Returns the looks with enough units to decide, if the error is divided over pairs."""
        first = self.planned
        if first is not None and first < fewest_units(self.planned_level / comparisons):
            first = None
        fewest = fewest_units(self.later_level / comparisons) if self.later else 0
        return replace(self, planned=first, later=tuple(n for n in self.later if n >= fewest))


def enough_units(a: int, b: int, level: float) -> bool:
    """Returns whether `a` units of one arm and `b` of another can decide at the level of a look."""
    # By chance, all units of one of two equal arms diverge, or end in another basin than all of the
    # other, with a p value of 2 / C(a + b, a), the smallest one of Fisher's exact test.
    return 2 / math.comb(a + b, a) <= level


def fewest_units(level: float) -> int:
    """Returns how many units of each arm a look needs to decide anything; see `enough_units`.

    >>> [fewest_units(0.04 / pairs) for pairs in (1, 3, 6, 15, 28)]
    [4, 5, 6, 6, 7]
    >>> [fewest_units(0.01 / pairs) for pairs in (1, 3, 6, 15, 28)]
    [5, 6, 7, 7, 8]
    """
    return next(n for n in itertools.count(2) if enough_units(n, n, level))


def fewest_signs(level: float) -> int:
    """Returns from how many units on the planned test of signs can decide.

    >>> [fewest_signs(0.04 / pairs) for pairs in (1, 3, 6, 15, 28)]
    [6, 8, 9, 10, 11]
    """
    return next(n for n in itertools.count(_FEWEST_SIGNS) if 2.0 ** (1 - n) < level)


def looks_of_plan(planned: int, revisions: tuple[int, ...] = (), skewed: bool = False) -> Looks:
    """Returns the looks of a plan: when its units have ended, and at the end of each revision.

    >>> looks_of_plan(5, (8, 12)).later
    (8, 12)
    """
    if skewed:  # a stricter level, and no e-values, which assume normal differences
        return Looks(planned, (), _SKEWED, 0.0)
    return Looks(planned, revisions)


def looks_at_any(units: int, changes: int = 0) -> Looks:
    """Returns the looks of a comparison that may be judged after every unit from the third on."""
    return Looks(None, tuple(range(_FEWEST_LOOKED_AT, units + 1)), 0.0, LEVEL / 2**changes)


def looks_of_file(kind: str, units: int, skewed: bool) -> Looks:
    """Returns the looks at so many units of a file whose `looks` are "planned" or "any"."""
    return looks_at_any(units) if kind == "any" else looks_of_plan(units, (), skewed)


def looks_after_change(changes: int, revisions: tuple[int, ...]) -> Looks:
    """Returns the looks of a pair whose compared configurations were replaced, so many times."""
    # It is a new pair, of which no look was planned before results were known. With the level
    # halved at each change, all pairs that follow each other have 1% together.
    return Looks(None, revisions, 0.0, _LATER / 2**changes)


class Decisions(NamedTuple):
    """What is decided about pairs of arms; arrays [draws, pairs], or [pairs] for one draw."""

    pairs: tuple[tuple[int, int], ...]  # the indices of the two arms of each pair
    # the mean of the first arm minus that of the second, over the units of the last look that can
    # decide; not a number where a unit diverged, or there is no such look
    difference: NDArray[np.float64]
    # the ends of its simultaneous interval; not a number where there is none
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    # over all pairs and looks, to be compared with .05; not a number where no test applies
    p: NDArray[np.float64]
    # -1 where the first arm has the smaller mean, 1 where it has the larger one, or else 0
    decided: NDArray[np.int8]
    # "t" (or e-values from t), "signs", "fisher" (the numbers of units that diverged or collapsed),
    # "diverged" (all units of one arm did, none of the other), or "" where no test applies
    test: NDArray[np.str_]


def collapsed(
    a: ArrayLike, b: ArrayLike, initial: tuple[float, float], better: str = "min"
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns which units of two arms, [..., units], collapsed or diverged.

    A unit collapsed if it gained less than half of what the median unit of both arms gained, where
    that gained anything over `initial`, the metric of each arm before its first step. Where that is
    NaN, only units that diverged, which are `inf`, or `-inf` for "max", are returned.

    >>> [x.tolist() for x in collapsed([0.3, 2.2, 0.4], [0.5, 0.4, np.inf], (2.3, 2.3))]
    [[False, True, False], [False, False, True]]
    """
    sign = direction(better)
    values = [sign * np.asarray(each, np.float64) for each in (a, b)]
    first, second = (np.logical_not(np.isfinite(x)) for x in values)
    if math.isnan(sum(initial)):
        return first, second
    gains = [sign * start - x for start, x in zip(initial, values, strict=True)]
    with np.errstate(invalid="ignore"):  # -inf + inf, of which the mean decides nothing
        half = np.median(np.concatenate(gains, -1), axis=-1, keepdims=True) / 2
    return first | ((half > 0) & (gains[0] < half)), second | ((half > 0) & (gains[1] < half))


def ranked(
    a: ArrayLike, b: ArrayLike, initial: tuple[float, float], better: str = "min"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the units of two arms, those that `collapsed` as bad as those that diverged.

    >>> [x.tolist() for x in ranked([0.3, 2.2, 0.4], [0.5, 0.4, np.inf], (2.3, 2.3))]
    [[0.3, inf, 0.4], [0.5, 0.4, inf]]
    """
    worst = direction(better) * math.inf
    first, second = collapsed(a, b, initial, better)
    return np.where(first, worst, a), np.where(second, worst, b)


def decide(
    values: ArrayLike,
    looks: Looks,
    better: str = "min",
    comparisons: int | None = None,
    initial: Sequence[float] | None = None,
) -> Decisions:
    """Decides which arms differ.

    `values` are [draws, arms, units] or [arms, units]; a diverged unit is `inf`, or `-inf` if
    larger values are better. The error is divided over `comparisons`, None for all pairs of these
    arms. `initial` has the metric of each arm before its first step, NaN where it is not known;
    without it, no unit counts as collapsed.

    >>> result = decide([[1.0, 1.2, 0.9, 1.1, 1.0], [2.0, 2.3, 1.8, 2.2, 2.1]], looks_of_plan(5))
    >>> result.decided.tolist(), round(float(result.p[0]), 6)
    ([-1], 1.6e-05)
    """
    array = np.asarray(values, np.float64)
    single = array.ndim == 2
    array = array[None] if single else array
    if array.ndim != 3 or array.shape[1] < 2:
        raise ValueError(f"Give values [draws, arms, units] of two arms or more: {array.shape}.")
    if np.isnan(array).any():
        raise ValueError("A value is NaN: give a diverged unit as inf, or as -inf for 'max'.")
    counts = [count for count in (looks.planned, *looks.later) if count is not None]
    if any(not 2 <= count <= array.shape[2] for count in counts):
        raise ValueError(f"The looks {counts} need 2 units or more, and have {array.shape[2]}.")
    # From here on smaller values are better, and diverged units are inf.
    sign = direction(better)
    pairs = tuple(itertools.combinations(range(array.shape[1]), 2))
    m = comparisons or len(pairs)
    start = [sign * x for x in ([math.nan] * array.shape[1] if initial is None else initial)]
    columns = [
        _pair(sign * array[:, a], sign * array[:, b], looks, m, (start[a], start[b]))
        for a, b in pairs
    ]
    stacked: list[Any] = [np.stack(each, 1) for each in zip(*columns, strict=True)]
    difference, low, high, p, decided, test = (each[0] if single else each for each in stacked)
    ends = (low, high) if sign > 0 else (-high, -low)
    return Decisions(pairs, sign * difference, *ends, p, (sign * decided).astype(np.int8), test)


def relevance(low: ArrayLike, high: ArrayLike, relevant: float) -> NDArray[np.str_]:
    """Says whether improvements matter, from the ends of their intervals, or NaN without one.

    For each interval it says "more" (than `relevant`), "less" (better, and less than that),
    "better" (whether it matters is open), "equivalent" (no improvement that matters in either
    direction), or "open". An interval below 0 is that of a worse arm: exchange the arms.

    >>> relevance([0.3, 0.1, 0.1, -0.1, -0.3], [0.5, 0.15, 0.5, 0.1, 0.5], 0.2).tolist()
    ['more', 'less', 'better', 'equivalent', 'open']
    """
    start, end = np.asarray(low, np.float64), np.asarray(high, np.float64)
    kinds = {
        "more": start > relevant,
        "less": (start > 0) & (end < relevant),
        "better": start > 0,
        "equivalent": (-relevant < start) & (end < relevant),
    }
    return np.select([*kinds.values()], [*kinds], "open")


def _pair(
    a: NDArray, b: NDArray, looks: Looks, m: int, start: tuple[float, float]
) -> tuple[NDArray, ...]:
    """Decides about one pair; `a` and `b` are [draws, units], and inf for diverged units."""
    # `start` has the metric of both arms before their first steps, or NaN. It returns the fields of
    # `Decisions` behind `pairs`, each [draws].
    draws = len(a)
    low, high = np.full(draws, -np.inf), np.full(draws, np.inf)
    p, decided = np.full(draws, np.nan), np.zeros(draws)
    difference, test = np.full(draws, np.nan), np.full(draws, "", "<U8")
    counted = looks.deciding(m)
    for n, later in [(counted.planned, False), *((n, True) for n in counted.later)]:
        if n is None:
            continue
        level = looks.later_level if later else looks.planned_level
        units = ranked(a[:, :n], b[:, :n], start)
        difference, bottom, top, p_now, side, test = _look(*units, level / m, later)
        low, high = np.maximum(low, bottom), np.minimum(high, top)
        p = np.fmin(p, np.minimum(1.0, p_now * m * LEVEL / level))
        decided = np.where(decided == 0, side, decided)
    # Looks that contradict each other are a sign of values that are not normal: decide nothing.
    clash = (low > high) | (decided * difference < 0)
    nothing = clash | ((low == -np.inf) & (high == np.inf))
    low, high = np.where(nothing, np.nan, low), np.where(nothing, np.nan, high)
    return difference, low, high, np.where(clash, 1.0, p), np.where(clash, 0, decided), test


def _look(a: NDArray, b: NDArray, level: float, later: bool) -> tuple[NDArray, ...]:
    """Judges n units of a pair at a level: by e-values if `later`, or else by tests."""
    # Units that diverged or collapsed are inf. It returns what `_pair` does, of this look alone.
    from scipy.special import bdtr, stdtr

    n = a.shape[1]
    bad_a, bad_b = np.logical_not(np.isfinite(a)), np.logical_not(np.isfinite(b))
    with np.errstate(invalid="ignore"):
        d = np.where(bad_a & bad_b, 0.0, a - b)
    finite = np.logical_not((bad_a | bad_b).any(1))
    safe = np.where(finite[:, None], d, 0.0)
    mean, deviation = safe.mean(1), safe.std(1, ddof=1)
    # A deviation that is tiny beside the operands consists of their rounding errors.
    scale = np.where(finite, np.maximum(np.abs(a).max(1), np.abs(b).max(1)), 0.0)
    normal = finite & (deviation > 1e-12 * scale)
    error = np.where(normal, deviation / math.sqrt(n), 1.0)
    t, wins, losses = mean / error, (d < 0).sum(1), (d > 0).sum(1)
    if later:  # reciprocals of e-values are p values for every look
        half, p, by_signs = limit_of_e(n, level), 1 / e_of_t(t, n), 1 / e_of_signs(wins, losses)
    else:
        half, p = limit_of_t(n, level), 2 * stdtr(n - 1, -np.abs(t))
        counted = wins + losses  # the test of signs leaves ties out
        tail = 2 * bdtr(np.minimum(wins, losses), counted, 0.5)
        by_signs = np.where(counted > 0, np.minimum(1.0, tail), 1.0)
    count_a, count_b = bad_a.sum(1), bad_b.sum(1)
    signs = ~normal & (n >= _FEWEST_SIGNS)
    p = np.where(normal, p, np.where(signs, by_signs, np.nan))
    fisher = np.zeros(len(a), bool)
    if not later and not finite.all():
        # Two tests share the level where so many units diverged or collapsed, in both arms
        # together, that their numbers could decide.
        total = count_a + count_b
        most = np.minimum(total, n)
        shared = ~finite & (_fisher_test(most, total - most, n) < level / 2)
        by_numbers = _fisher_test(count_a, count_b, n)
        fisher = shared & (~signs | (by_numbers < by_signs))
        p = np.where(fisher, by_numbers, p)
        p = np.where(shared, np.minimum(1.0, 2 * p), p)
    all_a, all_b = (count_a == n) & (count_b == 0), (count_b == n) & (count_a == 0)
    side = np.where(normal, np.sign(mean), np.sign(losses - wins))
    side = np.where(fisher, np.sign(count_a - count_b), side)
    decided = np.where(p < level, side, 0.0) + 0.0
    decided = np.where(all_a, 1.0, np.where(all_b, -1.0, decided))
    kinds = {"diverged": all_a | all_b, "t": normal, "fisher": fisher, "signs": signs}
    low = np.where(normal, mean - half * error, -np.inf)
    high = np.where(normal, mean + half * error, np.inf)
    p, test = np.where(all_a | all_b, np.nan, p), np.select([*kinds.values()], [*kinds], "")
    return np.where(finite, mean, np.nan), low, high, p, decided, test


def limit_of_t(n: int, level: float) -> float:
    """Returns the |t| above which the planned t test decides, with n >= 2 differences."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 1 - level / 2))


def limit_of_e(n: int, level: float) -> float:
    """Returns the |t| above which the e-value of n >= 2 differences decides; infinite for too few.

    `level` is the reciprocal of the e-value that decides.

    >>> round(limit_of_e(8, 0.01), 2), limit_of_e(3, 0.01)
    (5.66, inf)
    """
    a = _PRIOR / (n + _PRIOR)
    # e exceeds 1 / level where (1 + u) / (1 + a u) exceeds this ratio, with u = t^2 / (n - 1).
    ratio = (1 / (level * math.sqrt(a))) ** (2 / n)
    return math.inf if a * ratio >= 1 else math.sqrt((n - 1) * (ratio - 1) / (1 - a * ratio))


def e_of_t(t: ArrayLike, n: int) -> NDArray[np.float64]:
    """Returns the e-value of a paired t statistic of n >= 2 differences, against a mean of 0.

    If the mean is 0, it ever exceeds 1/a, at any n, with a probability of at most a
    (arXiv:2310.03722).

    >>> round(float(e_of_t(4.0, 8)), 2)
    15.52
    """
    a, u = _PRIOR / (n + _PRIOR), np.square(np.asarray(t, np.float64)) / (n - 1)
    return math.sqrt(a) * ((1 + u) / (1 + a * u)) ** (n / 2)


def _fisher_test(a: NDArray, b: NDArray, n: int) -> NDArray:
    """Returns the two-sided p of Fisher's exact test of `a` and `b` of n units of two arms each."""
    # By the symmetry of arms with equally many units it is twice that of one side.
    from scipy.stats import hypergeom  # a slow import, and rarely needed

    return np.minimum(1.0, 2 * hypergeom.cdf(np.minimum(a, b), 2 * n, a + b, n))


def e_of_signs(wins: ArrayLike, losses: ArrayLike) -> NDArray[np.float64]:
    """Returns the e-value of numbers of wins and losses, against equal probabilities of both.

    It is the Bayes factor with the prior Beta(1/2, 1/2) for the probability of winning. With
    growing numbers it is a martingale, as `e_of_t`.

    >>> e_of_signs([8, 4], [0, 4]).round(3).tolist()
    [50.273, 0.273]
    """
    from scipy.special import betaln

    w, k = np.asarray(wins, np.float64), np.asarray(losses, np.float64)
    return np.exp((w + k) * math.log(2) + betaln(w + 0.5, k + 0.5) - betaln(0.5, 0.5))


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
    values = row_of_numbers(differences)
    if len(values) < 2 or not np.isfinite(values).all() or not (deviation := spread(values)):
        return None
    return seeds_for_power(size / deviation, alpha=alpha)


def needed_range(number: int, degrees: int) -> tuple[int, int]:
    """Returns the 80% interval of a number from `needed` or `needed_unpaired`.

    The number is proportional to the variance of the differences, of which an estimate with few
    degrees of freedom says little. For heavy tails the interval is too narrow.

    >>> needed_range(100, 4), needed_range(100, 7), needed_range(100, 15)
    ((51, 377), (58, 248), (67, 176))
    """
    from scipy.special import chdtri

    low, high = (number * degrees / float(chdtri(degrees, p)) for p in (0.1, 0.9))
    return max(2, math.floor(low)), max(2, math.ceil(high))


def needed_unpaired(a: ArrayLike, b: ArrayLike, size: float, alpha: float = 0.05) -> int | None:
    """Returns as `needed` at how many runs in each arm a two-sample t test finds a difference."""
    first, second = row_of_numbers(a), row_of_numbers(b)
    if min(len(first), len(second)) < 2 or not np.isfinite(np.concatenate([first, second])).all():
        return None
    if not (pooled := math.hypot(spread(first), spread(second)) / math.sqrt(2)):
        return None
    effect = size / pooled
    return _smallest(lambda n: _power_of_t(2 * n - 2, effect * math.sqrt(n / 2), alpha), 0.8)


def _power_of_t(degrees: int, center: float, alpha: float) -> float:
    """Returns the power of a two-sided t test whose t is noncentral, with this center."""
    from scipy.special import nctdtr

    limit = limit_of_t(degrees + 1, alpha)
    return float(1 - nctdtr(degrees, center, limit) + nctdtr(degrees, center, -limit))


def _smallest(power_of: Callable[[int], float], power: float) -> int | None:
    """Returns the smallest n with a power, by bisection over 2 to MOST_SEEDS."""

    def reached(n: int) -> bool:
        # scipy's noncentral t is NaN at some points where the power is 1.
        return not power_of(n) < power

    numbers = range(2, MOST_SEEDS + 1)
    return next(iter(numbers[bisect.bisect_left(numbers, True, key=reached) :]), None)
