"""Computes in at least float32, because bfloat16(0.999) is 1, and rounds to narrower dtypes."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optim.tracing import require_whole


def compute_dtype(params: optax.Params) -> DTypeLike:
    """Returns the dtype of hyperparameters: float64 if any parameter has 64 bits, else float32."""
    # finfo describes the parts of a complex dtype: complex128 has 64 bits here, complex64 has 32.
    # It raises for integers, which are left out.
    dtypes = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.float64 if any(jnp.finfo(x).bits == 64 for x in dtypes) else jnp.float32


def widen(tree: Any, integers: bool = False) -> Any:
    """Casts floats narrower than float32, such as bfloat16, to float32; other leaves stay."""
    # With `integers`, integers and booleans become float32, too, as an average of them needs.

    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        whole = integers and not jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(jnp.float32) if whole or _is_narrow(x.dtype) else x

    return jax.tree.map(cast, tree)


def wide_zeros(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns zeros like an array, for a state; None is the dtype that `widen` gives the array."""
    return jnp.zeros_like(x, dtype=dtype or (jnp.float32 if _is_narrow(x.dtype) else x.dtype))


def _is_narrow(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


# Rounding.

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
    if how != "stochastic":
        return {path: x.astype(before[path].dtype) for path, x in after.items()}
    # Inside shard_map, all shards would get the same noise.
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
