"""Puts what was computed in float32 back into the dtype that a parameter is kept in."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

LowPrecision = Literal["nearest", "master", "stochastic"]


def round_to(
    after: dict[str, Any], before: dict[str, Any], how: LowPrecision, step: Any
) -> dict[str, Any]:
    """Casts new parameters back to the dtypes they are kept in."""
    if how != "stochastic":
        return {path: x.astype(before[path].dtype) for path, x in after.items()}
    key = jax.random.fold_in(jax.random.key(0), step)
    return {
        path: _stochastic_round(x, jax.random.fold_in(key, i))
        if before[path].dtype == jnp.bfloat16
        else x.astype(before[path].dtype)
        for i, (path, x) in enumerate(after.items())
    }


def _stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to a neighbour in bfloat16, up with the probability of the part cut off."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
