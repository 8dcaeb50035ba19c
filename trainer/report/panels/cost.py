"""What each arm cost, what was searched, and what was known at each revision."""

import math
from collections.abc import Sequence

from trainer.messages import plural
from trainer.report.document import Block, Cell, Column, Table
from trainer.report.results import Result, Workload
from trainer.report.spaces import tunings
from trainer.report.wording import joined


def cost_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of costs, tuned hyperparameters, spaces and revisions."""
    tables = [_costs(workload, prefix)]
    if workload.trials:
        tables.append(_tuned(workload, prefix))
    if workload.spaces:
        tables.append(_spaces(workload, prefix))
    if len(workload.revisions) > 1:
        tables.append(_revisions(workload, prefix))
    return Block(warnings=tuple(_warnings(workload)), tables=tuple(tables))


def _costs(workload: Workload, prefix: str) -> Table:
    columns = (
        Column("arm", "arm"),
        Column("runs", "runs"),
        Column("count", "number", "integer"),
        Column("done", "done", "integer"),
        Column("diverged", "diverged", "integer"),
        Column("failed", "failed", "integer"),
        Column("pruned", "stopped early", "integer"),
        Column("missing", "missing", "integer"),
        Column("retried", "retried", "integer"),
        Column("steps", "steps", "integer"),
        Column("flops", "FLOPs", "number"),
        Column("seconds", "training time", "seconds"),
    )
    rows = []
    for what, runs in _runs(workload).items():
        for arm in workload.arms:
            of_arm = [run for run in runs if run.arm == arm]
            if of_arm:
                rows.append((arm, what, *_cost(of_arm)))
    note = (
        "Steps and FLOPs are those of runs that have ended or wait at a cut; a FLOP count is the"
        " compiler's for a step, evaluations left out. Retried runs were interrupted and resumed."
        " Training time is the sum over runs, without compilation and evaluation."
    )
    return Table(f"{prefix}ledger", "What was computed", columns, tuple(rows), note).compact()


def _runs(workload: Workload) -> dict[str, Sequence[Result]]:
    """Returns all runs, by their purpose."""
    compared = _apart(workload)
    return {"search": workload.trials, "compared": compared, "replaced": workload.replaced}


def _apart(workload: Workload) -> list[Result]:
    """Returns the compared runs that are not also trials of the search."""
    names = {run.name for run in workload.trials}
    return [run for run in workload.finals if run.name not in names]


def _cost(runs: Sequence[Result]) -> tuple[Cell, ...]:
    ends = [run.end for run in runs]
    steps = sum(run.updates for run in runs)
    flops = [None if run.flops is None else run.flops * run.updates for run in runs]
    seconds = [run.summary.seconds for run in runs if run.end != "missing" or run.updates]
    return (
        len(runs),
        ends.count("done"),
        ends.count("diverged"),
        ends.count("failed"),
        ends.count("pruned") or None,
        ends.count("missing"),
        sum(run.retries > 0 for run in runs),
        steps,
        None if None in flops else math.fsum(x for x in flops if x is not None),
        None if None in seconds else math.fsum(x for x in seconds if x is not None),
    )


def _spaces(workload: Workload, prefix: str) -> Table:
    """Returns what was searched: a row for each axis, and for each revision that added points."""
    rows: list[tuple[Cell, ...]] = []
    several, many = workload.searches > 1, len(workload.revisions) > 1
    for arm, last in workload.spaces.items():
        first = [run for run in workload.trials_of(arm) if run.search == 0]
        points, seeds = (len(set(x)) for x in ([r.number for r in first], [r.seed for r in first]))
        parts = [(None, points, last)]
        if many:
            parts = [
                (each.number, each.points[arm], each.spaces[arm])
                for each in workload.revisions
                if each.points.get(arm)
            ]
        for revision, count, space in parts:
            for path, text in space.axes.items() or [("–", "–")]:
                searches = workload.searches if several else None
                rows.append((arm, revision, searches, count, seeds, space.method, path, text))
    columns = (
        Column("arm", "arm"),
        Column("revision", "revision", "integer"),
        Column("searches", "searches", "integer"),
        Column("points", "points of each" if several and not many else "points", "integer"),
        Column("seeds", "seeds", "integer"),
        Column("method", "method"),
        Column("path", "path", "code"),
        Column("space", "space"),
    )
    note = (
        "Points are those that a revision of the plan added, over all searches of the arm, with the"
        " space which they are from."
        if many
        else ""
    )
    return Table(f"{prefix}spaces", "What was searched", columns, tuple(rows), note).compact()


def _tuned(workload: Workload, prefix: str) -> Table:
    """Returns how many hyperparameters each arm tunes, with how many trials for each."""
    columns = (
        Column("arm", "arm"),
        Column("hyperparameters", "hyperparameters tuned", "integer"),
        Column("searches", "searches", "integer"),
        Column("trials", "trials of each search" if workload.searches > 1 else "trials", "integer"),
        Column("trials_each", "trials for each hyperparameter", "number"),
        Column("paths", "paths", "code"),
    )
    searches = workload.searches if workload.searches > 1 else None
    rows = tuple(
        (
            arm,
            each.count,
            searches,
            each.trials,
            each.trials_each,
            "; ".join(" = ".join(paths) for paths in each.hyperparameters) or None,
        )
        for arm, each in tunings(workload).items()
    )
    note = (
        "A hyperparameter is tuned if it has more than one value within a search. Paths that one"
        " entry of a space sets together, or that are equal in all trials, count once; so does an"
        " entry whose values are whole optimizers, in whatever these differ. An arm that tuned none"
        " is untuned in this sweep. Whether its values were tuned before is not known."
    )
    title = "How many hyperparameters each arm tuned"
    return Table(f"{prefix}tuned", title, columns, rows, note).compact(["trials_each"])


def _revisions(workload: Workload, prefix: str) -> Table:
    rows = tuple(
        (
            each.number,
            joined([f"{arm} {count:,}" for arm, count in each.trials.items()]) or "none",
            "; ".join(each.changes) or None,
            each.known,
            None if each.known is None else "yes" if each.winners_known else "no",
            each.digest[:12],
        )
        for each in workload.revisions
    )
    columns = (
        Column("revision", "revision", "integer"),
        Column("added", "runs added"),
        Column("changes", "also changed"),
        Column("known", "results known before", "integer"),
        Column("winners_known", "winners known"),
        Column("digest", "hash of the plan", "code"),
    )
    note = "A revision that was made after results were known may have been chosen because of them."
    return Table(f"{prefix}revisions", "Revisions of the plan", columns, rows, note).compact()


def _warnings(workload: Workload) -> list[str]:
    lines = []
    replaced = list(dict.fromkeys(run.arm for run in workload.replaced))
    if replaced:
        lines.append(
            f"The winner of {joined(replaced)} changed after it had final runs: results on the"
            " reported split were known when the sweep was extended."
        )
    points = {arm: len({run.number for run in workload.trials_of(arm)}) for arm in workload.arms}
    if workload.trials and len(set(points.values())) > 1:
        listed = joined([f"{arm} {count:,}" for arm, count in points.items()])
        lines.append(f"The arms had different numbers of trials ({listed}): budgets are unequal.")
    elif workload.budgets != "equal":
        lines.append(
            "The file of the sweep allows the arms unequal budgets: compare their steps and their"
            " FLOPs."
        )
    for arm in workload.arms:
        runs = workload.trials_of(arm)
        ended = [run for run in runs if run.end != "missing"]
        failed = [run for run in (*runs, *workload.finals_of(arm)) if run.end == "failed"]
        if ended and len(ended) == len(runs) and all(run.end == "diverged" for run in ended):
            lines.append(f"Every trial of {arm} diverged ({len(ended):,}).")
        if failed:
            lines.append(
                f"{plural(len(failed), 'run')} of {arm} failed, such as {failed[0].name}:"
                f" {failed[0].summary.why or 'no reason was recorded'}"
            )
    return lines
