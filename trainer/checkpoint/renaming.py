"""Renames the parameters of a checkpoint for a warm start, by regular expressions."""

import re
from collections.abc import Mapping
from typing import Any

from optim.paths import fullmatch


def rename(params: Mapping[str, Any], rules: Mapping[str, str | None]) -> dict[str, Any]:
    r"""Renames the paths of parameters by regular expressions; raises ValueError.

    Example:
        >>> rename({"encoder/bias": 1, "head": 2}, {"encoder/(.*)": r"net/\1", "head": None})
        {'net/bias': 1}
    """
    # A pattern must match a whole path. The first rule that matches applies, and None drops the
    # parameter; one that no rule matches keeps its path.
    compiled = [(_pattern(pattern), replacement) for pattern, replacement in rules.items()]
    unused = set(rules)
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for path, value in params.items():
        target: str | None = path
        for pattern, replacement in compiled:
            if match := fullmatch(pattern, path):
                unused.discard(pattern.pattern)
                target = None if replacement is None else _expand(match, replacement)
                break
        if target is None:
            continue
        # A path cannot be both a leaf and a dict: with a leaf a/b, there cannot be a leaf a.
        inside = f"{target}/"
        clash = next(
            (t for t in result if f"{t}/".startswith(inside) or inside.startswith(f"{t}/")), None
        )
        if clash is not None:
            raise ValueError(
                f"Renaming would put {path!r} at {target!r}, where {origin[clash]!r} is already."
            )
        result[target], origin[target] = value, path
    if unused:
        raise ValueError(
            f"The renaming rule {sorted(unused)[0]!r} applies to no parameter; "
            f"there are {', '.join(list(params)[:6])}{', ...' if len(params) > 6 else ''}. "
            "A pattern must match a whole path, and only the first rule that matches applies."
        )
    return result


def _pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ValueError(f"The renaming rule {pattern!r} is not a regular expression: {e}.") from e


def _expand(match: re.Match[str], replacement: str) -> str:
    try:
        target = match.expand(replacement)
    except (re.error, IndexError) as e:
        raise ValueError(
            f"The replacement {replacement!r} of the renaming rule {match.re.pattern!r} "
            f"cannot be used: {e}."
        ) from e
    if not target or "" in target.split("/"):
        raise ValueError(
            f"The renaming rule {match.re.pattern!r} turns {match.string!r} into {target!r}, "
            "which is not a path."
        )
    return target
