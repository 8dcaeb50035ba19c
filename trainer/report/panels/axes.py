"""The panel with a plot for each axis of the search spaces."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table
from trainer.report.results import Result, Workload
from trainer.report.spaces import number_of, spans_decades


def axes_block(workload: Workload, prefix: str, names: Mapping[str, str]) -> Block:
    """Returns the panel of axes: a plot of the trials for each axis of the search spaces."""
    paths = [path for space in workload.spaces.values() for path in space.axes]
    figures = []
    for index, name in enumerate(dict.fromkeys(names[path] for path in paths), 1):
        of_name = {path for path in paths if names[path] == name}
        figure = _figure(workload, of_name, name, f"{prefix}axis_{index}")
        if figure is not None:
            figures.append(figure)
    if not figures:
        return Block(text=("No axis was searched, or no trial has a finite value.",))
    diverged = sum(run.end == "diverged" for run in workload.trials)
    pruned = sum(run.end == "pruned" for run in workload.trials)
    text = [f"Trials that diverged ({diverged:,}) are not drawn."] if diverged else []
    text += [f"Trials that were stopped early ({pruned:,}) are not drawn."] if pruned else []
    return Block(text=tuple(text), figures=tuple(figures))


class _Point(NamedTuple):
    """A trial on an axis."""

    run: Result
    x: Tree
    goal: float


def _figure(workload: Workload, paths: Collection[str], name: str, stem: str) -> Figure | None:
    goal = workload.goal
    points: list[_Point] = []
    for run in workload.trials:
        path = next((path for path in run.values if path in paths), None)
        value = run.value(goal.selected)
        if path is not None and value is not None:
            points.append(_Point(run, run.values[path], value))
    if not points:
        return None
    numbers = [number_of(point.x) for point in points]
    categories: tuple[str, ...] = ()
    if None in numbers:
        categories = tuple(dict.fromkeys(_text(point.x) for point in points))
        numbers = [float(categories.index(_text(point.x))) for point in points]
    at: list[float] = [x for x in numbers if x is not None]
    series = []
    for arm in workload.arms:
        pairs = zip(at, points, strict=True)
        if of_arm := [(x, p.goal, p.run.name) for x, p in pairs if p.run.arm == arm]:
            xs, ys, trials = zip(*of_arm, strict=True)
            series.append(Series("points", arm, xs, ys, label=arm, trials=trials))
    columns: Columns[_Point] = {
        Column("trial", "trial"): lambda r: r.run.name,
        Column("arm", "arm"): lambda r: r.run.arm,
        Column("value", name, "text" if categories else "number"): lambda r: (
            _text(r.x) if categories else number_of(r.x)
        ),
        Column("goal", goal.metric, "number"): lambda r: r.goal,
    }
    best = min(points, key=lambda point: goal.sign * point.goal)
    return Figure(
        name=stem,
        title=f"{goal.metric.capitalize()} by {name}, {goal.select_on} split",
        description=(
            f"Every trial by its {name}; the best, {best.run.name}, has {_text(best.x)} and"
            f" reaches {best.goal:.4g}."
        ),
        x=Axis(name, log=not categories and spans_decades(at), labels=categories),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=spans_decades(p.goal for p in points)),
        series=tuple(series),
        table=Table.of(stem, f"Trials by {name}", points, columns),
    )


def _text(value: Tree) -> str:
    number = number_of(value)
    if number is not None:
        return f"{number:.4g}" if math.isfinite(number) else str(number)
    return value if isinstance(value, str) else brief(value)
