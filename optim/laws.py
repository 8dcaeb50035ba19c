"""Keeps every optimizer lawful, whatever optax does inside.

An optimizer arrives as a *recipe*: a `functools.partial` of a factory that has not been called, so
that its float arguments can still be schedules or traced scalars. At every step, while the step is
traced, `update` evaluates the schedules, calls the factory with their values, and runs the
transformation it returns between two borders:

- on the way in, parameters, gradients and extra arguments become at least float32, because
  bfloat16(0.999) is 1.0 and Adam then divides by zero;
- on the way out, the state gets the dtypes and strong types it came with, and buffers of its own.

Nothing here knows an optimizer by its name.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.paths import flatten, unflatten

Recipe = partial | optax.GradientTransformation


def takes_float(function: Callable[..., Any], name: str) -> bool:
    """Tells whether an argument of an optimizer factory is a float, so that a schedule may stand
    for it.

    Args:
        function: the factory, such as `optax.adamw`.
        name: the name of one of its arguments.

    Returns:
        True for an argument with a float default, or whose annotation speaks of a float, a scalar
        or an array; False for integers, booleans, masks, dtypes, functions and the like.
    """
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or isinstance(parameter.default, bool | int):
        return False
    words = ("float", "Scalar", "Numeric", "ArrayLike", "jax.Array")
    return isinstance(parameter.default, float) or _speaks_of(parameter, words)


def takes_recipe(function: Callable[..., Any], name: str) -> bool:
    """Tells whether an optimizer factory takes an optimizer, or a list of them, here."""
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and _speaks_of(parameter, ("GradientTransformation", "partial"))


def _speaks_of(parameter: inspect.Parameter, words: tuple[str, ...]) -> bool:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return False
    text = annotation if isinstance(annotation, str) else str(annotation)
    return any(word in text for word in words)


def recipes_within(recipe: Any) -> Iterator[partial]:
    """Yields a recipe, then the recipes among its arguments, outermost first."""
    if isinstance(recipe, partial):
        yield recipe
        for name, value in _bound(recipe).arguments.items():
            if takes_recipe(recipe.func, name):
                for inner in value if isinstance(value, list | tuple) else [value]:
                    yield from recipes_within(inner)


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Lists the float arguments of a recipe and of those inside it; the outermost wins a name.

    Args:
        recipe: a partial of a factory, or a finished transformation (which shows none).

    Returns:
        For each name a float, a traced scalar or a schedule, defaults included; None is left out.
    """
    found: dict[str, Any] = {}
    for inner in recipes_within(recipe):
        bound = _bound(inner)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if value is not None and takes_float(inner.func, name):
                found.setdefault(name, value)
    return found


def instantiate(recipe: Any, step: Any, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Calls the factory of a recipe, with each schedule replaced by its value at a step.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        step: the schedules' position, an int or an int32 scalar.
        dtype: the dtype of a schedule's value: float32, or float64 where parameters are.

    Returns:
        The optax transformation; it takes extra arguments, and ignores those it does not know.
    """

    def resolve(function: Callable[..., Any], name: str, value: Any) -> Any:
        if takes_recipe(function, name):
            if isinstance(value, list | tuple) and not isinstance(
                value, optax.GradientTransformation
            ):
                return type(value)(instantiate(one, step, dtype) for one in value)
            return instantiate(value, step, dtype)
        if takes_float(function, name):
            value = value(step) if callable(value) else value
            return value if isinstance(value, float | int | None) else jnp.asarray(value, dtype)
        return value

    if isinstance(recipe, partial):
        bound = _bound(recipe)
        for name, value in bound.arguments.items():
            bound.arguments[name] = resolve(recipe.func, name, value)
        recipe = recipe.func(*bound.args, **bound.kwargs)
    return optax.with_extra_args_support(recipe)


def _bound(recipe: partial) -> inspect.BoundArguments:
    return inspect.signature(recipe.func).bind_partial(*recipe.args, **recipe.keywords)


def init(recipe: Recipe, params: Any) -> Any:
    """Makes an optimizer's state for some parameters.

    Args:
        recipe: a partial of a factory, or a finished transformation.
        params: a pytree of arrays, widened (see `widen`).

    Returns:
        The state; every leaf is strongly typed and has a buffer of its own.
    """
    state = instantiate(recipe, 0, compute_dtype(params)).init(params)
    return own_buffers(jax.tree.map(_strong, state), params)


def update(
    recipe: Recipe, grads: Any, state: Any, params: Any, step: Any, extra: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Runs one step of an optimizer.

    Args:
        recipe: what `init` was given.
        grads: a pytree like `params`, widened.
        state: what `init` or the last `update` returned.
        params: the parameters before the step, widened.
        step: the schedules' position, an int32 scalar.
        extra: extra arguments for whoever takes them; see `extra_arguments`.

    Returns:
        The updates, to be added to the parameters; and the new state, whose structure, shapes,
        dtypes and strong types are those of `state`.

    Raises:
        ValueError: the optimizer changed the structure of its state, or the shape of a leaf.
    """
    tx = instantiate(recipe, step, compute_dtype(params))
    updates, new_state = tx.update(grads, state, params, **extra)
    return updates, own_buffers(match_avals(new_state, state), (params, grads))


def extra_arguments(extra: Mapping[str, Any], own: dict[str, Any], params: Any) -> dict[str, Any]:
    """Turns what the train step knows into what one group's optimizer may ask for.

    Args:
        extra: value, value_fn, grad_fn, obj_fn, ...: a function takes all the parameters in their
            true dtypes; a value is a scalar, an array, or a tree like `params`.
        own: the group's parameters by path name, widened.
        params: all the parameters.

    Returns:
        The same names. A function takes the group's parameters, with the others held, and gives its
        result in the compute dtype of the group; a tree like `params` is cut to the group.
    """
    dtype, whole = compute_dtype(own), jax.tree.structure(params)

    def cut(tree: Any) -> Any:
        if jax.tree.structure(tree) == whole and not isinstance(tree, jax.Array):
            named = flatten(tree)
            return widen({path: named[path] for path in own})
        return jax.tree.map(at_dtype, tree)

    def at_dtype(x: Any) -> Any:
        x = jnp.asarray(x)
        return (
            x.astype(dtype) if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating) else widen(x)
        )

    def restrict(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_own(wide: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            named = flatten(params)
            true = {path: w.astype(named[path].dtype) for path, w in wide.items()}
            return cut(function(unflatten(params, {**named, **true}), *args, **kwargs))

        return of_own

    return {name: restrict(x) if callable(x) else cut(x) for name, x in extra.items()}


def compute_dtype(params: Any) -> Any:
    """Tells the dtype of hyperparameters: float64 if a parameter has it, else float32."""
    wide = any(jnp.finfo(x.dtype).bits == 64 for x in jax.tree.leaves(params) if _inexact(x))
    return jnp.float64 if wide else jnp.float32


def widen(tree: Any) -> Any:
    """Casts bfloat16 and float16 leaves to float32 and leaves the others as they are."""

    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        low = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
        return x.astype(jnp.float32) if low else x

    return jax.tree.map(cast, tree)


def match_avals(new: Any, old: Any) -> Any:
    """Gives every leaf of a new state the dtype and the strong type of the old one.

    Args:
        new: the state after a step.
        old: the state before it.

    Returns:
        The new state, with the avals of the old.

    Raises:
        ValueError: another structure, or another shape of a leaf.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"An optimizer changed the structure of its state from {jax.tree.structure(old)} to "
            f"{jax.tree.structure(new)}; a state keeps its structure from step to step."
        )

    def cast(path: Any, n: Any, o: Any) -> Any:
        if jnp.shape(n) != jnp.shape(o):
            raise ValueError(
                f"An optimizer changed the shape of its state at {jax.tree_util.keystr(path)} from "
                f"{jnp.shape(o)} to {jnp.shape(n)}; a state keeps its shapes from step to step."
            )
        return jax.lax.convert_element_type(n, o.dtype)

    return jax.tree_util.tree_map_with_path(cast, new, old)


def _strong(x: Any) -> Any:
    return jax.lax.convert_element_type(x, jnp.asarray(x).dtype)


def own_buffers(state: Any, others: Any) -> Any:
    """Copies each leaf of a state that is also another leaf, so that all of them can be donated."""
    seen = {id(x) for x in jax.tree.leaves(others)}

    def distinct(x: Any) -> Any:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(distinct, state)


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def eval_params(state: Any, params: Any) -> Any:
    """Finds the parameters that evaluation must use: schedule-free keeps its average in its state.

    Args:
        state: an optimizer's state.
        params: the parameters that are trained.

    Returns:
        The averaged parameters, in the dtypes of `params`; `params` themselves for most optimizers.
    """
    is_average = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)  # noqa: E731
    for part in jax.tree.leaves(state, is_leaf=is_average):
        if is_average(part):
            average = optax.contrib.schedule_free_eval_params(part, widen(params))
            return jax.tree.map(lambda a, p: a.astype(p.dtype), average, params)
    return params
