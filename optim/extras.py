"""Restricts extra arguments, such as the loss and its functions, to one group's parameters."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.dtypes import widen
from optim.paths import flatten, unflatten

# Extra arguments that a group with maximize=True receives with the opposite sign.
_OF_LOSS = ("value", "grad", "value_fn", "obj_fn", "grad_fn")


def extra_arguments(
    extra: Mapping[str, Any], group_params: dict[str, Any], params: optax.Params
) -> dict[str, Any]:
    """Restricts the extra arguments of a train step to one group's parameters.

    Args:
        extra: value, value_fn, grad_fn, obj_fn, ...: a function takes all parameters in their own
            dtypes; a value is a scalar, an array, or a tree like `params`.
        group_params: the group's parameters by path name, widened.
        params: all the parameters.

    Returns:
        The restricted arguments, by name. A function takes the group's parameters, the others are
        fixed. Scalars, also results of functions, become float32 (float64 under x64). A tree like
        `params` is reduced to the group.
    """
    # The default float: a line search transposes its function at a Python 1.0.
    dtype, whole = jnp.result_type(float), jax.tree.structure(params)

    def cut(tree: Any) -> Any:
        # Where the parameters are a single array, any scalar has their structure.
        if jax.tree.structure(tree) == whole and not jax.tree_util.treedef_is_leaf(whole):
            by_path = flatten(tree)
            return widen({path: by_path[path] for path in group_params})
        return jax.tree.map(at_dtype, tree)

    def at_dtype(x: Any) -> Any:
        x = jnp.asarray(x)
        floating = x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating else widen(x)

    def restrict(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_own(wide: dict[str, Any], *args: Any, **others: Any) -> Any:
            # The loss needs all parameters, in their own dtypes: the others are those before the
            # step.
            by_path = flatten(params)
            true = {path: w.astype(by_path[path].dtype) for path, w in wide.items()}
            # optax passes on the extra arguments that `arguments` lists; the function itself has
            # none.
            taken = {name: value for name, value in others.items() if name not in extra}
            return cut(function(unflatten(params, {**by_path, **true}), *args, **taken))

        of_own.__signature__ = inspect.Signature(arguments)  # pyright: ignore
        return of_own

    # optax's line searches raise if an extra argument is not an argument of value_fn.
    kind = inspect.Parameter
    arguments = [
        kind("params", kind.POSITIONAL_ONLY),
        *(kind(name, kind.KEYWORD_ONLY) for name in extra if name.isidentifier()),
        kind("args", kind.VAR_POSITIONAL),
    ]
    # A Signature must have *args before arguments that are passed by name.
    arguments.sort(key=lambda argument: argument.kind)
    return {name: restrict(x) if callable(x) else cut(x) for name, x in extra.items()}


def negated(extra: Any) -> Any:
    """Reverses the sign of the loss in extra arguments, for maximize=True.

    Args:
        extra: the extra arguments of a group by name, as `extra_arguments` returns them.

    Returns:
        The arguments, of which the loss, its gradient and their functions have the opposite sign.
    """

    def negative(name: str, x: Any) -> Any:
        if name not in _OF_LOSS:
            return x
        if not callable(x):
            return jax.tree.map(jnp.negative, x)

        # wraps copies __signature__, which optax's line searches read.
        @functools.wraps(x)
        def function(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.map(jnp.negative, x(*args, **kwargs))

        return function

    return {name: negative(name, x) for name, x in extra.items()}
