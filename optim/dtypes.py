"""Chooses the dtypes that optimizers compute in: at least float32, because bfloat16(0.999) is 1."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike


def compute_dtype(params: optax.Params) -> DTypeLike:
    """Returns the dtype of hyperparameters: float64 if any parameter has 64 bits, else float32."""
    # finfo describes the parts of a complex dtype: complex128 has 64 bits here, complex64 has 32.
    # It raises for integers, which are left out.
    has_64_bits = any(
        jnp.finfo(x.dtype).bits == 64
        for x in jax.tree.leaves(params)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    )
    return jnp.float64 if has_64_bits else jnp.float32


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
