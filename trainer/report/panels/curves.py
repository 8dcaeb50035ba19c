"""The panel of learning curves: winners in front, the other trials faint."""

import math
from collections.abc import Sequence

import numpy as np

from trainer.report import statistics
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.results import Curve, Result, Workload
from trainer.report.wording import plural


def curves_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of learning curves, by step and by time.

    Args:
        workload: the results.
        prefix: of the names of figures and tables, which tells workloads apart.
    """
    figures = [_figure(workload, prefix, clock=False), _figure(workload, prefix, clock=True)]
    drawn = tuple(figure for figure in figures if figure is not None)
    if not drawn:
        row = workload.goal.selected
        return Block(text=(f"No run has a finite {row!r} in its metrics.jsonl.",))
    return Block(figures=drawn)


def _figure(workload: Workload, prefix: str, clock: bool) -> Figure | None:
    goal = workload.goal
    faint, front = [], []
    rows: list[tuple[Cell, ...]] = []
    compared = {run.name for run in workload.finals}
    for run in workload.trials:
        if run.name not in compared and (line := _line(workload, run, clock)):
            x, y = line
            faint.append(
                Series("line", run.arm, x, y, label=run.name, faint=True, trials=(run.name,))
            )
    for arm in workload.arms:
        runs = workload.finals_of(arm)
        curves = [curve for run in runs if len((curve := workload.curve(run)).values)]
        mean = _mean(curves, clock)
        if mean is None:
            continue
        x, y, low, high = mean
        if low is not None and high is not None:
            front.append(Series("band", arm, x, low, high, label="95% interval"))
        front.append(
            Series("line", arm, x, y, label=f"{arm}, mean of {plural(len(curves), 'run')}")
        )
        ends = low if low is not None else [None] * len(x)
        tops = high if high is not None else [None] * len(x)
        rows += [(arm, *each) for each in zip(x, y, ends, tops, strict=True)]
    if not front and not faint:
        return None
    values = [v for s in (*faint, *front) for v in s.y if math.isfinite(v)]
    log = goal.metric == "loss" and min(values) > 0 and max(values) / min(values) > 10
    by = "training time" if clock else "step"
    return Figure(
        name=f"{prefix}curves_{'time' if clock else 'step'}",
        title=f"{goal.metric.capitalize()} by {by}, {goal.select_on} split",
        description=(
            f"The mean {goal.metric} of each arm's compared runs over the {by}, with the 95%"
            f" interval of the mean; {plural(len(faint), 'other trial')} faint."
        ),
        x=Axis("training time (s)" if clock else "step"),
        y=Axis(f"{goal.metric}, {goal.select_on}", log=log),
        series=(
            *faint,
            *[s for s in front if s.kind == "band"],
            *[s for s in front if s.kind == "line"],
        ),
        table=Table(
            f"{prefix}curves_{'time' if clock else 'step'}",
            "Means of the compared runs",
            (
                Column("arm", "arm"),
                Column("x", by, "number" if clock else "integer"),
                Column("mean", f"mean {goal.metric}", "number"),
                Column("low", "95% from", "number"),
                Column("high", "to", "number"),
            ),
            tuple(rows),
        ),
    )


def _line(
    workload: Workload, run: Result, clock: bool
) -> tuple[Sequence[float], Sequence[float]] | None:
    curve = workload.curve(run)
    x = curve.seconds if clock else curve.steps
    drawn = np.isfinite(x) & np.isfinite(curve.values)
    if not drawn.any():
        return None
    return x[drawn].tolist(), curve.values[drawn].tolist()


Mean = tuple[list[float], list[float], list[float] | None, list[float] | None]


def _mean(curves: Sequence[Curve], clock: bool) -> Mean | None:
    """Returns the mean of curves at the steps that all have, with its interval."""
    if not curves:
        return None
    shared = sorted(set(curves[0].steps).intersection(*(set(c.steps) for c in curves[1:])))
    if not shared:
        return None
    at = [np.searchsorted(c.steps, shared) for c in curves]
    values = np.stack([c.values[i] for c, i in zip(curves, at, strict=True)])  # [run, evaluation]
    x = np.asarray(shared)
    if clock:
        x = np.mean([c.seconds[i] for c, i in zip(curves, at, strict=True)], axis=0)
    drawn = np.isfinite(x) & np.isfinite(values).all(axis=0)
    if not drawn.any():
        return None
    x, values = x[drawn], values[:, drawn]
    mean = values.mean(axis=0).tolist()
    if len(curves) < 2:
        return x.tolist(), mean, None, None
    each = [statistics.mean_interval(column) for column in values.T]
    return x.tolist(), mean, [e.low or 0.0 for e in each], [e.high or 0.0 for e in each]
