"""Finds by tracing what results depend on, and whether a function would be wrong on shards."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.interpreters import partial_eval


def reads(function: Callable[[Any], Any], arguments: Mapping[str, Any]) -> set[str]:
    """Returns the names of the arguments that the results of a function depend on."""
    # It takes a dict like `arguments`. Dependence on the shape of an argument alone does not count.
    jaxpr, owners = _trace(function, arguments)
    return _used(jaxpr, owners, [True] * len(jaxpr.outvars))


def reads_of_leaves(function: Callable[[Any], Any], arguments: Mapping[str, Any]) -> list[set[str]]:
    """Returns the arguments that each leaf of a function's result depends on; see `reads`."""
    jaxpr, owners = _trace(function, arguments)
    places = range(len(jaxpr.outvars))
    return [_used(jaxpr, owners, [i == place for i in places]) for place in places]


def _trace(function: Callable[[Any], Any], arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Returns the jaxpr of a function, and the argument's name of each of its inputs."""
    trace = jax.make_jaxpr(lambda *values: function(dict(zip(arguments, values, strict=True))))
    jaxpr = trace(*arguments.values()).jaxpr
    return jaxpr, [name for name, x in arguments.items() for _ in jax.tree.leaves(x)]


def _used(jaxpr: Any, owners: list[str], results: list[bool]) -> set[str]:
    # dce_jaxpr also looks into the bodies of scan, while, cond and pjit: an argument that a loop
    # only passes on, without effect on the results asked for, is not counted.
    _, used = partial_eval.dce_jaxpr(jaxpr, results)
    return {name for name, is_used in zip(owners, used, strict=True) if is_used}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of those inside it, the outer ones first."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in inner_jaxprs(value):
                yield from equations(inner)


def inner_jaxprs(value: Any) -> list[Any]:
    """Returns the jaxprs in a parameter of an equation."""
    # `cond` has a tuple of branches.
    values = value if isinstance(value, list | tuple) else [value]
    return [x for x in values if hasattr(getattr(x, "jaxpr", x), "eqns")]


# Computations on shards of parameters, inside shard_map.


def require_whole(
    function: Callable[..., Any] | None, operands: tuple[Any, Any], name: str
) -> None:
    """Raises ValueError, inside shard_map, if a function needs whole arrays and gets shards."""
    # The norm of a shard is not the norm of the parameter. A function is traced if an operand
    # differs between devices: it may work on shards unless it combines numbers of an array or draws
    # random ones. It takes the first of `operands`, the gradients; None always needs whole arrays.
    if not (axes := {axis for x in jax.tree.leaves(operands) for axis in _varying(jax.typeof(x))}):
        return
    try:
        whole = function is None or any(
            map(_mixes, equations(jax.make_jaxpr(function)(operands[0])))
        )
    except (TypeError, ValueError):  # shapes of shards do not fit a state made for whole arrays
        whole = True
    if whole:
        raise ValueError(
            f"Inside shard_map, {name} got parameters or gradients that differ along the mesh axis "
            f"{', '.join(sorted(map(str, axes)))}, but needs whole ones: it computes norms, sums, "
            f"products, random numbers or factors of the shape of a parameter. Keep the parameters "
            f"replicated and average the gradients (jax.lax.pmean), or leave shard_map and use jit "
            f"with named shardings."
        )


def _varying(aval: Any) -> frozenset[Any]:
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


# Prefixes of operations that combine several numbers of an array; others treat each by itself.
_MIXING = (
    "reduce", "arg", "cum", "dot_general", "conv_general", "sort", "top_k", "fft", "svd", "qr",
    "eigh", "eig", "lu", "cholesky", "triangular_solve", "householder", "random_bits", "threefry",
    "scatter", "gather", "concatenate",
)  # fmt: skip


def _mixes(equation: Any) -> bool:
    name = equation.primitive.name
    if not name.startswith(_MIXING):
        return False
    # A draw reads no gradient, but its numbers follow from the shape of the shard.
    drawn = name.startswith(("random", "threefry"))
    return drawn or any(_varying(v.aval) for v in equation.invars if v.aval.shape)
