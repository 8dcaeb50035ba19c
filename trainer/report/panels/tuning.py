"""The panel of tuning curves: what the best of k trials would have reached."""

import math

from trainer.report import best_of_k
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.results import Workload
from trainer.report.spaces import point_values
from trainer.report.wording import shown


def tuning_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of tuning curves.

    Args:
        workload: the results.
        prefix: of the names of figures and tables, which tells workloads apart.
    """
    goal = workload.goal
    series: list[Series] = []
    rows: list[tuple[Cell, ...]] = []
    warnings, drawn = [], []
    for arm in workload.arms:
        points = point_values(workload, arm)
        if not points:
            continue
        values = list(points.values())
        k = list(range(1, len(values) + 1))
        expected = best_of_k.expected_best(values, goal.better).tolist()
        low, high = (each.tolist() for each in best_of_k.bands(values, 0.95, goal.better))
        diverged = sum(map(math.isinf, values))
        if diverged:
            warnings.append(
                f"{diverged} of {len(values)} points of {arm} have no finite value: its expected"
                " best is infinite until k is so large that one of the others is always drawn."
            )
        names = tuple(run.name for run in workload.trials_of(arm) if run.number in points)
        drawn.append(arm)
        series.append(Series("band", arm, k, low, high, label="95% band of the median"))
        series.append(Series("line", arm, k, expected, label=arm, trials=names, recipe="best_of_k"))
        for index, each in enumerate(expected):
            rows.append((arm, index + 1, each, low[index], high[index]))
    if not drawn:
        return Block(text=("There is no search, or none of its trials has ended.",))
    ends = ", ".join(f"{arm} {shown(_last(rows, arm))}" for arm in drawn)
    figure = Figure(
        name=f"{prefix}tuning",
        title=f"Best {goal.metric} of k trials, {goal.select_on} split",
        description=(
            f"The expected best {goal.metric} of k trials drawn from those of each arm, over k."
            f" With all trials: {ends}."
        ),
        x=Axis("trials (k)", log=len(rows) > 20),
        y=Axis(f"best {goal.metric}, {goal.select_on}"),
        series=(*(s for s in series if s.kind == "band"), *(s for s in series if s.kind == "line")),
        table=Table(
            f"{prefix}tuning",
            "Best of k trials",
            (
                Column("arm", "arm"),
                Column("k", "k", "integer"),
                Column("expected", "expected best", "number"),
                Column("low", "median from", "number"),
                Column("high", "to", "number"),
            ),
            tuple(rows),
        ),
    )
    text = (
        "How good the best of k trials is on average, if k of an arm's trials are drawn without"
        " replacement (U statistic). The band holds the curve of the median best of k with 95%"
        " confidence for all k at once (arXiv:2311.09480). Where the curves cross, the better arm"
        " depends on the budget for tuning.",
    )
    return Block(text=text, warnings=tuple(warnings), figures=(figure,))


def _last(rows: list[tuple[Cell, ...]], arm: str) -> float:
    return float([row for row in rows if row[0] == arm][-1][2])  # type: ignore[arg-type]
