"""Compares the rows of metrics of two runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.writers.lines import PREFIXES

Rows = Sequence[Mapping[str, Any]]

_CLOCKED = "perf/"  # rows of equal runs differ in these
_EVALUATIONS = tuple(PREFIXES.values())


class Final(NamedTuple):
    """The last values of a metric in two runs.

    Attributes:
        name: the name of the metric.
        a: step and value in A; None if it has none.
        b: the same in B.
        first: the first step at which both have a value and the values differ; None if there is
            none, or if the metric is clocked.
    """

    name: str
    a: tuple[int, float] | None
    b: tuple[int, float] | None
    first: int | None


@dataclass(frozen=True)
class RowDifferences:
    """How the rows of two runs differ, without what is clocked.

    Attributes:
        shared: the steps of which both runs have a row, increasing.
        only_a: how many steps only A has a row of.
        only_b: the same for B.
        first: the first shared step whose rows differ; None if none do.
        names: the metrics that differ in that row, those that only one has included.
        metrics: the last values of every metric, those of evaluations first.
    """

    shared: tuple[int, ...]
    only_a: int
    only_b: int
    first: int | None
    names: tuple[str, ...]
    metrics: tuple[Final, ...]

    @property
    def equal_up_to(self) -> int | None:
        """The last shared step before the first difference; None if there is none."""
        equal = [step for step in self.shared if self.first is None or step < self.first]
        return equal[-1] if equal else None


def compare_rows(a: Rows, b: Rows) -> RowDifferences:
    """Compares the rows of two runs bit for bit.

    Args:
        a: the rows of one run, as `writers.read_metrics` returns them.
        b: the rows of the other run.
    """
    old, new = ({row["step"]: row for row in rows} for rows in (a, b))
    shared = [step for step in old if step in new]
    found = ((step, _differing(old[step], new[step])) for step in shared)
    first, names = next(((step, names) for step, names in found if names), (None, ()))
    return RowDifferences(
        tuple(shared),
        len(old) - len(shared),
        len(new) - len(shared),
        first,
        tuple(names),
        tuple(_finals(a, b)),
    )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys(name for name in [*a, *b] if not name.startswith(_CLOCKED))
    return [name for name in names if _bits(a.get(name)) != _bits(b.get(name))]


def _bits(value: Any) -> str:
    """Returns a text that is equal for equal bits: NaN equals NaN, and -0.0 differs from 0.0."""
    return "" if value is None else repr(float(value))


def _finals(a: Rows, b: Rows) -> list[Final]:
    finals = []
    for name in sorted({name for row in [*a, *b] for name in row} - {"step"}, key=_order):
        x, y = ({row["step"]: row[name] for row in rows if name in row} for rows in (a, b))
        differing = (step for step in x if step in y and _bits(x[step]) != _bits(y[step]))
        first = None if name.startswith(_CLOCKED) else next(differing, None)
        last_a, last_b = (max(values.items(), default=None) for values in (x, y))
        finals.append(Final(name, last_a, last_b, first))
    return finals


def _order(name: str) -> tuple[int, str]:
    """Sorts evaluations first and what is clocked last."""
    ranks = [*_EVALUATIONS, "", _CLOCKED]
    rank = next((r for r, start in enumerate(ranks) if start and name.startswith(start)), 2)
    return rank, name


def to_draw(finals: Sequence[Final]) -> list[str]:
    """Returns the metrics that both runs have and whose curves say most.

    Args:
        finals: the metrics, in the order of `RowDifferences`.

    Returns:
        At most two: of the validation split, else of the test split, else the loss of training.
    """
    both = [each.name for each in finals if each.a and each.b]
    for start in (*_EVALUATIONS, "train/"):
        names = [name for name in both if name.startswith(start)]
        if names:
            return sorted(names, key=lambda name: name != f"{start}loss")[:2]
    return []
