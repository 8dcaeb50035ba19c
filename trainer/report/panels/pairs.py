"""The panel of pairs: differences, intervals and tests."""

import math
from collections.abc import Sequence

from trainer.report.columns import INTERVAL, named_columns
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, finite
from trainer.report.pairs import Pair, standings
from trainer.report.results import Workload
from trainer.report.statistics.held_out import TwoWay
from trainer.report.statistics.power import noether
from trainer.report.wording import shown

_KINDS = {
    "more": "better, by more than matters",
    "less": "better, by less than matters",
    "better": "better; whether it matters is open",
    "equivalent": "equivalent",
    "open": "not decided",
}


def pairs_block(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Block:
    """Returns the panel of pairs: differences, intervals, tests."""
    if not pairs:
        return Block(text=("There are no two arms to compare.",))
    relevant = workload.goal.relevant
    columns: Columns[Pair] = {
        Column("arm", "arm"): lambda r: r.better,
        Column("against", "against"): lambda r: r.worse,
        Column("difference", "difference", "number"): lambda r: finite(r.difference),
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
    decisions = Table.of(f"{prefix}pairs", title, pairs, columns, note).compact()
    figure = _pairs_figure(workload, pairs, prefix)
    tables = (decisions, _tests(workload, pairs, prefix), *_test_sets(workload, pairs, prefix))
    return Block(figures=(figure,) if figure else (), tables=tables)


def _tests(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Table:
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
        f"The units are {units}. P(better) is the probability that a unit of the first arm has the"
        " better value, with the interval of this single pair; above 0.75 it is called meaningful"
        f" (arXiv:2103.03098), which {noether()} {units} would show with error rates of 5%."
    )
    return Table.of(f"{prefix}pairs_tests", "Tests of these pairs", pairs, columns, note).compact()


def _test_sets(workload: Workload, pairs: Sequence[Pair], prefix: str) -> list[Table]:
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
    columns: Columns[tuple[Pair, TwoWay, bool]] = {
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
    title = "Pairs of arms on other test sets"
    return [Table.of(f"{prefix}pairs_test_sets", title, known, columns, note)]


def decision(pair: Pair) -> str:
    """Returns what was decided about a pair, in a few words."""
    if not pair.looks:
        return "not judged"
    if pair.relevance is not None:
        return _KINDS[pair.relevance]
    return "better" if pair.decided else "not decided"


def _pairs_figure(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Figure | None:
    """Draws the differences to the arm with the best mean."""
    best = standings(workload)[0].arm
    drawn = [_to(best, p) for p in pairs if best in p.arms and not p.without_mean]
    if not drawn:
        return None
    columns = (*named_columns(arm="text", difference="number"), *INTERVAL)
    title = f"Differences to {best}"
    series: list[Series] = [Series("rule", "", (), [0.0], label="no difference")]
    for index, (arm, value, low, high) in enumerate(drawn):
        if low is not None and high is not None:
            label = "simultaneous 95% interval"
            series.append(Series("interval", arm, [index], [low], [high], label=label))
        series.append(Series("points", arm, [index], [value], label="difference"))
    return Figure(
        name=f"{prefix}pairs",
        title=f"Difference to {best}, with simultaneous 95% intervals",
        description=(
            f"For each other arm, its mean {workload.goal.words} minus that of {best}, with an"
            " interval that holds for all pairs and looks at once."
        ),
        x=Axis("", labels=tuple(row[0] for row in drawn)),
        y=Axis(f"{workload.goal.metric} minus that of {best}"),
        series=tuple(series),
        table=Table(f"{prefix}pairs_differences", title, columns, tuple(drawn)),
    )


def _to(best: str, pair: Pair) -> tuple[str, float, float | None, float | None]:
    """Returns the other arm of a pair, and its difference to the best arm with the interval."""
    if pair.worse == best:
        return pair.better, pair.difference, pair.low, pair.high
    low, high = (None if end is None else -end for end in (pair.high, pair.low))
    return pair.worse, -pair.difference, low, high
