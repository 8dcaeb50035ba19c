"""Which cases of a table the short suite runs: few, with every value and every pair of values.

`make test` leaves out what has the marker `long`. Three rules decide, each beside the tests:

- A table of slow cases is given to `parametrize` below, with what its cases vary in, such as the
  family of the optimizer and the dtype. A covering array keeps a few of them short.
- A slow test without a table is marked `@pytest.mark.long` if a quicker one looks at the same code.
  What decides that files are whole and runs resume has at least one short case each.
- All else, most of all what takes less than a second, is short. Property tests draw a quarter of
  their examples, which `examples` says.

Whether that is enough is measured: `make seeded_faults`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

# The part of their examples that property tests draw; tests/suite.py sets it.
DRAWN = 1.0

Case = TypeVar("Case")
Factor = Callable[[Case], Hashable]


def covering(
    cases: Iterable[Case], pairs: Sequence[Factor[Case]], each: Sequence[Factor[Case]] = ()
) -> list[Case]:
    """Returns few cases, in their order, in which every value and every pair of values occurs.

    A greedy search: it takes the case that adds most, and of several the first one, until nothing
    is missing. With factors of at most a dozen values, the number of cases is close to the least
    possible one, the product of the numbers of values of the two largest factors.

    Args:
        cases: all cases, those that are preferred first.
        pairs: functions of a case. Each pair of values of two of them that a case has occurs in
            one that is returned.
        each: further functions, of which each value occurs, and pairs need not.
    """
    every = list(cases)
    wanted = [_goals(case, pairs, each) for case in every]
    missing: set[Hashable] = set().union(*wanted)
    chosen = set()
    while missing:
        adds = [len(goals & missing) for goals in wanted]
        best = adds.index(max(adds))
        chosen.add(best)
        missing -= wanted[best]
    return [every[index] for index in sorted(chosen)]


def _goals(
    case: Case, pairs: Sequence[Factor[Case]], each: Sequence[Factor[Case]]
) -> set[Hashable]:
    values = list(enumerate(factor(case) for factor in (*pairs, *each)))
    return {*values, *combinations(values[: len(pairs)], 2)}


def parametrize(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    *pairs: Factor[Any],
    ids: Callable[[Any], str | None] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrizes a test as `pytest.mark.parametrize` does; most of its cases are long.

    Args:
        names: of the arguments.
        cases: the values, or tuples of values of several arguments.
        pairs: functions of a case, for `covering`; without one, the first case alone is short.
        ids: as for `pytest.mark.parametrize`.
    """
    every = list(cases)
    kept = covering(every, pairs or [lambda _: "the first"])
    several = not isinstance(names, str)
    values = [
        pytest.param(
            *(case if several else (case,)),
            marks=() if any(case is each for each in kept) else pytest.mark.long,
        )
        for case in every
    ]
    return pytest.mark.parametrize(names, values, ids=ids)


def examples(count: int) -> int:
    """Returns how many examples a property test draws: all of `count`, or a quarter of them."""
    return max(1, round(DRAWN * count))
