"""Compares the arms of a workload: their means, and every two of them by the rule of decision."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.engine.examples import Examples
from trainer.messages import joined, plural
from trainer.report.conditions import unlike_losses
from trainer.report.results import ReportGoal, Workload, planned_revision
from trainer.report.statistics import decide, estimates

# A narrow space wins too often in searches of few trials. In simulated sweeps of equal optimizers,
# one of which has a space a fifth as wide, a report of searches of 4 trials names a better one in
# at most 6% of the sweeps (docs/statistics.md). With 2 trials it was 16%, when this was set.
FEWEST_TRIALS = 4
# A mean difference that is a smaller share of the values is not decided. float32 has seven digits,
# of which sums and many steps lose some: two ways to write one optimizer may differ so, always to
# the same side.
ROUNDING = 1e-5
_NAMED = 3  # how many of the files that disagree a sentence lists


class OtherTestSets(NamedTuple):
    """The interval of a difference for other units and other test examples."""

    found: estimates.TwoWay | None  # better minus worse; None if it is not known
    complete: bool = True  # over all test examples, not the first 100,000
    why: str = ""  # why it is not known, as a part of a sentence
    unlike: bool = False  # whether runs had other test examples


@dataclass(frozen=True)
class Pair:
    """Two arms, the better one first: by the mean difference, or by signs if a run has no value."""

    better: str
    worse: str
    n: int  # how many units are compared: searches, or seeds if each arm was searched once
    difference: float  # of the means, better minus worse; NaN if a unit diverged or collapsed
    diverged: tuple[int, int]  # how many units of the two arms have a run that diverged
    collapsed: tuple[int, int]  # how many others of them collapsed; see `statistics.collapsed`
    # the metric of the two before their first steps; NaN if not known, and then none collapsed
    initial: tuple[float, float]
    # the ends of its interval, which holds for all pairs and looks at once; None if there is none
    low: float | None = None
    high: float | None = None
    deviation: float | None = None  # the standard deviation of the paired differences
    looks: tuple[int, ...] = ()  # the numbers of units at which it was judged; empty if not yet
    earlier: tuple["EarlierLook", ...] = ()  # all but the last; empty with `looks: any`
    test: str = ""  # such as "paired t test"; "" if none applies, or one arm has no values
    p: float | None = None  # the p value over all pairs and looks; None if there is no test
    decided: bool = False  # whether the better arm is better
    rounding: bool = False  # whether it would be, by a difference that rounding can make
    relevance: str | None = None  # by `decide.relevance`, if the goal says what matters
    improvement: estimates.Improvement | None = None  # P(a unit of the better arm is better)
    # the difference that so many units find with a power of 0.8, in standard deviations of the
    # paired differences; None if there is none, or runs have other seeds
    finds: float | None = None
    # how many units of a fresh sweep find the difference that matters; None if unknown or > 10,000
    needed: int | None = None
    needed_range: tuple[int, int] | None = None  # its 80% interval; None if it has none
    elsewhere: OtherTestSets | None = None  # None if nothing is known, or it was not judged

    @property
    def arms(self) -> tuple[str, str]:
        """The two arms, the better one first."""
        return self.better, self.worse

    @property
    def without_mean(self) -> bool:
        """Whether no mean is compared, because a unit diverged or collapsed."""
        return any(self.diverged) or any(self.collapsed)


class EarlierLook(NamedTuple):
    """What was said about a pair before units were added."""

    n: int  # the number of units
    until: str  # the day on which the last run of these units began, in UTC; "" if unknown
    better: str  # the arm that was better; "" if that was not decided
    p: float | None  # over all pairs and the looks until then; None if there was no test


class Standing(NamedTuple):
    """An arm with its compared units."""

    arm: str
    # number of a search, or seed -> the reported metric, a mean over the final seeds of the
    # search; infinity as the worst value of a unit with a run that diverged. Units that have not
    # ended, and those with a run that failed, are left out.
    values: dict[int, float]
    mean: estimates.Estimate  # infinite if a run diverged

    @property
    def valueless(self) -> int:
        """How many units have no finite value."""
        return sum(math.isinf(value) for value in self.values.values())


def standings(workload: Workload) -> list[Standing]:
    """Returns the arms with compared units, the best mean first."""
    found = [
        Standing(arm, values, estimates.mean_interval(list(values.values())))
        for arm in workload.arms
        if (values := workload.units_of(arm))
    ]
    return sorted(found, key=lambda each: workload.goal.sign * each.mean.value)


def compare_arms(workload: Workload) -> list[Pair]:
    """Compares every two arms, or each with the whole one; pairs of the best arm come first."""
    # Arms are compared unit by unit if every unit of one has its counterpart in the other; single
    # runs of other seeds are compared as independent samples. The error is divided over all pairs
    # of the workload, and of other rungs of a ladder, also those of arms without results.
    judge = not reason_not_to_judge(workload)
    unknown = {run.arm for run in workload.failed}
    return [
        _pair(a, b, workload, judge and not {a.arm, b.arm} & unknown)
        for a, b in itertools.combinations(standings(workload), 2)
        if not workload.ablated or workload.ablated in (a.arm, b.arm)
    ]


def reason_not_to_judge(workload: Workload) -> str:
    """Returns why the arms must not be judged, in a sentence; "" if they may be."""
    if workload.faults:
        what, check = "runs", ""
        if workload.path is not None:
            what = "sweep"
            check = f" `python -m trainer sweep check {workload.path}` names all of them."
        return (
            f"The results are not judged, because files of the {what} disagree:"
            f" {joined(workload.faults, _NAMED)}.{check}"
        )
    if workload.picked:
        return f"Not judged. {workload.picked}"
    if unlike := unlike_losses(workload):
        return f"Not judged. {unlike}"
    counts = {arm: workload.points_of_search(arm) for arm in workload.arms}
    fewest = min(counts.values(), default=0)
    if workload.searches > 1 and fewest < FEWEST_TRIALS:
        return (
            f"Nothing is said about the arms, because a search has {plural(fewest, 'trial')}: with"
            f" fewer than {FEWEST_TRIALS}, a narrow space would win too often."
        )
    trials = {run.name for run in workload.trials}
    again = any(run.name in trials and counts[run.arm] > 1 for run in workload.finals)
    if again and workload.goal.report_on == workload.goal.select_on:
        return (
            "There is no test, because the compared runs are those on which the winners were"
            " selected: `final: {seeds: 8}` runs the winners on fresh seeds."
        )
    return ""


def looks_of(workload: Workload, arms: Sequence[str], units: int) -> decide.Looks | None:
    """Returns the looks that were taken at the units of two arms; None if there was none yet."""
    # All revisions from before any compared run was known count as one plan, which is judged once,
    # when all of it has ended. A later revision is judged when it has ended, if it added units or
    # one of the two arms. `units` is how many units both arms have, without a gap.
    if not workload.revisions:
        return decide.looks_of_plan(units) if units > 1 else None
    ended = [each for each in workload.revisions if each.number <= workload.completed]
    # The runs of a new winner are compared only when all of them have ended.
    later = workload.revisions[workload.completed :]
    if any(set(arms) & set(each.new_winners) for each in later):
        return None
    with_both = [each for each in ended if set(arms) <= set(each.arms)]
    changed = [each.number for each in with_both if set(arms) & set(each.new_winners)]
    if workload.looks == "any":
        return decide.looks_at_any(units, len(changed)) if units > 2 else None
    plan = planned_revision(workload.revisions)
    since = max([plan.number + 1, *changed])
    counts = {each.units for each in with_both if each.number >= since}
    numbers = tuple(sorted(n for n in counts if 1 < n <= units))
    if changed:
        looks = decide.looks_after_change(len(changed), numbers)
    elif plan in with_both and 1 < plan.units <= units:
        added = tuple(n for n in numbers if n > plan.units)
        looks = decide.looks_of_plan(plan.units, added, workload.skewed)
    else:
        looks = decide.Looks(None, numbers)
    return looks if looks.planned is not None or (looks.later and not workload.skewed) else None


def _pair(a: Standing, b: Standing, workload: Workload, judge: bool) -> Pair:
    common = [unit for unit in a.values if unit in b.values]
    # If the units of one arm contain those of the other, the other's missing units have not ended.
    if not common or len(common) not in (len(a.values), len(b.values)):
        return _unpaired(a, b, workload, judge)
    # Those of the plan, from the first one without a gap.
    order = workload.units or sorted(common)
    units = next((n for n, unit in enumerate(order) if unit not in common), len(order))
    looks = looks_of(workload, (a.arm, b.arm), units) if judge else None
    looks = looks and looks.deciding(workload.comparisons)
    n = (looks and looks.last) or len(common)
    x, y = (np.array([each.values[unit] for unit in common[:n]]) for each in (a, b))
    before = [workload.initial_of(each.arm, workload.goal.reported) for each in (a, b)]
    start = before[0], before[1]
    ranks = decide.ranked(x, y, start, workload.goal.better)
    if _is_worse(*ranks, workload.goal.sign):
        return _pair(b, a, workload, judge)
    pair = _unjudged_pair(a.arm, b.arm, (x, y), ranks, start)
    if not pair.without_mean:
        pair = replace(pair, deviation=estimates.mean_interval(x - y).deviation or None)
    if looks is None or not looks.last:
        return pair
    pair = _judged_pair(pair, x, y, looks, workload)
    if pair.without_mean:
        return pair
    of_units = dict(zip(common[:n], x - y, strict=True))
    return replace(pair, elsewhere=other_test_sets(workload, *pair.arms, of_units))


def _is_worse(x: NDArray, y: NDArray, sign: int) -> bool:
    """Returns whether `x` is worse than `y`: by the mean, or by signs if a value is infinite."""
    if np.isfinite(x).all() and np.isfinite(y).all():
        return sign * float(x.mean() - y.mean()) > 0
    first, second = (x, y) if len(x) == len(y) else (x[:, None], y[None, :])
    return bool((sign * first > sign * second).sum() > (sign * first < sign * second).sum())


def _unjudged_pair(
    better: str,
    worse: str,
    units: tuple[NDArray, NDArray],
    ranks: tuple[NDArray, NDArray],
    initial: tuple[float, float] = (math.nan, math.nan),
) -> Pair:
    """Returns a pair with its difference, not judged; `ranks` are the units by `ranked`."""
    (x, y), bad = units, [int(np.isinf(each).sum()) for each in ranks]
    diverged = int(np.isinf(x).sum()), int(np.isinf(y).sum())
    gone = bad[0] - diverged[0], bad[1] - diverged[1]
    difference = math.nan if any(bad) else float(x.mean() - y.mean())
    return Pair(better, worse, min(len(x), len(y)), difference, diverged, gone, initial)


def _judged_pair(
    pair: Pair, x: NDArray, y: NDArray, looks: decide.Looks, workload: Workload
) -> Pair:
    """Returns a pair with the decision of its looks, of which there is at least one."""
    goal, comparisons = workload.goal, workload.comparisons
    found = decide.decide([x, y], looks, goal.better, comparisons, pair.initial)
    low, high, p = (estimates.finite(float(each[0])) for each in (found.low, found.high, found.p))
    t = "anytime-valid t test"
    if looks.planned is not None:
        t = "paired t test, then anytime-valid ones" if looks.later else "paired t test"
    tests = {"t": t, "signs": "test of signs", "fisher": "Fisher's exact test of their numbers"}
    taken = () if looks.planned is None else (looks.planned,)
    earlier = [] if workload.looks == "any" else looks.earlier()
    size = None if pair.without_mean else goal.relevant
    planned = decide.PLANNED_LEVEL / comparisons
    ranks = decide.ranked(x, y, pair.initial, goal.better)
    number = None if size is None else decide.needed(x - y, size, alpha=planned)
    relevance = _relevance(goal, low, high)
    decided = found.decided[0] == -goal.sign
    rounding = decided and abs(pair.difference) < ROUNDING * max(abs(x).mean(), abs(y).mean())
    return replace(
        pair,
        low=low,
        high=high,
        looks=(*taken, *looks.later),
        earlier=tuple(_earlier_look(pair, x, y, each, workload) for each in earlier),
        test=tests.get(str(found.test[0]), ""),
        p=p,
        decided=decided and not rounding,
        rounding=rounding,
        # Within what does not matter, a difference of rounding is none.
        relevance="equivalent" if rounding and relevance == "less" else relevance,
        improvement=estimates.probability_of_improvement(*ranks, goal.better),
        finds=decide.detectable_effect(
            pair.n, alpha=looks.level / comparisons, later=bool(looks.later)
        ),
        needed=number,
        needed_range=number and decide.needed_range(number, pair.n - 1),
    )


def _earlier_look(
    pair: Pair, x: NDArray, y: NDArray, looks: decide.Looks, workload: Workload
) -> EarlierLook:
    """Returns what the looks until one that is not the last say of a pair."""
    values = [x[: looks.last], y[: looks.last]]
    found = decide.decide(values, looks, workload.goal.better, workload.comparisons, pair.initial)
    side = int(found.decided[0]) * workload.goal.sign
    order = workload.units or sorted({workload.unit_of(run) for run in workload.finals})
    units = order[: looks.last]
    runs = [run for run in workload.finals if run.arm in pair.arms]
    until = max((run.began for run in runs if workload.unit_of(run) in units), default="")[:10]
    better = ("", pair.worse, pair.better)[side]
    return EarlierLook(looks.last, until, better, estimates.finite(float(found.p[0])))


def _unpaired(a: Standing, b: Standing, workload: Workload, judge: bool) -> Pair:
    """Compares runs of different seeds, which only single runs have when all have ended."""
    goal, level = workload.goal, decide.PLANNED_LEVEL / workload.comparisons
    x, y = (np.array(list(each.values.values())) for each in (a, b))
    if _is_worse(x, y, goal.sign):
        return _unpaired(b, a, workload, judge)
    pair = _unjudged_pair(a.arm, b.arm, (x, y), (x, y))
    judge = judge and not pair.without_mean and not workload.revisions
    judge = judge and decide.enough_units(len(x), len(y), level)
    result = estimates.welch(x, y, level) if judge else None
    if result is None:
        return pair
    size = goal.relevant
    number = None if size is None else decide.needed_unpaired(x, y, size, alpha=level)
    return replace(
        pair,
        low=result.low,
        high=result.high,
        looks=(pair.n,),
        test="Welch's t test",
        p=min(1.0, result.p * decide.LEVEL / level),
        decided=result.p < level,
        relevance=_relevance(goal, result.low, result.high),
        needed=number,
        needed_range=number and decide.needed_range(number, len(x) + len(y) - 2),
    )


def _relevance(goal: ReportGoal, low: float | None, high: float | None) -> str | None:
    if goal.relevant is None or low is None or high is None:
        return None
    return str(decide.relevance(*goal.gain(low, high), goal.relevant))


def other_test_sets(
    workload: Workload, better: str, worse: str, of_units: Mapping[int, float]
) -> OtherTestSets | None:
    """Computes a pair's interval from results on single test examples."""
    # `of_units` is unit -> difference of the reported metric, better minus worse. It is not known
    # if a run lacks such results, for example, because an earlier version computed it, or because
    # the metric is not a mean over examples. Returns None for single runs, which never keep them,
    # and without a test split.
    goal = workload.goal
    if goal.report_on != "test" or workload.path is None:
        return None
    metric, both = goal.metric, (better, worse)
    runs = [x for x in workload.finals if x.arm in both and workload.unit_of(x) in of_units]
    known = {x.name: kept for x in runs if (kept := workload.examples(x)) and metric in kept.values}
    if lacking := {run.arm for run in runs if run.name not in known}:
        arms = joined([arm for arm in both if arm in lacking])
        return OtherTestSets(None, why=f"Runs of {arms} have no results on single test examples")
    found: dict[tuple[str, int], list[Examples]] = {}  # (arm, unit) -> those of its runs
    for run in runs:
        found.setdefault((run.arm, workload.unit_of(run)), []).append(known[run.name])
    first, weights = known[runs[0].name], known[runs[0].name].weights[metric]
    alike = (np.array_equal(each.weights[metric], weights) for each in known.values())
    if len({each.sha256 for each in known.values()}) > 1 or not all(alike):
        of_arms = [{x.sha256 for unit in of_units for x in found[arm, unit]} for arm in both]
        what = workload.unit_plural if of_arms[0] == of_arms[1] else "arms"
        why = f"The {what} were not scored on the same test examples"
        return OtherTestSets(None, why=why, unlike=True)

    def means(arm: str) -> NDArray:  # over the final seeds of each unit, [units, examples]
        values = [[run.values[metric] for run in found[arm, unit]] for unit in of_units]
        return np.array([np.mean(each, axis=0, dtype=float) for each in values])

    table = means(better) - means(worse)
    if first.complete:  # the means over examples are known exactly, although files have float16
        exact = np.array(list(of_units.values()))
        table += (exact - np.average(table, axis=1, weights=weights))[:, None]
    return OtherTestSets(estimates.two_way(table, weights=weights), first.complete)
