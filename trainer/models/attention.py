"""Attention: queries, keys and values, rotary positions, and the products between them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from optim.dtypes import widen
from trainer.constraints import constrain, device, parts
from trainer.models.layers import SAVED, Initializer, Linear, RmsNorm, matrix, rows_times, zeros

IMPLEMENTATIONS = ("auto", "plain", "xla", "cudnn")
"""The values of the argument `implementation` of `attend`."""

ROTATIONS = ("full", "half")
"""The values of the argument `rope` of `rotary_angles`."""

_HALF = (jnp.bfloat16, jnp.float16)


class Qkv(nn.Module):
    """Computes queries, keys and values, or some of them, by a matrix each."""

    count: int  # of matrices: `kernel` [count, width, size], `bias` [count, size]
    num_heads: int  # divides the columns
    size: int | None = None  # the columns; None for the width of the tokens
    initial: Initializer = matrix
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, tokens, width] to [batch, tokens, count, heads, head_dim]."""
        (batch, tokens, width), size = x.shape, self.size or x.shape[-1]
        # Separate matrices, so that Muon orthogonalizes each of them, multiplied in one product.
        kernel = self.param("kernel", self.initial, (self.count, width, size))
        bias = self.param("bias", zeros, (self.count, size)) if self.use_bias else None
        kernel = constrain(kernel, None, None, "heads")
        if parts("heads") == 1:
            x = rows_times(x, kernel.transpose(1, 0, 2).reshape(width, self.count * size))
            x = x if bias is None else x + bias.reshape(-1).astype(x.dtype)
        else:
            # The columns of a matrix lie over several devices, which would have to be gathered to
            # bring those of all matrices into one row.
            x = jnp.einsum("nw,cws->ncs", x.astype(kernel.dtype).reshape(-1, width), kernel)
            x = x if bias is None else x + bias.astype(x.dtype)
        x = x.reshape(batch, tokens, self.count, self.num_heads, size // self.num_heads)
        return constrain(x, "batch", None, None, "heads", None)


class CausalAttention(nn.Module):
    """Self-attention of each token over itself and the tokens before it."""

    # If the collection `intermediates` is mutable, it gets the weights, float32 [batch, heads,
    # queries, keys], as `weights`; for `attention_logits` see `_observe`.

    num_heads: int
    num_kv_heads: int
    qk_norm: bool | str  # "unscaled" divides by the root mean squares without a learned scale
    scale: float  # the factor of the products of queries and keys
    implementation: str  # as in `attend`
    last: Initializer  # of `out/kernel`
    first: Initializer = matrix  # of the other kernels
    use_bias: bool = False
    epsilon: float | None = 1e-6  # as in `RmsNorm`
    observation = "attention_logits"  # see `trainer.protocols.Model`

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: jax.Array, mask: jax.Array | None, start: jax.Array | None
    ) -> jax.Array:
        """Mixes the tokens x, [batch, tokens, width]; the result has their shape."""
        # `angles` [tokens, head_dim / 2]; `mask` None, or bool [batch, 1, tokens, tokens], False
        # where a token must not attend; `start` None, or, in decoding, the number of tokens before
        # x, whose keys and values are in the collection `cache`; those of x are added there.
        batch, tokens, width = x.shape
        query, key, value = self._project(x)
        if self.qk_norm:
            norm = functools.partial(RmsNorm, self.epsilon, self.qk_norm != "unscaled")
            query, key = norm(name="q_norm")(query), norm(name="k_norm")(key)
        query, key = rotate(query, angles), rotate(key, angles)
        if self.is_mutable_collection(self.observation) and not self.is_initializing():
            self._observe(largest_logits(query, key, mask, self.scale), query.shape[-1])
        if start is None:
            mixed = attend(query, key, value, mask, self.scale, self.implementation)
            if self.is_mutable_collection("intermediates"):  # `attend` does not return the weights
                causal = jnp.tri(tokens, dtype=bool)
                seen = causal if mask is None else mask & causal
                self.sow("intermediates", "weights", _weights(query, key, seen, self.scale))
        else:
            key, value = self._remember("key", key, start), self._remember("value", value, start)
            # [tokens, places of the cache]: places after a token are empty, or are its future.
            seen = jnp.arange(key.shape[1]) <= start + jnp.arange(tokens)[:, None]
            mixed = _attend_cached(query, key, value, seen, self.scale)
        mixed = constrain(mixed.reshape(batch, tokens, width), "batch", None, "heads")
        return Linear(width, self.use_bias, self.last, ("heads", None), name="out")(mixed)

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, each [batch, tokens, heads, head_dim]."""
        batch, tokens, width = x.shape
        head_dim = width // self.num_heads
        if self.num_kv_heads == self.num_heads:
            qkv = Qkv(3, self.num_heads, None, self.first, self.use_bias, name="qkv")(x)
            return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        query = Linear(width, self.use_bias, self.first, (None, "heads"), name="q")(x)
        size = self.num_kv_heads * head_dim
        kv = Qkv(2, self.num_kv_heads, size, self.first, self.use_bias, name="kv")(x)
        return query.reshape(batch, tokens, self.num_heads, head_dim), kv[:, :, 0], kv[:, :, 1]

    def _observe(self, largest: jax.Array, head_dim: int) -> None:
        """Notes for kernels and biases the largest logit of the heads of each column."""
        # Heads that share keys have the largest of their logits; values have 0.
        shared = largest.reshape(self.num_kv_heads, -1).max(axis=1)
        keys = jnp.repeat(shared, head_dim)
        queries = jnp.repeat(shared, largest.size // shared.size * head_dim)
        found = {"q": queries, "kv": jnp.stack([keys, jnp.zeros_like(keys)])}
        if self.num_kv_heads == self.num_heads:
            found = {"qkv": jnp.stack([queries, keys, jnp.zeros_like(keys)])}
        for name, x in found.items():
            biases = {"bias": x} if self.use_bias else {}
            self.put_variable(self.observation, name, {"kernel": x[..., None, :], **biases})

    def _remember(self, name: str, new: jax.Array, start: jax.Array) -> jax.Array:
        """Writes new keys or values into the cache and returns all of them."""
        cache = self.variable("cache", name, zeros, None, new.shape)
        cache.value = jax.lax.dynamic_update_slice(
            cache.value, new.astype(cache.value.dtype), (0, start, 0, 0)
        )
        return cache.value


def rotary_angles(
    positions: jax.Array,
    head_dim: int,
    base: float,
    rope: str = "full",
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Returns the angles by which queries and keys are rotated, [tokens, head_dim / 2]."""
    # Radians: with rope="full", p * base ** (-2 * i / head_dim) for pair i at position p; with
    # "half", -p * base ** (-i / (head_dim / 4 - 1)) for the first head_dim / 4 pairs, of
    # wavelengths from 2 pi to 2 pi * base, and 0 for the others.
    if rope == "half":
        turned = head_dim // 4
        exponents = jnp.arange(turned, dtype=dtype) / max(turned - 1, 1)
        frequencies = jnp.concatenate([-(base**-exponents), jnp.zeros(turned, dtype)])
    else:
        frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    return positions.astype(dtype)[:, None] * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates queries or keys [batch, tokens, heads, head_dim] by their positions, in float32."""
    # Su et al., arXiv:2104.09864. Element i of the first half and element i of the second half are
    # a pair, as in GPT-NeoX and Llama; the paper pairs elements 2 i and 2 i + 1. The two differ by
    # a permutation of the columns of the kernels.
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(widen(x), 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(pair, axis=-1).astype(x.dtype)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: float,
    implementation: str = "auto",
) -> jax.Array:
    """Computes causal attention, with its softmax in float32."""
    # Queries are [batch, tokens, heads, head_dim], keys and values have kv_heads (Ainslie et al.,
    # arXiv:2305.13245); the mask is None or bool [batch, 1, tokens, tokens]. "cudnn" is flash
    # attention in bfloat16 and float16, and "xla" in other dtypes.
    if implementation == "auto":
        implementation = _choose(query)
    elif implementation == "cudnn" and query.dtype not in _HALF:
        implementation = "xla"
    if implementation == "plain":
        if (group := query.shape[2] // key.shape[2]) > 1:
            key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        return causal_attention(query, key, value, mask, scale)
    if implementation == "cudnn":
        key, value = (_divided_as(query, x) for x in (key, value))
    chosen: Any = implementation
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, is_causal=True, implementation=chosen
    )


def _divided_as(query: jax.Array, x: jax.Array) -> jax.Array:
    """Repeats heads of keys or values if devices divide only those of the queries evenly."""
    # jax refuses to partition cuDNN's attention where they are not divided as those of the queries.
    devices, heads = parts("heads"), query.shape[2]
    if heads % devices or not x.shape[2] % devices:
        return x
    return constrain(jnp.repeat(x, heads // x.shape[2], axis=2), "batch", None, "heads", None)


def _choose(query: jax.Array) -> str:
    computer = device()
    # For a v5e, a step of GPT-124M then takes 0.89 of the cycles that its compiler estimates and
    # 0.89 of the temporary memory; with sequences of 4,096 tokens, 0.51 and 0.61.
    if computer.platform in ("cpu", "tpu"):
        return "plain"
    tokens, head_dim = query.shape[1], query.shape[3]
    fits = not head_dim % 8 and not tokens % 2
    if fits and query.dtype in _HALF and "NVIDIA" in computer.device_kind:
        capability = float(computer.compute_capability)
        # Flash attention of cuDNN: Ampere and later, larger heads from Hopper on.
        if capability >= 8 and head_dim <= (256 if capability >= 9 else 128):
            return "cudnn"
    return "xla"


def _weights(query: jax.Array, key: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """Returns the weights of the keys, float32 [batch, heads, queries, keys]."""
    # Queries are [batch, queries, heads, head_dim], keys [batch, keys, kv_heads, head_dim]. The
    # mask is broadcast to the weights, and is False where a query must not attend.
    batch, tokens, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    # The heads that share keys are rows of one product: [batch, kv_heads, group * tokens, head_dim]
    rows = query.reshape(batch, tokens, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, head_dim)
    scores = widen(rows @ key.transpose(0, 2, 3, 1)) * scale
    scores = scores.reshape(batch, heads, tokens, -1)
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))


def _attend_cached(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scale: float
) -> jax.Array:
    """Computes attention to the keys of a cache, where `mask`, broadcast to the scores, is True."""
    batch, tokens, _, head_dim = query.shape
    kv_heads = key.shape[2]
    weights = _weights(query, key, mask, scale).astype(value.dtype)
    weights = weights.reshape(batch, kv_heads, -1, key.shape[1])
    mixed = (weights @ value.transpose(0, 2, 1, 3)).reshape(batch, kv_heads, -1, tokens, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


# Causal attention by products of blocks, for processors without a kernel for it.

_ROWS = 128  # queries of a block; 64 and 256 took longer on a CPU
_MOST_BLOCKS = 8  # on a TPU, whose compiler takes long for many


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
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


def largest_logits(
    query: jax.Array, key: jax.Array, mask: jax.Array | None, scale: float
) -> jax.Array:
    """Returns the largest product of a query and a key that it sees, float32 [heads]."""
    # The arguments are those of `attend`; the result is not differentiated.
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    queries, keys = _heads_first(*jax.lax.stop_gradient((query * scale, key)))
    found = []
    for rows, seen in _blocks(query.shape[1]):
        products = widen(queries[:, :, rows] @ keys[:, :, seen].mT)
        products = jnp.where(_sees(mask, rows, seen), products, -jnp.inf)
        found.append(products.max(axis=(0, 2, 3)))
    return jnp.stack(found).max(axis=0)


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
