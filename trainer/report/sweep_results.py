"""Reads the results of a sweep from its folder, as far as it is computed."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trainer.messages import plural
from trainer.report.results import Goal, Result, Revision, Space, Workload
from trainer.report.wording import joined
from trainer.sweep.differences import revised, shown
from trainer.sweep.final import rank
from trainer.sweep.outcome import Outcome, read_outcome
from trainer.sweep.plan import Trial
from trainer.sweep.status import Status, SweepReader
from trainer.sweep.stored_plan import StoredPlan, StoredProgram
from trainer.writers.json_files import DamagedFile
from trainer.writers.lines import PREFIXES
from trainer.writers.run_record import read_record


def read_sweep(
    folder: Path,
    target: float | None = None,
    metric: str | None = None,
    better: Literal["min", "max"] | None = None,
) -> Workload:
    """Reads what a sweep computed; imports no jax.

    Args:
        folder: of the sweep.
        target: a value of the metric to replace that of the sweep's file; None to keep it.
        metric: another metric than that of the goal, by which winners were selected, as a second
            outcome; None for that of the goal.
        better: whether the smallest or the largest value of that metric is the best.

    Raises:
        UserError: the folder is not that of a sweep, or is damaged.
    """
    reader = SweepReader(folder)
    status = reader.read()
    plan = reader.plan
    trials = tuple(_result(reader, status, trial) for trial in plan.trials)
    finals = tuple(_result(reader, status, trial) for trial in status.final or ())
    ranked = rank(plan, status.outcomes)
    best = {arm: next(iter(points.items()), (0, math.inf)) for arm, points in ranked.items()}
    winners = {(arm, 0): number for arm, (number, value) in best.items() if math.isfinite(value)}
    winners |= {(run.arm, run.search): run.number for run in finals if run.number is not None}
    if not plan.final_seeds:
        finals = tuple(run for run in trials if winners.get((run.arm, run.search)) == run.number)
    return Workload(
        name=folder.absolute().name,
        path=folder,
        goal=_goal(plan, finals, target, metric, better),
        arms=tuple(plan.arms),
        trials=trials,
        finals=finals,
        spaces={
            arm: Space(entry["method"], entry["space"])
            for arm, entry in plan.revisions[-1]["arms"].items()
        },
        winners=winners,
        revisions=tuple(_revision(plan.revisions, n) for n in range(1, plan.revision + 1)),
        replaced=tuple(_replaced(folder, plan, finals)),
        budgets=plan.budgets,
        missing=tuple(_missing(reader, status, trials, finals)),
        vocabulary=plan.vocabulary,
        configs={arm: config.root for arm, config in plan.arms.items()},
    )


def _goal(
    plan: StoredPlan,
    finals: tuple[Result, ...],
    target: float | None,
    metric: str | None,
    better: Literal["min", "max"] | None,
) -> Goal:
    goal = plan.goal
    second = metric not in (None, goal.metric)
    name = metric or goal.metric
    tested = any(PREFIXES["test"] + name in run.metrics for run in finals)
    return Goal(
        metric=name,
        better=(better or "min") if second else goal.better,
        select_on=goal.select_on,
        report_on="test" if tested else goal.select_on,
        target=target if second or target is not None else goal.target,
        relevant=None if second else goal.relevant,
        primary=goal.metric if second else "",
    )


def _result(reader: SweepReader, status: Status, trial: Trial) -> Result:
    program, folder = reader.program_of(trial), reader.path / trial.folder
    result = Result(
        name=trial.folder,
        folder=folder,
        arm=trial.arm,
        seed=trial.seed,
        number=trial.number,
        end="missing",
        steps=program.steps,
        flops=float(program.flops),
        values=trial.values,
    )
    outcome = status.outcomes.get(trial.folder)
    return result if outcome is None else _ended(result, outcome)


def _ended(result: Result, outcome: Outcome) -> Result:
    """Returns a run with what came of it."""
    record = _record(result.folder)
    return replace(
        result,
        end=outcome.end,
        why=outcome.why,
        step=outcome.step,
        seconds=outcome.seconds,
        metrics=outcome.metrics,
        retries=max(0, len(record.get("lineage", ())) - 1),
        fingerprint=record.get("fingerprint", {}),
    )


def _record(folder: Path) -> dict[str, Any]:
    """Returns the content of run.json; an empty dict if it is missing or damaged."""
    with contextlib.suppress(DamagedFile):
        return read_record(folder / "run.json") or {}
    return {}


def _replaced(folder: Path, plan: StoredPlan, finals: tuple[Result, ...]) -> Iterator[Result]:
    """Yields the final runs of winners that are not the winners any more."""
    known = {run.name for run in finals}
    programs = {arm: program for program in plan.programs for arm in _arms_of(program)}
    for place in sorted(folder.glob("final*/*/*")):
        name = place.relative_to(folder).as_posix()
        outcome = None if name in known else read_outcome(place)
        arm = place.parent.name
        if outcome is not None and arm in plan.arms and place.name.isdecimal():
            steps, flops = programs[arm].steps, float(programs[arm].flops)
            seed = int(place.name)
            run = Result(name, place, arm, seed, None, outcome.end, steps=steps, flops=flops)
            yield _ended(run, outcome)


def _arms_of(program: StoredProgram) -> set[str]:
    return {name.split("/")[0] for name in program.trials}


def _revision(revisions: Sequence[Mapping[str, Any]], number: int) -> Revision:
    content = revisions[number - 1]
    known = content.get("known")
    changes = [] if number == 1 else revised(revisions[number - 2], content)
    for name, arm in content["arms"].items() if number > 1 else ():
        before = revisions[number - 2]["arms"].get(name)
        if before is None:
            changes.append(f"arm {name} added")
        elif before["space"] != arm["space"]:
            changes.append(f"space of {name}: {shown(before['space'])} -> {shown(arm['space'])}")
    return Revision(
        number=number,
        digest=content["digest"],
        trials=Counter(trial[0] for trial in content["trials"]),
        known=None if known is None else len(known["finished"]),
        winners_known=bool(known and known["final"]),
        changes=tuple(changes),
    )


def _missing(
    reader: SweepReader, status: Status, trials: tuple[Result, ...], finals: tuple[Result, ...]
) -> list[str]:
    """Returns sentences about what an unfinished sweep lacks."""
    counts = Counter(run.arm for run in trials if run.end == "missing")
    lines = []
    if counts:
        listed = joined([f"{count:,} of {arm}" for arm, count in counts.items()])
        lines.append(
            f"The search is not complete: no result yet of {plural(counts.total(), 'trial')} of"
            f" {len(trials):,} ({listed})."
        )
    seeds = len(reader.plan.final_seeds)
    if seeds and status.final is None:
        lines.append(
            "The winners have not been chosen: when the search is complete, each runs again on"
            f" {plural(seeds, 'fresh seed')}."
        )
    left = [run for run in finals if run.end == "missing"]
    if left:
        lines.append(
            f"The runs of winners are not complete: no result yet of {len(left):,} of"
            f" {len(finals):,}."
        )
    if not seeds:
        lines.append(
            "The sweep has no final runs (final: null): the runs below are those by which the"
            " points were selected, so that their values may be better than those of fresh seeds."
        )
    ended = [run for run in (*trials, *finals) if run.end != "missing" and not run.fingerprint]
    damaged = [run.name for run in ended if os.path.lexists(run.folder / "run.json")]
    if damaged:
        lines.append(
            f"The run.json of {joined(damaged[:3])} is damaged, so that versions and retries of"
            " these runs are not known."
        )
    if status.unreadable:
        lines.append(
            f"The summary.json of {joined(list(status.unreadable[:3]))} is missing or damaged, so"
            " that these runs count as not computed."
        )
    return lines
