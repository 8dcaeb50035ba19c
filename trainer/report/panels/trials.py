"""The panel of trials: every run of the search, with its values, its result and its folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.document import Cell, Column, Table, Trials
from trainer.report.results import Result, Workload
from trainer.report.spaces import number_of


def trials_of(
    workload: Workload, prefix: str, names: Mapping[str, str], report: Path
) -> Trials | None:
    """Returns the trials of a workload, the compared runs of winners included.

    Args:
        workload: the results.
        prefix: of the name of the table, which tells workloads apart.
        names: config path -> the name of the axis.
        report: the folder of the report, from which links go to the folders of trials.

    Returns:
        None without any run.
    """
    search = {run.name for run in workload.trials}
    runs = [*workload.trials, *(run for run in workload.finals if run.name not in search)]
    if not runs:
        return None
    goal = workload.goal
    paths = list(dict.fromkeys(p for run in runs for p in run.values if p in names))
    numeric = {
        path: all(number_of(run.values[path]) is not None for run in runs if path in run.values)
        for path in paths
    }
    both = goal.report_on != goal.select_on
    columns = (
        Column("trial", "trial", "code"),
        Column("arm", "arm"),
        Column("seed", "seed"),
        Column("end", "end"),
        Column(goal.select_on, f"{goal.metric}, {goal.select_on}", "number"),
        *([Column(goal.report_on, f"{goal.metric}, {goal.report_on}", "number")] if both else []),
        *(
            Column(f"axis_{index + 1}", names[path], "number" if numeric[path] else "text")
            for index, path in enumerate(paths)
        ),
        Column("steps", "steps", "integer"),
        Column("seconds", "training time", "seconds"),
        Column("folder", "folder", "code"),
    )
    rows = []
    for run in runs:
        values: list[Cell] = [run.value(goal.selected)]
        if both:
            values.append(run.value(goal.reported))
        axes = [_cell(run, path, numeric[path]) for path in paths]
        folder = os.path.relpath(run.folder.absolute(), report.absolute())
        ends = (run.step, run.seconds, folder)
        rows.append((run.name, run.arm, str(run.seed), run.end, *values, *axes, *ends))
    options = "".join(f" --vocabulary={quote(each)}" for each in workload.vocabulary)
    return Trials(
        workload=workload.name,
        table=Table(f"{prefix}trials", "Every run", columns, tuple(rows)).compact(),
        goal=goal.select_on,
        better=goal.better,
        axes=tuple(f"axis_{index + 1}" for index in range(len(paths))),
        command=f"python -m trainer --config={_root(workload)}{{trial}}/config.yaml{options}",
    )


def _root(workload: Workload) -> str:
    return "" if workload.path is None else f"{quote(str(workload.path))}/"


def _cell(run: Result, path: str, numeric: bool) -> Cell:
    value: Tree = run.values.get(path)
    if path not in run.values:
        return None
    return number_of(value) if numeric else value if isinstance(value, str) else brief(value)
