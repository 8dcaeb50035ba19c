"""Initializers whose values are drawn for a whole model by a single PRNG program.

Drawing each parameter by itself compiles one PRNG program per parameter, which takes half of a
small model's cold start. Here a parameter only declares its mean and standard deviation (flax keeps
them with the value, as it does with the axis names of a partitioned parameter), and `one_draw`
fills all parameters from one long array of random numbers.

An initializer takes a PRNG key and a shape, and returns a `Drawn` with an array of that shape,
float32 unless the initializer was made for another dtype. `one_draw` ignores the numbers of the
array, and so the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike


class Drawn(struct.PyTreeNode, nn.meta.AxisMetadata):
    """An initial value with the mean and standard deviation of its normal distribution."""

    value: jax.Array
    mean: float = struct.field(pytree_node=False)
    deviation: float = struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        """Returns the value."""
        return self.value

    def replace_boxed(self, val: jax.Array) -> Drawn:
        """Returns a copy with another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Drawn:
        """Returns itself: mean and deviation are the same for each layer of a stack."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Drawn:
        """Returns itself, as `add_axis` does."""
        return self


def _draw(
    key: Any,
    shape: Sequence[int],
    mean: float,
    deviation: float,
    dtype: DTypeLike = jnp.float32,
) -> Drawn:
    # `one_draw` uses only shape and dtype of this array; its numbers are used if flax initializes
    # the module.
    value = jnp.full(shape, mean, jnp.float32)
    if deviation:
        value = value + deviation * jax.random.normal(key, shape, jnp.float32)
    return Drawn(value.astype(dtype), mean, deviation)


def matrix(key: jax.Array, shape: Sequence[int]) -> Any:
    """Draws matrices [..., rows, columns] from a normal distribution of variance 1 / rows."""
    return _draw(key, shape, 0.0, shape[-2] ** -0.5)


def normal(
    deviation: float, dtype: DTypeLike = jnp.float32
) -> Callable[[jax.Array, Sequence[int]], Any]:
    """Returns an initializer that draws from a normal distribution; deviation 0 makes zeros."""
    return lambda key, shape: _draw(key, shape, 0.0, deviation, dtype)


def scaled_matrix(factor: float) -> Callable[[jax.Array, Sequence[int]], Any]:
    """Returns an initializer like `matrix`, with a deviation of factor / sqrt(rows)."""
    return lambda key, shape: _draw(key, shape, 0.0, factor * shape[-2] ** -0.5)


def convolution(key: jax.Array, shape: Sequence[int]) -> Any:
    """Draws a kernel [height, width, inputs, features] of variance 2 / (height * width * inputs).

    He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852).
    """
    return _draw(key, shape, 0.0, math.sqrt(2 / math.prod(shape[:-1])))


def small(key: jax.Array, shape: Sequence[int]) -> Any:
    """Draws from a normal distribution of standard deviation 0.02."""
    return _draw(key, shape, 0.0, 0.02)


def zeros(key: jax.Array | None, shape: Sequence[int]) -> Any:
    """Makes zeros; the key is ignored."""
    return _draw(key, shape, 0.0, 0.0)


def ones(key: jax.Array | None, shape: Sequence[int]) -> Any:
    """Makes ones; the key is ignored."""
    return _draw(key, shape, 1.0, 0.0)


def one_draw(shapes: Mapping[str, Any], key: jax.Array) -> Any:
    """Fills all `Drawn` leaves of nested dicts from one array of standard normal numbers.

    Only shapes and dtypes of their values are used. The result for a leaf depends on the key and on
    the leaves before it.
    """
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, Drawn))
    # Constants take no random numbers.
    sizes = [math.prod(leaf.value.shape) if leaf.deviation else 0 for leaf in leaves]
    noise = jax.random.normal(key, (sum(sizes),), jnp.float32)
    arrays, start = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        # The leaves are sorted by their paths, so that the same key gives the same parameters.
        array = jnp.full(leaf.value.shape, leaf.mean, jnp.float32)
        if size:
            piece = noise[start : start + size].reshape(leaf.value.shape)
            array = array + leaf.deviation * piece
        arrays.append(array.astype(leaf.value.dtype))
        start += size
    return jax.tree.unflatten(structure, arrays)
