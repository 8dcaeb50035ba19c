"""The panel of learning curves: winners in front, the other trials faint."""

import numpy as np

from trainer.messages import plural
from trainer.report.columns import INTERVAL
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.plots import Points, combine, describe_bands
from trainer.report.results import Workload
from trainer.report.spaces import spans_decades


def curves_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of learning curves, by step and by time."""
    figures = [_figure(workload, prefix, clock) for clock in (False, True)]
    drawn = tuple(figure for figure in figures if figure is not None)
    if not drawn:
        row = workload.goal.selected
        return Block(text=(f"No run has a finite {row!r} in its metrics.jsonl.",))
    return Block(figures=drawn)


def _figure(workload: Workload, prefix: str, clock: bool) -> Figure | None:
    compared = {run.name for run in workload.finals}
    faint: list[Series] = []
    for run in (each for each in workload.trials if each.name not in compared):
        curve, name = workload.curve(run), run.name
        x = curve.seconds if clock else curve.steps
        drawn = np.isfinite(x) & np.isfinite(curve.values)
        if drawn.any():
            line = x[drawn].tolist(), curve.values[drawn].tolist()
            faint.append(Series("line", run.arm, *line, label=name, faint=True, trials=(name,)))
    front: list[Series] = []
    rows: list[tuple[Cell, ...]] = []
    for arm in workload.arms:
        series, lines = _arm(workload, arm, clock)
        front += series
        rows += lines
    if not front and not faint:
        return None
    goal, by = workload.goal, "training time" if clock else "step"
    name = f"{prefix}curves_{'time' if clock else 'step'}"
    at = Column("x", by, "number" if clock else "integer")
    mean = Column("mean", f"mean {goal.metric}", "number")
    columns = (Column("arm", "arm"), at, mean, *INTERVAL)
    log = spans_decades(v for s in (*faint, *front) for v in s.y)
    return Figure(
        name=name,
        title=f"{goal.metric.capitalize()} by {by}, {goal.select_on} split",
        description=(
            f"The mean {goal.metric} of each arm's compared runs over the {by}, with the 95%"
            f" interval of the mean; {plural(len(faint), 'other trial')} faint."
        ),
        x=Axis("training time (s)" if clock else "step"),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=log),
        series=(*faint, *sorted(front, key=lambda each: each.kind)),  # bands, then lines
        table=Table(name, "Means of the compared runs", columns, tuple(rows)),
    )


def _arm(workload: Workload, arm: str, clock: bool) -> tuple[list[Series], list[tuple[Cell, ...]]]:
    """Returns the mean of an arm's compared runs with its band, and the same as rows."""
    curves = [workload.curve(run) for run in workload.finals_of(arm)]
    curves = [curve for curve in curves if len(curve.values)]
    if not curves:
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
