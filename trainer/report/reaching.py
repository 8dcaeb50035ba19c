"""After how many steps the runs of an arm have reached the target, by the rule of the goal."""

import math
from collections.abc import Sequence

import numpy as np

from trainer.messages import joined, plural
from trainer.report.results import Result, Workload
from trainer.report.wording import shown
from trainer.sweep.target_rule import LASTING, LEVEL, Reached, TargetRule, reached


class NotJudgedError(Exception):
    """The runs of an arm cannot be judged by the rule; the text says why, as a whole sentence."""


def judge(workload: Workload, arm: str) -> Reached:
    """Judges the compared runs of an arm by the rule of the goal, over all evaluated steps."""
    # Raises NotJudgedError if the runs have not all ended, chose the configuration themselves, or
    # were not evaluated after the same steps.
    rule = workload.goal.rule
    if rule is None:
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
    return reached(rule, steps, values, min(first.units, len(runs)) if known else 0)


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
    at = "" if rule.rule == LASTING else " at that step"
    return (
        f"{subject} has reached {target} after {found.step:,} steps: {numbers}, at least the"
        f" {found.limit:.4g} that is needed (p{at} at most {LEVEL:g})."
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
