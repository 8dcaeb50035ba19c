"""Converts values of a config to annotated types."""

import collections.abc
import os
import pathlib
import typing
from typing import Any

from trainer.config.annotations import (
    MAPPINGS,
    SEQUENCES,
    SETS,
    accepts_anything,
    is_literal,
    takes_dtype,
    union_members,
)
from trainer.config.tree import Tree


class TypeMismatch(Exception):
    """A value does not fit an annotation."""


def leaf(value: Tree, hint: Any, default: Any = None) -> Any:
    """Converts a leaf to the annotated type: 3 to 3.0, a string to a Path.

    Args:
        value: a string, number, boolean or None.
        hint: the annotation.
        default: the default of the parameter; an integer becomes a float if this is one.

    Returns:
        The value, converted where necessary.

    Raises:
        TypeMismatch: the value does not fit the annotation.

    Example:
        >>> leaf(3, float | None)
        3.0
    """
    parts = union_members(hint)
    if accepts_anything(hint) or collections.abc.Hashable in parts:  # every leaf is hashable
        return value
    for part in parts:
        # 1 == 1.0 == True in Python, so that the types are compared as well.
        if is_literal(part) and any(
            type(value) is type(choice) and value == choice for choice in typing.get_args(part)
        ):
            return value
    if value is None and type(None) in parts:
        return value
    # Before the numbers: True is an instance of int.
    if isinstance(value, bool):
        return _bool(value, parts)
    if isinstance(value, int | float):
        return _number(value, parts, default)
    if isinstance(value, str):
        return _string(value, parts)
    raise TypeMismatch


def _bool(value: bool, parts: list[Any]) -> bool:
    # jax.typing.ArrayLike accepts bool, but a config that writes true for a float is mistaken
    if bool in parts and float not in parts:
        return value
    raise TypeMismatch


def _number(value: int | float, parts: list[Any], default: Any) -> int | float:
    if isinstance(value, int):
        # optax annotates floats as ArrayLike, which includes int. A 1 in the place of 0.9 becomes
        # 1.0, because only floats follow schedules and are inputs of the program.
        if int in parts and not isinstance(default, float):
            return value
        if float in parts or _holds_numbers(parts):
            return float(value)
    elif float in parts or complex in parts or _holds_numbers(parts):
        return value
    raise TypeMismatch


def _holds_numbers(parts: list[Any]) -> bool:
    return any(
        getattr(part, "__name__", "") in ("Array", "ndarray", "number", "Real", "Number")
        for part in parts
    )


def _string(value: str, parts: list[Any]) -> Any:
    # jax takes a dtype by its name.
    if str in parts or any(takes_dtype(part) for part in parts):
        return value
    if any((typing.get_origin(part) or part) in (pathlib.Path, os.PathLike) for part in parts):
        return pathlib.Path(value)
    raise TypeMismatch


def items(hint: Any, count: int) -> tuple[list[Any], type] | None:
    """Returns an annotation for each element of a list, and the sequence type.

    Args:
        hint: the annotation of the list.
        count: the length of the list.

    Returns:
        The annotations and the type; None if the annotation does not accept a list.

    Raises:
        TypeMismatch: the annotation accepts lists, but none of this length.
    """
    if accepts_anything(hint):
        return [Any] * count, list
    wrong_length = False
    elements: list[Any] = []
    kinds: list[type] = []
    for part in union_members(hint):
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
        raise TypeMismatch
    return ([typing.Union[tuple(elements)]] * count, kinds[0]) if elements else None  # noqa: UP007


def entries(hint: Any) -> tuple[Any, Any] | None:
    """Returns the annotations of a dict's keys and values.

    Args:
        hint: the annotation of the dict.

    Returns:
        The two annotations; None if the annotation does not accept a dict.

    Example:
        >>> entries(dict[str, float] | None)
        (<class 'str'>, <class 'float'>)
    """
    if accepts_anything(hint):
        return Any, Any
    found = [
        (str, Any) if typing.is_typeddict(part) else typing.get_args(part) or (Any, Any)
        for part in union_members(hint)
        if (typing.get_origin(part) or part) in MAPPINGS or typing.is_typeddict(part)
    ]
    if not found:
        return None
    keys, values = zip(*found, strict=True)
    return typing.Union[keys], typing.Union[values]  # noqa: UP007  # the number of members varies
