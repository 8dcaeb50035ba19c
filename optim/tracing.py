"""Asks of a function, by tracing it, which of its arguments its results depend on."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.interpreters import partial_eval


def reads(function: Callable[[Any], Any], named: Mapping[str, Any]) -> set[str]:
    """Names the arguments that the results of a function depend on.

    Args:
        function: takes a dict like `named`; it is traced, and nothing is computed.
        named: name -> a number, an array or a pytree of them.

    Returns:
        The names of the values that some result depends on. A result that depends on the shape of
        an argument alone does not depend on it.
    """
    jaxpr, owners = _trace(function, named)
    return _used(jaxpr, owners, [True] * len(jaxpr.outvars))


def reads_of_leaves(function: Callable[[Any], Any], named: Mapping[str, Any]) -> list[set[str]]:
    """Names the arguments that each leaf of a function's result depends on; see `reads`."""
    jaxpr, owners = _trace(function, named)
    places = range(len(jaxpr.outvars))
    return [_used(jaxpr, owners, [i == place for i in places]) for place in places]


def _trace(function: Callable[[Any], Any], named: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Traces a function; gives its jaxpr, and the name behind each of the jaxpr's arguments."""
    jaxpr = jax.make_jaxpr(function)(dict(named)).jaxpr
    return jaxpr, [name for name in sorted(named) for _ in jax.tree.leaves(named[name])]


def _used(jaxpr: Any, owners: list[str], results: list[bool]) -> set[str]:
    _, used = partial_eval.dce_jaxpr(jaxpr, results)
    return {name for name, is_used in zip(owners, used, strict=True) if is_used}
