"""The panel of trials: every run of the search, with its values, its result and its folder."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.columns import columns_of
from trainer.report.document import Cell, Column, Columns, Table, Trials
from trainer.report.results import Result, Workload
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
    points = {run.name: {names[p]: v for p, v in run.values.items() if p in names} for run in runs}

    def metric(row: str) -> Callable[[Result], Cell]:
        # None for the test split of trials, if selection did not use it.
        hidden = row.startswith(PREFIXES["test"]) and goal.select_on != "test"
        return lambda r: None if hidden and r.name in search else r.value(row)

    def searched(name: str, numeric: bool) -> Callable[[Result], Cell]:
        return lambda r: _cell(points[r.name].get(name), numeric)

    columns: Columns[Result] = {
        Column("trial", "trial", "code"): lambda r: r.name,
        Column("arm", "arm"): lambda r: r.arm,
        Column("seed", "seed"): lambda r: str(r.seed),
        Column("end", "end"): lambda r: r.end,
        Column(goal.select_on, f"{goal.metric}, {goal.select_on}", "number"): metric(goal.selected),
    }
    if goal.report_on != goal.select_on:
        title = f"{goal.metric}, {goal.report_on}"
        columns |= {Column(goal.report_on, title, "number"): metric(goal.reported)}
    tail: Columns[Result] = {
        Column("steps", "steps", "integer"): lambda r: r.summary.step,
        Column("seconds", "training time", "seconds"): lambda r: r.summary.seconds,
        Column("folder", "folder", "code"): lambda r: os.path.relpath(
            r.folder.absolute(), report.absolute()
        ),
    }
    titles = list(dict.fromkeys(name for point in points.values() for name in point))
    axes = columns_of(titles, {column.name for column in columns | tail})
    for axis in axes:
        known = [point[axis.title] for point in points.values() if axis.title in point]
        numeric = all(number_of(value) is not None for value in known)
        columns[replace(axis, kind="number" if numeric else "text")] = searched(axis.title, numeric)
    columns |= tail
    rows = dict.fromkeys(row for run in runs for row in run.summary.metrics)
    others = [row for row in rows if row not in (goal.selected, goal.reported)]
    more = columns_of(others, {column.name for column in columns}, "number", only_csv=True)
    columns |= {column: metric(column.title) for column in more}
    table = Table.of(f"{prefix}trials", "Every run", runs, columns)
    root = "" if workload.path is None else f"{quote(str(workload.path))}/"
    names_of_axes = tuple(axis.name for axis in axes)
    options = "".join(f" --vocabulary={quote(each)}" for each in workload.vocabulary)
    return Trials(
        workload=workload.name,
        table=table.compact((goal.select_on, *names_of_axes)),
        goal=goal.select_on,
        better=goal.better,
        axes=names_of_axes,
        command=f"python -m trainer --config={root}{{trial}}/config.yaml{options}",
    )


def _cell(value: Tree, numeric: bool) -> Cell:
    if value is None or isinstance(value, str):
        return value
    return number_of(value) if numeric else brief(value)
