"""The panel of pairs: differences, intervals and tests."""

import math
from collections.abc import Sequence

from trainer.report.document import Axis, Block, Column, Figure, Series, Table
from trainer.report.pairs import Pair
from trainer.report.results import Workload
from trainer.report.wording import plural


def pairs_block(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Block:
    """Returns the panel of pairs: differences, intervals, tests.

    Args:
        workload: the results.
        pairs: from `compare_arms`.
        prefix: of the names of figures and tables.
    """
    if not pairs:
        return Block(text=("There are no two arms to compare.",))
    columns = (
        Column("arm", "better"),
        Column("than", "than"),
        Column("seeds", "seeds", "integer"),
        Column("difference", "difference", "number"),
        Column("low", "95% from", "number"),
        Column("high", "to", "number"),
        Column("test", "test"),
        Column("p", "p", "p"),
        Column("holm_p", "p, Holm", "p"),
        Column("smallest_p", "smallest p by signs", "p"),
        Column("improvement", "P(better)", "number"),
        Column("improvement_low", "95% from", "number"),
        Column("improvement_high", "to", "number"),
        Column("decision", "decision"),
        Column("seeds_needed", "seeds that would decide", "integer"),
    )
    rows = tuple(_row(pair) for pair in pairs)
    counts = plural(len([pair for pair in pairs if pair.p is not None]), "pair")
    note = (
        f"Differences are better minus worse. p is two-sided, and corrected by Holm over {counts}."
        " P(better) is the probability that a run of the first arm has the better value; it is"
        " called meaningful above 0.75 (arXiv:2103.03098). The last column is the number of seeds"
        " at which a paired t test would find a single difference of this size with a power of 0.8."
    )
    table = Table(
        f"{prefix}pairs", f"Pairs of arms, {workload.goal.words}", columns, rows, note
    ).compact()
    figure = _pairs_figure(workload, pairs, prefix)
    return Block(figures=(figure,) if figure else (), tables=(table,))


def _row(pair: Pair) -> tuple:
    improvement = pair.improvement
    difference = pair.difference
    return (
        pair.better,
        pair.worse,
        pair.n,
        difference.value if math.isfinite(difference.value) else None,
        difference.low,
        difference.high,
        pair.test if pair.p is not None else "none",
        pair.p,
        pair.corrected,
        pair.smallest,
        improvement.value if improvement else None,
        improvement.low if improvement else None,
        improvement.high if improvement else None,
        _decision(pair),
        pair.needed,
    )


def _decision(pair: Pair) -> str:
    if not pair.decided:
        return "not decided"
    if pair.improvement is None or "not meaningful" not in pair.improvement.decision:
        return "better"
    return "better, hardly meaningful"


def _pairs_figure(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Figure | None:
    """Draws the differences to the best arm."""
    drawn = [p for p in pairs if p.better == pairs[0].better and math.isfinite(p.difference.value)]
    if not drawn:
        return None
    series: list[Series] = [Series("rule", "", (), [0.0], label="no difference")]
    for index, pair in enumerate(drawn):
        d = pair.difference
        if d.low is not None and d.high is not None:
            series.append(Series("interval", pair.worse, [index], [-d.high], [-d.low]))
        series.append(Series("points", pair.worse, [index], [-d.value], label="difference"))
    best = pairs[0].better
    rows = tuple(
        (p.worse, -p.difference.value, _minus(p.difference.high), _minus(p.difference.low))
        for p in drawn
    )
    return Figure(
        name=f"{prefix}pairs",
        title=f"Difference to {best}, with 95% intervals (not corrected)",
        description=(
            f"For each other arm, its mean {workload.goal.words} minus that of {best}. An interval"
            " that contains 0 leaves open which of the two is better."
        ),
        x=Axis("", labels=tuple(pair.worse for pair in drawn)),
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
            rows,
        ),
    )


def _minus(x: float | None) -> float | None:
    return None if x is None else -x
