"""The logits of a model with a large vocabulary, which are computed a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkedLogits:
    """Logits that are not an array: the features and the kernel whose product they are.

    A language model with 50,000 tokens has 50,000 logits for each position of a batch: with the
    array of them, and its gradient, a step of a small model takes several times its memory. The
    losses and metrics of this package compute the logits of `chunk` positions at a time.

    Attributes:
        features: [batch, positions, width].
        kernel: [width, vocabulary].
        scale: the factor of the product.
        soft_cap: c in c * tanh(logits / c), which bounds the logits; None does not bound them
            (Gemma Team 2024, arXiv:2408.00118).
        z_loss: the weight of the squared logarithm of the softmax's denominator, which the loss
            adds (Chowdhery et al. 2022, arXiv:2204.02311).
        chunk: how many positions to compute at a time.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer.logits import ChunkedLogits
        >>> logits = ChunkedLogits(features=jnp.ones((2, 3, 4)), kernel=jnp.ones((4, 5)), chunk=2)
        >>> logits.shape, logits.whole()[0, 0].tolist()
        ((2, 3, 5), [4.0, 4.0, 4.0, 4.0, 4.0])
        >>> logits.map(lambda rows: rows.argmax(axis=-1)).shape
        (2, 3)
    """

    features: jax.Array
    kernel: jax.Array
    scale: float = field(default=1.0, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    z_loss: float = field(default=0.0, metadata={"static": True})
    chunk: int = field(default=1024, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits, (batch, positions, vocabulary)."""
        return (*self.features.shape[:-1], self.kernel.shape[-1])

    def whole(self) -> jax.Array:
        """Returns all logits as one array, float32 [batch, positions, vocabulary]."""
        return self._rows(self.features)

    def map(self, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Applies a function to the logits of all positions, a chunk of positions at a time.

        The logits are not kept for the backward pass, which computes them again.

        Args:
            function: `function(logits, *rows)` of logits float32 [rows, vocabulary] and, for each
                of `arrays`, an array [rows, ...]. It returns a pytree of arrays [rows, ...].
            *arrays: arrays [batch, positions, ...].

        Returns:
            The results for all positions: a pytree of arrays [batch, positions, ...].
        """
        rows = [x.reshape(-1, *x.shape[2:]) for x in (self.features, *arrays)]
        count = rows[0].shape[0]
        size = min(self.chunk, count)
        # Rows of zeros fill the last chunk, and what is computed for them is dropped.
        padded = [jnp.pad(x, [(0, -count % size)] + [(0, 0)] * (x.ndim - 1)) for x in rows]
        chunks = [x.reshape(-1, size, *x.shape[1:]) for x in padded]
        one = jax.checkpoint(lambda xs: function(self._rows(xs[0]), *xs[1:]), prevent_cse=False)
        results = jax.lax.map(one, chunks)
        shape = self.features.shape[:-1]
        return jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:])[:count].reshape(*shape, *x.shape[2:]), results
        )

    def _rows(self, features: jax.Array) -> jax.Array:
        """Returns the logits, float32 [..., vocabulary], of features [..., width]."""
        flat = features.reshape(-1, features.shape[-1]) @ self.kernel
        logits = flat.reshape(*features.shape[:-1], -1).astype(jnp.float32) * self.scale
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)
