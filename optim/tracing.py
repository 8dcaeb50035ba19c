"""Finds the arguments that the results of a function depend on, by tracing it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.interpreters import partial_eval


def reads(function: Callable[[Any], Any], arguments: Mapping[str, Any]) -> set[str]:
    """Returns the names of the arguments that the results of a function depend on."""
    # The function takes a dict like `arguments`, of numbers, arrays or pytrees of them. It is
    # traced, and nothing is computed. Dependence on the shape of an argument alone does not count.
    jaxpr, owners = _trace(function, arguments)
    return _used(jaxpr, owners, [True] * len(jaxpr.outvars))


def reads_of_leaves(function: Callable[[Any], Any], arguments: Mapping[str, Any]) -> list[set[str]]:
    """Returns the arguments that each leaf of a function's result depends on; see `reads`."""
    jaxpr, owners = _trace(function, arguments)
    places = range(len(jaxpr.outvars))
    return [_used(jaxpr, owners, [i == place for i in places]) for place in places]


def _trace(function: Callable[[Any], Any], arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Returns the jaxpr of a function, and the argument's name of each of its inputs."""

    def of_values(*values: Any) -> Any:
        return function(dict(zip(arguments, values, strict=True)))

    jaxpr = jax.make_jaxpr(of_values)(*arguments.values()).jaxpr
    return jaxpr, [name for name, x in arguments.items() for _ in jax.tree.leaves(x)]


def _used(jaxpr: Any, owners: list[str], results: list[bool]) -> set[str]:
    # dce_jaxpr also looks into the bodies of scan, while, cond and pjit: an argument that a loop
    # only passes on, without effect on the results asked for, is not counted.
    _, used = partial_eval.dce_jaxpr(jaxpr, results)
    return {name for name, is_used in zip(owners, used, strict=True) if is_used}
