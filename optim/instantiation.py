"""Calls recipes: turns them into optax transformations for one step.

This happens at every step while the train step is traced, so that a schedule's value is a traced
scalar, and the compiled program is the same for every step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optim.arguments import bound, takes_partial, takes_recipe
from optim.factories import Recipe, map_arrays, map_floats, name_of
from optim.transformations import standardize


def at_step(recipe: Recipe, step: ArrayLike, dtype: DTypeLike) -> Any:
    """Replaces each schedule of a recipe, and of those inside it, by its value at a step.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        step: the schedules' position, an int or an int32 scalar.
        dtype: the dtype of a schedule's value; see `dtypes.compute_dtype`.

    Returns:
        A recipe whose float arguments are numbers or traced scalars.
    """

    def number(path: str, value: Any) -> Any:
        name = path.split(".")[-1]
        value = evaluate(value, step, name.split("[")[0]) if callable(value) else value
        # A Python number stays one: a factory may compare it with 0, as `descend` does.
        inexact = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)
        return jnp.asarray(value, dtype) if inexact else value

    return map_floats(recipe, number)


def instantiate(
    recipe: Recipe, step: ArrayLike, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Calls the factory of a recipe, with each schedule replaced by its value at a step.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        step: the schedules' position, an int or an int32 scalar.
        dtype: the dtype of a schedule's value; see `dtypes.compute_dtype`.

    Returns:
        The optax transformation; it takes extra arguments, and ignores those it does not know.

    Raises:
        ValueError: if the factory branches in Python on a scheduled argument, or a schedule fails.
    """
    return _called(at_step(recipe, step, dtype))


def separate_arrays(
    recipe: Recipe,
) -> tuple[
    list[jax.Array],
    Callable[[Sequence[jax.Array], DTypeLike], optax.GradientTransformationExtraArgs],
]:
    """Separates the arrays among the arguments of a recipe from the rest.

    Args:
        recipe: a partial of a factory, or a finished transformation.

    Returns:
        The arrays; and a function that takes as many arrays, and the dtype of `instantiate`, and
        returns the optax transformation with these arrays in place of those.
    """
    held: list[jax.Array] = []
    map_arrays(recipe, held.append)

    def make(
        arrays: Sequence[jax.Array], dtype: DTypeLike
    ) -> optax.GradientTransformationExtraArgs:
        rest = iter(arrays)
        return instantiate(map_arrays(recipe, lambda _: next(rest)), 0, dtype)

    return held, make


def _called(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
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
            # `cautious` calls its base itself, with other weight decays.
            if takes_recipe(recipe.func, name) and not takes_partial(recipe.func, name):
                given.arguments[name] = optimizers(value)
        try:
            made = recipe.func(*given.args, **given.kwargs)
        except jax.errors.ConcretizationTypeError as error:
            raise ValueError(
                f"{name_of(recipe)} branches in Python on the value of one of its arguments "
                f"({', '.join(n for n, v in given.arguments.items() if isinstance(v, jax.Array))}),"
                f" which must be a number, not a schedule or a traced value."
            ) from error
    return standardize(made, name_of(recipe))


def evaluate(schedule: Callable[[Any], Any], step: ArrayLike, name: str) -> Any:
    """Evaluates a schedule at a step.

    Args:
        schedule: a function of the step, which receives it as an array.
        step: an int or an int32 scalar.
        name: the argument that the schedule is for, for errors.

    Returns:
        A number or a scalar.

    Raises:
        ValueError: if the schedule fails, or returns no scalar.
    """
    try:
        value = schedule(step if isinstance(step, jax.Array) else jnp.asarray(step, jnp.int32))
        if isinstance(value, int | float) or jnp.shape(jnp.asarray(value)) == ():
            return value
        gave = f"returned an array of shape {jnp.shape(value)}"
    except Exception as error:  # whatever a user's function raises
        text = " ".join(str(error).split())[:200]
        gave = f"raised {type(error).__name__}: {text}"
    raise ValueError(
        f"The schedule of {name} {gave}. A schedule is a function of the step, a traced int32 "
        f"scalar, and returns a scalar."
    )
