"""Reads a recipe, a factory with its arguments that has not been called, and calls it.

A recipe is a `functools.partial` of an optimizer factory. Its float arguments may be schedules or
traced scalars, and its optimizer arguments recipes; `instantiate` turns all of them into an optax
transformation at one step, while the train step is traced.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.arguments import (
    bound,
    parameters,
    takes_float,
    takes_floats,
    takes_partial,
    takes_recipe,
)
from optim.transformations import standardize

Recipe = partial | optax.GradientTransformation


class ArgumentError(ValueError):
    """An argument of a recipe that cannot be as it is.

    Attributes:
        argument: its path below the recipe, such as "base_optimizer.learning_rate".
    """

    def __init__(self, message: str, argument: str):
        super().__init__(message)
        self.argument = argument


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
    return {key: value for key, _, _, value, _ in named_floats(recipe)}


def named_floats(recipe: Recipe) -> Iterator[tuple[str, partial, str, Any, Any]]:
    """Yields the float arguments of a recipe and of those inside it, see `hyperparameters`: the
    name it is called by, the recipe that has it, its own name there, its value and its default."""
    found: set[str] = set()
    for path, inner in located(recipe):
        for name, value, default in floats(inner):
            key = f"{path}.{name}" if name in found else name
            found.add(key)
            yield key, inner, name, value, default


def floats(recipe: partial) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of every float argument of one recipe, see
    `hyperparameters`."""
    given = bound(recipe)
    given.apply_defaults()
    for name, value in given.arguments.items():
        default = parameters(recipe.func)[name].default
        if takes_float(recipe.func, name):
            if value is not None:
                yield name, value, default
        elif takes_floats(recipe.func, name) and isinstance(value, list | tuple):
            for i, x in enumerate(value):
                if not isinstance(x, str | list | tuple | None):
                    known = isinstance(default, tuple) and i < len(default)
                    yield f"{name}[{i}]", x, default[i] if known else None


def declared_dtypes(recipe: Recipe) -> list[Any]:
    """Lists the dtypes that a recipe's arguments name, such as `mu_dtype`, inner recipes included.

    Args:
        recipe: a partial of a factory, or a finished transformation (which shows none).
    """
    given = [item for _, inner in located(recipe) for item in bound(inner).arguments.items()]
    return [jnp.dtype(x) for name, x in given if "dtype" in name and x is not None]


def learning_rate_of(recipe: Any) -> Any:
    """Finds the learning rate of an optimizer: the outermost float argument of that name.

    Args:
        recipe: a partial of a factory.

    Returns:
        A number, a traced scalar or a schedule.

    Raises:
        ValueError: it has no argument `learning_rate`, or several, none of which is the outermost.
    """
    found = {
        path: value
        for path, inner in located(recipe)
        for name, value, _ in floats(inner)
        if name == "learning_rate"
    }
    if not found:
        raise ValueError(f"{name_of(recipe)} has no learning_rate to multiply weight_decay by.")
    outer = min(found, key=len)
    others = [path for path in found if path != outer and not f".{path}".startswith(f".{outer}.")]
    if outer and others:
        names = " and ".join(f"{path}.learning_rate" for path in sorted([outer, *others]))
        raise ValueError(
            f"{name_of(recipe)} has several learning rates, {names}, and weight_decay is "
            f"multiplied by one. Give the weight decay to the optimizers inside."
        )
    return found[outer]


def map_floats(recipe: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Changes the float arguments of a recipe and of those inside it, defaults included.

    Args:
        recipe: a partial of a factory, a container of them, or anything else, which is returned.
        change: takes an argument's path, such as "base_optimizer.b1" or "betas[0]", and its value
            (a number, a traced scalar, a schedule or None); returns what to put in its place.
        path: where the recipe stands, for use inside.

    Returns:
        A recipe of the same factories.
    """

    def below(key: Any) -> str:
        return f"{path}.{key}".lstrip(".")

    if isinstance(recipe, Mapping):
        return {key: map_floats(value, change, below(key)) for key, value in recipe.items()}
    if isinstance(recipe, list | tuple) and not isinstance(recipe, optax.GradientTransformation):
        return type(recipe)(map_floats(x, change, below(i)) for i, x in enumerate(recipe))
    if not isinstance(recipe, partial):
        return recipe
    given = bound(recipe)
    for name, parameter in parameters(recipe.func).items():
        if name not in given.arguments:
            default = parameter.default
            value = change(below(name), default) if isinstance(default, float) else default
            if value is not default:
                given.arguments[name] = value
            continue
        value = given.arguments[name]
        if takes_recipe(recipe.func, name):
            value = map_floats(value, change, below(name))
        elif takes_float(recipe.func, name):
            value = change(below(name), value)
        elif takes_floats(recipe.func, name) and isinstance(value, list | tuple):
            value = type(value)(change(below(f"{name}[{i}]"), x) for i, x in enumerate(value))
        given.arguments[name] = value
    return partial(recipe.func, *given.args, **given.kwargs)


def float_paths(recipe: Any) -> dict[str, Any]:
    """Lists the float arguments of a recipe and of those inside it by their paths.

    Args:
        recipe: a partial of a factory, or anything else, which has none.

    Returns:
        Path, such as "base_optimizer.b1" -> number, traced scalar, schedule or None.
    """
    found: dict[str, Any] = {}
    map_floats(recipe, lambda path, value: found.setdefault(path, value))
    return found


def at_step(recipe: Any, step: Any, dtype: Any) -> Any:
    """Replaces each schedule of a recipe, and of those inside it, by its value at a step.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        step: the schedules' position, an int or an int32 scalar.
        dtype: the dtype of a schedule's value: float32, or float64 where parameters are.

    Returns:
        A recipe whose float arguments are numbers or traced scalars.
    """

    def number(path: str, value: Any) -> Any:
        name = path.split(".")[-1]
        value = _scheduled(value, step, name.split("[")[0]) if callable(value) else value
        inexact = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)
        return jnp.asarray(value, dtype) if inexact else value

    return map_floats(recipe, number)


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
    return _called(at_step(recipe, step, dtype))


def _called(recipe: Any) -> optax.GradientTransformationExtraArgs:
    """Calls the factory of a recipe without schedules, the factories inside it first."""

    def optimizers(value: Any) -> Any:
        if isinstance(value, partial | optax.GradientTransformation):
            return _called(value)
        if isinstance(value, Mapping):
            return {key: optimizers(x) for key, x in value.items()}
        return type(value)(map(optimizers, value)) if isinstance(value, list | tuple) else value

    made: Any = recipe
    if isinstance(recipe, partial):
        given = bound(recipe)
        for name, value in given.arguments.items():
            if takes_recipe(recipe.func, name) and not takes_partial(recipe.func, name):
                given.arguments[name] = optimizers(value)
        try:
            made = recipe.func(*given.args, **given.kwargs)
        except jax.errors.ConcretizationTypeError as error:
            raise ValueError(
                f"{name_of(recipe)} decides in Python by the value of one of its arguments "
                f"({', '.join(n for n, v in given.arguments.items() if isinstance(v, jax.Array))}),"
                f" so that it takes a number and neither a schedule nor a value that a sweep lifts."
            ) from error
    return standardize(made, name_of(recipe))


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
