"""The panels of trials: a table of every run, plots along the axes of spaces, learning curves."""

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.messages import plural
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, Trials
from trainer.report.plots import Points, combine, describe_bands
from trainer.report.results import Result, Workload, number_of, spans_decades
from trainer.writers.lines import PREFIXES


def trials_of(
    workload: Workload, names: Mapping[str, str], report: Path, prefix: str
) -> Trials | None:
    """Returns the trials of a workload and the compared runs of winners; None if it has none."""
    # `report` is the folder of the report, from which links go to the folders of trials; `prefix`
    # is how the name of the table begins.
    search = {run.name for run in workload.trials}
    runs = [*workload.trials, *(run for run in workload.finals if run.name not in search)]
    if not runs:
        return None
    goal = workload.goal
    points = {run.name: {names[p]: v for p, v in run.values.items() if p in names} for run in runs}

    def metric(row: str) -> Callable[[Result], float | None]:
        # None for the test split of trials, if selection did not use it.
        hidden = row.startswith(PREFIXES["test"]) and goal.select_on != "test"
        return lambda r: None if hidden and r.name in search else r.value(row)

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
    axes = Column.titled(titles, {column.name for column in columns | tail})
    for axis in axes:
        values = {name: point[axis.title] for name, point in points.items() if axis.title in point}
        column, cells = _with_cells(axis, values)
        columns[column] = lambda r, cells=cells: cells.get(r.name)
    columns |= tail
    rows = dict.fromkeys(row for run in runs for row in run.summary.metrics)
    others = [row for row in rows if row not in (goal.selected, goal.reported)]
    more = Column.titled(others, {column.name for column in columns}, "number")
    columns |= {replace(column, only_csv=True): metric(column.title) for column in more}
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


def _with_cells(axis: Column, values: Mapping[str, Tree]) -> tuple[Column, Mapping[str, Any]]:
    """Returns the column of an axis, and its cells by the name of the run: numbers, if all are."""
    numbers = {name: number_of(value) for name, value in values.items()}
    if None not in numbers.values():
        return replace(axis, kind="number"), numbers
    return axis, {name: x if isinstance(x, str | None) else brief(x) for name, x in values.items()}


def axes_block(workload: Workload, names: Mapping[str, str]) -> Block:
    """Returns the panel of axes: a plot of the trials for each axis of the search spaces."""
    paths = [path for space in workload.spaces.values() for path in space.axes]
    figures = []
    for index, name in enumerate(dict.fromkeys(names[path] for path in paths), 1):
        of_name = {path for path in paths if names[path] == name}
        if (figure := _figure(workload, of_name, name, f"axis_{index}")) is not None:
            figures.append(figure)
    if not figures:
        return Block(text=("No axis was searched, or no trial has a finite value.",))
    diverged = sum(run.end == "diverged" for run in workload.trials)
    pruned = sum(run.end == "pruned" for run in workload.trials)
    text = [f"Trials that diverged ({diverged:,}) are not drawn."] if diverged else []
    text += [f"Trials that were stopped early ({pruned:,}) are not drawn."] if pruned else []
    return Block(text=tuple(text), figures=tuple(figures))


def _figure(workload: Workload, paths: Collection[str], name: str, stem: str) -> Figure | None:
    goal = workload.goal
    points: list[tuple[Result, Tree, float]] = []  # trials, their places and their goals
    for run in workload.trials:
        path = next((path for path in run.values if path in paths), None)
        value = run.value(goal.selected)
        if path is not None and value is not None:
            points.append((run, run.values[path], value))
    if not points:
        return None
    numbers = [number_of(x) for _, x, _ in points]
    categories: tuple[str, ...] = ()
    if None in numbers:
        categories = tuple(dict.fromkeys(_text(x) for _, x, _ in points))
        numbers = [float(categories.index(_text(x))) for _, x, _ in points]
    at: list[float] = [x for x in numbers if x is not None]
    series = []
    for arm in workload.arms:
        placed = zip(at, points, strict=True)
        if of_arm := [(x, y, run.name) for x, (run, _, y) in placed if run.arm == arm]:
            xs, ys, trials = zip(*of_arm, strict=True)
            series.append(Series("points", arm, xs, ys, label=arm, trials=trials))
    columns: Columns[tuple[Result, Tree, float]] = {
        Column("trial", "trial"): lambda r: r[0].name,
        Column("arm", "arm"): lambda r: r[0].arm,
        Column("value", name, "text" if categories else "number"): lambda r: (
            _text(r[1]) if categories else number_of(r[1])
        ),
        Column("goal", goal.metric, "number"): lambda r: r[2],
    }
    best, best_x, best_y = min(points, key=lambda point: goal.sign * point[2])
    return Figure(
        name=stem,
        title=f"{goal.metric.capitalize()} by {name}, {goal.select_on} split",
        description=f"Every trial by its {name}; the best, {best.name}, has {_text(best_x)} and"
        f" reaches {best_y:.4g}.",
        x=Axis(name, log=not categories and spans_decades(at), labels=categories),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=spans_decades(y for *_, y in points)),
        series=tuple(series),
        table=Table.of(stem, f"Trials by {name}", points, columns),
    )


def _text(value: Tree) -> str:
    if (number := number_of(value)) is not None:
        return f"{number:.4g}" if math.isfinite(number) else str(number)
    return value if isinstance(value, str) else brief(value)


def curves_block(workload: Workload) -> Block:
    """Returns the panel of learning curves, by step and by time."""
    figures = [_curves_figure(workload, clock) for clock in (False, True)]
    if not (drawn := tuple(figure for figure in figures if figure is not None)):
        row = workload.goal.selected
        return Block(text=(f"No run has a finite {row!r} in its metrics.jsonl.",))
    return Block(figures=drawn)


def _curves_figure(workload: Workload, clock: bool) -> Figure | None:
    compared = {run.name for run in workload.finals}
    faint: list[Series] = []
    for run in (each for each in workload.trials if each.name not in compared):
        curve, name = workload.curve(run), run.name
        x = curve.seconds if clock else curve.steps
        drawn = np.isfinite(x) & np.isfinite(curve.values)
        if drawn.any():
            line = x[drawn].tolist(), curve.values[drawn].tolist()
            faint.append(Series("line", run.arm, *line, label=name, faint=True, trials=(name,)))
    means = [_mean(workload, arm, clock) for arm in workload.arms]
    front = [series for drawn, _ in means for series in drawn]
    if not front and not faint:
        return None
    goal, by = workload.goal, "training time" if clock else "step"
    name = f"curves_{'time' if clock else 'step'}"
    at = Column("x", by, "number" if clock else "integer")
    mean = Column("mean", f"mean {goal.metric}", "number")
    columns = (Column("arm", "arm"), at, mean, *Column.ends())
    rows = tuple(row for _, of_arm in means for row in of_arm)
    log = spans_decades(v for s in (*faint, *front) for v in s.y)
    return Figure(
        name=name,
        title=f"{goal.metric.capitalize()} by {by}, {goal.select_on} split",
        description=f"The mean {goal.metric} of each arm's compared runs over the {by}, with the"
        f" 95% interval of the mean; {plural(len(faint), 'other trial')} faint.",
        x=Axis("training time (s)" if clock else "step"),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=log),
        series=(*faint, *sorted(front, key=lambda each: each.kind)),  # bands, then lines
        table=Table(name, "Means of the compared runs", columns, rows),
    )


def _mean(workload: Workload, arm: str, clock: bool) -> tuple[list[Series], list[tuple[Any, ...]]]:
    """Returns the mean of an arm's compared runs with its band, and the same as rows."""
    every = map(workload.curve, workload.finals_of(arm))
    if not (curves := [curve for curve in every if len(curve.values)]):
        return [], []
    mean = combine([Points(c.steps, c.seconds if clock else c.steps, c.values) for c in curves])
    drawn = np.isfinite(mean.x) & np.isfinite(mean.y)  # where all runs have finite values
    if not drawn.any():
        return [], []
    x, y = np.asarray(mean.x)[drawn].tolist(), np.asarray(mean.y)[drawn].tolist()
    series: list[Series] = []
    ends: list[tuple[float | None, float | None]] = [(None, None)] * len(x)
    if mean.low is not None and mean.high is not None:
        low, high = mean.low[drawn].tolist(), mean.high[drawn].tolist()
        label = describe_bands([mean]).removeprefix("band: ")
        series.append(Series("band", arm, x, low, high, label=label))
        ends = list(zip(low, high, strict=True))
    label = f"{arm}, mean of {plural(len(curves), 'run')}"
    series.append(Series("line", arm, x, y, label=label))
    return series, [(arm, a, b, *each) for a, b, each in zip(x, y, ends, strict=True)]
