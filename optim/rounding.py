"""Rounds parameters computed in float32 to the dtypes in which they are stored."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optim.shard_map_checks import require_whole

LowPrecision = Literal["nearest", "master", "stochastic"]


def round_to(
    after: dict[str, jax.Array],
    before: dict[str, jax.Array],
    how: LowPrecision,
    step: ArrayLike,
    key: jax.Array | None,
) -> dict[str, jax.Array]:
    """Casts new parameters, float32 or wider, to the dtypes of the old ones."""
    # The noise of "stochastic" depends on the step and the PRNG key; None is one key for all runs.
    # Raises ValueError for it inside shard_map, where all shards would get the same noise.
    if how != "stochastic":
        return {path: x.astype(before[path].dtype) for path, x in after.items()}
    require_whole(None, (after, ()), 'low_precision="stochastic"')
    # A function of key and step alone, so that a resumed run rounds as an uninterrupted one does.
    key = jax.random.fold_in(jax.random.key(0) if key is None else key, step)
    return {
        # With one key for all, parameters of equal shapes would be rounded with equal noise.
        path: stochastic_round(x, jax.random.fold_in(key, i), before[path].dtype)
        if before[path].dtype in (jnp.bfloat16, jnp.float16)
        else x.astype(before[path].dtype)
        for i, (path, x) in enumerate(after.items())
    }


def stochastic_round(x: jax.Array, key: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 up or down to a narrower dtype at random, without bias."""
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    if dtype == jnp.bfloat16:  # the upper half of a float32
        # The noise carries into the upper half with a probability of lower half / 2**16, which is
        # the distance to the lower neighbor in units of bfloat16.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    else:
        info = jnp.finfo(dtype)
        _, exponent = jnp.frexp(x)  # |x| in [2**(exponent - 1), 2**exponent)
        # The distance of two neighbors of the narrow dtype at x; it is the same for all subnormal
        # numbers, those below 2**minexp.
        unit = jnp.ldexp(jnp.ones_like(x), jnp.maximum(exponent - 1, info.minexp) - info.nmant)
        # 11 bits before the point and 13 after it: all 24 bits of a float32.
        rounded = jnp.floor(x / unit + (noise >> 3).astype(x.dtype) / 2**13) * unit
    # Noise could turn the bits of a NaN into those of -0.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)
