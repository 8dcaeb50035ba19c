"""A GPT written by hand in jax and optax, with which models.gpt is compared.

The parameters have the names and shapes of those of models.gpt, so that both sides can start from
the same ones. Shapes are those of `Shape`; the model has RMSNorm, rotary positions, normalized
queries and keys, squared ReLU and an untied head, as in modded-nanogpt.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optim
from benchmarks.by_hand import label

CLIP = 1.0
ADAMW: dict[str, Any] = {
    "learning_rate": 3e-3,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
MUON: dict[str, Any] = {"learning_rate": 0.02, "momentum": 0.95, "weight_decay": 0.1}
MATRICES = "blocks/.*/kernel"


class Shape(NamedTuple):
    """The sizes of a GPT and of its batches.

    Args:
        vocab_size: number of tokens.
        width: size of a token's vector.
        depth: number of layers.
        num_heads: number of attention heads.
        length: positions of a sequence.
        batch_size: sequences of a batch.
    """

    vocab_size: int
    width: int
    depth: int
    num_heads: int
    length: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch."""
        return self.batch_size * self.length

    def batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns random tokens and labels, int32 [batch_size, length]."""
        draw = np.random.default_rng(seed)
        size = (self.batch_size, self.length + 1)
        text = draw.integers(0, self.vocab_size, size, dtype=np.int32)
        return {"tokens": text[:, :-1].copy(), "label": text[:, 1:].copy()}


def mean_loss(
    params: Any, batch: Any, shape: Shape, dtype: Any = jnp.float32, attended: str = "auto"
) -> jax.Array:
    """Returns the mean cross-entropy of a batch, in nats a token.

    Args:
        params: the parameters, as models.gpt names them, float32.
        batch: `tokens` and `label`, int32 [batch, length].
        shape: the sizes.
        dtype: the dtype of the products; norms, softmaxes and the loss are float32.
        attended: how `attention` is computed.
    """
    x, head = features(params, batch["tokens"], shape, dtype, attended)
    labels = batch["label"].reshape(-1)

    def losses(x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (x @ head).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    if shape.vocab_size < 8192:
        return losses(x, labels).mean()
    # Whole logits of 50,000 tokens would take most of the memory of the step.
    parts = (x.reshape(shape.batch_size, -1, x.shape[-1]), labels.reshape(shape.batch_size, -1))
    one = jax.checkpoint(lambda part: losses(*part).sum(), prevent_cse=False)
    return jax.lax.map(one, parts).sum() / labels.size


def features(
    params: Any, tokens: jax.Array, shape: Shape, dtype: Any, attended: str
) -> tuple[Any, Any]:
    """Returns the last features, [batch * length, width], and the kernel of the head."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    rows, size = tokens.size, shape.width // shape.num_heads
    angles = jnp.arange(shape.length)[:, None] * 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)

    # The products are saved, and everything else is computed again in the backward pass.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        attn = p["attn"]
        h = rms_norm(x, p["attn_norm"]["scale"])
        qkv = h @ attn["qkv"]["kernel"].transpose(1, 0, 2).reshape(shape.width, -1)
        heads = qkv.reshape(*tokens.shape, 3, shape.num_heads, size)
        query = rotate(rms_norm(heads[:, :, 0], attn["q_norm"]["scale"]))
        key = rotate(rms_norm(heads[:, :, 1], attn["k_norm"]["scale"]))
        mixed = attention(query, key, heads[:, :, 2], attended).reshape(rows, shape.width)
        x = x + mixed @ attn["out"]["kernel"]
        h = rms_norm(x, p["mlp_norm"]["scale"]) @ p["mlp"]["up"]["kernel"]
        return x + jnp.square(jax.nn.relu(h)) @ p["mlp"]["down"]["kernel"], None

    x = params["embed"]["embedding"][tokens.reshape(-1)]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return rms_norm(x, params["norm"]["scale"]), params["head"]["kernel"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides the last axis by its root mean square, in float32, and multiplies by a scale."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def attention(query: jax.Array, key: jax.Array, value: jax.Array, how: str) -> jax.Array:
    """Causal attention of [batch, length, heads, size].

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        how: "xla" or "cudnn" for those of jax.nn, "plain" for two products, or "auto": cuDNN's in
            bfloat16 on a GPU, or two products.
    """
    if how == "auto":
        half = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
        how = "cudnn" if half else "plain"
    if how != "plain":
        theirs: Any = how
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=theirs
        )
    length, size = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * size**-0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def make_optimizer(name: str, ns_dtype: str | None = None) -> optax.GradientTransformation:
    """Returns AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

    Args:
        name: "adamw" or "muon".
        ns_dtype: the dtype of Muon's Newton-Schulz steps; None for float32.
    """
    adamw = optax.adamw(**ADAMW)
    if name == "adamw":
        return optax.chain(optax.clip_by_global_norm(CLIP), adamw)
    muon = optim.muon(**MUON, ns_dtype=ns_dtype)
    groups = optax.partition({"matrices": muon, "rest": adamw}, label)
    return optax.chain(optax.clip_by_global_norm(CLIP), groups)
