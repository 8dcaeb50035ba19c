"""The panels of steps and time to a target, and of AlgoPerf's score across workloads.

`judge` says after how many steps the runs of an arm have reached the target by the rule of a goal.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, shown
from trainer.report.pairs import standings
from trainer.report.results import Result, Workload
from trainer.report.statistics import scores
from trainer.report.statistics.estimates import finite, one_sample
from trainer.sweep import target_rule
from trainer.sweep.target_rule import Reached, TargetRule

_LARGEST_RATIO = 4.0  # the r_max of AlgoPerf's score


def target_of(workload: Workload) -> tuple[float | None, str]:
    """Returns the target, or None, and a sentence about its origin."""
    # It is the target of the sweep's file or of --target; without one, the mean value at which the
    # runner-up ended, which shows how much earlier the winner gets there.
    goal = workload.goal
    if goal.target is not None:
        return goal.target, f"The target is {goal.metric} {shown(goal.target)} on {goal.select_on}."
    ordered = standings(workload)
    means = [workload.values_of(each.arm, goal.selected) for each in ordered]
    if len(ordered) < 2 or not means[1]:
        return None, "No target was given: --target=VALUE, or target in the goal of the sweep."
    value = math.fsum(means[1]) / len(means[1])
    return value, (
        f"No target was given. {shown(value)} is the mean {goal.metric} on {goal.select_on} at"
        f" which {ordered[1].arm}, the runner-up, ended. --target=VALUE sets another."
    )


def to_target(workload: Workload, arm: str, target: float, clock: bool) -> list[float]:
    """Returns the steps, or seconds by the `clock`, after which each run first reached a target."""
    # The runs are the compared ones. A miss is infinite; a run without recorded times is NaN. The
    # target is a value of the metric on the split of the selection.
    reached = []
    for run in workload.finals_of(arm):
        curve = workload.curve(run)
        axis = curve.seconds if clock else curve.steps
        first = scores.steps_to_target(axis, curve.values, target, workload.goal.better)
        reached.append(first if not clock or np.isfinite(axis).all() else math.nan)
    return reached


def targets_block(workload: Workload) -> Block:
    """Returns the panel of steps and time to the target."""
    target, sentence = target_of(workload)
    arms = [arm for arm in workload.arms if workload.finals_of(arm)]
    if target is None or not arms:
        return Block(text=(sentence if arms else "No run that can be compared has ended.",))
    steps = {arm: to_target(workload, arm, target, clock=False) for arm in arms}
    missed = all(not math.isfinite(x) for each in steps.values() for x in each)
    warnings = (f"No run met the target {shown(target)}.",) if missed else ()
    return Block(
        text=(sentence, *_by_rule(workload)),
        warnings=(*warnings, *_uneven(workload)),
        figures=() if missed else (_figure(workload, steps, target),),
        tables=(_table(workload, steps, target),),
    )


def _by_rule(workload: Workload) -> Iterator[str]:
    """Yields sentences about the rule of the goal, if it has one, and what it decides."""
    if (rule := workload.goal.rule) is None:
        return
    yield (
        f"The rule {rule.rule} decides after how many steps the runs of an arm have reached it"
        f" together: {rule.formula} is at least {rule.margin:.3g}, for a standard"
        f" deviation of {rule.sigma:g} that was given before."
    )
    yield from (sentence(workload, arm) for arm in workload.arms)


class NotJudgedError(Exception):
    """The runs of an arm cannot be judged by the rule; the text says why, as a whole sentence."""


def judge(workload: Workload, arm: str) -> Reached:
    """Judges the compared runs of an arm by the rule of the goal, over all evaluated steps."""
    # Raises NotJudgedError if the runs have not all ended, chose the configuration themselves, or
    # were not evaluated after the same steps.
    if (rule := workload.goal.rule) is None:
        raise NotJudgedError("The goal has no rule.")
    if workload.faults:
        raise NotJudgedError(
            f"{arm} is not judged by the rule of the target, because files of the sweep disagree:"
            f" {joined(workload.faults, 2)}."
        )
    runs = _ended(workload, arm)
    steps, values = _values(workload, arm, runs)
    # None was planned of an arm that came later, or had another configuration compared before.
    first, *later = workload.revisions
    known = arm in first.arms and not any(arm in each.new_winners for each in later)
    return target_rule.reached(rule, steps, values, min(first.units, len(runs)) if known else 0)


def means(workload: Workload, arm: str) -> dict[int, float]:
    """Returns evaluated step -> the mean of the runs of an arm; raises as `judge` does."""
    steps, values = _values(workload, arm, _ended(workload, arm))
    return dict(zip(steps, values.mean(0).tolist(), strict=True))


def sentence(workload: Workload, arm: str) -> str:
    """Says whether the runs of an arm have reached the target, in a sentence."""
    rule = workload.goal.rule
    assert rule is not None
    target = f"{workload.goal.metric} {shown(rule.target)} on {workload.goal.select_on}"
    try:
        return sentence_of(arm, target, rule, judge(workload, arm))
    except NotJudgedError as error:
        return str(error)


def sentence_of(subject: str, target: str, rule: TargetRule, found: Reached) -> str:
    """Says whether runs have reached a target, and by which numbers, in a sentence."""
    # `subject` is whose runs they are, `target` the metric and the value. The rule "earliest_step"
    # looks at each evaluation until one passes, so that LEVEL is the error at that step alone.
    numbers = (
        f"the mean of {plural(found.runs, 'run')} is {found.mean:.6g}, and {rule.formula} is"
        f" {found.statistic:.4g}"
    )
    if found.step is None:
        return (
            f"{subject} has not been shown to reach {target}: where it is closest, after"
            f" {found.closest:,} steps, {numbers}, less than the {found.limit:.4g} that is needed."
        )
    at = "" if rule.rule == target_rule.LASTING else " at that step"
    return (
        f"{subject} has reached {target} after {found.step:,} steps: {numbers}, at least the"
        f" {found.limit:.4g} that is needed (p{at} at most {target_rule.LEVEL:g})."
    )


def _ended(workload: Workload, arm: str) -> list[Result]:
    """Returns the compared runs of an arm, if all have ended and none chose the configuration."""
    planned = [run for run in workload.finals if run.arm == arm]
    runs = workload.finals_of(arm)
    if not runs or len(runs) < len(planned):
        raise NotJudgedError(
            f"{arm} is not judged by the rule of the target before all its runs have ended:"
            f" {len(runs)} of {max(len(planned), len(workload.units))} have."
        )
    points = {run.number for run in workload.trials_of(arm)}
    if len(points) > 1 and {run.name for run in runs} & {run.name for run in workload.trials}:
        raise NotJudgedError(
            f"{arm} is not judged by the rule of the target, because its runs are those by which"
            f" its point was chosen among {len(points)}: add final: {{seeds: 8}}."
        )
    return runs


def _values(workload: Workload, arm: str, runs: Sequence[Result]) -> tuple[list[int], np.ndarray]:
    """Returns the evaluated steps, and the values [runs, steps]; infinite after a divergence."""
    curves = [workload.curve(run) for run in runs]
    steps = max((curve.steps for curve in curves), key=len)
    if not len(steps):
        raise NotJudgedError(f"{arm} has no {workload.goal.selected} in its rows.")
    worst = workload.goal.sign * math.inf
    rows = []
    for run, curve in zip(runs, curves, strict=True):
        count = len(curve.steps)
        cut = count < len(steps) and run.end == "done"
        if cut or not np.array_equal(curve.steps, steps[:count]):
            raise NotJudgedError(
                f"{arm} is not judged by the rule of the target, because {run.name} was evaluated"
                f" after other steps than {runs[0].name}."
            )
        values = np.where(np.isfinite(curve.values), curve.values, worst)
        rows.append(np.concatenate([values, np.full(len(steps) - count, worst)]))
    return steps.astype(int).tolist(), np.stack(rows)


_MOST_LOAD = 1.2  # the load average per core up to which times can be trusted

_NOTE = (
    "A run is compared with the target at its evaluations, so that these numbers are no finer than"
    " eval_every. The median counts a miss as later than any other, and is – where the median run"
    " missed."
)
_FINAL_NOTE = (
    " p, final value: of a one-sided t test that the mean at the last step is better than the"
    " target."
)
_CLOCK_NOTE = (
    " Time is that of training, without compilation and evaluation. The column {title} is the mean"
    " at the end of the arms whose runs had all ended by then; the others had not finished their"
    " schedules, and have no value."
)


def _table(workload: Workload, steps: Mapping[str, Sequence[float]], target: float) -> Table:
    seconds = {arm: to_target(workload, arm, target, clock=True) for arm in steps}
    clocked = not any(math.isnan(x) for each in seconds.values() for x in each)
    ended = [[run.summary for run in workload.finals_of(arm) if run.end == "done"] for arm in steps]
    times = [[each.seconds for each in of_arm if each.seconds is not None] for of_arm in ended]
    limit = None  # the time at which all runs of the arm with the shortest median time had ended
    if clocked and any(times):
        limit = max(min(filter(None, times), key=statistics.median))
    ends = {arm: _at(workload, arm, limit) for arm in steps}
    compared = sum(value is not None for value in ends.values()) > 1
    met = {arm: [x for x in reached if math.isfinite(x)] for arm, reached in steps.items()}
    title = f"{workload.goal.metric} at {limit or 0:.3g} s"

    def p_final(arm: str) -> float | None:
        values = workload.values_of(arm, workload.goal.selected)
        if len(values) < len(workload.finals_of(arm)) or workload.goal.target is None:
            return None  # a run diverged, or the target was chosen from the results
        test = one_sample(values, target, workload.goal.better)
        return test and test[1]

    columns: Columns[str] = {
        Column("arm", "arm"): lambda arm: arm,
        Column("met", "met", "integer"): lambda arm: len(met[arm]),
        Column("missed", "missed", "integer"): lambda arm: len(steps[arm]) - len(met[arm]),
        Column("median_steps", "median steps", "integer"): lambda arm: finite(
            statistics.median(steps[arm])
        ),
        Column("min_steps", "least", "integer"): lambda arm: min(met[arm], default=None),
        Column("max_steps", "most", "integer"): lambda arm: max(met[arm], default=None),
        Column("median_seconds", "median time", "seconds"): lambda arm: (
            finite(statistics.median(seconds[arm])) if clocked else None
        ),
        Column("at_equal_time", title, "number"): lambda arm: ends[arm] if compared else None,
        Column("p_final", "p, final value", "p"): p_final,
    }
    made = Table.of("target", "Steps and time to the target", steps, columns, _NOTE).compact()
    tested = any(column.name == "p_final" for column in made.columns)
    clock = _CLOCK_NOTE.format(title=title) if compared else ""
    return replace(made, note=_NOTE + (_FINAL_NOTE if tested else "") + clock)


def why_not_clocked(*workloads: Workload) -> str:
    """Returns why the times of the compared runs cannot be compared, in words; "" if they can."""
    runs = [run for each in workloads for run in each.finals if run.end == "done"]
    if any(run.summary.seconds is None for run in runs):
        return "they were not recorded."
    if any(run.at_once > 1 for run in runs):
        return "several runs were computed at once, by vmap."
    if any(run.load is not None and run.load > _MOST_LOAD for run in runs):
        return "the machine was busy with other work."
    if len({(run.fingerprint.get("devices"), run.fingerprint.get("cpu")) for run in runs}) > 1:
        return "runs were computed on different devices."
    return next(chain.from_iterable(map(_uneven, workloads)), "")


def _uneven(workload: Workload) -> Iterator[str]:
    """Yields warnings about arms of which a run took much longer for a step than the others."""
    for arm in workload.arms:
        times = {
            run.name: run.summary.seconds / run.updates
            for run in workload.finals_of(arm)
            if run.summary.seconds is not None and run.updates
        }
        slowest = max(times, key=lambda name: times[name], default="")
        if len(times) > 2 and times[slowest] > 2 * statistics.median(times.values()):
            ratio = times[slowest] / statistics.median(times.values())
            yield (
                f"A step of {slowest} took {ratio:.1f} times as long as the median of {arm}: the"
                " machine was busy, or the clock is wrong, so do not trust times."
            )


def _at(workload: Workload, arm: str, limit: float | None) -> float | None:
    """Returns the mean of the metric at the end of runs, None unless all had ended by a time."""
    runs = workload.finals_of(arm)
    times = [run.summary.seconds if run.end == "done" else None for run in runs]
    values = [workload.curve(run).values for run in runs]
    if limit is None or any(x is None or x > limit for x in times) or not all(map(len, values)):
        return None
    return math.fsum(float(each[-1]) for each in values) / len(values)


def _figure(workload: Workload, steps: Mapping[str, Sequence[float]], target: float) -> Figure:
    series: list[Series] = []
    missed = {arm: sum(not math.isfinite(x) for x in each) for arm, each in steps.items()}
    # Draw misses at the upper edge, beyond all steps that were computed.
    most = max((run.steps for arm in steps for run in workload.finals_of(arm)), default=0)
    edge = 1.06 * max(most, *(x for each in steps.values() for x in each if math.isfinite(x)))
    if any(missed.values()):
        series.append(Series("rule", "", (), [edge], label="missed"))
    for index, (arm, reached) in enumerate(steps.items()):
        runs = workload.finals_of(arm)
        for drawn, label in ((True, arm), (False, "missed")):
            of_kind = [
                (x if drawn else edge, run.name)
                for x, run in zip(reached, runs, strict=True)
                if math.isfinite(x) is drawn
            ]
            if of_kind:
                last = max(1, len(of_kind) - 1)
                spread = [index - 0.15 + 0.3 * i / last for i in range(len(of_kind))]
                xs, names = zip(*of_kind, strict=True)
                more = {"label": label, "faint": not drawn, "trials": names}
                series.append(Series("points", arm, spread, xs, **more))
    columns = Column.named(arm="text", seed="text", steps="integer")
    rows = tuple(
        (arm, str(run.seed), finite(x))
        for arm, reached in steps.items()
        for x, run in zip(reached, workload.finals_of(arm), strict=True)
    )
    labels = [f"{a} ({n} of {len(steps[a])} missed)" if n else a for a, n in missed.items()]
    misses = sum(missed.values())
    return Figure(
        name="target",
        title=f"Steps to {workload.goal.metric} {shown(target)}, {workload.goal.select_on} split",
        description="The step at which each compared run first reached the target, by arm;"
        f" {plural(misses, 'run')} that missed it {'is' if misses == 1 else 'are'} drawn above all"
        " steps.",
        x=Axis("", labels=tuple(labels)),
        y=Axis("steps"),
        series=tuple(series),
        table=Table("target_points", "Steps to the target of every run", columns, rows),
    )


def workloads_block(workloads: Sequence[Workload]) -> Block:
    """Returns the panel across workloads, of which there are at least two."""
    arms = [a for a in workloads[0].arms if all(each.finals_of(a) for each in workloads)]
    left_out = dict.fromkeys(a for each in workloads for a in each.arms if a not in arms)
    warnings = []
    if left_out:
        warnings.append(
            f"{joined(list(left_out))} {'is' if len(left_out) == 1 else 'are'} left out, because"
            " not every workload has compared runs of that arm."
        )
    values = [value for value, _ in map(target_of, workloads) if value is not None]
    if len(arms) < 2 or len(values) < len(workloads):
        text = (
            "Scores across workloads need two arms that every workload has, and a target for each."
        )
        return Block(text=(text,), warnings=tuple(warnings))
    why = next(filter(None, map(why_not_clocked, workloads)), "")
    goals = list(zip(workloads, values, strict=True))
    # The times to the target of each compared run, [arm][workload], and the medians over these.
    runs = [[to_target(each, arm, x, clock=not why) for each, x in goals] for arm in arms]
    times = np.asarray([[np.median(each) for each in own] for own in runs])
    if any(each.goal.target is None for each in workloads):
        warnings.append(
            "Targets that were not given are those that the runner-up reached, so that they depend"
            " on the arms that take part: give a target to report scores."
        )
    what = "steps" if why else "training time"
    text = (
        f"Each arm has one time for each workload: the median {what} to the target over its"
        " compared runs, where a miss is later than any other. A score depends on the other arms,"
        " because each workload is measured by its fastest: the columns at the right leave one arm"
        " out.",
    )
    if why:
        warnings.append(f"Scores are over steps, because times cannot be trusted: {why}")
    kind = "integer" if why else "seconds"
    columns = Column("arm", "arm"), *Column.titled([w.name for w in workloads], {"arm"}, kind)
    rows = tuple((arm, *map(finite, row)) for arm, row in zip(arms, times.tolist(), strict=True))
    of_times = Table("workloads_times", "Times to the targets", columns, rows, "– is a miss.")
    tables = (of_times, _scores(arms, times, runs), _pairs(arms, times))
    figures = (_profile(arms, times),)
    return Block(text=text, warnings=tuple(warnings), figures=figures, tables=tables)


def _scores(
    arms: Sequence[str], times: NDArray, runs: Sequence[Sequence[Sequence[float]]]
) -> Table:
    means = scores.algoperf_score(times, _LARGEST_RATIO)
    low, high = scores.score_intervals(runs, _LARGEST_RATIO)
    without = scores.leave_one_out(times, _LARGEST_RATIO)
    columns: Columns[int] = {
        Column("arm", "arm"): lambda i: arms[i],
        Column("score", "score", "number"): lambda i: float(means[i]),
        Column("low", "95% from", "number"): lambda i: float(low[i]),
        Column("high", "to", "number"): lambda i: float(high[i]),
    }
    titles, taken = [f"without {arm}" for arm in arms], {column.name for column in columns}
    for gone, column in enumerate(Column.titled(titles, taken, "number")):
        columns[column] = lambda i, rest=without[gone]: finite(float(rest[i]))
    note = (
        "AlgoPerf's score (arXiv:2306.07179), without its qualification rules: the mean over ratios"
        " from 1 to 4 of the share of workloads on which an arm needs at most that many times the"
        " fastest arm's time. The intervals are of a bootstrap over the runs of each workload; they"
        f" say nothing about other workloads. {_swaps(arms, means, without)}"
    )
    return Table.of("workloads_scores", "AlgoPerf score", range(len(arms)), columns, note)


def _swaps(arms: Sequence[str], means: NDArray, without: dict[int, NDArray]) -> str:
    """Says whether leaving an arm out changes the order of the first two of the others."""
    order = [int(i) for i in np.argsort(-means, kind="stable")]
    for gone, rest in without.items():
        left = [i for i in order if i != gone]
        if len(left) > 1 and rest[left[0]] < max(rest[i] for i in left[1:]):
            first = max(left, key=lambda i: rest[i])  # noqa: B023
            return f"Without {arms[gone]}, {arms[first]} comes before {arms[left[0]]}."
    return "The best of the remaining arms stays the best, whichever arm is left out."


def _pairs(arms: Sequence[str], times: NDArray) -> Table:
    found = [(arms[a], arms[b], each) for (a, b), each in scores.speedups(times).items() if a < b]
    columns: Columns[tuple[str, str, scores.Speedup]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("other", "over"): lambda r: r[1],
        Column("speedup", "speedup", "number"): lambda r: r[2].factor,
        Column("both", "both met", "integer"): lambda r: r[2].both,
        Column("only_first", "only the first", "integer"): lambda r: r[2].only_first,
        Column("only_second", "only the second", "integer"): lambda r: r[2].only_second,
        Column("neither", "neither", "integer"): lambda r: r[2].neither,
    }
    note = (
        "The geometric mean, over the workloads on which both arms met the target, of the second"
        " arm's time divided by the first's. Workloads that one arm missed are counted at the right"
        " and are not in the mean."
    )
    return Table.of("workloads_speedups", "Speedups", found, columns, note)


def _profile(arms: Sequence[str], times: NDArray) -> Figure:
    met = times[:, np.isfinite(times).any(axis=0)]  # the workloads that any arm met
    ratios = met / met.min(axis=0)
    finite = ratios[np.isfinite(ratios)]
    end = max(_LARGEST_RATIO, float(finite.max(initial=1.0)))
    taus = np.unique([1.0, *finite[finite <= end], end])
    shares = scores.performance_profile(times, taus)
    columns = Column.named(arm="text", multiple="number", share="share")
    lines = dict(zip(arms, shares.tolist(), strict=True))
    x = taus.tolist()
    rows = tuple((arm, *each) for arm, y in lines.items() for each in zip(x, y, strict=True))
    return Figure(
        name="workloads_profile",
        title="Performance profile",
        description="For each arm, the share of workloads on which its time to the target is at"
        " most the given multiple of the fastest arm's.",
        x=Axis("multiple of the fastest time"),
        y=Axis("share of workloads"),
        series=tuple(Series("steps", arm, x, y, label=arm) for arm, y in lines.items()),
        table=Table("workloads_profile", "Performance profile", columns, rows),
    )
