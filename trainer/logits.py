"""Logits that are the product of features and a kernel, computed a chunk of rows at a time.

The functions before `ChunkedLogits` compute their cross-entropy. Start with `cross_entropy`, whose
derivative is `_forward` and `_backward`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.constraints import constrain, device, parts

__all__ = ["SOFT_CAPS", "ChunkedLogits"]

AGAIN = "gradient_again"
"""The name of the scope of the loop in `_backward`, which has no iterations in the usual case."""

SOFT_CAPS = ("tanh", "algebraic")
"""How logits may be bounded; see `trainer.logits.ChunkedLogits`."""


class Head(NamedTuple):
    """The function from products of features and a kernel to logits and losses."""

    # For `soft_cap`, `soft_cap_form` and `z_loss` see `trainer.logits.ChunkedLogits`.

    scale: float  # the factor of the products
    soft_cap: float | None
    soft_cap_form: str
    z_loss: float
    count: int  # of chunks

    def logits(self, products: jax.Array, bias: Any) -> jax.Array:
        """Returns the logits of products, float32 [rows, vocabulary]; bias [vocabulary] or None."""
        products = constrain(products, "batch", "vocabulary")
        logits = products if self.scale == 1 else products * self.scale
        logits = logits if bias is None else logits + bias.astype(logits.dtype)
        if self.soft_cap is None:
            return logits
        if self.soft_cap_form == "algebraic":
            return self.soft_cap * logits * jax.lax.rsqrt(jnp.square(logits) + self.soft_cap**2)
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def losses(
        self, products: jax.Array, bias: Any, labels: jax.Array, smoothing: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the losses of rows, which include the z-loss, and the z-loss; float32 [rows]."""
        # Products are float32 [rows, vocabulary], the bias is an array [vocabulary] or None, labels
        # are integers [rows]; smoothing is a scalar, perhaps traced, or None.
        logits = self.logits(products, bias)
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
    head: Head, features: Any, kernel: Any, bias: Any, labels: Any, counts: Any, smoothing: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns what `Head.losses` does for rows of features, a chunk of rows at a time."""
    # The gradient is computed with the losses, while a chunk's logits are there, for the weight 1
    # of a row that counts and 0 of another; weights that are a multiple of these, as in a mean,
    # multiply it. For others it is computed again: the same numbers, a third slower.
    chunks = (split(features, head.count), split(labels, head.count))
    losses, z_loss = jax.lax.map(
        lambda chunk: head.losses(product(chunk[0], kernel), bias, chunk[1], smoothing), chunks
    )
    return join(losses, labels.shape), join(z_loss, labels.shape)


def _forward(
    head: Head, features: Any, kernel: Any, bias: Any, labels: Any, counts: Any, smoothing: Any
) -> Any:
    weights = counts.astype(wide(kernel.dtype))
    start = _Sums.start(head, features, kernel, bias, smoothing)
    add = _adding(head, features, kernel, bias, labels, weights, smoothing)
    sums = jax.lax.fori_loop(0, head.count, add, start)
    found = (join(sums.losses, labels.shape), join(sums.z_loss, labels.shape))
    return found, (features, kernel, bias, labels, weights, smoothing, sums)


def _backward(head: Head, saved: Any, cotangents: Any) -> Any:
    features, kernel, bias, labels, weights, smoothing, sums = saved
    cotangent, _ = cotangents  # the z-loss is returned without a gradient
    low, high = jnp.min(cotangent), jnp.max(cotangent)
    multiple = jnp.where(high > 0, high, low)
    # A mean of the losses, over those that count, or a multiple of it: the usual case.
    is_known = jnp.all(cotangent == multiple * weights)
    add = _adding(head, features, kernel, bias, labels, cotangent, smoothing)
    start = jax.tree.map(lambda x: jnp.where(is_known, multiple * x, 0.0), sums)
    # A loop and not a branch, which would keep a second copy of the kernel's gradient, and of which
    # vmap would compute both sides.
    with jax.named_scope(AGAIN):
        sums = jax.lax.fori_loop(0, jnp.where(is_known, 0, head.count), add, start)
    by_features = join(sums.features, features.shape[:1]).astype(features.dtype)
    by_bias = None if bias is None else sums.bias.astype(bias.dtype)
    by_kernel = sums.kernel if sums.kernel.ndim == 2 else sums.kernel.sum(axis=0)
    by_kernel = constrain(by_kernel, None, "vocabulary")
    return by_features, by_kernel.astype(kernel.dtype), by_bias, None, None, sums.smoothing


cross_entropy.defvjp(_forward, _backward)


class _Sums(NamedTuple):
    """What the chunks add up to: losses and gradients."""

    losses: jax.Array  # float32 [chunks, rows]
    z_loss: jax.Array  # float32 [chunks, rows]
    features: jax.Array  # the gradient, float32 [chunks, rows, width]
    kernel: jax.Array  # the gradient, float32 [width, vocabulary], or [parts, width, vocabulary]
    bias: Any  # the gradient, float32 [vocabulary], or None
    smoothing: Any  # the gradient, a scalar, or None

    @classmethod
    def start(
        cls, head: Head, features: jax.Array, kernel: jax.Array, bias: Any, smoothing: Any
    ) -> "_Sums":
        dtype = wide(kernel.dtype)
        rows = jnp.zeros((head.count, -(-features.shape[0] // head.count)), dtype)
        by_features = jnp.zeros((*rows.shape, features.shape[1]), dtype)
        by_bias = None if bias is None else jnp.zeros(bias.shape, dtype)
        count = _kernel_parts(rows.shape[1])
        by_kernel = jnp.zeros(kernel.shape if count == 1 else (count, *kernel.shape), dtype)
        by_kernel = by_kernel if count == 1 else constrain(by_kernel, "batch", None, "vocabulary")
        zero = None if smoothing is None else jnp.zeros((), jnp.float32)
        return cls(rows, rows, by_features, by_kernel, by_bias, zero)


def _adding(
    head: Head, features: Any, kernel: Any, bias: Any, labels: Any, weights: Any, smoothing: Any
) -> Callable[[Any, _Sums], _Sums]:
    """Returns the body of a loop that adds one chunk's losses, and gradients with these weights."""
    chunks = [split(x, head.count) for x in (features, labels, weights)]

    def add(index: Any, sums: _Sums) -> "_Sums":
        at = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
        rows, targets, factors = map(at, chunks)
        products = _dot(rows, kernel, 1, 0)
        wide_bias = None if bias is None else bias.astype(products.dtype)

        def losses_of(products: jax.Array, bias: Any, smoothing: Any) -> Any:
            return head.losses(products, bias, targets, smoothing)

        losses, pull, z_loss = jax.vjp(losses_of, products, wide_bias, smoothing, has_aux=True)
        by_products, by_bias, by_smoothing = pull(factors)
        by_products = by_products.astype(kernel.dtype)
        return _Sums(
            sums.losses.at[index].set(losses),
            sums.z_loss.at[index].set(z_loss),
            sums.features.at[index].set(_dot(by_products, kernel, 1, 1)),
            sums.kernel + _kernel_gradient(rows, by_products),
            jax.tree.map(jnp.add, sums.bias, by_bias),
            jax.tree.map(jnp.add, sums.smoothing, by_smoothing),
        )

    return add


def _kernel_parts(rows: int) -> int:
    """Returns into how many parts the gradient of the kernel is added, of a chunk with `rows`."""
    # Each device adds its rows of all chunks to a part of its own, and the parts are added at the
    # end: one sum over the devices, where each chunk would need one.
    count = parts("batch")
    return count if rows % count == 0 else 1


def _kernel_gradient(rows: jax.Array, by_products: jax.Array) -> jax.Array:
    """Returns the gradient of the kernel, in parts as `_kernel_parts` says, of [rows, ...]."""
    if (count := _kernel_parts(len(rows))) == 1:
        return _dot(rows, by_products, 0, 0)
    own = [x.reshape(count, -1, x.shape[-1]) for x in (rows, by_products)]
    return constrain(jax.vmap(lambda a, b: _dot(a, b, 0, 0))(*own), "batch", None, "vocabulary")


@jax.custom_vjp
def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the product of rows [rows, width] and a kernel, float32 [rows, vocabulary]."""
    # It multiplies in the dtype of the kernel and adds in float32, and so does its derivative: the
    # one of jax.lax.dot_general would multiply in float32.
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
    """Contracts an axis of each of two matrices in the dtype of `b`, and returns a wide one."""
    a, dtype = a.astype(b.dtype), wide(b.dtype)
    if device().platform == "cpu":
        # The same numbers: some versions of jax cannot multiply bfloat16 to float32 on a CPU.
        a, b = a.astype(dtype), b.astype(dtype)
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


def wide(dtype: DTypeLike) -> DTypeLike:
    """Returns float64 for float64, and float32 for all narrower floats."""
    # All that is called float32 here is float64 for parameters in float64, such as those of tests.
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def split(rows: jax.Array, count: int) -> jax.Array:
    """Returns rows [rows, ...] in chunks, [count, rows / count, ...]; zeros fill the last ones."""
    padded = jnp.pad(rows, [(0, -rows.shape[0] % count)] + [(0, 0)] * (rows.ndim - 1))
    # Chunk i has the rows i, i + count, ...: each device has its share of all of them.
    return padded.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1)


def join(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the rows of the chunks of `split` in order, [*shape, ...], without the filling."""
    rows = chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])
    return rows[: math.prod(shape)].reshape(*shape, *chunks.shape[2:])


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
                third longer; see `_backward`.

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
            both: Any = cross_entropy(
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
