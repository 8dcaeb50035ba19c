"""Packs the scalars of a state into one vector for each dtype.

Each leaf of a donated state adds about a microsecond to a step, and the state of many groups has
many scalars.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class OptimizerState(NamedTuple):
    """The state of an `optim.Optimizer`.

    Attributes:
        scalars: every rank-0 value of every group and the step count, packed by dtype: {"int32":
            (n,), "float32": (m,)}.
        groups: group name -> the state of its optimizer, with None in place of scalars.
        master: path -> float32 copy of a low-precision parameter; empty but for
            low_precision="master".
        lookahead: the state of the lookahead, with None in place of scalars; without one, an empty
            tuple.
        readout: the same of the readout.
    """

    scalars: dict[str, jax.Array]
    groups: dict[str, Any]
    master: dict[str, jax.Array]
    lookahead: Any = ()
    readout: Any = ()


class Unpacked(NamedTuple):
    """The state of an `optim.Optimizer` before its scalars are packed."""

    # The leaves of a tuple are in the order of its fields. So the last two scalars that `pack`
    # finds of dtype int32 are `skipped` and `step`, whatever the groups are.

    groups: dict[str, Any]  # group name -> the state of its optimizer
    lookahead: Any  # or ()
    readout: Any  # or ()
    skipped: Any  # the number of updates that were skipped, int32
    step: Any  # the number of updates, int32


def _is_scalar(x: Any) -> bool:
    # Extended dtypes are those of typed PRNG keys.
    return x.ndim == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def pack(state: optax.OptState) -> tuple[dict[str, jax.Array], Any]:
    """Splits a state into a vector of scalars for each dtype name, and the rest of the tree."""
    leaves, structure = jax.tree.flatten(state)
    scalars: dict[str, list[Any]] = {}
    for x in filter(_is_scalar, leaves):
        scalars.setdefault(x.dtype.name, []).append(x)
    # None is a tree without leaves, so the rest has the arrays only.
    rest = structure.unflatten([None if _is_scalar(x) else x for x in leaves])
    return {dtype: jnp.stack(values) for dtype, values in scalars.items()}, rest


def unpack(scalars: Mapping[str, jax.Array], rest: Any, template: Any) -> Any:
    """Restores the state that `pack` has split."""
    # `template` has the structure, shapes and dtypes of the state.
    leaves, structure = jax.tree.flatten(template)
    # `pack` took scalars and tensors in the order of the leaves; they return in that order.
    tensors = iter(jax.tree.leaves(rest))
    values = {dtype: iter([v[i] for i in range(v.size)]) for dtype, v in scalars.items()}
    return structure.unflatten(
        [next(values[x.dtype.name]) if _is_scalar(x) else next(tensors) for x in leaves]
    )


def packed(state: Unpacked) -> OptimizerState:
    """Packs the state of an optimizer, without the copies of low_precision="master"."""
    scalars, rest = pack(state)
    return OptimizerState(scalars, rest.groups, {}, rest.lookahead, rest.readout)
