"""Reads from the signature of an optimizer factory which arguments are floats or optimizers."""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

# Arguments of these names are floats, with any annotation or none.
FLOATS = ("learning_rate", "weight_decay")


def takes_float(function: Callable[..., Any], name: str) -> bool:
    """Returns whether an argument of an optimizer factory is a float, and may be a schedule.

    Args:
        function: the factory, such as `optax.adamw`.
        name: the name of one of its arguments.

    Returns:
        True for an argument with a float default, or annotated as a float, alone or in a union, and
        for `learning_rate` and `weight_decay` with any annotation and default; False for
        integers, booleans, masks, dtypes, functions and the like.
    """
    return _kind(function, name) == "float"


def takes_floats(function: Callable[..., Any], name: str) -> bool:
    """Returns whether an argument is a tuple of floats, such as `betas`.

    Args:
        function: the factory of an optimizer.
        name: the name of one of its arguments.
    """
    return _kind(function, name) == "floats"


def takes_recipe(function: Callable[..., Any], name: str) -> bool:
    """Returns whether an argument is an optimizer, or a container of optimizers.

    Args:
        function: the factory of an optimizer, such as `optax.lookahead`.
        name: the name of one of its arguments, such as "fast_optimizer".
    """
    return _kind(function, name) == "recipe"


def takes_partial(function: Callable[..., Any], name: str) -> bool:
    """Returns whether an argument is a recipe that the factory itself calls.

    Such a recipe is passed on as it is; any other is replaced by its transformation.

    Args:
        function: the factory of an optimizer, such as `optim.cautious`.
        name: the name of one of its arguments, such as "base_optimizer".
    """
    return "partial" in str(parameters(function)[name].annotation)


@cache
def _kind(function: Callable[..., Any], name: str) -> str | None:
    parameter = parameters(function).get(name)
    if parameter is not None and name in FLOATS:
        return "float"
    # An integer default is a count or a flag, whatever the annotation says: for ns_steps of optax,
    # it is a union with float.
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
        return None  # a tree of parameters, such as a mask
    if float in members:
        return "float"
    tuples = [m for m in members if typing.get_origin(m) in (tuple, list)]
    inside = {x for m in tuples for one in typing.get_args(m) for x in _members(one)}
    return "floats" if float in inside else None


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns a factory's parameters by name, with annotations evaluated if possible."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # a string annotation with a name that its module does not import
        return inspect.signature(function).parameters


def _members(annotation: Any) -> set[Any]:
    """Returns the members of a union; none if one of them is Any, which excludes nothing."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = set(typing.get_args(annotation)) if union else {annotation}
    return set() if Any in members else members


def bound(recipe: partial) -> inspect.BoundArguments:
    """Returns the arguments of a recipe by name, without the defaults."""
    return inspect.signature(recipe.func).bind_partial(*recipe.args, **recipe.keywords)
