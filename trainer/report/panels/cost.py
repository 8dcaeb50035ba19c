"""What each arm cost, what was searched, and what was known at each revision."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trainer.messages import joined, plural
from trainer.report.columns import named_columns
from trainer.report.document import Block, Cell, Column, Columns, Table
from trainer.report.results import Result, Revision, Workload
from trainer.report.spaces import tunings
from trainer.sweep.tuned import Tuning


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
    trials = {run.name for run in workload.trials}
    purposes = {
        "search": workload.trials,
        "compared": [run for run in workload.finals if run.name not in trials],
        "replaced": workload.replaced,
    }
    groups = [
        _Runs(arm, purpose, of_arm)
        for purpose, runs in purposes.items()
        for arm in workload.arms
        if (of_arm := [run for run in runs if run.arm == arm])
    ]
    columns: Columns[_Runs] = {
        Column("arm", "arm"): lambda r: r.arm,
        Column("runs", "runs"): lambda r: r.purpose,
        Column("count", "number", "integer"): lambda r: len(r.runs),
        Column("done", "done", "integer"): lambda r: r.ended("done"),
        Column("diverged", "diverged", "integer"): lambda r: r.ended("diverged"),
        Column("failed", "failed", "integer"): lambda r: r.ended("failed"),
        Column("pruned", "stopped early", "integer"): lambda r: r.ended("pruned") or None,
        Column("missing", "missing", "integer"): lambda r: r.ended("missing"),
        Column("retried", "retried", "integer"): lambda r: sum(run.retries > 0 for run in r.runs),
        Column("steps", "steps", "integer"): lambda r: sum(run.updates for run in r.runs),
        Column("flops", "FLOPs", "number"): lambda r: _sum(
            None if run.flops is None else run.flops * run.updates for run in r.runs
        ),
        Column("seconds", "training time", "seconds"): lambda r: _sum(
            run.summary.seconds for run in r.runs if run.end != "missing" or run.updates
        ),
    }
    note = (
        "Steps and FLOPs are those of runs that have ended or wait at a cut; a FLOP count is the"
        " compiler's for a step, evaluations left out. Retried runs were interrupted and resumed."
        " Training time is the sum over runs, without compilation and evaluation."
    )
    return Table.of(f"{prefix}ledger", "What was computed", groups, columns, note).compact()


class _Runs(NamedTuple):
    """The runs of an arm for one purpose."""

    arm: str
    purpose: str
    runs: Sequence[Result]

    def ended(self, end: str) -> int:
        """Returns how many ended so."""
        return sum(run.end == end for run in self.runs)


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns a sum, None if a value is not known."""
    found = list(values)
    return None if None in found else math.fsum(x for x in found if x is not None)


def _spaces(workload: Workload, prefix: str) -> Table:
    """Returns what was searched: a row for each axis, and for each revision that added points."""
    rows: list[tuple[Cell, ...]] = []
    searches = workload.searches if workload.searches > 1 else None
    many = len(workload.revisions) > 1
    for arm, last in workload.spaces.items():
        first = [run for run in workload.trials_of(arm) if run.search == 0]
        points, seeds = len({run.number for run in first}), len({run.seed for run in first})
        parts = [(None, points, last)]
        if many:
            parts = [
                (each.number, each.points[arm], each.spaces[arm])
                for each in workload.revisions
                if each.points.get(arm)
            ]
        for revision, count, space in parts:
            for path, text in space.axes.items() or [("–", "–")]:
                rows.append((arm, revision, searches, count, seeds, space.method, path, text))
    columns = (
        *named_columns(arm="text", revision="integer", searches="integer"),
        Column("points", "points of each" if searches and not many else "points", "integer"),
        *named_columns(seeds="integer", method="text", path="code", space="text"),
    )
    note = (
        "Points are those that a revision of the plan added, over all searches of the arm, with the"
        " space which they are from."
    )
    title = "What was searched"
    return Table(f"{prefix}spaces", title, columns, tuple(rows), note if many else "").compact()


def _tuned(workload: Workload, prefix: str) -> Table:
    """Returns how many hyperparameters each arm tunes, with how many trials for each."""
    searches = workload.searches if workload.searches > 1 else None
    trials = "trials of each search" if searches else "trials"
    columns: Columns[tuple[str, Tuning]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("hyperparameters", "hyperparameters tuned", "integer"): lambda r: r[1].count,
        Column("searches", "searches", "integer"): lambda _: searches,
        Column("trials", trials, "integer"): lambda r: r[1].trials,
        Column("trials_each", "trials for each hyperparameter", "number"): lambda r: (
            r[1].trials_each
        ),
        Column("paths", "paths", "code"): lambda r: (
            "; ".join(" = ".join(paths) for paths in r[1].hyperparameters) or None
        ),
    }
    note = (
        "A hyperparameter is tuned if it has more than one value within a search. Paths that one"
        " entry of a space sets together, or that are equal in all trials, count once; so does an"
        " entry whose values are whole optimizers, in whatever these differ. An arm that tuned none"
        " is untuned in this sweep. Whether its values were tuned before is not known."
    )
    title = "How many hyperparameters each arm tuned"
    made = Table.of(f"{prefix}tuned", title, tunings(workload).items(), columns, note)
    return made.compact(["trials_each"])


def _revisions(workload: Workload, prefix: str) -> Table:
    columns: Columns[Revision] = {
        Column("revision", "revision", "integer"): lambda r: r.number,
        Column("added", "runs added"): lambda r: (
            joined([f"{arm} {count:,}" for arm, count in r.trials.items()]) or "none"
        ),
        Column("changes", "also changed"): lambda r: "; ".join(r.changes) or None,
        Column("known", "results known before", "integer"): lambda r: r.known,
        Column("winners_known", "winners known"): lambda r: (
            None if r.known is None else "yes" if r.winners_known else "no"
        ),
        Column("digest", "hash of the plan", "code"): lambda r: r.digest[:12],
    }
    note = "A revision that was made after results were known may have been chosen because of them."
    title = "Revisions of the plan"
    return Table.of(f"{prefix}revisions", title, workload.revisions, columns, note).compact()


def _warnings(workload: Workload) -> Iterator[str]:
    if replaced := list(dict.fromkeys(run.arm for run in workload.replaced)):
        yield (
            f"The winner of {joined(replaced)} changed after it had final runs: results on the"
            " reported split were known when the sweep was extended."
        )
    points = {arm: len({run.number for run in workload.trials_of(arm)}) for arm in workload.arms}
    if workload.trials and len(set(points.values())) > 1:
        listed = joined([f"{arm} {count:,}" for arm, count in points.items()])
        yield f"The arms had different numbers of trials ({listed}): budgets are unequal."
    elif workload.budgets != "equal":
        yield (
            "The file of the sweep allows the arms unequal budgets: compare their steps and their"
            " FLOPs."
        )
    for arm in workload.arms:
        runs = workload.trials_of(arm)
        ended = [run for run in runs if run.end != "missing"]
        failed = [run for run in (*runs, *workload.finals_of(arm)) if run.end == "failed"]
        if ended and len(ended) == len(runs) and all(run.end == "diverged" for run in ended):
            yield f"Every trial of {arm} diverged ({len(ended):,})."
        if failed:
            yield (
                f"{plural(len(failed), 'run')} of {arm} failed, such as {failed[0].name}:"
                f" {failed[0].summary.why or 'no reason was recorded'}"
            )
