"""The panels of arms: every compared run, means, and the differences of pairs with their tests."""

import math
from collections.abc import Iterator, Sequence

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, shown
from trainer.report.pairs import Pair, Standing, standings
from trainer.report.results import Workload
from trainer.report.statistics import estimates
from trainer.report.statistics.decide import NOETHER
from trainer.sweep.final import mean

_KINDS = {
    "more": "better, by more than matters",
    "less": "better, by less than matters",
    "better": "better; whether it matters is open",
    "equivalent": "equivalent",
    "open": "not decided",
}


def arms_block(workload: Workload) -> Block:
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
        values = workload.values_of(each.arm, goal.selected)
        return estimates.mean_interval(values).value if values else None

    columns: Columns[Standing] = {
        Column("arm", "arm"): lambda r: r.arm,
        Column("trial", "trial", "integer"): lambda r: winners.get((r.arm, 0)),
        Column("units", workload.unit_plural, "integer"): lambda r: len(r.values),
        Column("without_value", "without value", "integer"): lambda r: r.valueless,
        Column("mean", reported, "number"): lambda r: estimates.finite(r.mean.value),
        Column("low", "95% from", "number"): lambda r: r.mean.low,
        Column("high", "to", "number"): lambda r: r.mean.high,
        Column("deviation", "standard deviation", "number"): lambda r: r.mean.deviation,
        Column("iqm", "interquartile mean", "number"): iqm,
        Column("selected_mean", f"mean {goal.metric}, {goal.select_on}", "number"): selected,
    }
    table = Table.of("arms", f"{goal.words.capitalize()}, by arm", ordered, columns).compact()
    tables = (table, _searches(workload)) if several else (table,)
    figures = (_arms_figure(workload, ordered),)
    return Block(warnings=tuple(warnings), figures=figures, tables=tables)


def _searches(workload: Workload) -> Table:
    """Returns the table of the winner of each search, with its results."""
    goal = workload.goal
    reported = f"mean {goal.metric}, {goal.report_on}"
    runs = {
        (arm, search): [run for run in workload.finals_of(arm) if run.search == search]
        for arm in workload.arms
        for search in range(workload.searches)
    }

    def selected(r: tuple[str, int]) -> float | None:
        return mean([run.value(goal.selected) for run in runs[r]])

    columns: Columns[tuple[str, int]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("search", "search", "integer"): lambda r: r[1],
        Column("trial", "best trial", "integer"): lambda r: workload.winners.get(r),
        Column("seeds", "final seeds", "integer"): lambda r: len(runs[r]),
        Column("mean", reported, "number"): lambda r: estimates.finite(
            workload.units_of(r[0]).get(r[1], math.nan)
        ),
        Column("selected_mean", f"mean {goal.metric}, {goal.select_on}", "number"): selected,
    }
    return Table.of("searches", "The winner of each search", runs, columns).compact()


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


def _arms_figure(workload: Workload, ordered: Sequence[Standing]) -> Figure:
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
        name="arms",
        title=f"{workload.goal.words.capitalize()}: every {what}, the mean and its 95% interval",
        description=f"One column of points for each of {plural(len(ordered), 'arm')}, with the mean"
        f" and its t interval{ends}.",
        x=Axis("", labels=tuple(each.arm for each in ordered)),
        y=Axis(f"{workload.goal.metric}, {workload.goal.report_on}"),
        series=tuple(series),
        table=Table("arms_points", f"Every compared {what}", columns, rows),
    )


def pairs_block(workload: Workload, pairs: Sequence[Pair]) -> Block:
    """Returns the panel of pairs: differences, intervals, tests."""
    if not pairs:
        return Block(text=("There are no two arms to compare.",))
    relevant = workload.goal.relevant

    def decision(pair: Pair) -> str:
        if not pair.looks:
            return "not judged"
        if pair.relevance is not None:
            return _KINDS[pair.relevance]
        return "better" if pair.decided else "not decided"

    columns: Columns[Pair] = {
        Column("arm", "arm"): lambda r: r.better,
        Column("against", "against"): lambda r: r.worse,
        Column("difference", "difference", "number"): lambda r: estimates.finite(r.difference),
        Column("low", "95% from", "number"): lambda r: r.low,
        Column("high", "to", "number"): lambda r: r.high,
        Column("deviations", "in standard deviations", "number"): lambda r: (
            abs(r.difference) / r.deviation if r.deviation and math.isfinite(r.difference) else None
        ),
        Column("p", "adjusted p", "p"): lambda r: r.p,
        Column("decision", "decision"): decision,
    }
    if relevant is None:
        columns |= {Column("found", "found with a power of 0.8", "number"): lambda r: r.finds}
        last = (
            " The last column is the difference that so many units find with a power of 0.8, in"
            " standard deviations."
        )
    else:
        columns |= {
            Column("units_needed", "needed, in a fresh sweep", "integer"): lambda r: r.needed,
            Column("units_from", "from", "integer"): lambda r: r.needed_range and r.needed_range[0],
            Column("units_to", "to", "integer"): lambda r: r.needed_range and r.needed_range[1],
        }
        last = (
            f" The last columns are the number of {workload.unit_plural} at which a fresh sweep"
            f" would find the difference that matters, {shown(relevant)}, with a power of 0.8, and"
            " its 80% interval for normal differences, because their standard deviation is"
            " estimated."
        )
    note = (
        "The arm with the better mean stands first (the one that is better more often, where a run"
        " has no value), and a difference is its mean minus the other one. The intervals hold with"
        " a probability of 95% for all pairs and all looks at the results at once; an arm is better"
        " where its interval excludes 0, and p, which is adjusted for all pairs and looks, is below"
        f" 0.05 exactly then.{last}"
    )
    title = f"Pairs of arms, {workload.goal.words}"
    decisions = Table.of("pairs", title, pairs, columns, note).compact()
    figure = _pairs_figure(workload, pairs)
    tables = (decisions, _tests(workload, pairs), *_test_sets(workload, pairs))
    return Block(figures=(figure,) if figure else (), tables=tables)


def _tests(workload: Workload, pairs: Sequence[Pair]) -> Table:
    columns: Columns[Pair] = {
        Column("arm", "arm"): lambda r: r.better,
        Column("against", "against"): lambda r: r.worse,
        Column("units", "units", "integer"): lambda r: r.n,
        Column("test", "test"): lambda r: r.test or "none",
        Column("looks", "judged at"): lambda r: ", ".join(map(str, r.looks)) or None,
        Column("improvement", "P(better)", "number"): lambda r: (
            r.improvement and r.improvement.value
        ),
        Column("improvement_low", "95% from", "number"): lambda r: (
            r.improvement and r.improvement.low
        ),
        Column("improvement_high", "to", "number"): lambda r: r.improvement and r.improvement.high,
    }
    units = workload.unit_plural
    note = (
        f"The units are {units}; 'judged at' is how many there were when the pair was judged,"
        " several numbers if the sweep was extended. P(better) is the probability that a unit of"
        " the first arm has the better value, with the interval of this single pair; above 0.75 it"
        " is called meaningful"
        f" (arXiv:2103.03098), which {NOETHER} {units} would show with error rates of 5%."
    )
    return Table.of("pairs_tests", "Tests of these pairs", pairs, columns, note).compact()


def _test_sets(workload: Workload, pairs: Sequence[Pair]) -> list[Table]:
    """Returns the table of intervals for other test sets, if there are any."""
    known = [
        (pair, each.found, each.complete)
        for pair in pairs
        if (each := pair.elsewhere) is not None and each.found is not None
    ]
    if not known:
        return []
    which = "of the test split"
    if not all(complete for _, _, complete in known):
        which = "at the beginning of the test split"
    note = (
        f"Each interval holds for other {workload.unit_plural} and other test examples at once,"
        " with a probability of 95% for its pair; it is computed from the differences on the single"
        f" examples {which}. Where it includes 0, the order may change on another test set of this"
        " size."
    )
    columns: Columns[tuple[Pair, estimates.TwoWay, bool]] = {
        Column("arm", "arm"): lambda r: r[0].better,
        Column("against", "against"): lambda r: r[0].worse,
        Column("examples", "test examples", "integer"): lambda r: r[1].examples,
        Column("difference", "difference", "number"): lambda r: r[1].difference,
        Column("low", "95% from", "number"): lambda r: r[1].low,
        Column("high", "to", "number"): lambda r: r[1].high,
        Column("units_error", "standard error over units", "number"): lambda r: (
            r[1].units_deviation
        ),
        Column("examples_error", "over examples", "number"): lambda r: r[1].examples_deviation,
    }
    return [Table.of("pairs_test_sets", "Pairs of arms on other test sets", known, columns, note)]


def _pairs_figure(workload: Workload, pairs: Sequence[Pair]) -> Figure | None:
    """Draws the differences of the arm with the best mean from each other one."""
    best = standings(workload)[0].arm
    of_best = [p for p in pairs if p.better == best and not p.without_mean]
    if not (drawn := [(p.worse, p.difference, p.low, p.high) for p in of_best]):
        return None
    columns = (*Column.named(arm="text", difference="number"), *Column.ends())
    title = f"{best} minus each other arm"
    series: list[Series] = [Series("rule", "", (), [0.0], label="no difference")]
    for index, (arm, value, low, high) in enumerate(drawn):
        if low is not None and high is not None:
            label = "simultaneous 95% interval"
            series.append(Series("interval", arm, [index], [low], [high], label=label))
        series.append(Series("points", arm, [index], [value], label="difference"))
    return Figure(
        name="pairs",
        title=f"{title}, with simultaneous 95% intervals",
        description=f"For each other arm, the mean {workload.goal.words} of {best} minus its own,"
        " with an interval that holds for all pairs and looks at once.",
        x=Axis("", labels=tuple(row[0] for row in drawn)),
        y=Axis(f"{workload.goal.metric}, {title}"),
        series=tuple(series),
        table=Table("pairs_differences", title, columns, tuple(drawn)),
    )
