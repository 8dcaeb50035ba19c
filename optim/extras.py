"""Turns what a train step knows of the loss into what one group's optimizer may ask for."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optim.laws import widen
from optim.paths import flatten, unflatten

# What a train step says of the loss, and a maximizing group sees with the opposite sign.
_OF_LOSS = ("value", "grad", "value_fn", "obj_fn", "grad_fn")


def extra_arguments(extra: Mapping[str, Any], own: dict[str, Any], params: Any) -> dict[str, Any]:
    """Turns what the train step knows into what one group's optimizer may ask for.

    Args:
        extra: value, value_fn, grad_fn, obj_fn, ...: a function takes all the parameters in their
            true dtypes; a value is a scalar, an array, or a tree like `params`.
        own: the group's parameters by path name, widened.
        params: all the parameters.

    Returns:
        The same names. A function takes the group's parameters, with the others held; scalars, also
        a function's, become float32 (float64 under x64); a tree like `params` is cut to the group.
    """
    # Of all floats there may be this one: a line search transposes its function at a Python 1.0.
    dtype, whole = jnp.result_type(float), jax.tree.structure(params)

    def cut(tree: Any) -> Any:
        if jax.tree.structure(tree) == whole and not jax.tree_util.treedef_is_leaf(whole):
            named = flatten(tree)
            return widen({path: named[path] for path in own})
        return jax.tree.map(at_dtype, tree)

    def at_dtype(x: Any) -> Any:
        x = jnp.asarray(x)
        floating = x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating else widen(x)

    def restrict(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_own(wide: dict[str, Any], *args: Any, **others: Any) -> Any:
            named = flatten(params)
            true = {path: w.astype(named[path].dtype) for path, w in wide.items()}
            taken = {name: value for name, value in others.items() if name not in extra}
            return cut(function(unflatten(params, {**named, **true}), *args, **taken))

        of_own.__signature__ = inspect.Signature(arguments)  # pyright: ignore
        return of_own

    # optax's line searches raise at every extra argument that is no argument of value_fn.
    kind = inspect.Parameter
    arguments = [
        kind("params", kind.POSITIONAL_ONLY),
        *(kind(name, kind.KEYWORD_ONLY) for name in extra if name.isidentifier()),
        kind("args", kind.VAR_POSITIONAL),
    ]
    arguments.sort(key=lambda argument: argument.kind)
    return {name: restrict(x) if callable(x) else cut(x) for name, x in extra.items()}


def negated(extra: Any) -> Any:
    """Gives a group's extra arguments for the opposite loss: a group that climbs descends on it."""

    def negative(name: str, x: Any) -> Any:
        if name not in _OF_LOSS:
            return x
        if not callable(x):
            return jax.tree.map(jnp.negative, x)

        @functools.wraps(x)
        def function(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.map(jnp.negative, x(*args, **kwargs))

        return function

    return {name: negative(name, x) for name, x in extra.items()}
