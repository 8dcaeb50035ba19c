"""The cross-entropy of products of features and a kernel, computed a chunk of rows at a time.

Start with `cross_entropy`, whose derivative is `_forward` and `_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

AGAIN = "gradient_again"
"""The name of the scope of the loop in `_backward`, which has no iterations in the usual case."""


class Head(NamedTuple):
    """The function from products of features and a kernel to logits and losses.

    Attributes:
        scale: the factor of the products.
        soft_cap: see `trainer.logits.ChunkedLogits`.
        z_loss: see there.
        count: the number of chunks.
    """

    scale: float
    soft_cap: float | None
    z_loss: float
    count: int

    def logits(self, products: jax.Array) -> jax.Array:
        """Returns the logits of products, both float32 [..., vocabulary]."""
        logits = products if self.scale == 1 else products * self.scale
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def losses(
        self, products: jax.Array, labels: jax.Array, smoothing: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the losses of rows, which include the z-loss, and the z-loss; float32 [rows].

        Products are float32 [rows, vocabulary], labels are integers [rows]; smoothing is a scalar,
        perhaps traced, or None.
        """
        logits = self.logits(products)
        denominator = jax.nn.logsumexp(logits, axis=-1)
        # A comparison for each logit, and not a gather, whose gradient would be a scatter.
        at_label = jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels[:, None]
        likelihood = jnp.sum(jnp.where(at_label, logits, 0.0), axis=-1) - denominator
        is_label = (labels >= 0) & (labels < logits.shape[-1])
        if smoothing is not None:
            uniform = jnp.mean(logits, axis=-1) - denominator
            likelihood = (1 - smoothing) * likelihood + smoothing * uniform
        z_loss = self.z_loss * jnp.square(denominator)
        losses = z_loss - likelihood if self.z_loss else -likelihood
        return jnp.where(is_label, losses, jnp.nan), z_loss


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(
    head: Head, features: Any, kernel: Any, labels: Any, counts: Any, smoothing: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns what `Head.losses` does for rows of features, a chunk of rows at a time.

    The gradient is computed together with the losses, while the logits of a chunk are there, for
    the weight 1 of a row that counts and 0 of another. If the weights of the losses turn out to be
    a multiple of these, as in a mean of the losses, the gradient is multiplied. Otherwise it is
    computed again: the same numbers, a third slower.

    Args:
        head: what to compute, and the number of chunks.
        features: [rows, width].
        kernel: [width, vocabulary].
        labels: integers [rows].
        counts: bool [rows].
        smoothing: a scalar, perhaps traced, or None.
    """
    chunks = (split(features, head.count), split(labels, head.count))
    losses, z_loss = jax.lax.map(
        lambda chunk: head.losses(product(chunk[0], kernel), chunk[1], smoothing), chunks
    )
    return join(losses, labels.shape), join(z_loss, labels.shape)


def _forward(
    head: Head, features: Any, kernel: Any, labels: Any, counts: Any, smoothing: Any
) -> Any:
    weights = counts.astype(jnp.float32)
    start = _Sums.start(head, features, kernel, smoothing)
    add = _adding(head, features, kernel, labels, weights, smoothing)
    sums = jax.lax.fori_loop(0, head.count, add, start)
    found = (join(sums.losses, labels.shape), join(sums.z_loss, labels.shape))
    return found, (features, kernel, labels, weights, smoothing, sums)


def _backward(head: Head, saved: Any, cotangents: Any) -> Any:
    features, kernel, labels, weights, smoothing, sums = saved
    cotangent, _ = cotangents  # the z-loss is returned without a gradient
    low, high = jnp.min(cotangent), jnp.max(cotangent)
    multiple = jnp.where(high > 0, high, low)
    # A mean of the losses, over those that count, or a multiple of it: the usual case.
    is_known = jnp.all(cotangent == multiple * weights)
    add = _adding(head, features, kernel, labels, cotangent, smoothing)
    start = jax.tree.map(lambda x: jnp.where(is_known, multiple * x, 0.0), sums)
    # A loop and not a branch, which would keep a second copy of the kernel's gradient, and of which
    # vmap would compute both sides.
    with jax.named_scope(AGAIN):
        sums = jax.lax.fori_loop(0, jnp.where(is_known, 0, head.count), add, start)
    by_features = join(sums.features, features.shape[:1]).astype(features.dtype)
    return by_features, sums.kernel.astype(kernel.dtype), None, None, sums.smoothing


cross_entropy.defvjp(_forward, _backward)


class _Sums(NamedTuple):
    """What the chunks add up to: losses and gradients."""

    losses: jax.Array  # float32 [chunks, rows]
    z_loss: jax.Array  # float32 [chunks, rows]
    features: jax.Array  # the gradient, float32 [chunks, rows, width]
    kernel: jax.Array  # the gradient, float32 [width, vocabulary]
    smoothing: Any  # the gradient, a scalar, or None

    @classmethod
    def start(cls, head: Head, features: jax.Array, kernel: jax.Array, smoothing: Any) -> _Sums:
        rows = jnp.zeros((head.count, -(-features.shape[0] // head.count)), jnp.float32)
        by_features = jnp.zeros((*rows.shape, features.shape[1]), jnp.float32)
        zero = None if smoothing is None else jnp.zeros((), jnp.float32)
        return cls(rows, rows, by_features, jnp.zeros(kernel.shape, jnp.float32), zero)


def _adding(
    head: Head, features: Any, kernel: Any, labels: Any, weights: Any, smoothing: Any
) -> Callable[[Any, _Sums], _Sums]:
    """Returns the body of a loop that adds one chunk's losses, and gradients with these weights."""
    chunks = [split(x, head.count) for x in (features, labels, weights)]

    def add(index: Any, sums: _Sums) -> _Sums:
        rows, targets, factors = [
            jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in chunks
        ]
        products = _dot(rows, kernel, 1, 0)
        losses, pull, z_loss = jax.vjp(
            lambda products, smoothing: head.losses(products, targets, smoothing),
            products,
            smoothing,
            has_aux=True,
        )
        by_products, by_smoothing = pull(factors)
        by_products = by_products.astype(kernel.dtype)
        return _Sums(
            sums.losses.at[index].set(losses),
            sums.z_loss.at[index].set(z_loss),
            sums.features.at[index].set(_dot(by_products, kernel, 1, 1)),
            sums.kernel + _dot(rows, by_products, 0, 0),
            jax.tree.map(jnp.add, sums.smoothing, by_smoothing),
        )

    return add


@jax.custom_vjp
def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the product of rows [rows, width] and a kernel, float32 [rows, vocabulary].

    It multiplies in the dtype of the kernel and adds in float32, and so does its derivative: the
    one of jax.lax.dot_general would multiply in float32.
    """
    return _dot(rows, kernel, 1, 0)


def _product_forward(rows: jax.Array, kernel: jax.Array) -> Any:
    return _dot(rows, kernel, 1, 0), (rows, kernel)


def _product_backward(saved: Any, cotangent: jax.Array) -> Any:
    rows, kernel = saved
    cotangent = cotangent.astype(kernel.dtype)
    by_rows, by_kernel = _dot(cotangent, kernel, 1, 1), _dot(rows, cotangent, 0, 0)
    return by_rows.astype(rows.dtype), by_kernel.astype(kernel.dtype)


product.defvjp(_product_forward, _product_backward)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contracts an axis of each of two matrices in the dtype of `b`, and returns float32."""
    a = a.astype(b.dtype)
    if jax.default_backend() == "cpu":
        # The same numbers: some versions of jax cannot multiply bfloat16 to float32 on a CPU.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def split(rows: jax.Array, count: int) -> jax.Array:
    """Returns rows [rows, ...] in chunks, [count, rows / count, ...]; zeros fill the last ones."""
    padded = jnp.pad(rows, [(0, -rows.shape[0] % count)] + [(0, 0)] * (rows.ndim - 1))
    # Chunk i has the rows i, i + count, ...: each device has its share of all of them.
    return padded.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1)


def join(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the rows of chunks that `split` made in their order, [*shape, ...].

    What filled the last chunks is dropped.
    """
    rows = chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])
    return rows[: math.prod(shape)].reshape(*shape, *chunks.shape[2:])
