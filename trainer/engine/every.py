"""Steps at which something is due: at one interval, or at intervals that change during a run.

An interval n makes the multiples of n due. `Every` is an interval, or a mapping from the step from
which on an interval holds to that interval, such as {0: 125, 2925: 25}: every 125 steps up to step
2,924, and from 2,925 on every 25.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainer.messages import plural

Every = int | Mapping[int, int]


class Stretch(NamedTuple):
    """Steps with one interval: `first` to `last`, both included; None for no end."""

    first: int
    last: int | None
    interval: int


def wrong(every: Every) -> str | None:
    """Returns what is wrong with intervals, as the end of a sentence; None if nothing is."""
    if isinstance(every, int) and not isinstance(every, bool):
        return None if every >= 1 else f"must be at least 1, got {every!r}"
    if not isinstance(every, Mapping) or not every:
        return f"must be a number of steps, or a mapping such as {{0: 125, 90%: 25}}, got {every!r}"
    for first, interval in every.items():
        if not all(isinstance(x, int) for x in (first, interval)) or first < 0 or interval < 1:
            return (
                "maps the step from which on an interval holds, at least 0, to the interval, at "
                f"least 1, and has {first!r}: {interval!r}"
            )
    if 0 not in every:
        return (
            f"says no interval from the first step on: it begins with step {min(every):,}. Add an "
            "interval for 0"
        )
    return None


def stretches(every: Every, after: int = 0) -> Iterator[Stretch]:
    """Yields the stretches of equal intervals behind a step, the first of them cut to that."""
    pairs = [(0, every)] if isinstance(every, int) else sorted(every.items())
    for index, (first, interval) in enumerate(pairs):
        last = pairs[index + 1][0] - 1 if index + 1 < len(pairs) else None
        if last is None or last > after:
            yield Stretch(max(first, after + 1), last, interval)


def is_due(every: Every, step: int) -> bool:
    """Returns whether it is due after a step, which is at least 1.

    Example:
        >>> [step for step in range(1, 41) if is_due({0: 10, 25: 4}, step)]
        [10, 20, 28, 32, 36, 40]
    """
    return step % next(stretches(every, step - 1)).interval == 0


def next_due(every: Every, step: int) -> int:
    """Returns the next step after `step` at which it is due.

    Example:
        >>> next_due(10, 20), next_due({0: 10, 25: 4}, 20)
        (30, 28)
    """
    for first, last, interval in stretches(every, step):
        found = -(-first // interval) * interval
        if last is None or found <= last:
            return found
    raise AssertionError("The last stretch has no end.")


def due_steps(every: Every, after: int, last: int) -> Iterator[int]:
    """Yields the steps behind `after` at which it is due, up to `last` included.

    Example:
        >>> list(due_steps({0: 10, 25: 4}, after=10, last=34))
        [20, 28, 32]
    """
    while (after := next_due(every, after)) <= last:
        yield after


def shortest(every: Every) -> int:
    """Returns the shortest interval."""
    return every if isinstance(every, int) else min(every.values())


def describe_changes(evaluations: Every) -> str:
    """Says when a run is evaluated, if the interval changes; else "".

    Example:
        >>> describe_changes({0: 125, 2925: 25})
        'evaluated every 125 steps, from step 2,925 on every 25, and after the last step'
    """
    if isinstance(evaluations, int):
        return ""
    first, *later = (x for x in stretches(evaluations))
    text = f"evaluated every {plural(first.interval, 'step').removeprefix('1 ')}"
    text += "".join(f", from step {x.first:,} on every {x.interval:,}" for x in later)
    return f"{text}, and after the last step"
