"""The panel of pairs: differences, intervals and tests."""

import math
from collections.abc import Sequence

from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.pairs import Pair, standings
from trainer.report.results import Workload
from trainer.report.statistics import noether
from trainer.report.wording import shown

_ARMS = (Column("arm", "arm"), Column("against", "against"))
_DECISIONS = (
    *_ARMS,
    Column("difference", "difference", "number"),
    Column("low", "95% from", "number"),
    Column("high", "to", "number"),
    Column("deviations", "in standard deviations", "number"),
    Column("p", "adjusted p", "p"),
    Column("decision", "decision"),
)
_FOUND = (Column("found", "found with a power of 0.8", "number"),)
_NEEDED = (
    Column("units_needed", "needed, in a fresh sweep", "integer"),
    Column("units_from", "from", "integer"),
    Column("units_to", "to", "integer"),
)
_TESTS = (
    *_ARMS,
    Column("units", "units", "integer"),
    Column("test", "test"),
    Column("looks", "judged at"),
    Column("improvement", "P(better)", "number"),
    Column("improvement_low", "95% from", "number"),
    Column("improvement_high", "to", "number"),
)
_TEST_SETS = (
    *_ARMS,
    Column("examples", "test examples", "integer"),
    Column("difference", "difference", "number"),
    Column("low", "95% from", "number"),
    Column("high", "to", "number"),
    Column("units_error", "standard error over units", "number"),
    Column("examples_error", "over examples", "number"),
)
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
    words, figure = workload.goal.words, _pairs_figure(workload, pairs, prefix)
    units = "searches" if workload.searches > 1 else "seeds"
    relevant = workload.goal.relevant
    last = (
        " The last column is the difference that so many units find with a power of 0.8, in"
        " standard deviations."
    )
    if relevant is not None:
        last = (
            f" The last columns are the number of {units} at which a fresh sweep would find the"
            f" difference that matters, {shown(relevant)}, with a power of 0.8, and its 80%"
            " interval for normal differences, because their standard deviation is estimated."
        )
    decisions = Table(
        f"{prefix}pairs",
        f"Pairs of arms, {words}",
        (*_DECISIONS, *(_FOUND if relevant is None else _NEEDED)),
        tuple(_decided(pair, relevant is not None) for pair in pairs),
        "The arm with the better mean stands first (the one that is better more often, where a run"
        " has no value), and a difference is its mean minus the other one. The intervals hold with"
        " a probability of 95% for all pairs and all looks at the results at once; an arm is better"
        " where its interval excludes 0, and p, which is adjusted for all pairs and looks, is below"
        f" 0.05 exactly then.{last}",
    )
    tests = Table(
        f"{prefix}pairs_tests",
        "Tests of these pairs",
        _TESTS,
        tuple(_tested(pair) for pair in pairs),
        f"The units are {units}. P(better) is the probability that a unit of the first arm has the"
        " better value, with the interval of this single pair; above 0.75 it is called meaningful"
        f" (arXiv:2103.03098), which {noether()} {units} would show with error rates of 5%.",
    )
    tables = [decisions.compact(), tests.compact(), *_test_sets(pairs, prefix, units)]
    return Block(figures=(figure,) if figure else (), tables=tuple(tables))


def _test_sets(pairs: Sequence[Pair], prefix: str, units: str) -> list[Table]:
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
        f"Each interval holds for other {units} and other test examples at once, with a probability"
        f" of 95% for its pair; it is computed from the differences on the single examples {which}."
        " Where it includes 0, the order may change on another test set of this size."
    )
    rows = tuple(
        (
            pair.better,
            pair.worse,
            found.examples,
            found.difference,
            found.low,
            found.high,
            found.units_deviation,
            found.examples_deviation,
        )
        for pair, found, _ in known
    )
    title = "Pairs of arms on other test sets"
    return [Table(f"{prefix}pairs_test_sets", title, _TEST_SETS, rows, note)]


def _decided(pair: Pair, relevant: bool) -> tuple[Cell, ...]:
    known = math.isfinite(pair.difference)
    low, high = pair.needed_range or (None, None)
    return (
        pair.better,
        pair.worse,
        pair.difference if known else None,
        pair.low,
        pair.high,
        abs(pair.difference) / pair.deviation if known and pair.deviation else None,
        pair.p,
        decision(pair),
        *((pair.needed, low, high) if relevant else (pair.finds,)),
    )


def _tested(pair: Pair) -> tuple[Cell, ...]:
    improvement = pair.improvement
    return (
        pair.better,
        pair.worse,
        pair.n,
        pair.test or "none",
        ", ".join(map(str, pair.looks)) or None,
        improvement.value if improvement else None,
        improvement.low if improvement else None,
        improvement.high if improvement else None,
    )


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
    drawn = [_to(best, p) for p in pairs if best in (p.better, p.worse) and not p.without_mean]
    if not drawn:
        return None
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
        table=Table(
            f"{prefix}pairs_differences",
            f"Differences to {best}",
            (
                Column("arm", "arm"),
                Column("difference", "difference", "number"),
                Column("low", "95% from", "number"),
                Column("high", "to", "number"),
            ),
            tuple(drawn),
        ),
    )


def _to(best: str, pair: Pair) -> tuple[str, float, float | None, float | None]:
    """Returns the other arm of a pair, and its difference to the best arm with the interval."""
    if pair.worse == best:
        return pair.better, pair.difference, pair.low, pair.high
    low, high = (None if end is None else -end for end in (pair.high, pair.low))
    return pair.worse, -pair.difference, low, high
