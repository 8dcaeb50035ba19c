"""Puts what was computed in float32 back into the dtype that a parameter is kept in."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from optim.parts import refuse_parts

LowPrecision = Literal["nearest", "master", "stochastic"]


def round_to(
    after: dict[str, Any], before: dict[str, Any], how: LowPrecision, step: Any, key: Any
) -> dict[str, Any]:
    """Casts new parameters back to the dtypes they are kept in.

    Args:
        after: path -> the new parameter, float32 or wider.
        before: path -> the old one, in its dtype.
        how: see `optimizer`.
        step: an int32 scalar, which makes the noise of "stochastic" another one.
        key: where that noise comes from; None for the same in every run.

    Returns:
        Path -> the new parameter, in the dtype of the old.

    Raises:
        ValueError: inside shard_map, "stochastic" would draw the same noise for every part.
    """
    if how != "stochastic":
        return {path: x.astype(before[path].dtype) for path, x in after.items()}
    refuse_parts(None, (after, ()), 'low_precision="stochastic"')
    key = jax.random.fold_in(jax.random.key(0) if key is None else key, step)
    return {
        path: _stochastic_round(x, jax.random.fold_in(key, i), before[path].dtype)
        if before[path].dtype in (jnp.bfloat16, jnp.float16)
        else x.astype(before[path].dtype)
        for i, (path, x) in enumerate(after.items())
    }


def _stochastic_round(x: jax.Array, key: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 to a neighbour in a smaller dtype, up with the probability of what is cut."""
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    if dtype == jnp.bfloat16:  # the upper half of a float32
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    else:
        info = jnp.finfo(dtype)
        _, exponent = jnp.frexp(x)  # |x| in [2**(exponent - 1), 2**exponent)
        unit = jnp.ldexp(jnp.ones_like(x), jnp.maximum(exponent - 1, info.minexp) - info.nmant)
        # 11 bits before the point and 13 behind it: all that a float32 holds.
        rounded = jnp.floor(x / unit + (noise >> 3).astype(x.dtype) / 2**13) * unit
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)
