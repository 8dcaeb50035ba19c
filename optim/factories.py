"""Reads recipes: optimizer factories with arguments that have not been called.

A recipe is a `functools.partial` of an optimizer factory. Its float arguments may be schedules or
traced scalars, and its optimizer arguments may be recipes; `optim.instantiation` turns a recipe
into an optax transformation for one step, while the train step is traced.
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
    takes_recipe,
)

Recipe = partial | optax.GradientTransformation


class ArgumentError(ValueError):
    """Raised if an argument of a recipe is not allowed.

    Attributes:
        argument: its path below the recipe, such as "base_optimizer.learning_rate".
    """

    def __init__(self, message: str, argument: str):
        super().__init__(message)
        self.argument = argument


def recipes_within(recipe: object) -> Iterator[partial]:
    """Yields a recipe and the recipes inside it, outermost first.

    Args:
        recipe: a partial of a factory, a container of them, or anything else, which yields nothing.
    """
    return (inner for _, inner in located(recipe))


def located(recipe: object, path: str = "") -> Iterator[tuple[str, partial]]:
    """Yields a recipe and those inside it, outermost first, each with its path.

    Args:
        recipe: a partial of a factory, a container of them, or anything else, which yields nothing.
        path: the path of this recipe, for recursive calls.

    Yields:
        The path, such as "" or "inner.base_optimizer", and the recipe.
    """

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
    """Returns a factory's name as in a config: "optax.adamw", "optax.contrib.muon".

    Args:
        recipe: a partial of the factory; a finished transformation has no name and is called "an
            optax transformation".
    """
    if not isinstance(recipe, partial):
        return "an optax transformation"
    for package in (optax, optax.contrib):  # optax.nadam is itself a partial, without a __name__
        for name, thing in vars(package).items():
            if thing is recipe.func and not name.startswith("_"):
                return f"{package.__name__}.{name}"
    return f"{recipe.func.__module__.split('.')[0]}.{recipe.func.__name__}"


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Returns the float arguments of a recipe and of those inside it.

    Args:
        recipe: a partial of a factory, or a finished transformation (which has none).

    Returns:
        Name -> float, traced scalar or schedule, defaults included, without arguments that are
        None. Items of a tuple of floats are called "betas[0]", "betas[1]". If several recipes have
        an argument of one name, the outermost is called by the name and the others by their path,
        "base_optimizer.learning_rate".
    """
    return {key: value for key, _, _, value, _ in named_floats(recipe)}


def named_floats(recipe: Recipe) -> Iterator[tuple[str, partial, str, Any, Any]]:
    """Yields the float arguments of a recipe and of those inside it; see `hyperparameters`.

    Args:
        recipe: a partial of a factory, or a finished transformation (which has none).

    Yields:
        The unique name, the recipe with the argument, the argument's name, its value, its default.
    """
    found: set[str] = set()
    for path, inner in located(recipe):
        for name, value, default in floats(inner):
            key = f"{path}.{name}" if name in found else name
            found.add(key)
            yield key, inner, name, value, default


def floats(recipe: partial) -> Iterator[tuple[str, Any, Any]]:
    """Yields the float arguments of one recipe, without those of the recipes inside it.

    Args:
        recipe: a partial of a factory.

    Yields:
        The argument's name, its value and its default; arguments that are None are left out.
    """
    given = bound(recipe)
    given.apply_defaults()
    for name, value in given.arguments.items():
        default = parameters(recipe.func)[name].default
        if takes_float(recipe.func, name):
            if value is not None:
                yield name, value, default
        elif takes_floats(recipe.func, name) and isinstance(value, list | tuple):
            for i, x in enumerate(value):
                # optax.contrib.muon's ns_coeffs may be a name, a triple or a tuple of triples.
                if not isinstance(x, str | list | tuple | None):
                    known = isinstance(default, tuple) and i < len(default)
                    yield f"{name}[{i}]", x, default[i] if known else None


def declared_dtypes(recipe: Recipe) -> list[Any]:
    """Returns the dtypes in arguments such as `mu_dtype`, inner recipes included.

    Args:
        recipe: a partial of a factory, or a finished transformation (which has none).
    """
    given = [item for _, inner in located(recipe) for item in bound(inner).arguments.items()]
    return [jnp.dtype(x) for name, x in given if "dtype" in name and x is not None]


def learning_rate_of(recipe: Recipe) -> Any:
    """Returns the learning rate of an optimizer: the outermost argument `learning_rate`.

    Args:
        recipe: a partial of a factory.

    Returns:
        A number, a traced scalar or a schedule.

    Raises:
        ValueError: if there is no argument `learning_rate`, or several and none is the outermost.
    """
    found = {
        path: value
        for path, inner in located(recipe)
        for name, value, _ in floats(inner)
        if name == "learning_rate"
    }
    if not found:
        raise ValueError(f"{name_of(recipe)} has no learning_rate to multiply weight_decay by.")
    # An outer recipe has a shorter path than those inside it; "" is the recipe itself.
    outer = min(found, key=len)
    others = [path for path in found if path != outer and not f".{path}".startswith(f".{outer}.")]
    if outer and others:
        names = " and ".join(f"{path}.learning_rate" for path in sorted([outer, *others]))
        raise ValueError(
            f"{name_of(recipe)} has several learning rates, {names}, and weight_decay is "
            f"multiplied by one. Give the weight decay to the optimizers inside."
        )
    return found[outer]


def map_floats(recipe: object, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Changes the float arguments of a recipe and of those inside it, defaults included.

    Args:
        recipe: a partial of a factory, a container of them, or anything else, which is returned.
        change: takes an argument's path, such as "base_optimizer.b1" or "betas[0]", and its value
            (a number, a traced scalar, a schedule or None); returns what to put in its place.
        path: the path of this recipe, for recursive calls.

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
            # Only what changes is bound: `bound` lists the arguments that a recipe was given.
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


def map_arrays(recipe: Any, change: Callable[[jax.Array], Any]) -> Any:
    """Changes the arrays among the arguments of a recipe and of those inside it.

    Args:
        recipe: a partial of a factory, a container of them, or anything else, which is returned.
        change: takes an array, which may be traced; returns what to put in its place.

    Returns:
        A recipe of the same factories. The arrays are visited in the same order at every call.
    """
    if isinstance(recipe, jax.Array):
        return change(recipe)
    if isinstance(recipe, partial):
        args, keywords = map_arrays((recipe.args, recipe.keywords), change)
        return partial(recipe.func, *args, **keywords)
    if type(recipe) is dict:
        return {key: map_arrays(value, change) for key, value in recipe.items()}
    # Not tuples with names, such as a finished transformation.
    if type(recipe) in (list, tuple):
        return type(recipe)(map_arrays(value, change) for value in recipe)
    return recipe


def float_paths(recipe: object) -> dict[str, Any]:
    """Returns the float arguments of a recipe and of those inside it by their paths.

    Args:
        recipe: a partial of a factory, or anything else, which has none.

    Returns:
        Path, such as "base_optimizer.b1" -> number, traced scalar, schedule or None.
    """
    found: dict[str, Any] = {}
    # setdefault returns the value, so that nothing changes.
    map_floats(recipe, lambda path, value: found.setdefault(path, value))
    return found
