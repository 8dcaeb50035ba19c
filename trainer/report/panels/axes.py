"""The panel with a plot for each axis of the search spaces."""

import math
from collections.abc import Mapping, Sequence

from trainer.config import Tree
from trainer.config.wording import brief
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.results import Result, Workload
from trainer.report.spaces import number_of, spans_decades


def axes_block(workload: Workload, prefix: str, names: Mapping[str, str]) -> Block:
    """Returns the panel of axes.

    Args:
        workload: the results.
        prefix: of the names of figures and tables, which tells workloads apart.
        names: config path -> the name of the axis.
    """
    paths = list(dict.fromkeys(p for space in workload.spaces.values() for p in space.axes))
    figures = []
    for index, path in enumerate(paths):
        figure = _figure(workload, path, names[path], f"{prefix}axis_{index + 1}")
        if figure is not None:
            figures.append(figure)
    if not figures:
        return Block(text=("No axis was searched, or no trial has a finite value.",))
    diverged = sum(run.end == "diverged" for run in workload.trials)
    text = f"Trials that diverged ({diverged:,}) are not drawn." if diverged else ""
    return Block(text=(text,) if text else (), figures=tuple(figures))


def _figure(workload: Workload, path: str, name: str, stem: str) -> Figure | None:
    goal = workload.goal
    runs = [
        (run, value)
        for run in workload.trials
        if path in run.values and (value := run.value(goal.selected)) is not None
    ]
    if not runs:
        return None
    values = [run.values[path] for run, _ in runs]
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
    best, value = min(runs, key=lambda pair: goal.sign * pair[1])
    return Figure(
        name=stem,
        title=f"{goal.metric.capitalize()} by {name}, {goal.select_on} split",
        description=(
            f"Every trial by its {name}; the best, {best.name}, has {_text(best.values[path])} and"
            f" reaches {value:.4g}."
        ),
        x=Axis(name, log=log, labels=categories),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=spans_decades(v for _, v in runs)),
        series=tuple(series),
        table=_table(stem, name, goal.metric, runs, path),
    )


def _table(
    stem: str, name: str, metric: str, runs: Sequence[tuple[Result, float]], path: str
) -> Table:
    numeric = all(number_of(run.values[path]) is not None for run, _ in runs)
    rows: list[tuple[Cell, ...]] = []
    for run, value in runs:
        x = run.values[path]
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
