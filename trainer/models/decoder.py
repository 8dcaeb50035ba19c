"""The modules of a decoder-only transformer."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from trainer.logits import ChunkedLogits
from trainer.models.attention import rotary_angles
from trainer.models.initial import normal
from trainer.models.layers import Initializer, Mlp, RmsNorm, run_stack


class Block(nn.Module):
    """Applies attention and a perceptron, each to a norm and with a residual."""

    attention: functools.partial
    mlp_dim: int
    activation: str
    last: Initializer
    dropout: float

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        mask: jax.Array | None,
        start: jax.Array | None,
        train: bool,
    ) -> jax.Array:
        """Maps [batch, tokens, width] to an array of the same shape; see `CausalAttention`."""
        drop = nn.Dropout(self.dropout, deterministic=not train)
        attention = self.attention(last=self.last, name="attn")
        x = x + drop(attention(RmsNorm(name="attn_norm")(x), angles, mask, start))
        mlp = Mlp(self.mlp_dim, self.activation, self.last, name="mlp")
        return x + drop(mlp(RmsNorm(name="mlp_norm")(x)))


class Embed(nn.Module):
    """Looks up tokens in `embedding` [vocab_size, width], and normalizes them if `norm`."""

    vocab_size: int
    width: int
    norm: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps int32 [batch, tokens] to [batch, tokens, width], and returns the embedding, too."""
        embedding = self.param("embedding", normal(0.02), (self.vocab_size, self.width))
        # A token that is not in the vocabulary becomes NaN, which ends the run.
        x = jnp.take(embedding, tokens, axis=0)
        return RmsNorm(name="norm")(x) if self.norm else x, embedding


class Head(nn.Module):
    """Holds `kernel` [width, vocab_size], by which the last features are multiplied."""

    vocab_size: int
    initial: Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the kernel for features [batch, tokens, width]."""
        return self.param("kernel", self.initial, (x.shape[-1], self.vocab_size))


class Gpt(nn.Module):
    """Embeds tokens, applies the blocks, and multiplies their norm by the head."""

    vocab_size: int
    width: int
    depth: int
    head_dim: int
    block: functools.partial
    embed_norm: bool
    head: Initializer | None
    rope_base: float
    max_length: int
    outputs: functools.partial
    z_loss: float
    remat: str
    scan_layers: bool
    dropout: float

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        documents: jax.Array | None = None,
        start: jax.Array | None = None,
        train: bool = False,
    ) -> ChunkedLogits:
        """Computes the logits of the token after each token, [batch, positions, vocab_size].

        Args:
            tokens: int32 [batch, positions].
            documents: None, or int32 [batch, positions]; a token attends to those of its document.
            start: None, or, in decoding, the number of tokens before these, int32.
            train: whether dropout and z-loss are active.
        """
        _check_length(tokens, self.max_length)
        x, embedding = Embed(self.vocab_size, self.width, self.embed_norm, name="embed")(tokens)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        positions = jnp.arange(tokens.shape[1]) + (0 if start is None else start)
        angles = rotary_angles(positions, self.head_dim, self.rope_base)
        mask = None
        if documents is not None:
            mask = documents[:, None, :, None] == documents[:, None, None, :]

        def call(layer: nn.Module, x: jax.Array) -> jax.Array:
            return layer(x, angles, mask, start, train)

        x = run_stack(self.block, call, x, self.depth, self.scan_layers, self.remat)
        x = RmsNorm(name="norm")(x)
        kernel = embedding.T
        if self.head is not None:
            kernel = Head(self.vocab_size, self.head, name="head")(x)
        return self.outputs(features=x, kernel=kernel, z_loss=self.z_loss if train else 0.0)


def _check_length(tokens: jax.Array, max_length: int) -> None:
    if tokens.shape[1] > max_length:
        raise ValueError(
            f"models.gpt got sequences of {tokens.shape[1]} tokens, but its max_length is "
            f"{max_length}. Take shorter sequences, or set max_length to {tokens.shape[1]}."
        )
