"""Compares what a function is annotated to return with what an argument accepts."""

import collections.abc
import inspect
import typing
from typing import Any

from trainer.config.annotations import (
    accepts_anything,
    is_optimizer,
    is_protocol,
    is_scalar,
    union_members,
)


def takes_result(hint: Any, returns: Any) -> bool:
    """Returns whether the result of a function may fit an annotation.

    Only numbers, strings, booleans and optimizers are compared: other objects are accepted for
    what they do, not for their class.

    Args:
        hint: the annotation of the argument.
        returns: the annotation of what the function returns.
    """
    parts = union_members(hint)
    if accepts_anything(hint) or returns is inspect.Parameter.empty or accepts_anything(returns):
        return True
    if all(is_optimizer(part) for part in union_members(returns)):
        # The argument is not one for optimizers, which `returns_optimizer` compares.
        return any(is_protocol(part) for part in parts)
    if not all(is_scalar(part) for part in parts):
        return True
    # As for Python's own annotations, an int fits a float.
    return any(part in parts or (part is int and float in parts) for part in union_members(returns))


def returns_optimizer(hint: Any, returns: Any) -> bool:
    """Returns whether a function may return an optimizer, or another value that fits.

    Args:
        hint: the annotation of the argument, which accepts an optimizer.
        returns: the annotation of what the function returns.
    """
    if returns is inspect.Parameter.empty or accepts_anything(returns):
        return True
    wanted = tuple(part for part in union_members(hint) if inspect.isclass(part))
    if any(is_protocol(part) for part in wanted):
        return True
    return any(
        is_optimizer(part) or (inspect.isclass(part) and issubclass(part, wanted))
        for part in union_members(returns)
    )


def returns_factory(hint: Any, returns: Any) -> bool:
    """Returns whether a function has to be called to get a value that fits an annotation.

    This is the case if the annotation accepts a class, or a function that does not itself return a
    function, and the function is annotated to return a function or a class.

    Args:
        hint: the annotation of the argument.
        returns: the annotation of what the function returns.
    """
    if returns is inspect.Parameter.empty or accepts_anything(returns):
        return False
    wanted = [part for part in union_members(hint) if _is_function(part)]
    if (
        accepts_anything(hint)
        or not wanted
        or not all(_is_function(part) for part in union_members(returns))
    ):
        return False
    return not any(_may_return_function(part) for part in wanted)


def _may_return_function(wanted: Any) -> bool:
    if (typing.get_origin(wanted) or wanted) is type:
        return False
    result = (typing.get_args(wanted) or (Any,))[-1]
    return accepts_anything(result) or any(_is_function(part) for part in union_members(result))


def _is_function(part: Any) -> bool:
    origin = typing.get_origin(part) or part
    if is_protocol(origin):
        return "__call__" in dir(origin)
    return origin in (collections.abc.Callable, type)
