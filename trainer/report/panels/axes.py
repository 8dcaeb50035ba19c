"""The panel with a plot for each axis of the search spaces."""

import math
from collections.abc import Collection, Mapping, Sequence

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
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


def _figure(workload: Workload, paths: Collection[str], name: str, stem: str) -> Figure | None:
    goal = workload.goal
    runs: list[tuple[Result, float]] = []
    values: list[Tree] = []
    for run in workload.trials:
        path = next((path for path in run.values if path in paths), None)
        value = run.value(goal.selected)
        if path is not None and value is not None:
            runs.append((run, value))
            values.append(run.values[path])
    if not runs:
        return None
    numbers = [number_of(value) for value in values]
    categories: tuple[str, ...] = ()
    if None in numbers:
        categories = tuple(dict.fromkeys(_text(value) for value in values))
        places = {text: float(index) for index, text in enumerate(categories)}
        numbers = [places[_text(value)] for value in values]
    at: list[float] = [x for x in numbers if x is not None]
    log = not categories and spans_decades(at)
    series = []
    for arm in workload.arms:
        of_arm = [(x, v, run) for x, (run, v) in zip(at, runs, strict=True) if run.arm == arm]
        if of_arm:
            xs, ys, found = zip(*of_arm, strict=True)
            series.append(
                Series("points", arm, xs, ys, label=arm, trials=tuple(r.name for r in found))
            )
    index = min(range(len(runs)), key=lambda i: goal.sign * runs[i][1])
    best, value = runs[index]
    return Figure(
        name=stem,
        title=f"{goal.metric.capitalize()} by {name}, {goal.select_on} split",
        description=(
            f"Every trial by its {name}; the best, {best.name}, has {_text(values[index])} and"
            f" reaches {value:.4g}."
        ),
        x=Axis(name, log=log, labels=categories),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=spans_decades(v for _, v in runs)),
        series=tuple(series),
        table=_table(stem, name, goal.metric, runs, values),
    )


def _table(
    stem: str,
    name: str,
    metric: str,
    runs: Sequence[tuple[Result, float]],
    values: Sequence[Tree],
) -> Table:
    numeric = all(number_of(value) is not None for value in values)
    rows: list[tuple[Cell, ...]] = []
    for (run, value), x in zip(runs, values, strict=True):
        rows.append((run.name, run.arm, number_of(x) if numeric else _text(x), value))
    columns = (
        Column("trial", "trial"),
        Column("arm", "arm"),
        Column("value", name, "number" if numeric else "text"),
        Column("goal", metric, "number"),
    )
    return Table(stem, f"Trials by {name}", columns, tuple(rows))


def _text(value: Tree) -> str:
    number = number_of(value)
    if number is not None:
        return f"{number:.4g}" if math.isfinite(number) else str(number)
    return value if isinstance(value, str) else brief(value)
