"""Reads a recipe, a factory with its arguments that has not been called, and calls it.

A recipe is a `functools.partial` of an optimizer factory. Its float arguments may be schedules or
traced scalars, and its optimizer arguments recipes; `instantiate` turns all of them into an optax
transformation at one step, while the train step is traced.
"""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Recipe = partial | optax.GradientTransformation

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


@cache
def _kind(function: Callable[..., Any], name: str) -> str | None:
    parameter = _parameters(function).get(name)
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
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
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


def recipes_within(recipe: Any) -> Iterator[partial]:
    """Yields a recipe, then the recipes among its arguments, outermost first."""
    return (inner for _, inner in located(recipe))


def located(recipe: Any, path: str = "") -> Iterator[tuple[str, partial]]:
    """Yields a recipe and those among its arguments, each with its path, "inner.base_optimizer"."""

    def below(key: Any) -> str:
        return f"{path}.{key}".lstrip(".")

    if isinstance(recipe, partial):
        yield path, recipe
        for name, value in bound(recipe).arguments.items():
            if takes_recipe(recipe.func, name):
                yield from located(value, below(name))
    elif isinstance(recipe, Mapping):
        for key, value in recipe.items():
            yield from located(value, below(key))
    elif isinstance(recipe, list | tuple) and not isinstance(recipe, optax.GradientTransformation):
        for index, value in enumerate(recipe):
            yield from located(value, below(index))


def name_of(recipe: Recipe) -> str:
    """Names the factory of a recipe as a config does: "optax.adamw", "optax.contrib.muon"."""
    if not isinstance(recipe, partial):
        return "an optax transformation"
    for package in (optax, optax.contrib):  # optax.nadam is itself a partial, and has no name
        for name, thing in vars(package).items():
            if thing is recipe.func and not name.startswith("_"):
                return f"{package.__name__}.{name}"
    return f"{recipe.func.__module__.split('.')[0]}.{recipe.func.__name__}"


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Lists the float arguments of a recipe and of those inside it.

    Args:
        recipe: a partial of a factory, or a finished transformation (which shows none).

    Returns:
        For each name a float, a traced scalar or a schedule, defaults included; None is left out.
        The parts of a tuple of floats are called "betas[0]", "betas[1]". Where recipes share a
        name, the outermost has it, and the others are called by their path,
        "base_optimizer.learning_rate".
    """
    found: dict[str, Any] = {}
    for path, inner in located(recipe):
        for name, value, _ in floats(inner):
            found[f"{path}.{name}" if name in found else name] = value
    return found


def floats(recipe: partial) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of every float argument of one recipe, see
    `hyperparameters`."""
    given = bound(recipe)
    given.apply_defaults()
    for name, value in given.arguments.items():
        default = _parameters(recipe.func)[name].default
        if takes_float(recipe.func, name):
            if value is not None:
                yield name, value, default
        elif takes_floats(recipe.func, name) and isinstance(value, list | tuple):
            for i, x in enumerate(value):
                if not isinstance(x, str | list | tuple | None):
                    known = isinstance(default, tuple) and i < len(default)
                    yield f"{name}[{i}]", x, default[i] if known else None


def instantiate(recipe: Any, step: Any, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Calls the factory of a recipe, with each schedule replaced by its value at a step.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        step: the schedules' position, an int or an int32 scalar.
        dtype: the dtype of a schedule's value: float32, or float64 where parameters are.

    Returns:
        The optax transformation; it takes extra arguments, and ignores those it does not know.

    Raises:
        ValueError: the factory compares a scheduled argument in Python.
    """

    def number(value: Any, name: str) -> Any:
        value = _scheduled(value, step, name) if callable(value) else value
        inexact = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)
        return jnp.asarray(value, dtype) if inexact else value

    def optimizers(value: Any) -> Any:
        if isinstance(value, partial | optax.GradientTransformation):
            return instantiate(value, step, dtype)
        if isinstance(value, Mapping):
            return {key: optimizers(x) for key, x in value.items()}
        return type(value)(map(optimizers, value)) if isinstance(value, list | tuple) else value

    made: Any = recipe
    if isinstance(recipe, partial):
        given = bound(recipe)
        for name, value in given.arguments.items():
            if takes_recipe(recipe.func, name):
                value = optimizers(value)
            elif takes_float(recipe.func, name):
                value = number(value, name)
            elif takes_floats(recipe.func, name) and isinstance(value, list | tuple):
                value = type(value)(number(x, name) for x in value)
            given.arguments[name] = value
        try:
            made = recipe.func(*given.args, **given.kwargs)
        except jax.errors.ConcretizationTypeError as error:
            raise ValueError(
                f"{name_of(recipe)} decides in Python by the value of one of its arguments "
                f"({', '.join(n for n, v in given.arguments.items() if isinstance(v, jax.Array))}),"
                f" so that it takes a number and neither a schedule nor a value that a sweep lifts."
            ) from error
    return _with_known_extras(_with_slow_params(_finished(made, recipe)))


def _scheduled(schedule: Callable[[Any], Any], step: Any, name: str) -> Any:
    """Reads a schedule at a step; raises ValueError where it does not give one number."""
    try:
        value = schedule(step)
        if isinstance(value, int | float) or jnp.shape(jnp.asarray(value)) == ():
            return value
        gave = f"gave an array of shape {jnp.shape(value)}"
    except Exception as error:  # whatever a user's function raises
        text = " ".join(str(error).split())[:200]
        gave = f"raised {type(error).__name__}: {text}"
    raise ValueError(
        f"The schedule of {name} {gave}. A schedule is a function of the step, a traced int32 "
        f"scalar, and gives one number."
    )


def _finished(made: Any, recipe: Recipe) -> optax.GradientTransformation:
    """Turns what a factory made into a transformation (MultiSteps is a class of its own)."""
    if isinstance(made, optax.MultiSteps):
        return made.gradient_transformation()
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"{name_of(recipe)} gave an object of class {type(made).__name__}, and what moves a "
            f"group is an optax transformation. Groups do not stand within groups."
        )
    return made


def _with_known_extras(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out the extra arguments that a transformation does not know.

    `optax.with_extra_args_support` does so for transformations that take none; `contrib.sam` takes
    one, and raises at any other.
    """
    tx = optax.with_extra_args_support(tx)
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return tx

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        known = {name: value for name, value in extra.items() if name in parameters}
        return tx.update(updates, state, params, **known)

    return optax.GradientTransformationExtraArgs(tx.init, update)


class SlowParams(NamedTuple):
    """The state of an optimizer that trains fast parameters and evaluates slow ones."""

    slow: Any
    state: Any


def _with_slow_params(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps the slow parameters of a lookahead in its state.

    Such an update takes and returns a pair of parameters, `optax.LookaheadParams`; everyone else
    knows one. The annotation of its `params` tells it from others.
    """
    params_of = inspect.signature(tx.update).parameters.get("params")
    if params_of is None or params_of.annotation is not optax.LookaheadParams:
        return tx

    def init(params: Any) -> SlowParams:
        pair: Any = optax.LookaheadParams(fast=params, slow=params)
        return SlowParams(params, tx.init(pair))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        pair: Any = optax.LookaheadParams(fast=params, slow=state.slow)
        moves: Any
        moves, inner = tx.update(updates, state.state, pair)
        return moves.fast, SlowParams(optax.apply_updates(state.slow, moves.slow), inner)

    return optax.GradientTransformation(init, update)
