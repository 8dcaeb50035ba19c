"""Builds the parts of messages: descriptions of values, and suggestions."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.config.tree import Call, Key, Tree


def nearest(word: str, known: Iterable[Key]) -> str | None:
    """Returns the known name with the spelling nearest to a word.

    Args:
        word: the word.
        known: the names.

    Returns:
        The name, or None if none is near.

    Example:
        >>> nearest("adamW", ["adam", "adamw", "sgd"])
        'adamw'
    """
    names = {str(name).lower(): str(name) for name in known}
    # difflib takes time that grows with the product of the lengths.
    close = difflib.get_close_matches(word[:100].lower(), names, n=1)
    return names[close[0]] if close else None


def known_names(word: str, known: Iterable[Key], there_is: str = "There is") -> str:
    """Returns a sentence that suggests the nearest known name, or lists the known names.

    Args:
        word: the unknown name.
        known: the known names.
        there_is: how the sentence with the list begins.

    Returns:
        The sentence; "" if there are no names.

    Example:
        >>> known_names("widht", ["width", "depth"])
        "Did you mean 'width'?"
        >>> known_names("color", ["width", "depth"], "It has")
        'It has: depth, width.'
    """
    names = sorted(map(str, known))
    near = nearest(word, names)
    if near is not None:
        return f"Did you mean {near!r}?"
    return f"{there_is}: {listing(names)}." if names else ""


def listing(names: Sequence[str], most: int = 8) -> str:
    """Joins names by commas.

    Args:
        names: the names.
        most: how many names are shown; the others are counted.

    Example:
        >>> listing(["a", "b", "c"], most=2)
        'a, b, and 1 more'
    """
    shown = ", ".join(name[:100] for name in names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


def describe(tree: Tree) -> str:
    """Describes a value in a message.

    Args:
        tree: any value of a config.

    Example:
        >>> describe("fast"), describe(Call("optax.adamw"))
        ("the string 'fast'", 'a call of optax.adamw')
    """
    if isinstance(tree, Call):
        return f"the function {tree.name}" if tree.partial else f"a call of {tree.name}"
    if tree is None:
        return "null"
    kinds: list[tuple[type, str]] = [
        (bool, "the boolean"),  # before int: True is an instance of int
        (int, "the integer"),
        (float, "the float"),
        (str, "the string"),
        (list, "the list"),
        (dict, "the dict"),
    ]
    kind = next((words for of, words in kinds if isinstance(tree, of)), "the value")
    return f"{kind} {brief(tree)}"


def shorten(text: str, most: int = 60) -> str:
    """Returns a text of limited length.

    Args:
        text: any text.
        most: the largest number of characters; a longer text ends in three dots.

    Example:
        >>> shorten("optax.adamw(b2=0.95)", most=14)
        'optax.adamw...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def brief(tree: Tree, most: int = 60) -> str:
    """Returns a value as one line of limited length.

    Args:
        tree: any value of a config.
        most: the largest number of characters; a longer line ends in three dots.

    Example:
        >>> brief(Call("optax.adamw", {"b2": 0.95}))
        'optax.adamw(b2=0.95)'
    """
    return shorten(_brief(tree), most)


def _brief(tree: Tree) -> str:
    if isinstance(tree, Call):
        sign = "@" if tree.partial else ""
        return f"{sign}{tree.name}({_items(tree.kwargs, '=', str)})"
    if isinstance(tree, dict):
        return "{" + _items(tree, ": ", repr) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_brief, tree[:9])) + "]"
    return repr(tree[:100]) if isinstance(tree, str) else repr(tree)


def _items(items: Mapping[Any, Tree], sign: str, spell: Callable[[Any], str]) -> str:
    some = list(items.items())[:9]
    return ", ".join(f"{spell(key)}{sign}{_brief(value)}" for key, value in some)
