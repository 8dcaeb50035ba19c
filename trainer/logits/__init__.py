"""Logits that are the product of features and a kernel, computed a chunk of rows at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from trainer.constraints import parts
from trainer.logits import cross_entropy
from trainer.logits.cross_entropy import SOFT_CAPS, Head, join, product, split

__all__ = ["SOFT_CAPS", "ChunkedLogits"]

# The logits of a chunk on a device, in numbers. Smaller ones take longer: each chunk adds to the
# gradient of the whole kernel, and devices that divide the vocabulary exchange sums of each.
_CHUNK_SIZE = 2**25


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkedLogits:
    """Logits that are not an array: the features and the kernel whose product they are.

    A language model with 50,000 tokens has 50,000 logits for each position of a batch: with the
    array of them, and its gradient, a step of a small model takes several times its memory.
    `losses.softmax_cross_entropy`, `metrics.accuracy` and `metrics.top_k_accuracy` compute the
    logits of a chunk of positions at a time. Other losses and metrics call `whole()` or `map()`.

    Attributes:
        features: [batch, positions, width].
        kernel: [width, vocabulary].
        scale: the factor of the product.
        bias: [vocabulary], which is added to the products times `scale`; None adds nothing.
        soft_cap: c, the bound of the logits; None does not bound them (Gemma Team 2024,
            arXiv:2408.00118).
        soft_cap_form: "tanh" bounds them by c * tanh(logits / c), "algebraic" by c * logits /
            sqrt(logits^2 + c^2), as modded-nanogpt does.
        z_loss: the weight of the squared logarithm of the softmax's denominator, which the loss
            adds (Chowdhery et al. 2022, arXiv:2204.02311).
        chunk: the most positions, over the whole batch, to compute at a time; None chooses the
            number of positions that have 2**25 logits (128 MiB) on each device.

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
    bias: jax.Array | None = None
    scale: float = field(default=1.0, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    soft_cap_form: str = field(default="tanh", metadata={"static": True})
    z_loss: float = field(default=0.0, metadata={"static": True})
    chunk: int | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits, (batch, positions, vocabulary)."""
        return (*self.features.shape[:-1], self.kernel.shape[-1])

    @property
    def ndim(self) -> int:
        """The number of axes of the logits."""
        return len(self.shape)

    def whole(self) -> jax.Array:
        """Returns all logits as one array, float32 [batch, positions, vocabulary]."""
        rows = self.features.reshape(-1, self.features.shape[-1])
        return self._head.logits(product(rows, self.kernel), self.bias).reshape(self.shape)

    def argmax(self, axis: int = -1) -> jax.Array:
        """Returns the most likely token of each position, integers [batch, positions].

        Args:
            axis: that of the vocabulary, which is the last one.
        """
        if axis not in (-1, self.ndim - 1):
            raise ValueError(f"ChunkedLogits.argmax needs axis=-1, but got {axis}.")
        return self.map(lambda logits: jnp.argmax(logits, axis=-1))

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
        head, shape = self._head, self.features.shape[:-1]

        @partial(jax.checkpoint, prevent_cse=False)
        def one(rows: list[jax.Array]) -> Any:
            return function(head.logits(product(rows[0], self.kernel), self.bias), *rows[1:])

        chunks = [split(_rows(x), head.count) for x in (self.features, *arrays)]
        return jax.tree.map(lambda x: join(x, shape), jax.lax.map(one, chunks))

    def cross_entropy(
        self, labels: jax.Array, label_smoothing: Any = 0.0, counts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the cross-entropy of the softmax of the logits, with the z-loss.

        Args:
            labels: integers [batch, positions], from 0 to vocabulary - 1. The loss at another one
                is NaN.
            label_smoothing: as in `losses.softmax_cross_entropy`.
            counts: bool [batch, positions], where the losses have equal weights and not 0; None
                stands for everywhere. Other weights do not change what is computed, but take a
                third longer; see `trainer/logits/cross_entropy.py`.

        Returns:
            The losses, float32 [batch, positions], and the part of them that is the z-loss, which
            has no gradient of its own.
        """
        shape, head = self.features.shape[:-1], self._head
        counts = jnp.ones(shape, bool) if counts is None else counts
        features, targets = _rows(self.features), _rows(labels)
        smoothing = None
        if not isinstance(label_smoothing, int | float) or label_smoothing:
            smoothing = jnp.asarray(label_smoothing, jnp.float32)
        if head.count == 1:
            products = product(features, self.kernel)
            losses, z_loss = head.losses(products, self.bias, targets, smoothing)
        else:
            both: Any = cross_entropy.cross_entropy(
                head, features, self.kernel, self.bias, targets, _rows(counts), smoothing
            )
            losses, z_loss = both
        return losses.reshape(shape), jax.lax.stop_gradient(z_loss.reshape(shape))

    @property
    def _head(self) -> Head:
        *shape, vocabulary = self.shape
        positions = max(1, math.prod(shape))
        at_once = _CHUNK_SIZE * parts("batch") * parts("vocabulary") // vocabulary
        count = -(-positions // (self.chunk or max(1, at_once)))
        # Chunks of equal size, without rows to fill the last one, if such are not much smaller; and
        # of as many rows for each device.
        equal = [n for n in range(count, 2 * count) if positions % n == 0]
        even = [n for n in equal if positions // n % parts("batch") == 0]
        count = next(iter(even or equal), count)
        return Head(self.scale, self.soft_cap, self.soft_cap_form, self.z_loss, count)


def _rows(x: jax.Array) -> jax.Array:
    """Returns an array [batch, positions, ...] as [batch * positions, ...]."""
    return x.reshape(-1, *x.shape[2:])
