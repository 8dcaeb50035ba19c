"""The panel of trials: every run of the search, with its values, its result and its folder."""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from shlex import quote

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.document import Cell, Column, Table, Trials, column_names
from trainer.report.results import Goal, Result, Workload
from trainer.report.spaces import number_of
from trainer.writers.lines import PREFIXES


def trials_of(
    workload: Workload, prefix: str, names: Mapping[str, str], report: Path
) -> Trials | None:
    """Returns the trials of a workload and the compared runs of winners; None if it has none."""
    # `report` is the folder of the report, from which links go to the folders of trials.
    search = {run.name for run in workload.trials}
    runs = [*workload.trials, *(run for run in workload.finals if run.name not in search)]
    if not runs:
        return None
    goal = workload.goal
    axes = list(dict.fromkeys(names[p] for run in runs for p in run.values if p in names))
    values = [{names[p]: v for p, v in run.values.items() if p in names} for run in runs]
    numeric = {
        name: all(number_of(each[name]) is not None for each in values if name in each)
        for name in axes
    }
    both = goal.report_on != goal.select_on
    heads = [
        Column("trial", "trial", "code"),
        Column("arm", "arm"),
        Column("seed", "seed"),
        Column("end", "end"),
        Column(goal.select_on, f"{goal.metric}, {goal.select_on}", "number"),
        *([Column(goal.report_on, f"{goal.metric}, {goal.report_on}", "number")] if both else []),
    ]
    tail = [
        Column("steps", "steps", "integer"),
        Column("seconds", "training time", "seconds"),
        Column("folder", "folder", "code"),
    ]
    searched = column_names(axes, {column.name for column in (*heads, *tail)})
    heads += [
        Column(column, name, "number" if numeric[name] else "text")
        for column, name in zip(searched, axes, strict=True)
    ]
    others = _others(goal, runs)
    taken = {column.name for column in (*heads, *tail)}
    metrics = [
        Column(name, row, "number", only_csv=True)
        for name, row in zip(column_names(others, taken), others, strict=True)
    ]
    rows = []
    for run, point in zip(runs, values, strict=True):
        goals = (_value(run, goal.selected, search, goal), _value(run, goal.reported, search, goal))
        found = [_cell(point.get(name), numeric[name]) for name in axes]
        folder = os.path.relpath(run.folder.absolute(), report.absolute())
        ends = (run.summary.step, run.summary.seconds, folder)
        more = [_value(run, row, search, goal) for row in others]
        start = (run.name, run.arm, str(run.seed), run.end, *goals[: 1 + both])
        rows.append((*start, *found, *ends, *more))
    kept = (goal.select_on, *searched)
    columns = (*heads, *tail, *metrics)
    options = "".join(f" --vocabulary={quote(each)}" for each in workload.vocabulary)
    return Trials(
        workload=workload.name,
        table=Table(f"{prefix}trials", "Every run", columns, tuple(rows)).compact(kept),
        goal=goal.select_on,
        better=goal.better,
        axes=tuple(searched),
        command=f"python -m trainer --config={_root(workload)}{{trial}}/config.yaml{options}",
    )


def _others(goal: Goal, runs: Iterable[Result]) -> list[str]:
    """Returns the names of the metrics that are not those of the goal."""
    names = dict.fromkeys(name for run in runs for name in run.summary.metrics)
    return [name for name in names if name not in (goal.selected, goal.reported)]


def _value(run: Result, row: str, search: Collection[str], goal: Goal) -> float | None:
    """Returns a metric of a run; None for the test split of trials, if selection did not use it."""
    of_test = row.startswith(PREFIXES["test"]) and goal.select_on != "test"
    return None if of_test and run.name in search else run.value(row)


def _root(workload: Workload) -> str:
    return "" if workload.path is None else f"{quote(str(workload.path))}/"


def _cell(value: Tree, numeric: bool) -> Cell:
    if value is None or isinstance(value, str):
        return value
    return number_of(value) if numeric else brief(value)
