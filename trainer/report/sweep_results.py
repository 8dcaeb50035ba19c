"""Reads the results of a sweep from its folder, as far as it is computed."""

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trainer.config.wording import known_names
from trainer.messages import UserError, joined, plural
from trainer.report import results
from trainer.report.results import ArmSpace, ReportGoal, Result, Revision, Workload, with_outcome
from trainer.sweep.code_changes import change_sentences, changes_in, code_or_data, versions_in
from trainer.sweep.evidence import Evidence, examine
from trainer.sweep.final import Choice, rank, read_choices, trials_of_choice, trials_until
from trainer.sweep.halving import read_cuts, waiting_folder
from trainer.sweep.ladder import RETUNED, PlannedLadder, rung_of, split_name
from trainer.sweep.ledger import began_late, compared_known
from trainer.sweep.plan import Plan, SharedProgram, Trial, point_name, searches_of
from trainer.sweep.plan_file import revision_changes, shown_part
from trainer.sweep.status import Status, SweepReader
from trainer.sweep.tuned import linked_of
from trainer.workdir.code import are_steps
from trainer.writers.json_files import DamagedFile
from trainer.writers.lines import PREFIXES
from trainer.writers.run_record import read_record
from trainer.writers.summary import Summary, read_outcome, read_summary

_Runs = tuple[Result, ...]


def read_sweep_results(
    folder: Path,
    target: float | None = None,
    metric: str | None = None,
    better: Literal["min", "max"] | None = None,
) -> Workload:
    """Reads what a sweep computed, without jax; raises UserError if it cannot be read."""
    # `target` replaces that of the sweep's file, unless it is None. `metric` is a second outcome,
    # beside the goal by which winners were selected, and `better` says which of its values are
    # better; None for the goal. That no run has the metric is an error, too.
    reader = SweepReader(folder)
    status, plan = reader.read(), reader.plan
    so_far = {**_waiting(reader, status), **status.outcomes}
    trials = tuple(_result(reader, so_far.get(trial.folder), trial) for trial in plan.trials)
    choices = read_choices(folder, plan)
    completed, until, winners, finals = _compared(reader, status, choices, trials)
    goal, searches = _goal(reader, trials, finals, target, metric, better), len(plan.offsets)
    # Most digests are taken from the ledger, so that few files are read.
    evidence = examine(folder, status.outcomes, thorough=False)
    late = began_late(evidence.ledger)
    revisions = tuple(_revision(plan, n, choices, goal, late) for n in range(1, plan.revision + 1))
    planned = plan.revisions[results.planned_revision(revisions).number - 1]
    return Workload(
        name=folder.absolute().name,
        path=folder,
        goal=replace(goal, relevant=None if goal.primary else planned["goal"].get("relevant")),
        arms=tuple(plan.arms),
        trials=trials,
        finals=finals,
        spaces=_spaces(plan.revisions[-1]),
        winners=winners,
        later=frozenset(trial.folder for trial in plan.trials[len(until) :]),
        revisions=revisions,
        completed=completed,
        searches=searches,
        units=tuple(range(searches) if searches > 1 else plan.final_seeds or plan.seeds),
        looks=plan.looks,
        skewed=plan.skewed,
        replaced=tuple(_replaced(folder, plan, finals)),
        budgets=plan.budgets,
        missing=tuple(_missing(reader, status, trials, finals, len(until) < len(trials))),
        faults=tuple(f"{fault.file} ({fault.why})" for fault in evidence.faults),
        code=versions_in(evidence.ledger),
        again=evidence.again,
        initial=evidence.initial,
        vocabulary=plan.vocabulary,
        configs={name: arm.config.root for name, arm in plan.arms.items()},
        warnings=plan.warnings,
        linked={arm: linked_of(plan.revisions, arm) for arm in plan.arms},
        listed_seeds=plan.listed_seeds,
        differs=tuple(planned.get("differs", ())),
        caveats=(*filter(None, (late, _changed_late(plan, planned))), *_changed_steps(evidence)),
        ablated=plan.ablated,
        ladder=plan.ladder,
        branch=plan.branch,
        cuts=plan.cuts,
        orders=read_cuts(folder, plan),
    )


def on_rungs(workload: Workload) -> list[Workload]:
    """Returns a ladder's rungs, from the lowest, each a workload of the arms of the file."""
    # A rung on which arms are searched beside the rule comes twice, "4x" and "4x-retuned". Without
    # a ladder, it is the workload itself. The error of 5% is divided among the rungs on which
    # several arms are compared.
    if (ladder := workload.ladder) is None:
        return [workload]
    suffixes = dict.fromkeys(map(rung_of, workload.arms))
    order = [label + again for label in ladder.labels for again in ("", RETUNED)]
    rungs = [_on_rung(workload, ladder, each) for each in order if each in suffixes]
    families = max(1, sum(len(each.arms) > 1 for each in rungs))
    first, *others = (replace(each, families=families) for each in rungs)
    # What is missing concerns the whole sweep, and is said once.
    return [first, *(replace(each, missing=()) for each in others)]


_OF_ARMS = ("spaces", "configs", "warnings", "initial", "linked")  # fields of a workload, by arm


def _on_rung(workload: Workload, ladder: PlannedLadder, suffix: str) -> Workload:
    """Returns what a ladder has on one rung, whose arms end in a suffix of the plan."""
    names = {arm: split_name(arm)[0] for arm in workload.arms if rung_of(arm) == suffix}

    def of_arms(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names[arm]: value for arm, value in values.items() if arm in names}

    def of_runs(runs: Sequence[Result]) -> tuple[Result, ...]:
        return tuple(replace(run, arm=names[run.arm]) for run in runs if run.arm in names)

    revisions = tuple(
        replace(
            each,
            arms=tuple(names[arm] for arm in each.arms if arm in names),
            new_winners=tuple(names[arm] for arm in each.new_winners if arm in names),
            **{field: of_arms(getattr(each, field)) for field in ("trials", "points", "spaces")},
        )
        for each in workload.revisions
    )
    winners = workload.winners.items()
    moved = {arm: ladder.sources(arm)[-1] for arm in names if ladder.is_moved(arm)}
    return replace(
        workload,
        name=f"{ladder.path.rpartition('.')[2]} {suffix.replace(RETUNED, ', re-tuned')}",
        arms=tuple(names.values()),
        trials=of_runs(workload.trials),
        finals=of_runs(workload.finals),
        winners={(names[a], s): number for (a, s), number in winners if a in names},
        revisions=revisions,
        replaced=of_runs(workload.replaced),
        **{field: of_arms(getattr(workload, field)) for field in _OF_ARMS},
        rung=suffix,
        chosen_from={
            names[arm]: len({run.number for run in workload.trials_of(source)})
            for arm, source in moved.items()
        },
        failed_below=tuple(
            replace(run, arm=names[arm])
            for arm in moved
            for source in ladder.sources(arm)
            for run in workload.trials_of(source)
            if run.end == "failed"
        ),
    )


def _compared(
    reader: SweepReader, status: Status, choices: Sequence[Choice], trials: Sequence[Result]
) -> tuple[int, Sequence[Trial], dict[tuple[str, int], int], tuple[Result, ...]]:
    """Returns the last complete revision, the trials before it, the winners and their runs."""
    plan, known = reader.plan, status.outcomes
    # After an extension, the winners are those of before until its trials are complete.
    again = trials_of_choice(plan, choices) if choices else ()
    # The status has only the outcomes of the plan's last revision.
    ended = (known.get(x.folder) or read_outcome(reader.path / x.folder) for x in again)
    finals = tuple(_result(reader, *each) for each in zip(ended, again, strict=True))
    completed = _completed(plan, choices, trials, finals)
    until = trials_until(plan, choices[-1].revision if choices else completed) or plan.trials
    winners = _winners(plan, {x.folder: known.get(x.folder) for x in until}, choices)
    if not plan.final_seeds:
        finals = tuple(run for run in trials if winners.get((run.arm, run.search)) == run.number)
    return completed, until, winners, finals


def _winners(
    plan: Plan, outcomes: Mapping[str, Summary | None], choices: Sequence[Choice]
) -> dict[tuple[str, int], int]:
    """Returns the winner of each search: that of the last choice, or the best point so far."""
    if choices:
        return {key: number for key, number in choices[-1].winners.items() if number is not None}
    ranked = rank(plan, outcomes)
    best = {key: next(iter(points.items()), (0, math.inf)) for key, points in ranked.items()}
    return {key: number for key, (number, value) in best.items() if math.isfinite(value)}


def _completed(
    plan: Plan, choices: Sequence[Choice], trials: Sequence[Result], finals: Sequence[Result]
) -> int:
    """Returns the number of the last revision of which all runs have ended; 0 if none has."""
    if plan.final_seeds:
        ended = choices[:-1] if any(run.end == "missing" for run in finals) else choices
        return ended[-1].revision if ended else 0
    names = {run.name for run in trials if run.end == "missing"}
    until = [{each.folder for each in trials_until(plan, n + 1)} for n in range(plan.revision)]
    return next((n for n, planned in enumerate(until) if planned & names), plan.revision)


def _goal(
    reader: SweepReader,
    trials: _Runs,
    finals: _Runs,
    target: float | None,
    metric: str | None,
    better: Literal["min", "max"] | None,
) -> ReportGoal:
    """Returns the goal, or that of a second outcome; raises UserError if no run has the metric."""
    plan, goal = reader.plan, reader.plan.goal
    second = metric not in (None, goal.metric)
    name = metric or goal.metric
    rows = {row for run in (*trials, *finals) for row in run.summary.metrics}
    known = sorted({row.partition("/")[2] for row in rows if "/" in row})
    if known and name not in (*known, goal.metric):
        hint = known_names(name, known)
        raise UserError(f"No run of the sweep in {reader.path} has the metric {name!r}. {hint}")
    tested = any(PREFIXES["test"] + name in run.summary.metrics for run in finals)
    # A target or a rule of --target or of an extension was chosen when results were known.
    planned = all(each["goal"] == plan.revisions[0]["goal"] for each in plan.revisions)
    return ReportGoal(
        metric=name,
        better=(better or "min") if second else goal.better,
        select_on=goal.select_on,
        report_on="test" if tested else goal.select_on,
        target=target if second or target is not None else goal.target,
        primary=goal.metric if second else "",
        rule=goal.target_rule if target is None and not second and planned else None,
    )


def _waiting(reader: SweepReader, status: Status) -> dict[str, Summary]:
    """Returns what is known of the trials that wait at a cut, by their folders."""
    waiting = [trial for trial in reader.plan.trials if trial.folder in status.waiting]
    places = {t.folder: waiting_folder(reader.path, t, status.waiting[t.folder]) for t in waiting}
    return {name: found for name, place in places.items() if (found := read_summary(place))}


def _result(reader: SweepReader, outcome: Summary | None, trial: Trial) -> Result:
    folder = reader.path / trial.folder
    result = Result(
        name=trial.folder,
        folder=folder,
        arm=trial.arm,
        seed=trial.seed,
        number=trial.number,
        search=trial.search,
        values=trial.values,
        **_planned(reader.program_of(trial)),
    )
    return result if outcome is None else with_outcome(result, outcome, _record(folder))


def _planned(program: SharedProgram) -> dict[str, Any]:
    """Returns what a run has of its program."""
    steps, flops = program.steps, float(program.flops)
    return {"steps": steps, "first_step": program.first_step or 0, "flops": flops}


def _record(folder: Path) -> dict[str, Any]:
    """Returns the content of run.json; an empty dict if it is missing or damaged."""
    with contextlib.suppress(DamagedFile):
        return read_record(folder / "run.json") or {}
    return {}


def _replaced(folder: Path, plan: Plan, finals: tuple[Result, ...]) -> Iterator[Result]:
    """Yields the final runs of earlier winners that are no longer the winners."""
    known = {run.name for run in finals}
    programs = {arm: program for program in plan.programs for arm in program.arms}
    for place in sorted(folder.glob("final*/*/*")):
        name = place.relative_to(folder).as_posix()
        outcome = None if name in known else read_outcome(place)
        arm, seed = place.parent.name, place.name
        if outcome is not None and arm in plan.arms and seed.isdecimal():
            run = Result(name, place, arm, int(seed), None, **_planned(programs[arm]))
            yield with_outcome(run, outcome, _record(place))


def _changed_steps(evidence: Evidence) -> list[str]:
    """Returns sentences on changed programs and data; changed files are in runs' fingerprints."""
    changes = changes_in(evidence.ledger)
    told = (x for x in changes if are_steps(x.files) or "data" in map(code_or_data, x.files))
    return change_sentences([*told])


def _changed_late(plan: Plan, planned: Mapping[str, Any]) -> str:
    """Returns a sentence if the file changed what a verdict means after results were known."""
    # `planned` is the last revision before that.
    before, now = (
        {"goal.relevant": each["goal"].get("relevant"), "differs": each.get("differs", [])}
        for each in (planned, plan.revisions[-1])
    )
    changes = [
        f"{name} from {shown_part(before[name])} to {shown_part(value)}"
        for name, value in now.items()
        if value != before[name]
    ]
    text = f"After results were known, the file changed {joined(changes)}, which does not count."
    return text if changes else ""


def _revision(
    plan: Plan, number: int, choices: Sequence[Choice], goal: ReportGoal, late: str
) -> Revision:
    revisions: Sequence[Mapping[str, Any]] = plan.revisions
    before, content = revisions[: number - 1], revisions[number - 1]
    known = content.get("known")
    # Arm -> how many points it added, without new seeds of earlier points.
    added = Counter(arm for arm, _ in _points(content).difference(*map(_points, before)))
    changes = revision_changes(before[-1], content) if before else []
    for name, arm in content["arms"].items() if before else ():
        if (old := before[-1]["arms"].get(name)) is None:
            changes.append(f"arm {name} added")
        elif old["space"] != arm["space"]:
            changes.append(
                f"space of {name}: {shown_part(old['space'])} -> {shown_part(arm['space'])}"
            )
    return Revision(
        number=number,
        digest=content["digest"],
        trials=Counter(trial[0] for trial in content["trials"]),
        known=None if known is None else len(known["finished"]),
        winners_known=bool(known and known["final"]),
        compared_known=compared_known(
            revisions[:number], not late, goal.report_on != goal.select_on
        ),
        changes=tuple(changes),
        arms=tuple(content["arms"]),
        units=planned_units(content),
        new_winners=_new_winners(number, choices),
        points={arm: added[arm] for arm in content["arms"] if arm in added},
        spaces=_spaces(content),
    )


def planned_units(revision: Mapping[str, Any]) -> int:
    """Returns how many units a revision has: searches, or seeds if each arm is searched once."""
    searches = searches_of(revision)
    return searches if searches > 1 else len(revision["final_seeds"] or revision["seeds"])


def _points(revision: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Returns the points to which a revision added runs: the arm, and the name of the point."""
    return {(arm, point_name(sum(search), n)) for arm, n, _, _, *search in revision["trials"]}


def _spaces(revision: Mapping[str, Any]) -> dict[str, ArmSpace]:
    arms = revision["arms"].items()
    return {arm: ArmSpace(each["method"], each["space"], "asks" in each) for arm, each in arms}


def _new_winners(number: int, choices: Sequence[Choice]) -> tuple[str, ...]:
    """Returns the arms of which a revision chose another point than the choice before it."""
    for before, now in itertools.pairwise(choices):
        if now.revision == number:
            changed = [key[0] for key, n in now.winners.items() if before.winners.get(key, n) != n]
            return tuple(dict.fromkeys(changed))
    return ()


def _missing(
    reader: SweepReader, status: Status, trials: _Runs, finals: _Runs, extended: bool
) -> Iterator[str]:
    """Yields sentences about the runs that an unfinished sweep lacks, and about damaged files."""
    if counts := Counter(run.arm for run in trials if run.end == "missing"):
        listed = joined([f"{count:,} of {arm}" for arm, count in counts.items()])
        yield (
            f"The search is not complete: no result yet of {plural(counts.total(), 'trial')} of"
            f" {len(trials):,} ({listed})."
        )
    seeds = len(reader.plan.final_seeds)
    if extended or (seeds and status.final is None and finals):
        yield (
            "The sweep was extended. Until the new trials have ended, the winners are those of"
            " before, with the runs of before."
        )
    elif seeds and status.final is None:
        yield (
            "The winners have not been chosen: when the search is complete, each runs again on"
            f" {plural(seeds, 'fresh seed')}."
        )
    if left := sum(run.end == "missing" for run in finals):
        yield (
            f"The runs of winners are not complete: no result yet of {left:,} of {len(finals):,}."
        )
    if not seeds:
        yield (
            "The sweep has no final runs (final: null): the runs below are those by which the"
            " points were selected, so that their values may be better than those of fresh seeds."
        )
    ended = [run for run in (*trials, *finals) if run.end != "missing" and not run.fingerprint]
    if damaged := [run.name for run in ended if os.path.lexists(run.folder / "run.json")]:
        yield (
            f"The run.json of {joined(damaged[:3])} is damaged, so that versions and retries of"
            " these runs are not known."
        )
    if status.unreadable:
        yield (
            f"The summary.json of {joined(list(status.unreadable[:3]))} is missing or damaged, so"
            " that these runs count as not computed."
        )
