"""Differences between two arms, with their tests, as functions of arrays.

A diverged run counts as infinitely bad: pass `inf` (`-inf` if larger is better), never NaN. What
cannot be computed then is None. Intervals of one arm are in `estimates.py`, P(A > B) is in
`improvement.py`, and the number of seeds for a power in `power.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.statistics.estimates import Estimate, interval
from trainer.report.statistics.improvement import Improvement, probability_of_improvement
from trainer.report.statistics.power import needed, needed_unpaired
from trainer.report.statistics.samples import sample, spread

# All 2^n sign flips up to this n; for more, a sample of that many.
_EXACT_FLIPS, _SAMPLED_FLIPS = 16, 2**14 - 1
# All divisions of unpaired runs into two arms, if they are no more than for 8 and 8 runs.
_EXACT_DIVISIONS = 12_870


@dataclass(frozen=True)
class Difference:
    """How two arms differ, from runs with the same seeds (`paired`) or with different ones.

    Attributes:
        n: the pairs, or the runs of the smaller arm.
        difference: the mean of a minus the mean of b, with its interval.
        t_p: the two-sided p of the paired t test, or of Welch's. None where `difference` has no
            interval.
        wilcoxon_p: the two-sided p of Wilcoxon's signed ranks, or of his rank sum (Mann-Whitney).
            It exists for diverged runs too.
        sign_flip_p: the two-sided p of the mean under all flips of signs. None for unpaired runs,
            and where a run diverged.
        smallest_p: the smallest two-sided p that tests of ranks and signs can reach at this n:
            2 / 2^n, or 2 / C(n + m, n).
        improvement: P(a is better than b), with its decision.
        needed: the seeds of each arm at which the observed effect would be decided with power .8;
            see `needed`.
        paired: whether runs were compared seed by seed.
    """

    n: int
    difference: Estimate
    t_p: float | None
    wilcoxon_p: float
    sign_flip_p: float | None
    smallest_p: float
    improvement: Improvement
    needed: int | None
    paired: bool

    @property
    def p(self) -> float:
        """The p to report: of the t test, or else of the sign flips, or else of the ranks."""
        return next(p for p in (self.t_p, self.sign_flip_p, self.wilcoxon_p) if p is not None)


def paired(
    a: ArrayLike, b: ArrayLike, better: str = "min", confidence: float = 0.95, alpha: float = 0.05
) -> Difference:
    """Compares two arms over shared seeds.

    The p of sign flips (and Wilcoxon's, with ties) is exact up to 16 pairs; above, it is taken from
    16,383 flips that are always the same. Two runs of one seed that both diverged are a tie.

    Args:
        a: one number a seed.
        b: the numbers of the other arm, in the order of the same seeds.
        better: "min" if smaller numbers are better, or "max".
        confidence: the coverage of the intervals.
        alpha: the level of the test for which `needed` seeds are counted.

    Returns:
        The difference a - b and its tests. With one pair there is no interval and p is 1.

    Raises:
        ValueError: the arms have different lengths, no value, or a NaN.

    >>> result = paired([1.0, 2.0, 3.0], [1.5, 2.3, 3.9])
    >>> round(result.difference.value, 4), round(result.t_p, 4), result.smallest_p
    (-0.5667, 0.0848, 0.25)
    """
    first, second = sample(a), sample(b)
    if len(first) != len(second):
        raise ValueError(
            f"Paired arms need one value for each shared seed, got {len(first)} and {len(second)}"
            " values: keep the seeds that both have, or use welch."
        )
    tied = first == second  # also where both diverged, whose difference is NaN
    differences = np.subtract(first, second, out=np.zeros(len(first)), where=~tied)
    # A difference is rounded as its operands are, so that its spread is compared with those.
    together = np.abs(np.concatenate([first, second]))
    scale = float(together[np.isfinite(together)].max(initial=0.0))
    difference = interval(differences, confidence, scale)
    t_p = None
    if difference.low is not None:
        from scipy import stats

        test: Any = stats.ttest_1samp(differences, 0.0)
        t_p = float(test.pvalue)
    return Difference(
        n=len(differences),
        difference=difference,
        t_p=t_p,
        wilcoxon_p=_signed_ranks(differences, scale),
        sign_flip_p=_sign_flips(differences) if np.isfinite(differences).all() else None,
        smallest_p=math.ldexp(2.0, -len(differences)),
        improvement=probability_of_improvement(first, second, True, confidence, better),
        needed=None if t_p is None else needed(differences, alpha=alpha),
        paired=True,
    )


def welch(
    a: ArrayLike, b: ArrayLike, better: str = "min", confidence: float = 0.95, alpha: float = 0.05
) -> Difference:
    """Compares two arms whose runs have different seeds, with unequal variances allowed.

    Args:
        a: the numbers of one arm.
        b: the numbers of the other arm.
        better: "min" if smaller numbers are better, or "max".
        confidence: the coverage of the intervals.
        alpha: the level of the test for which `needed` seeds are counted.

    Returns:
        The difference of means with Welch's t interval and p, and the p of Mann-Whitney (exact up
        to 8 runs in the smaller arm; with ties, in both).

    Raises:
        ValueError: an arm has no value, or a NaN.
    """
    from statsmodels.stats.weightstats import CompareMeans

    first, second = sample(a), sample(b)
    with np.errstate(invalid="ignore"):  # infinite means
        means = float(first.mean()), float(second.mean())
    value = 0.0 if means[0] == means[1] else means[0] - means[1]
    low = high = t_p = deviation = seeds = None
    finite = bool(np.isfinite(first).all() and np.isfinite(second).all())
    if finite and min(len(first), len(second)) > 1:
        deviation = math.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 2)
        if spread(first) or spread(second):
            # scipy's test warns of an arm without spread, which this test allows.
            arms = CompareMeans.from_data(first, second)
            t_p = float(arms.ttest_ind(usevar="unequal")[1])
            low, high = map(float, arms.tconfint_diff(1 - confidence, usevar="unequal"))
            seeds = needed_unpaired(first, second, alpha=alpha)
    n = min(len(first), len(second))
    return Difference(
        n=n,
        difference=Estimate(value, low, high, n, deviation),
        t_p=t_p,
        wilcoxon_p=_rank_sum(first, second),
        sign_flip_p=None,
        smallest_p=min(1.0, 2 / math.comb(len(first) + len(second), n)),
        improvement=probability_of_improvement(first, second, False, confidence, better),
        needed=seeds,
        paired=False,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected by Holm's method, in the given order.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    if not len(p_values):
        return []
    from statsmodels.stats.multitest import multipletests

    result: Any = multipletests(p_values, method="holm")
    return [float(p) for p in result[1]]


def _signed_ranks(differences: NDArray, scale: float) -> float:
    """Returns the two-sided p of Wilcoxon's signed ranks; differences of 0 are left out.

    Differences count as equal if rounding errors of numbers of the given scale separate them.
    """
    from scipy import stats

    values = differences[differences != 0]
    if not len(values):
        return 1.0
    ranks = stats.rankdata(np.round(np.abs(values) / scale, 12)) * np.sign(values)
    if len(set(np.abs(ranks))) < len(ranks):  # scipy's own p takes seconds then, or is not exact
        return _sign_flips(ranks)
    test: Any = stats.wilcoxon(ranks)
    return float(test.pvalue)


def _rank_sum(first: NDArray, second: NDArray) -> float:
    """Returns the two-sided p of Mann and Whitney; exact for few runs, with ties too."""
    from scipy import stats

    # By ranks, since scipy subtracts values, which inf does not allow.
    ranks = stats.rankdata(np.concatenate([first, second]))
    different = len(set(ranks))
    if different == 1:
        return 1.0
    method: Any = "auto"
    if different < len(ranks) and math.comb(len(ranks), len(first)) <= _EXACT_DIVISIONS:
        method = stats.PermutationMethod(n_resamples=_EXACT_DIVISIONS)
    test: Any = stats.mannwhitneyu(ranks[: len(first)], ranks[len(first) :], method=method)
    return float(test.pvalue)


def _sign_flips(values: NDArray) -> float:
    """Returns the share of sign flips whose sum is as far from 0 as that of the values."""
    n = len(values)
    observed = abs(values.sum()) * (1 - 1e-12)  # equal sums may differ in their last bits
    if n <= _EXACT_FLIPS:  # flipping all signs keeps |sum|, so that half of the flips will do
        flips = np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1
        return float((np.abs((1 - 2 * flips) @ values) >= observed).mean())
    draws = np.random.default_rng(0).integers(0, 2, (_SAMPLED_FLIPS, n), dtype=np.int8)
    extreme = int((np.abs((1.0 - 2.0 * draws) @ values) >= observed).sum())
    return (extreme + 1) / (_SAMPLED_FLIPS + 1)
