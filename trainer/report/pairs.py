"""Compares the arms of a workload: their means, and every two of them by a test."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.report import statistics
from trainer.report.results import Goal, Workload
from trainer.report.statistics import Estimate, Improvement

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Pair:
    """Two arms, the better one first: by the mean difference, or by ranks if a run has no value.

    Attributes:
        better, worse: the names of the arms.
        n: how many seeds are compared.
        difference: that of the means, better minus worse; no interval if a run has no value.
        valueless: whether a compared run has no value, which then counts as the worst.
        test: the name of the test that gave `p`.
        p: the p value; None if no test applies.
        corrected: `p` after Holm's correction over all pairs of the workload.
        smallest: the smallest p that signs of the differences can reach with n seeds.
        improvement: the probability that a run of the better arm has the better value.
        needed: with how many seeds a difference of this size would be decided, at the level 0.05
            divided by the number of pairs; None if unknown.
    """

    better: str
    worse: str
    n: int
    difference: Estimate
    valueless: bool
    test: str
    p: float | None
    corrected: float | None
    smallest: float | None
    improvement: Improvement | None
    needed: int | None

    @property
    def decided(self) -> bool:
        """Whether the corrected p is below 0.05."""
        return self.corrected is not None and self.corrected < SIGNIFICANT


@dataclass(frozen=True)
class Standing:
    """An arm with its compared runs.

    Attributes:
        arm: the name.
        values: seed -> the reported metric; infinity as the worst value of a run that diverged or
            failed.
        mean: with its interval; infinite if a run diverged.
    """

    arm: str
    values: dict[int, float]
    mean: Estimate

    @property
    def valueless(self) -> int:
        """How many runs have no finite value: they diverged, failed, or lack the metric."""
        return sum(math.isinf(value) for value in self.values.values())


def standings(workload: Workload) -> list[Standing]:
    """Returns the arms with compared runs, the best mean first.

    Args:
        workload: the results.
    """
    sign, found = workload.goal.sign, []
    for arm in workload.arms:
        values = {}
        for run in workload.finals_of(arm):
            value = run.value(workload.goal.reported)
            values[run.seed] = sign * math.inf if value is None else value
        if not values:
            continue
        mean = statistics.mean_interval(list(values.values()))
        found.append(Standing(arm, values, mean))
    return sorted(found, key=lambda each: sign * each.mean.value)


def level_text(pairs: Sequence[Pair]) -> str:
    """Returns the level at which each of several pairs is tested, such as "0.05 / 10".

    Args:
        pairs: all pairs of a workload.
    """
    return f"{SIGNIFICANT}" if len(pairs) == 1 else f"{SIGNIFICANT} / {len(pairs)}"


def compare_arms(workload: Workload) -> list[Pair]:
    """Compares every two arms: by seed if one has no seeds that the other lacks.

    Args:
        workload: the results.

    Returns:
        The pairs; those of the arm with the best mean come first.
    """
    couples = list(itertools.combinations(standings(workload), 2))
    level = SIGNIFICANT / max(1, len(couples))
    pairs = [_pair(a, b, workload.goal, level) for a, b in couples]
    tested = [pair.p for pair in pairs if pair.p is not None]
    corrected = iter(statistics.holm(tested))
    return [pair if pair.p is None else replace(pair, corrected=next(corrected)) for pair in pairs]


def _pair(a: Standing, b: Standing, goal: Goal, level: float) -> Pair:
    seeds = sorted(a.values.keys() & b.values.keys())
    # Seeds that only one arm has are those whose other run has not ended.
    shared = len(seeds) > 0 and len(seeds) in (len(a.values), len(b.values))
    x = [a.values[seed] for seed in seeds] if shared else list(a.values.values())
    y = [b.values[seed] for seed in seeds] if shared else list(b.values.values())
    valueless = any(map(math.isinf, (*x, *y)))
    result = (statistics.paired if shared else statistics.welch)(x, y, goal.better, alpha=level)
    if valueless:
        wins = result.improvement.value
        none = {"t_p": None, "sign_flip_p": None, "needed": None}
        result = replace(result, difference=_NO_DIFFERENCE, **none)
    else:
        wins = 0.5 - goal.sign * result.difference.value
    if wins < 0.5:
        return _pair(b, a, goal, level)
    alone = min(len(x), len(y)) < 2
    return Pair(
        better=a.arm,
        worse=b.arm,
        n=result.n,
        difference=result.difference,
        valueless=valueless,
        test=_test(result),
        p=None if alone else result.p,
        corrected=None,
        smallest=result.smallest_p,
        improvement=None if alone else result.improvement,
        needed=result.needed,
    )


_NO_DIFFERENCE = Estimate(math.nan, None, None, 0, None)


def _test(result: statistics.Difference) -> str:
    """Returns the name of the test whose p is reported."""
    if result.t_p is not None:
        return "paired t test" if result.paired else "Welch's t test"
    if result.sign_flip_p is not None:
        return "test of sign flips"
    return "Wilcoxon signed-rank test" if result.paired else "Mann-Whitney test"
