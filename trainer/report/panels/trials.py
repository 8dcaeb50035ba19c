"""The panel of trials: every run of the search, with its values, its result and its folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.document import Cell, Column, Table, Trials
from trainer.report.results import Workload
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
    axes = list(dict.fromkeys(names[p] for run in runs for p in run.values if p in names))
    values = [{names[p]: v for p, v in run.values.items() if p in names} for run in runs]
    numeric = {
        name: all(number_of(each[name]) is not None for each in values if name in each)
        for name in axes
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
            Column(f"axis_{index + 1}", name, "number" if numeric[name] else "text")
            for index, name in enumerate(axes)
        ),
        Column("steps", "steps", "integer"),
        Column("seconds", "training time", "seconds"),
        Column("folder", "folder", "code"),
    )
    rows = []
    for run, point in zip(runs, values, strict=True):
        metrics: list[Cell] = [run.value(goal.selected)]
        if both:
            metrics.append(run.value(goal.reported))
        found = [_cell(point.get(name), numeric[name]) for name in axes]
        folder = os.path.relpath(run.folder.absolute(), report.absolute())
        ends = (run.step, run.seconds, folder)
        rows.append((run.name, run.arm, str(run.seed), run.end, *metrics, *found, *ends))
    searched = tuple(f"axis_{index + 1}" for index in range(len(axes)))
    kept = (goal.select_on, *searched)
    options = "".join(f" --vocabulary={quote(each)}" for each in workload.vocabulary)
    return Trials(
        workload=workload.name,
        table=Table(f"{prefix}trials", "Every run", columns, tuple(rows)).compact(kept),
        goal=goal.select_on,
        better=goal.better,
        axes=searched,
        command=f"python -m trainer --config={_root(workload)}{{trial}}/config.yaml{options}",
    )


def _root(workload: Workload) -> str:
    return "" if workload.path is None else f"{quote(str(workload.path))}/"


def _cell(value: Tree, numeric: bool) -> Cell:
    if value is None or isinstance(value, str):
        return value
    return number_of(value) if numeric else brief(value)
