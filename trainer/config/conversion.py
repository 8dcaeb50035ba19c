"""Turns a value of a config into what an annotation asks for, where it fits."""

import collections.abc
import os
import pathlib
import typing
from typing import Any

from trainer.config.annotations import MAPPINGS, SEQUENCES, SETS, is_literal, is_open, members
from trainer.config.tree import Tree


class Misfit(Exception):
    """A value does not fit an annotation."""


def leaf(value: Tree, hint: Any, default: Any = None) -> Any:
    """Returns a leaf as the annotation wants it (3 as 3.0, a path as a Path); raises Misfit."""
    parts = members(hint)
    if is_open(hint) or collections.abc.Hashable in parts:
        return value
    for part in parts:
        if is_literal(part) and any(
            type(value) is type(choice) and value == choice for choice in typing.get_args(part)
        ):
            return value
    if value is None and type(None) in parts:
        return value
    if isinstance(value, bool):
        return _bool(value, parts)
    if isinstance(value, int | float):
        return _number(value, parts, default)
    if isinstance(value, str):
        return _string(value, parts)
    raise Misfit


def _bool(value: bool, parts: list[Any]) -> bool:
    # jax.typing.ArrayLike holds bool; where floats are meant, a config does not
    if bool in parts and float not in parts:
        return value
    raise Misfit


def _number(value: int | float, parts: list[Any], default: Any) -> int | float:
    if isinstance(value, int):
        if int in parts and not isinstance(default, float):
            return value
        if float in parts or _holds_numbers(parts):
            return float(value)
    elif float in parts or complex in parts or _holds_numbers(parts):
        return value
    raise Misfit


def _holds_numbers(parts: list[Any]) -> bool:
    return any(
        getattr(part, "__name__", "") in ("Array", "ndarray", "number", "Real", "Number")
        for part in parts
    )


def _string(value: str, parts: list[Any]) -> Any:
    if str in parts or any(getattr(part, "__name__", "") == "dtype" for part in parts):
        return value
    if any((typing.get_origin(part) or part) in (pathlib.Path, os.PathLike) for part in parts):
        return pathlib.Path(value)
    raise Misfit


def items(hint: Any, count: int) -> tuple[list[Any], type] | None:
    """Returns an annotation for each element of a list, and the type that is asked for.

    Returns None where no list fits; raises Misfit where one of this length does not.
    """
    if is_open(hint):
        return [Any] * count, list
    wrong_length = False
    elements: list[Any] = []
    kinds: list[type] = []
    for part in members(hint):
        origin = typing.get_origin(part) or part
        args = typing.get_args(part)
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(args) == count:
                return list(args), tuple
            wrong_length = True
        elif origin in (list, tuple, *SEQUENCES, *SETS):
            kind = list if origin in (list, collections.abc.MutableSequence) else tuple
            kind = origin if origin in (set, frozenset) else kind
            kind = frozenset if origin is collections.abc.Set else kind
            kinds.append(kind)
            elements.append(args[0] if args else Any)
    if not elements and wrong_length:
        raise Misfit
    return ([typing.Union[tuple(elements)]] * count, kinds[0]) if elements else None  # noqa: UP007


def entries(hint: Any) -> tuple[Any, Any] | None:
    """Returns the annotations of the keys and values of a dict, or None where none fits."""
    if is_open(hint):
        return Any, Any
    found = [
        (str, Any) if typing.is_typeddict(part) else typing.get_args(part) or (Any, Any)
        for part in members(hint)
        if (typing.get_origin(part) or part) in MAPPINGS or typing.is_typeddict(part)
    ]
    if not found:
        return None
    keys, values = zip(*found, strict=True)
    return typing.Union[keys], typing.Union[values]  # noqa: UP007  # of as many as there are
