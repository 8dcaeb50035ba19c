"""Reads the signature of an optimizer factory: what kind of thing each of its arguments is."""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

# Arguments of these names are floats whatever their annotation, also where there is none.
FLOATS = ("learning_rate", "weight_decay")


def takes_float(function: Callable[..., Any], name: str) -> bool:
    """Tells whether an argument of an optimizer factory is a float, so that a schedule may stand
    for it.

    Args:
        function: the factory, such as `optax.adamw`.
        name: the name of one of its arguments.

    Returns:
        True for an argument with a float default, or annotated as a float, alone or in a union, and
        for `learning_rate` and `weight_decay` whatever their annotation and default; False for
        integers, booleans, masks, dtypes, functions and the like.
    """
    return _kind(function, name) == "float"


def takes_floats(function: Callable[..., Any], name: str) -> bool:
    """Tells whether an argument is a tuple of floats, such as `betas`."""
    return _kind(function, name) == "floats"


def takes_recipe(function: Callable[..., Any], name: str) -> bool:
    """Tells whether an optimizer factory takes an optimizer, or a container of them, here."""
    return _kind(function, name) == "recipe"


def takes_partial(function: Callable[..., Any], name: str) -> bool:
    """Tells whether a factory wants the recipe itself here, to call it on its own terms."""
    return "partial" in str(parameters(function)[name].annotation)


@cache
def _kind(function: Callable[..., Any], name: str) -> str | None:
    parameter = parameters(function).get(name)
    if parameter is not None and name in FLOATS:
        return "float"
    if parameter is None or isinstance(parameter.default, bool | int):
        return None
    if isinstance(parameter.default, float):
        return "float"
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return None
    text = annotation if isinstance(annotation, str) else str(annotation)
    if "GradientTransformation" in text or "partial" in text:
        return "recipe"
    members = _members(annotation)
    if any(typing.get_origin(m) in (collections.abc.Mapping, dict) for m in members):
        return None  # a tree, such as a mask
    if float in members:
        return "float"
    tuples = [m for m in members if typing.get_origin(m) in (tuple, list)]
    inside = {x for m in tuples for one in typing.get_args(m) for x in _members(one)}
    return "floats" if float in inside else None


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Gives a factory's parameters by name, with evaluated annotations where that works."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # an annotation that is a string, of a name that is not imported
        return inspect.signature(function).parameters


def _members(annotation: Any) -> set[Any]:
    """Lists the members of a union; none where one is Any, which says nothing."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = set(typing.get_args(annotation)) if union else {annotation}
    return set() if Any in members else members


def bound(recipe: partial) -> inspect.BoundArguments:
    """Gives the arguments of a recipe by name, without the defaults."""
    return inspect.signature(recipe.func).bind_partial(*recipe.args, **recipe.keywords)
