"""Refuses, inside shard_map, what would be silently wrong on parts of parameters."""

from collections.abc import Callable, Iterator
from typing import Any

import jax


def refuse_parts(function: Callable[..., Any] | None, operands: tuple[Any, Any], name: str) -> None:
    """Refuses, inside shard_map, what would need whole parameters and is given parts of them.

    A norm of a part is not the norm, and nobody would notice. What moves each number by itself may
    work on parts; so the operations decide, and not the optimizer's name.

    Args:
        function: what is to be done with the gradients; it is traced, and only where an operand
            differs from device to device. None for what always needs whole arrays.
        operands: the gradients, then whatever else the function uses.
        name: what the error calls the function.

    Raises:
        ValueError: the function mixes the numbers of an array, or draws random ones, and an operand
            differs from device to device.
    """
    axes = {axis for x in jax.tree.leaves(operands) for axis in _varying(jax.typeof(x))}
    if not axes:
        return
    try:
        whole = function is None or any(
            _mixes(equation) for equation in _equations(jax.make_jaxpr(function)(operands[0]))
        )
    except (TypeError, ValueError):  # shapes of parts do not fit what was made for the whole
        whole = True
    if whole:
        raise ValueError(
            f"Inside shard_map, {name} got parameters or gradients that differ along the mesh axis "
            f"{', '.join(sorted(map(str, axes)))}, and needs whole ones: it computes norms, sums, "
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


# Operations that move each number by itself, or only move numbers about.
_MIXING = (
    "reduce", "arg", "cum", "dot_general", "conv_general", "sort", "top_k", "fft", "svd", "qr",
    "eigh", "eig", "lu", "cholesky", "triangular_solve", "householder", "random_bits", "threefry",
    "scatter", "gather", "concatenate",
)  # fmt: skip


def _mixes(equation: Any) -> bool:
    name = equation.primitive.name
    if not name.startswith(_MIXING):
        return False
    drawn = name.startswith(("random", "threefry"))
    return drawn or any(_varying(v.aval) for v in equation.invars if v.aval.shape)
