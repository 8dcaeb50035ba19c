"""The panel of searches whose worse trials were stopped early: who went on, and how it turned out.

Nothing here can show that a trial that was stopped would not have come out ahead; the panel shows
how much the order of those that went on still changed.
"""

import itertools
import math

from trainer.report.document import Block, Column, Columns, Table
from trainer.report.results import Workload
from trainer.report.spaces import point_values
from trainer.sweep.halving import Cut

_NAMED = 9  # points that a cell lists
_TEXT = (
    "At each cut the points of a search were ordered by the goal after that step, and the trials of"
    " all but the best were stopped. What begins slowly, such as a small learning rate or an"
    " optimizer that gains late, is at a disadvantage, and no result tells how a point that was"
    " stopped would have ended. Two signs that a cut came too early: the winner was among the last"
    " that went on, or the order of those that went on changed much until the next cut or the end."
)
_NOTE = (
    "The place of the winner is that among all points at the cut. The pairs are those of points"
    " that went on and had values at the next cut, or at the end after the last one, without pairs"
    " of equal values: how many of them had the same order there."
)


def cuts_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of cuts."""
    cuts: list[tuple[Cut, int, int]] = []
    for arm, planned in workload.cuts.items():
        values = point_values(workload, arm)
        for search in range(workload.searches):
            ends = {number: x for (of, number), x in values.items() if of == search}
            made = workload.orders.get((arm, search), ())
            for cut, after in itertools.zip_longest(made, made[1:]):
                later = {} if after is None else _values(after)
                if after is None and cut.step == planned.steps[-1]:
                    later = {number: x for number, x in ends.items() if math.isfinite(x)}
                cuts.append((cut, *_same_order(cut, later)))
    if not cuts:
        return Block(text=("No cut was made yet.",))
    several = workload.searches > 1

    def winner(cut: Cut) -> int | None:
        number = workload.winners.get((cut.arm, cut.search))
        return cut.order.index(number) + 1 if number in cut.order else None

    columns: Columns[tuple[Cut, int, int]] = {
        Column("arm", "arm"): lambda r: r[0].arm,
        Column("search", "search", "integer"): lambda r: r[0].search if several else None,
        Column("step", "cut at step", "integer"): lambda r: r[0].step,
        Column("points", "points", "integer"): lambda r: len(r[0].order),
        Column("valueless", "without value", "integer"): lambda r: r[0].values.count(None),
        Column("kept", "went on", "integer"): lambda r: r[0].kept,
        Column("winner", "place of the winner", "integer"): lambda r: winner(r[0]),
        Column("same", "pairs in the same order later", "integer"): lambda r: (
            r[1] if r[2] else None
        ),
        Column("pairs", "of", "integer"): lambda r: r[2] or None,
        Column("order", "those that went on, the best first", "code"): lambda r: _best(r[0]),
    }
    table = Table.of(f"{prefix}cuts", "Cuts of the searches", cuts, columns, _NOTE)
    return Block(text=(_TEXT,), tables=(table,))


def _values(cut: Cut) -> dict[int, float]:
    """Returns the values of points at a cut, without those that have none."""
    pairs = zip(cut.order, cut.values, strict=True)
    return {number: value for number, value in pairs if value is not None}


def _best(cut: Cut) -> str | None:
    """Returns the numbers of the points that went on, of many the first ones."""
    names = [f"{number:04d}" for number in cut.going_on[:_NAMED]]
    more = [f"and {cut.kept - _NAMED} more"] if cut.kept > _NAMED else []
    return ", ".join([*names, *more]) or None


def _same_order(cut: Cut, after: dict[int, float]) -> tuple[int, int]:
    """Returns how many pairs, but those of equal values, have the same order, and of how many."""
    before = _values(cut)
    pairs = [
        (before[a] - before[b]) * (after[a] - after[b])
        for a, b in itertools.combinations([n for n in cut.going_on if n in after], 2)
        if before[a] != before[b] and after[a] != after[b]
    ]
    return sum(product > 0 for product in pairs), len(pairs)
