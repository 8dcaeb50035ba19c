"""Reads an annotation: what may stand there, and what to call it in a message."""

import collections.abc
import functools
import inspect
import types
import typing
from typing import Any

from trainer.config.units import is_steps

SEQUENCES = (
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.MutableSequence,
)
SETS = (set, frozenset, collections.abc.Set)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_RECIPES = ("GradientTransformation", "GradientTransformationExtraArgs")


def of(hint: Any, default: Any) -> Any:
    """Returns the annotation of a parameter; without one, the type of its default speaks."""
    if hint is not inspect.Parameter.empty:
        return hint
    if default is inspect.Parameter.empty or default is None:
        return Any
    if callable(default):
        return Any
    if isinstance(default, list | tuple):
        return type(default)
    return type(default) if type(default) in (bool, int, float, str, dict) else Any


def with_float(hint: Any, default: Any) -> Any:
    """Returns an annotation widened to a float; without one, that of a float or a schedule."""
    if hint is not inspect.Parameter.empty:
        return hint if takes_float(hint) else typing.Union[float, hint]  # noqa: UP007
    scheduled = float | collections.abc.Callable[..., Any]
    return scheduled | None if default is None else scheduled


def members(hint: Any) -> list[Any]:
    """Returns what an annotation is a union of: itself, if it is none."""
    while True:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif isinstance(hint, typing.TypeVar):
            hint = hint.__bound__ or Any
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif origin in (typing.Final, typing.ClassVar) or str(origin) == "typing.Required":
            hint = (typing.get_args(hint) or (Any,))[0]
        else:
            break
    if origin in (typing.Union, types.UnionType):
        return [part for each in typing.get_args(hint) for part in members(each)]
    return [type(None) if hint is None else hint]


def is_open(hint: Any) -> bool:
    """Says whether an annotation takes anything, as far as can be known."""
    return any(
        part in (Any, object, inspect.Parameter.empty) or isinstance(part, str | typing.ForwardRef)
        for part in members(hint)
    )


def mentions_recipe(hint: Any) -> bool:
    """Says whether an optimizer is asked for, which stays a recipe until the step is traced."""
    return any(_is_recipe(part) for part in members(hint))


def _is_recipe(part: Any) -> bool:
    part = typing.get_origin(part) or part
    if part is functools.partial:
        return True
    module = getattr(part, "__module__", None) or ""
    return module.split(".")[0] == "optax" and getattr(part, "__name__", "") in _RECIPES


def takes_callable(hint: Any) -> bool:
    """Says whether any function at all may stand there, as for Callable[..., Any]."""
    return any(
        (typing.get_origin(part) or part) is collections.abc.Callable for part in members(hint)
    )


def takes_float(hint: Any) -> bool:
    """Says whether a float fits."""
    return is_open(hint) or float in members(hint)


def takes_int(hint: Any) -> bool:
    """Says whether an integer is asked for."""
    parts = members(hint)
    return int in parts and float not in parts and not is_open(hint)


def takes_number(hint: Any) -> bool:
    """Says whether an integer or a float is asked for."""
    return not is_open(hint) and not {int, float}.isdisjoint(members(hint))


def takes_none(hint: Any) -> bool:
    """Says whether None fits."""
    return is_open(hint) or type(None) in members(hint)


def takes_leaf(hint: Any) -> bool:
    """Says whether a string, a number or a boolean may fit."""
    return is_open(hint) or any(_is_scalar(part) for part in members(hint))


def takes_function(hint: Any) -> bool:
    """Says whether a function itself may stand there, and not only what it returns."""
    return is_open(hint) or any(_takes_function(part) for part in members(hint))


def is_factory_of_what_fits(hint: Any, returns: Any) -> bool:
    """Says whether a function is known to return what is asked for, and not to be it.

    So it is where a function of which the result is known, or a class, is asked for, and the
    function says that it returns a function, or a class.
    """
    if returns is inspect.Parameter.empty or is_open(returns):
        return False
    wanted = [part for part in members(hint) if _is_function(part)]
    if is_open(hint) or not wanted or not all(_is_function(part) for part in members(returns)):
        return False
    return not any(_may_return_function(part) for part in wanted)


def _is_function(part: Any) -> bool:
    return (typing.get_origin(part) or part) in (collections.abc.Callable, type)


def _may_return_function(wanted: Any) -> bool:
    if (typing.get_origin(wanted) or wanted) is type:
        return False
    result = (typing.get_args(wanted) or (Any,))[-1]
    return is_open(result) or any(_is_function(part) for part in members(result))


def _takes_function(part: Any) -> bool:
    origin = typing.get_origin(part) or part
    if origin in (type, collections.abc.Callable, functools.partial) or _is_recipe(part):
        return True
    if not inspect.isclass(origin):
        return not is_literal(part)
    return _is_protocol(origin) or "__call__" in dir(origin) and not _is_scalar(origin)


def _is_protocol(part: Any) -> bool:
    return getattr(part, "_is_protocol", False)


def takes_result(hint: Any, returns: Any) -> bool:
    """Says whether what a function returns may stand there, as far as annotations tell.

    Only numbers, strings and booleans are compared, and optimizers are known; what else a function
    returns is known by its behaviour and not by its class.
    """
    parts = members(hint)
    if is_open(hint) or returns is inspect.Parameter.empty or is_open(returns):
        return True
    if all(_is_recipe(part) for part in members(returns)):
        return any(_is_protocol(part) for part in parts)
    if not all(_is_scalar(part) for part in parts):
        return True
    return any(part in parts or (part is int and float in parts) for part in members(returns))


def takes_recipe(hint: Any, returns: Any) -> bool:
    """Says whether a function returns an optimizer, or what else fits, as far as is known."""
    if returns is inspect.Parameter.empty or is_open(returns):
        return True
    wanted = tuple(part for part in members(hint) if inspect.isclass(part))
    if any(_is_protocol(part) for part in wanted):
        return True
    return any(
        _is_recipe(part) or (inspect.isclass(part) and issubclass(part, wanted))
        for part in members(returns)
    )


def _is_scalar(part: Any) -> bool:
    return part in (bool, int, float, complex, str, type(None)) or is_literal(part)


def is_literal(part: Any) -> bool:
    """Says whether one of some values is asked for."""
    return typing.get_origin(part) is typing.Literal


_WORDS = {bool: "true or false", int: "an integer", float: "a float", str: "a string"}


def words(hint: Any) -> str:
    """Returns what an annotation asks for, for a message."""
    found: list[str] = ["a number of steps"] if is_steps(hint) else []
    for part in members(hint):
        if is_steps(hint) and part in (int, str):
            continue
        origin = typing.get_origin(part) or part
        if part in _WORDS:
            word = _WORDS[part]
        elif part is type(None):
            word = "null"
        elif is_literal(part):
            word = " or ".join(map(repr, typing.get_args(part)))
        elif origin is collections.abc.Callable:
            word = "a function"
        elif origin is type:
            word = "a class"
        elif origin in (list, tuple, *SEQUENCES, *SETS):
            word = "a list"
        elif origin in MAPPINGS:
            word = "a dict"
        elif part is functools.partial and takes_callable(hint):
            continue
        elif _is_recipe(part):
            word = "an optimizer"
        else:
            name = getattr(origin, "__name__", str(origin))
            word = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
        found.append(word)
    if "a float" in found:  # jax.typing.ArrayLike is a long union
        found = [word for word in found if word in ("a float", "null", "a function", "a string")]
    return " or ".join(dict.fromkeys(found))
