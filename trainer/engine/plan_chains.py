"""Describes the chains of parts of a plan, for a person who compares them with a paper."""

from functools import partial
from typing import Any

import optim
from optim.factories import bound, name_of, takes_recipe


def describe_chain(recipe: Any) -> list[str]:
    """Lists the parts of a group's `optim.chain` in their order; empty for other optimizers."""
    # Each line has a part and its arguments: "parts.momentum: decay 0.95, nesterov true".
    if not isinstance(recipe, partial) or recipe.func is not optim.chain:
        return []
    given = bound(recipe).arguments
    lines = [line for part in given["before"] for line in _describe_part(part)]
    lines.append("times -learning_rate")
    return [*lines, *(line for part in given.get("after", ()) for line in _describe_part(part))]


def _describe_part(part: Any, indent: str = "") -> list[str]:
    if not isinstance(part, partial):
        return [indent + name_of(part)]
    given = bound(part)
    given.apply_defaults()
    inner = [x for key, x in given.arguments.items() if takes_recipe(part.func, key) and x]
    told = [
        f"{key} {_told(x)}"
        for key, x in given.arguments.items()
        if x is not None and not takes_recipe(part.func, key) and not key.startswith("eps")
    ]
    line = indent + name_of(part).removeprefix("optim.") + (f": {', '.join(told)}" if told else "")
    around = [row for x in inner for row in _describe_part(x, f"{indent}  around ")]
    return [line, *around]


def _told(x: Any) -> str:
    if callable(x):
        return "scheduled"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_told, x))}]"
    if isinstance(x, bool):
        return str(x).lower()
    return f"{x:.4g}" if isinstance(x, float) else str(x)
