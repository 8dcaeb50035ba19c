"""The panel of searches whose worse trials were stopped early: who went on, and how it turned out.

Nothing here can show that a trial that was stopped would not have come out ahead; the panel shows
how much the order of those that went on still changed.
"""

import itertools
import math
from collections.abc import Sequence

from trainer.report.document import Block, Cell, Column, Table
from trainer.report.results import Workload
from trainer.report.spaces import Place, point_values
from trainer.sweep.halving import Cut

_NAMED = 9  # points that a cell lists
_TEXT = (
    "At each cut the points of a search were ordered by the goal after that step, and the trials of"
    " all but the best were stopped. What begins slowly, such as a small learning rate or an"
    " optimizer that gains late, is at a disadvantage, and no result tells how a point that was"
    " stopped would have ended. Two signs that a cut came too early: the winner was among the last"
    " that went on, or the order of those that went on changed much until the next cut or the end."
)
_COLUMNS = (
    Column("arm", "arm"),
    Column("search", "search", "integer"),
    Column("step", "cut at step", "integer"),
    Column("points", "points", "integer"),
    Column("valueless", "without value", "integer"),
    Column("kept", "went on", "integer"),
    Column("winner", "place of the winner", "integer"),
    Column("same", "pairs in the same order later", "integer"),
    Column("pairs", "of", "integer"),
    Column("order", "those that went on, the best first", "code"),
)
_NOTE = (
    "The place of the winner is that among all points at the cut. The pairs are those of points"
    " that went on and had values at the next cut, or at the end after the last one, without pairs"
    " of equal values: how many of them had the same order there."
)


def cuts_block(workload: Workload, prefix: str) -> Block:
    """Returns the panel of cuts."""
    rows = []
    for arm, cuts in workload.cuts.items():
        values = point_values(workload, arm)
        for search in range(workload.searches):
            made = workload.orders.get((arm, search), ())
            for cut, after in itertools.zip_longest(made, made[1:]):
                ended = after is None and cut.step == cuts.steps[-1]
                later = _values(after) if after else _at_end(values, search) if ended else {}
                rows.append(_row(workload, cut, later))
    if not rows:
        return Block(text=("No cut was made yet.",))
    table = Table(f"{prefix}cuts", "Cuts of the searches", _COLUMNS, tuple(rows), _NOTE)
    return Block(text=(_TEXT,), tables=(table,))


def _values(cut: Cut) -> dict[int, float]:
    """Returns the values of points at a cut, without those that have none."""
    pairs = zip(cut.order, cut.values, strict=True)
    return {number: value for number, value in pairs if value is not None}


def _at_end(values: dict[Place, float], search: int) -> dict[int, float]:
    """Returns the values at the end of the points of a search, without those that have none."""
    found = {number: x for (of, number), x in values.items() if of == search}
    return {number: x for number, x in found.items() if math.isfinite(x)}


def _row(workload: Workload, cut: Cut, later: dict[int, float]) -> tuple[Cell, ...]:
    winner = workload.winners.get((cut.arm, cut.search))
    place = cut.order.index(winner) + 1 if winner in cut.order else None
    same, pairs = _same_order([n for n in cut.going_on if n in later], _values(cut), later)
    names = [f"{number:04d}" for number in cut.going_on[:_NAMED]]
    more = [f"and {cut.kept - _NAMED} more"] if cut.kept > _NAMED else []
    search = cut.search if workload.searches > 1 else None
    return (
        cut.arm,
        search,
        cut.step,
        len(cut.order),
        cut.values.count(None),
        cut.kept,
        place,
        same if pairs else None,
        pairs or None,
        ", ".join([*names, *more]) or None,
    )


def _same_order(
    points: Sequence[int], before: dict[int, float], after: dict[int, float]
) -> tuple[int, int]:
    """Returns how many pairs, but those of equal values, have the same order, and of how many."""
    pairs = [
        (before[a] - before[b]) * (after[a] - after[b])
        for a, b in itertools.combinations(points, 2)
        if before[a] != before[b] and after[a] != after[b]
    ]
    return sum(product > 0 for product in pairs), len(pairs)
