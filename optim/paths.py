"""Names the leaves of a parameter tree, "blocks/attn/qkv/kernel", and matches patterns with them.

Matching has a time limit, because Python's `re` takes exponential time for some patterns:
(([a-z]*)*)*X tries all splits of a path.
"""

import difflib
import re
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import jax

_VALUE = jax.tree_util.GetAttrKey("value")


def path_name(path: tuple[Any, ...]) -> str:
    """Joins the keys of a jax key path by "/", on one line, with control characters escaped."""
    # The path of parameters that are a single array is empty.
    name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "params"
    if name.isprintable():
        return name
    # A key may be any string, and names are printed: a line break would end a line of the plan.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def names(tree: Any) -> list[str]:
    """Returns the path names of a tree's leaves, in the order of the leaves; two may be the same.

    Example:
        >>> names({"dense": {"kernel": 1.0, "bias": 0.0}, "layers": [2.0, 3.0]})
        ['dense/bias', 'dense/kernel', 'layers/0', 'layers/1']
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if any(path and path[-1] == _VALUE for path in paths):
        # A node whose only child is `value`, such as a variable of flax.nnx, has the name of its
        # value: "dense/kernel", not "dense/kernel/value". One with other children keeps the key:
        # without it, one leaf's name would be the beginning of the others'.
        below = Counter(path[:end] for path in paths for end in range(len(path)))
        alone = [len(path) > 1 and path[-1] == _VALUE and below[path[:-1]] == 1 for path in paths]
        paths = [path[:-1] if cut else path for path, cut in zip(paths, alone, strict=True)]
    return [path_name(path) for path in paths]


def flatten(tree: Any, verbatim: bool = False) -> dict[str, Any]:
    """Returns leaves by their path names, in order; raises ValueError if two are the same."""
    # If `verbatim`, a name contains every key of the path, unescaped, as in saved files. By default
    # the names are those of `names`, which users see and match. Two leaves have the same name in
    # {"a/b": x, "a": {"b": y}}.
    called = names(tree)
    if verbatim:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        called = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    by_path = dict(zip(called, jax.tree.leaves(tree), strict=True))
    if len(by_path) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise ValueError(
            f"Two leaves have the same path, {twice!r}. Rename one of them: a key must not contain "
            f"'/'."
        )
    return by_path


def unflatten(like: Any, by_path: dict[str, Any]) -> Any:
    """Inverts `flatten`: builds a tree like `like` from leaves by name; KeyError if one lacks."""
    return jax.tree.unflatten(jax.tree.structure(like), [by_path[name] for name in names(like)])


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
