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
    values = dict(named)
    jaxpr = jax.make_jaxpr(function)(values).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    owners = [name for name in sorted(values) for _ in jax.tree.leaves(values[name])]
    return {name for name, is_used in zip(owners, used, strict=True) if is_used}
