"""The panel of arms: every compared run, the mean of each arm and its interval."""

import math
from collections.abc import Iterator, Sequence

from trainer.messages import plural
from trainer.report import statistics
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.pairs import Standing, standings
from trainer.report.results import Workload
from trainer.report.wording import joined, shown


def arms_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of arms: every compared run, means and intervals."""
    goal, ordered = workload.goal, standings(workload)
    warnings = list(_warnings(workload, ordered))
    if not ordered:
        return Block(text=("No run that can be compared has ended.",), warnings=tuple(warnings))
    rows = []
    for each in ordered:
        selected = workload.values_of(each.arm, goal.selected)
        mean = statistics.mean_interval(list(selected.values())) if selected else None
        finite = [v for v in each.values.values() if math.isfinite(v)]
        estimate = each.mean
        rows.append(
            (
                each.arm,
                workload.winners.get((each.arm, 0)) if workload.searches == 1 else None,
                len(each.values),
                each.valueless,
                estimate.value if math.isfinite(estimate.value) else None,
                estimate.low,
                estimate.high,
                estimate.deviation,
                statistics.iqm(finite) if finite else None,
                mean.value if mean else None,
            )
        )
    units = "searches" if workload.searches > 1 else "seeds"
    columns = (
        Column("arm", "arm"),
        Column("trial", "trial", "integer"),
        Column("units", units, "integer"),
        Column("without_value", "without value", "integer"),
        Column("mean", f"mean {goal.metric}, {goal.report_on}", "number"),
        Column("low", "95% from", "number"),
        Column("high", "to", "number"),
        Column("deviation", "standard deviation", "number"),
        Column("iqm", "interquartile mean", "number"),
        Column("selected_mean", f"mean {goal.metric}, {goal.select_on}", "number"),
    )
    table = Table(
        f"{prefix}arms", f"{goal.words.capitalize()}, by arm", columns, tuple(rows)
    ).compact()
    tables = (table, *([_searches(workload, prefix)] if workload.searches > 1 else []))
    return Block(
        warnings=tuple(warnings),
        figures=(_arms_figure(workload, ordered, prefix),),
        tables=tables,
    )


def _searches(workload: Workload, prefix: str) -> Table:
    """Returns the table of the winner of each search, with its results."""
    goal = workload.goal
    rows: list[tuple[Cell, ...]] = []
    for arm in workload.arms:
        reported = workload.units_of(arm)
        for search in range(workload.searches):
            runs = [run for run in workload.finals_of(arm) if run.search == search]
            selected = [run.value(goal.selected) for run in runs]
            known = [value for value in selected if value is not None]
            mean = math.fsum(known) / len(known) if known and len(known) == len(runs) else None
            value = reported.get(search)
            finite = value if value is not None and math.isfinite(value) else None
            winner = workload.winners.get((arm, search))
            rows.append((arm, search, winner, len(runs), finite, mean))
    columns = (
        Column("arm", "arm"),
        Column("search", "search", "integer"),
        Column("trial", "best trial", "integer"),
        Column("seeds", "final seeds", "integer"),
        Column("mean", f"mean {goal.metric}, {goal.report_on}", "number"),
        Column("selected_mean", f"mean {goal.metric}, {goal.select_on}", "number"),
    )
    return Table(f"{prefix}searches", "The winner of each search", columns, tuple(rows)).compact()


def _warnings(workload: Workload, ordered: Sequence[Standing]) -> Iterator[str]:
    what = "search" if workload.searches > 1 else "seed"
    for each in ordered:
        if each.valueless:
            yield (
                f"{each.arm} has {plural(each.valueless, f'compared {what}')} of"
                f" {len(each.values)} without a finite value, so that it has no mean. Pairs with it"
                f" are decided by counting which arm is better in more of them, from six on."
            )
        elif len(each.values) == 1:
            yield f"{each.arm} has one {what}, so that there is no interval for it."
    absent = [arm for arm in workload.arms if arm not in {each.arm for each in ordered}]
    if absent and ordered:
        yield f"No compared run of {joined(absent)} has ended."
    lacking = [
        arm
        for arm in workload.arms
        if (runs := workload.finals_of(arm))
        and not any(workload.goal.reported in run.summary.metrics for run in runs)
    ]
    if lacking:
        yield (
            f"No run of {joined(lacking)} has the metric {workload.goal.reported!r}, so that"
            f" {'it counts' if len(lacking) == 1 else 'they count'} as without a value."
        )


def _arms_figure(workload: Workload, ordered: Sequence[Standing], prefix: str) -> Figure:
    series, rows = [], []
    runs = {(run.arm, workload.unit_of(run)): run.name for run in reversed(workload.finals)}
    what = "search" if workload.searches > 1 else "run"
    for index, each in enumerate(ordered):
        finite = {seed: v for seed, v in each.values.items() if math.isfinite(v)}
        # Draw points beside the interval and side by side, so that each can be seen.
        spread = [0.12 + 0.22 * i / max(1, len(finite) - 1) for i in range(len(finite))]
        names = tuple(runs[each.arm, seed] for seed in finite)
        series.append(
            Series(
                "points", each.arm, [index + x for x in spread], list(finite.values()), trials=names
            )
        )
        mean = each.mean
        if mean.low is not None and mean.high is not None:
            label = "95% interval of the mean"
            low, high = [mean.low], [mean.high]
            series.append(Series("interval", each.arm, [index], low, high, label=label))
        if math.isfinite(mean.value):
            series.append(Series("points", each.arm, [index], [mean.value], label="mean"))
        rows += [(each.arm, str(seed), value) for seed, value in each.values.items()]
    best = ordered[0]
    ends = f"; {best.arm} has the best mean, {shown(best.mean.value)}" if not best.valueless else ""
    return Figure(
        name=f"{prefix}arms",
        title=f"{workload.goal.words.capitalize()}: every {what}, the mean and its 95% interval",
        description=(
            f"One column of points for each of {plural(len(ordered), 'arm')}, with the mean and its"
            f" t interval{ends}."
        ),
        x=Axis("", labels=tuple(each.arm for each in ordered)),
        y=Axis(f"{workload.goal.metric}, {workload.goal.report_on}"),
        series=tuple(series),
        table=Table(
            f"{prefix}arms_points",
            f"Every compared {what}",
            (
                Column("arm", "arm"),
                Column("unit", "search" if workload.searches > 1 else "seed"),
                Column("value", workload.goal.metric, "number"),
            ),
            tuple(rows),
        ),
    )
