"""The panel of steps and time to a target."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainer.messages import plural
from trainer.report import reaching
from trainer.report.columns import named_columns
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, finite
from trainer.report.pairs import standings
from trainer.report.results import Workload
from trainer.report.statistics.estimates import one_sample
from trainer.report.statistics.scores import steps_to_target
from trainer.report.wording import shown


def target_of(workload: Workload) -> tuple[float | None, str]:
    """Returns the target, or None, and a sentence about its origin."""
    # It is the target of the sweep's file or of --target; without one, the mean value at which the
    # runner-up ended, which shows how much earlier the winner gets there.
    goal = workload.goal
    if goal.target is not None:
        return goal.target, f"The target is {goal.metric} {shown(goal.target)} on {goal.select_on}."
    ordered = standings(workload)
    means = [list(workload.values_of(each.arm, goal.selected).values()) for each in ordered]
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
        first = steps_to_target(axis, curve.values, target, workload.goal.better)
        reached.append(first if not clock or np.isfinite(axis).all() else math.nan)
    return reached


def targets_block(workload: Workload, prefix: str) -> Block:
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
        figures=() if missed else (_figure(workload, steps, target, prefix),),
        tables=(_table(workload, steps, target, prefix),),
    )


def _by_rule(workload: Workload) -> Iterator[str]:
    """Yields sentences about the rule of the goal, if it has one, and what it decides."""
    rule = workload.goal.rule
    if rule is None:
        return
    yield (
        f"The rule {rule.rule} decides after how many steps the runs of an arm have reached it"
        f" together: {rule.formula} is at least {rule.margin:.3g}, for a standard"
        f" deviation of {rule.sigma:g} that was given before."
    )
    yield from (reaching.sentence(workload, arm) for arm in workload.arms)


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


def _table(
    workload: Workload, steps: Mapping[str, Sequence[float]], target: float, prefix: str
) -> Table:
    seconds = {arm: to_target(workload, arm, target, clock=True) for arm in steps}
    clocked = not any(math.isnan(x) for each in seconds.values() for x in each)
    limit = _limit(workload, list(steps)) if clocked else None
    ends = {arm: _at(workload, arm, limit) for arm in steps}
    compared = sum(value is not None for value in ends.values()) > 1
    met = {arm: [x for x in reached if math.isfinite(x)] for arm, reached in steps.items()}
    title = f"{workload.goal.metric} at {limit or 0:.3g} s"

    def p_final(arm: str) -> float | None:
        values = list(workload.values_of(arm, workload.goal.selected).values())
        if len(values) < len(workload.finals_of(arm)) or workload.goal.target is None:
            return None  # a run diverged, or the target was chosen from the results
        return one_sample(values, target, workload.goal.better).p

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
    name = "Steps and time to the target"
    made = Table.of(f"{prefix}target", name, steps, columns, _NOTE).compact()
    tested = any(column.name == "p_final" for column in made.columns)
    clock = _CLOCK_NOTE.format(title=title) if compared else ""
    return replace(made, note=_NOTE + (_FINAL_NOTE if tested else "") + clock)


def why_not_clocked(workload: Workload) -> str:
    """Returns why the times of the compared runs cannot be compared, in words; "" if they can."""
    runs = [run for run in workload.finals if run.end == "done"]
    if any(run.summary.seconds is None for run in runs):
        return "they were not recorded."
    if any(run.side_by_side > 1 for run in runs):
        return "runs were computed side by side, and share the time of their wave equally."
    if any(run.load is not None and run.load > _MOST_LOAD for run in runs):
        return "the machine was busy with other work."
    return next(_uneven(workload), "")


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


def _limit(workload: Workload, arms: Sequence[str]) -> float | None:
    """Returns the time at which all runs of the arm with the shortest median time had ended."""
    done = [[run.summary for run in workload.finals_of(arm) if run.end == "done"] for arm in arms]
    times = [[each.seconds for each in of_arm if each.seconds is not None] for of_arm in done]
    return max(min(filter(None, times), key=statistics.median)) if any(times) else None


def _at(workload: Workload, arm: str, limit: float | None) -> float | None:
    """Returns the mean of the metric at the end of runs, None unless all had ended by a time."""
    runs = workload.finals_of(arm)
    times = [run.summary.seconds if run.end == "done" else None for run in runs]
    values = [workload.curve(run).values for run in runs]
    if limit is None or any(x is None or x > limit for x in times) or not all(map(len, values)):
        return None
    return math.fsum(float(each[-1]) for each in values) / len(values)


def _figure(
    workload: Workload, steps: Mapping[str, Sequence[float]], target: float, prefix: str
) -> Figure:
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
    columns = named_columns(arm="text", seed="text", steps="integer")
    rows = tuple(
        (arm, str(run.seed), finite(x))
        for arm, reached in steps.items()
        for x, run in zip(reached, workload.finals_of(arm), strict=True)
    )
    labels = [f"{a} ({n} of {len(steps[a])} missed)" if n else a for a, n in missed.items()]
    misses = sum(missed.values())
    return Figure(
        name=f"{prefix}target",
        title=f"Steps to {workload.goal.metric} {shown(target)}, {workload.goal.select_on} split",
        description=(
            "The step at which each compared run first reached the target, by arm;"
            f" {plural(misses, 'run')} that missed it {'is' if misses == 1 else 'are'} drawn above"
            " all steps."
        ),
        x=Axis("", labels=tuple(labels)),
        y=Axis("steps"),
        series=tuple(series),
        table=Table(f"{prefix}target_points", "Steps to the target of every run", columns, rows),
    )
