"""The modules of a decoder-only transformer."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optim.dtypes import widen
from trainer.constraints import constrain
from trainer.logits import ChunkedLogits
from trainer.logits.cross_entropy import wide
from trainer.models.initial import zeros
from trainer.models.layers import Initializer, run_stack


class Block(nn.Module):
    """Applies attention and a perceptron, each to a norm and with a residual."""

    attention: functools.partial
    mlp: functools.partial
    norm: functools.partial
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
        x = x + drop(attention(self.norm(name="attn_norm")(x), angles, mask, start))
        x = constrain(x, "batch", None, None)
        mlp = self.mlp(last=self.last, name="mlp")
        return constrain(x + drop(mlp(self.norm(name="mlp_norm")(x))), "batch", None, None)


class Embed(nn.Module):
    """Looks up tokens in `embedding` [vocab_size, width]."""

    vocab_size: int
    width: int
    initial: Initializer
    norm: functools.partial | None  # of the embedded tokens; None does not normalize them

    @nn.compact
    def __call__(self, tokens: jax.Array, dtype: DTypeLike | None) -> tuple[jax.Array, jax.Array]:
        """Maps int32 [batch, tokens] to [batch, tokens, width]; returns the embedding, too."""
        # The dtype is that of the result, for an embedding that is stored in another one than the
        # other parameters; None stands for that of the embedding.
        embedding = self.param("embedding", self.initial, (self.vocab_size, self.width))
        embedding = constrain(embedding, "vocabulary", None)
        # A token that is not in the vocabulary becomes NaN, which ends the run. The gradients of a
        # token are added in float32: in bfloat16, the sum of any number of ones ends at 256.
        x = jnp.take(widen(embedding), tokens, axis=0).astype(dtype or embedding.dtype)
        x = constrain(x, "batch", None, None)
        return x if self.norm is None else self.norm(name="norm")(x), embedding


class Head(nn.Module):
    """Holds `kernel` [width, vocab_size] of the last features, and `bias` [vocab_size] or none."""

    width: int
    vocab_size: int
    initial: Initializer
    use_bias: bool

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns kernel and bias."""
        kernel = self.param("kernel", self.initial, (self.width, self.vocab_size))
        kernel = constrain(kernel, None, "vocabulary")
        return kernel, self.param("bias", zeros, (self.vocab_size,)) if self.use_bias else None


class Gpt(nn.Module):
    """Embeds tokens, applies the blocks, and multiplies their norm by the head."""

    # The parts are made with a name: `block(name=...)`. `angles(positions, dtype=...)` returns what
    # `rotary_angles` does.

    vocab_size: int
    depth: int
    head_dim: int
    block: functools.partial
    embed: functools.partial
    norm: functools.partial
    head: functools.partial | None  # None where the embedding is the head
    angles: functools.partial
    max_length: int
    outputs: functools.partial
    z_loss: float
    remat: str | Sequence[str] | None
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
        """Computes the logits of the token after each token, [batch, positions, vocab_size]."""
        # `tokens` and `documents` are int32 [batch, positions]; a token attends to those of its
        # document. `start` is None, or, in decoding, the number of tokens before these. `train` is
        # also for z-loss.
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f"models.gpt got sequences of {tokens.shape[1]} tokens, but its max_length is "
                f"{self.max_length}. Take shorter sequences, or set max_length to "
                f"{tokens.shape[1]}."
            )
        kernel, bias = (None, None) if self.head is None else self.head(name="head")()
        # The embedding may be stored in another dtype than the other parameters.
        x, embedding = self.embed(name="embed")(tokens, None if kernel is None else kernel.dtype)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        positions = jnp.arange(tokens.shape[1]) + (0 if start is None else start)
        angles = self.angles(positions, dtype=wide(x.dtype))
        mask = None
        if documents is not None:
            mask = documents[:, None, :, None] == documents[:, None, None, :]

        def call(layer: nn.Module, x: jax.Array) -> jax.Array:
            return layer(x, angles, mask, start, train)

        x = run_stack(self.block, call, x, self.depth, self.scan_layers, self.remat)
        x = self.norm(name="norm")(x)
        kernel = embedding.T if kernel is None else kernel
        z_loss = self.z_loss if train else 0.0
        return self.outputs(features=x, kernel=kernel, bias=bias, z_loss=z_loss)
