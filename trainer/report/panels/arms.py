"""The panel of arms: every compared run, the mean of each arm and its interval."""

import math
from collections.abc import Iterator, Sequence

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, finite
from trainer.report.pairs import Standing, standings
from trainer.report.results import Workload
from trainer.report.statistics import estimates
from trainer.report.wording import shown


def arms_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of arms: every compared run, means and intervals."""
    goal, ordered = workload.goal, standings(workload)
    warnings = list(_warnings(workload, ordered))
    if not ordered:
        return Block(text=("No run that can be compared has ended.",), warnings=tuple(warnings))
    several = workload.searches > 1
    winners = {} if several else workload.winners
    reported = f"mean {goal.metric}, {goal.report_on}"

    def iqm(each: Standing) -> float | None:
        known = [v for v in each.values.values() if math.isfinite(v)]
        return estimates.iqm(known) if known else None

    def selected(each: Standing) -> float | None:
        values = list(workload.values_of(each.arm, goal.selected).values())
        return estimates.mean_interval(values).value if values else None

    columns: Columns[Standing] = {
        Column("arm", "arm"): lambda r: r.arm,
        Column("trial", "trial", "integer"): lambda r: winners.get((r.arm, 0)),
        Column("units", workload.unit_plural, "integer"): lambda r: len(r.values),
        Column("without_value", "without value", "integer"): lambda r: r.valueless,
        Column("mean", reported, "number"): lambda r: finite(r.mean.value),
        Column("low", "95% from", "number"): lambda r: r.mean.low,
        Column("high", "to", "number"): lambda r: r.mean.high,
        Column("deviation", "standard deviation", "number"): lambda r: r.mean.deviation,
        Column("iqm", "interquartile mean", "number"): iqm,
        Column("selected_mean", f"mean {goal.metric}, {goal.select_on}", "number"): selected,
    }
    title = f"{goal.words.capitalize()}, by arm"
    table = Table.of(f"{prefix}arms", title, ordered, columns).compact()
    tables = (table, _searches(workload, prefix)) if several else (table,)
    figures = (_arms_figure(workload, ordered, prefix),)
    return Block(warnings=tuple(warnings), figures=figures, tables=tables)


def _searches(workload: Workload, prefix: str) -> Table:
    """Returns the table of the winner of each search, with its results."""
    goal = workload.goal
    reported = f"mean {goal.metric}, {goal.report_on}"
    runs = {
        (arm, search): [run for run in workload.finals_of(arm) if run.search == search]
        for arm in workload.arms
        for search in range(workload.searches)
    }

    def selected(r: tuple[str, int]) -> float | None:
        values = [run.value(goal.selected) for run in runs[r]]
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(values) else None

    columns: Columns[tuple[str, int]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("search", "search", "integer"): lambda r: r[1],
        Column("trial", "best trial", "integer"): lambda r: workload.winners.get(r),
        Column("seeds", "final seeds", "integer"): lambda r: len(runs[r]),
        Column("mean", reported, "number"): lambda r: finite(
            workload.units_of(r[0]).get(r[1], math.nan)
        ),
        Column("selected_mean", f"mean {goal.metric}, {goal.select_on}", "number"): selected,
    }
    return Table.of(f"{prefix}searches", "The winner of each search", runs, columns).compact()


def _warnings(workload: Workload, ordered: Sequence[Standing]) -> Iterator[str]:
    for each in ordered:
        if each.valueless:
            yield (
                f"{each.arm} has {plural(each.valueless, f'compared {workload.unit}')} of"
                f" {len(each.values)} without a finite value, so that it has no mean. Pairs with it"
                f" are decided by counting which arm is better in more of them, from six on."
            )
        elif len(each.values) == 1:
            yield f"{each.arm} has one {workload.unit}, so that there is no interval for it."
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
    series = []
    runs = {(run.arm, workload.unit_of(run)): run.name for run in reversed(workload.finals)}
    what = "search" if workload.searches > 1 else "run"
    for index, each in enumerate(ordered):
        known = {seed: v for seed, v in each.values.items() if math.isfinite(v)}
        # Draw points beside the interval and side by side, so that each can be seen.
        x = [index + (0.12 + 0.22 * i / max(1, len(known) - 1)) for i in range(len(known))]
        names = tuple(runs[each.arm, seed] for seed in known)
        series.append(Series("points", each.arm, x, list(known.values()), trials=names))
        mean = each.mean
        if mean.low is not None and mean.high is not None:
            label = "95% interval of the mean"
            low, high = [mean.low], [mean.high]
            series.append(Series("interval", each.arm, [index], low, high, label=label))
        if math.isfinite(mean.value):
            series.append(Series("points", each.arm, [index], [mean.value], label="mean"))
    value = Column("value", workload.goal.metric, "number")
    columns = Column("arm", "arm"), Column("unit", workload.unit), value
    rows = tuple((each.arm, str(unit), v) for each in ordered for unit, v in each.values.items())
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
        table=Table(f"{prefix}arms_points", f"Every compared {what}", columns, rows),
    )
