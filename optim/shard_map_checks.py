"""Raises, inside shard_map, if a computation on shards of parameters would be silently wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import jax


def require_whole(
    function: Callable[..., Any] | None, operands: tuple[Any, Any], name: str
) -> None:
    """Raises ValueError, inside shard_map, if a function needs whole arrays and gets shards."""
    # The norm of a shard is not the norm of the parameter. A function is traced if an operand
    # differs between devices: it may work on shards unless it combines numbers of an array or draws
    # random ones. It takes the first of `operands`, the gradients; None always needs whole arrays.
    axes = {axis for x in jax.tree.leaves(operands) for axis in _varying(jax.typeof(x))}
    if not axes:
        return
    try:
        whole = function is None or any(
            _mixes(equation) for equation in _equations(jax.make_jaxpr(function)(operands[0]))
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


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of those inside it."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in inner.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _equations(value)


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
