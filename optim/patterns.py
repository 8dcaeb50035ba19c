"""Matches regular expressions with path names, within a time limit.

Python's `re` takes exponential time for some patterns: (([a-z]*)*)*X tries all splits of a path.
"""

import difflib
import re
import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

_SECONDS = 1.0  # of processor time; an ordinary pattern takes microseconds


class SlowPattern(ValueError):
    """Raised if matching a pattern takes too long."""


# Every trace matches all parameters again, and the timer costs 30 times as much as the match.
@lru_cache(maxsize=1 << 16)
def fullmatch(pattern: re.Pattern[str], path: str) -> re.Match[str] | None:
    """Matches a whole path name; raises SlowPattern after a second of processor time."""
    # It raises only in the main thread, because no other handles signals.
    with _limit(pattern, path):
        return pattern.fullmatch(path)


def occurs(pattern: re.Pattern[str], path: str) -> bool:
    """Returns whether a pattern occurs in a path name; False if that takes more than a second."""
    try:
        with _limit(pattern, path):
            return pattern.search(path) is not None
    except SlowPattern:
        return False


def nearest_parameters(pattern: re.Pattern[str], paths: Collection[str], owner: str) -> str:
    """Says which parameters are nearest to a pattern that matches none, and what to do."""
    # `owner` is what has the pattern, such as "group".
    partly = [path for path in paths if occurs(pattern, path)]
    near = ", ".join(partly[:3]) or nearest_paths(pattern.pattern, paths)
    advice = f"Correct the pattern, or remove the {owner}."
    if partly:
        advice = "A pattern matches a whole path: add .* where other text may follow or precede."
    return f"The nearest parameters are {near}. {advice}"


def nearest_paths(text: str, paths: Collection[str]) -> str:
    """Returns the three path names nearest to a text, also if none is like it."""
    near = difflib.get_close_matches(text, paths, n=max(1, len(paths)), cutoff=0.0)
    # First those that end as the text does: kernels for a pattern of kernels, whatever holds them.
    near.sort(key=lambda path: path.rpartition("/")[2] != text.rpartition("/")[2])
    return ", ".join(near[:3])


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Returns " Did you mean 'adamw'?", or "" if no known name is near another."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@contextmanager
def _limit(pattern: re.Pattern[str], path: str) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise SlowPattern(
            f"Comparing the pattern {pattern.pattern!r} with {path!r} takes too long. Repetitions "
            f"within repetitions, as in (a*)*, take exponential time: write it without them."
        )

    # SIGVTALRM counts processor time and is rarely used; `re` handles signals while it matches.
    # A process has one such timer: where it runs already, setting it again would cancel it.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
        yield
    finally:
        # In this order: the default action of SIGVTALRM ends the process.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
