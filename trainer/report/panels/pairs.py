"""The panel of pairs: differences, intervals and tests."""

import math
from collections.abc import Sequence

from trainer.messages import plural
from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.pairs import Pair, level_text, standings
from trainer.report.results import Workload
from trainer.report.statistics import noether

_DECISIONS = (
    Column("arm", "better"),
    Column("than", "than"),
    Column("difference", "difference", "number"),
    Column("low", "95% from", "number"),
    Column("high", "to", "number"),
    Column("p", "p", "p"),
    Column("decision", "decision"),
    Column("seeds_needed", "seeds that would decide", "integer"),
)
_TESTS = (
    Column("arm", "better"),
    Column("than", "than"),
    Column("seeds", "seeds", "integer"),
    Column("test", "test"),
    Column("p", "p, not corrected", "p"),
    Column("smallest_p", "smallest p", "p"),
    Column("improvement", "P(better)", "number"),
    Column("improvement_low", "95% from", "number"),
    Column("improvement_high", "to", "number"),
)


def pairs_block(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Block:
    """Returns the panel of pairs: differences, intervals, tests.

    Args:
        workload: the results.
        pairs: from `compare_arms`.
        prefix: of the names of figures and tables.
    """
    if not pairs:
        return Block(text=("There are no two arms to compare.",))
    words, figure = workload.goal.words, _pairs_figure(workload, pairs, prefix)
    counts = plural(len([pair for pair in pairs if pair.p is not None]), "pair")
    decisions = Table(
        f"{prefix}pairs",
        f"Pairs of arms, {words}",
        _DECISIONS,
        tuple(_decided(pair) for pair in pairs),
        "Differences are better minus worse, with t intervals that are not corrected. p is"
        f" two-sided and corrected by Holm over {counts}. The last column is the number of seeds at"
        " which a difference of this size would be found with a power of 0.8, at the level"
        f" {level_text(pairs)}.",
    )
    tests = Table(
        f"{prefix}pairs_tests",
        "Tests of these pairs",
        _TESTS,
        tuple(_tested(pair) for pair in pairs),
        "P(better) is the probability that a run of the first arm has the better value; it is"
        f" called meaningful above 0.75 (arXiv:2103.03098), which {noether()} seeds would show with"
        " error rates of 5%. The smallest p is what tests by signs or ranks can reach at this"
        " number of seeds.",
    )
    tables = (decisions.compact(), tests.compact())
    return Block(figures=(figure,) if figure else (), tables=tables)


def _decided(pair: Pair) -> tuple[Cell, ...]:
    difference = pair.difference
    return (
        pair.better,
        pair.worse,
        difference.value if math.isfinite(difference.value) else None,
        difference.low,
        difference.high,
        pair.corrected,
        _decision(pair),
        pair.needed,
    )


def _tested(pair: Pair) -> tuple[Cell, ...]:
    improvement = pair.improvement
    return (
        pair.better,
        pair.worse,
        pair.n,
        pair.test if pair.p is not None else "none",
        pair.p,
        pair.smallest,
        improvement.value if improvement else None,
        improvement.low if improvement else None,
        improvement.high if improvement else None,
    )


def _decision(pair: Pair) -> str:
    if not pair.decided:
        return "not decided"
    if pair.improvement is None or "not meaningful" not in pair.improvement.decision:
        return "better"
    return "better, hardly meaningful"


def _pairs_figure(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Figure | None:
    """Draws the differences to the arm with the best mean."""
    best = standings(workload)[0].arm
    drawn = [_to(best, p) for p in pairs if best in (p.better, p.worse) and not p.valueless]
    if not drawn:
        return None
    series: list[Series] = [Series("rule", "", (), [0.0], label="no difference")]
    for index, (arm, value, low, high) in enumerate(drawn):
        if low is not None and high is not None:
            series.append(Series("interval", arm, [index], [low], [high]))
        series.append(Series("points", arm, [index], [value], label="difference"))
    return Figure(
        name=f"{prefix}pairs",
        title=f"Difference to {best}, with single 95% intervals",
        description=(
            f"For each other arm, its mean {workload.goal.words} minus that of {best}, with the"
            " interval of this single pair; the table decides by p values that are corrected for"
            " all pairs."
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
    """Returns the other arm of a pair, and its difference to the best with its interval."""
    d = pair.difference
    if pair.worse == best:
        return pair.better, d.value, d.low, d.high
    low, high = (None if end is None else -end for end in (d.high, d.low))
    return pair.worse, -d.value, low, high
