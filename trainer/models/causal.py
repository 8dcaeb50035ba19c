"""Causal attention by products of blocks, for processors without a kernel for it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from optim.dtypes import widen
from trainer.constraints import device

SAVED = "attended"
"""The name of what a backward pass needs besides queries, keys and values, for remat policies."""

_ROWS = 128  # queries of a block; 64 and 256 took longer on a CPU
_MOST_BLOCKS = 8  # on a TPU, whose compiler takes long for many


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, scale: float
) -> jax.Array:
    """Computes causal attention a block of queries at a time, with its softmax in float32."""
    # As in flash attention (Dao et al., arXiv:2205.14135), the backward pass computes a block's
    # weights again, from the logarithm of the softmax's denominator. Arrays are [batch, tokens,
    # heads, head_dim]; the mask is as in `attend`, and a token must attend to itself.
    return _forward(query, key, value, mask, scale)[0]


def _forward(query: Any, key: Any, value: Any, mask: Any, scale: float) -> tuple[jax.Array, Any]:
    queries, keys, values = _heads_first(query * scale, key, value)
    mixed, denominators = [], []
    for rows, seen in _blocks(query.shape[1]):
        products = widen(queries[:, :, rows] @ keys[:, :, seen].mT)
        scores = jnp.where(_sees(mask, rows, seen), products, -jnp.inf)
        largest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        block = weights.astype(value.dtype) @ values[:, :, seen]
        mixed.append((widen(block) / total).astype(value.dtype))
        denominators.append(largest + jnp.log(total))
    found = checkpoint_name(jnp.concatenate(mixed, axis=2), SAVED)
    denominator = checkpoint_name(jnp.concatenate(denominators, axis=2), SAVED)
    return found.swapaxes(1, 2), (query, key, value, mask, found, denominator)


def _backward(scale: float, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    query, key, value, mask, found, denominator = saved
    queries, keys, values, by_found = _heads_first(query * scale, key, value, cotangent)
    inner = (widen(by_found) * widen(found)).sum(axis=-1, keepdims=True)
    by_queries, by_keys, by_values = [], [], []
    for rows, seen in _blocks(query.shape[1]):
        products = widen(queries[:, :, rows] @ keys[:, :, seen].mT)
        weights = jnp.exp(products - denominator[:, :, rows])
        weights = jnp.where(_sees(mask, rows, seen), weights, 0.0)
        by_weights = widen(by_found[:, :, rows] @ values[:, :, seen].mT)
        by_scores = (weights * (by_weights - inner[:, :, rows])).astype(query.dtype)
        by_queries.append(by_scores @ keys[:, :, seen])
        # [batch, heads, head_dim, keys]: the product of the other order, whose first matrix is the
        # wide one, takes more than twice as long on a CPU.
        by_keys.append(queries[:, :, rows].mT @ by_scores)
        by_values.append(by_found[:, :, rows].mT @ weights.astype(value.dtype))
    by_query = jnp.concatenate(by_queries, axis=2).swapaxes(1, 2) * scale
    by_key, by_value = (_sum_blocks(x).transpose(0, 3, 1, 2) for x in (by_keys, by_values))
    return by_query, by_key.astype(key.dtype), by_value.astype(value.dtype), None


causal_attention.defvjp(_forward, _backward)


def _heads_first(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays [batch, tokens, heads, head_dim] as [batch, heads, tokens, head_dim]."""
    return tuple(x.swapaxes(1, 2) for x in arrays)


def _blocks(tokens: int) -> list[tuple[slice, slice]]:
    """Returns the slice of each block of queries, and that of the keys which it may see."""
    # For a v5e, 256 queries took the fewest of the cycles that its compiler estimates.
    rows = max(256, -(-tokens // _MOST_BLOCKS)) if device().platform == "tpu" else _ROWS
    ends = [min(start + rows, tokens) for start in range(0, tokens, rows)]
    return [(slice(rows * i, end), slice(0, end)) for i, end in enumerate(ends)]


def _sees(mask: jax.Array | None, rows: slice, seen: slice) -> jax.Array:
    """Returns which queries of a block see which keys, bool [..., rows, seen]."""
    causal = jnp.arange(rows.start, rows.stop)[:, None] >= jnp.arange(seen.stop)
    return causal if mask is None else causal & mask[:, :, rows, seen]


def _sum_blocks(arrays: list[jax.Array]) -> jax.Array:
    """Adds arrays [..., keys] in float32; each ends before the next, at the end of its block."""
    starts = [0, *(x.shape[-1] for x in arrays[:-1])]
    parts = [
        sum(widen(x[..., start : first.shape[-1]]) for x in arrays[i:])
        for i, (start, first) in enumerate(zip(starts, arrays, strict=True))
    ]
    return jnp.concatenate(parts, axis=-1)
