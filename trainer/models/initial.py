"""Initializers whose values are drawn for a whole model by a single PRNG program.

Drawing each parameter by itself compiles one PRNG program per parameter, which takes half of a
small model's cold start. Here a parameter only declares its mean and standard deviation (flax keeps
them with the value, as it does with the axis names of a partitioned parameter), and `one_draw`
fills all parameters from one long array of random numbers. On a mesh, where all parameters may be
larger than the memory of a device, each device draws its part of that array for itself.

An initializer takes a PRNG key and a shape, and returns a `Drawn` with an array of that shape,
float32 unless the initializer was made for another dtype. `one_draw` ignores the numbers of the
array, and so the key.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.extend import random as jax_prng
from jax.typing import DTypeLike

from optim.division import is_divided

Initializer = Callable[..., Any]


class Drawn(struct.PyTreeNode, nn.meta.AxisMetadata):
    """An initial value with the mean and standard deviation of its normal distribution."""

    value: jax.Array
    mean: float = struct.field(pytree_node=False)
    deviation: float = struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        """Returns the value."""
        return self.value

    def replace_boxed(self, val: jax.Array) -> "Drawn":
        """Returns a copy with another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Drawn":
        """Returns itself: mean and deviation are the same for each layer of a stack."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Drawn":
        """Returns itself, as `add_axis` does."""
        return self


def _draw(
    key: Any, shape: Sequence[int], mean: float, deviation: float, dtype: DTypeLike = jnp.float32
) -> Drawn:
    # `one_draw` uses only shape and dtype of this array; flax uses its numbers, too.
    value = jnp.full(shape, mean, jnp.float32)
    if deviation:
        value = value + deviation * jax.random.normal(key, shape, jnp.float32)
    return Drawn(value.astype(dtype), mean, deviation)


def normal(deviation: float, dtype: DTypeLike = jnp.float32) -> Initializer:
    """Returns an initializer that draws from a normal distribution; deviation 0 makes zeros."""
    return lambda key, shape: _draw(key, shape, 0.0, deviation, dtype)


def scaled_matrix(factor: float) -> Initializer:
    """Returns an initializer of matrices [..., rows, columns] of deviation factor / sqrt(rows)."""
    return lambda key, shape: _draw(key, shape, 0.0, factor * shape[-2] ** -0.5)


matrix = scaled_matrix(1.0)
small = normal(0.02)
zeros = normal(0.0)  # the key is ignored, and may be None


def convolution(key: jax.Array, shape: Sequence[int]) -> Any:
    """Draws [height, width, inputs, features] of variance 2 / (height * width * inputs)."""
    # He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852).
    return _draw(key, shape, 0.0, math.sqrt(2 / math.prod(shape[:-1])))


def ones(key: jax.Array | None, shape: Sequence[int]) -> Any:
    """Makes ones; the key is ignored."""
    return _draw(key, shape, 1.0, 0.0)


def one_draw(shapes: Mapping[str, Any], key: jax.Array) -> Any:
    """Fills all `Drawn` leaves of nested dicts from one array of standard normal numbers."""
    # Only shapes and dtypes of their values are used. The result for a leaf depends on the key and
    # on the leaves before it.
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, Drawn))
    # Constants take no random numbers.
    sizes = [math.prod(leaf.value.shape) if leaf.deviation else 0 for leaf in leaves]
    piece_of = _normal_numbers(key, sum(sizes))
    arrays, start = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        # The leaves are sorted by their paths, so that the same key gives the same parameters.
        array = jnp.full(leaf.value.shape, leaf.mean, jnp.float32)
        if size:
            array = array + leaf.deviation * piece_of(start, leaf.value.shape)
        arrays.append(array.astype(leaf.value.dtype))
        start += size
    return jax.tree.unflatten(structure, arrays)


def _normal_numbers(key: jax.Array, count: int) -> Callable[[int, Sequence[int]], jax.Array]:
    """Returns a function (start, shape) that reads from `jax.random.normal(key, [count])`."""
    # On a mesh, it computes these numbers alone, so that devices whose parts are parts of the
    # result need neither the long array nor each other.
    by_counter = str(jax.random.key_impl(key)) == "threefry2x32"
    if is_divided() and by_counter and jax.config.values["jax_threefry_partitionable"]:
        # The barrier keeps the compiler from merging factors of the numbers with those of a
        # parameter, which rounds otherwise.
        return lambda start, shape: jax.lax.optimization_barrier(
            jax.random.normal(_skip(key, start), shape, jnp.float32)
        )
    noise = jax.random.normal(key, (count,), jnp.float32)
    return lambda start, shape: noise[start : start + math.prod(shape)].reshape(shape)


def _skip(key: jax.Array, start: int) -> jax.Array:
    """Returns a key whose random numbers are those of a threefry key from `start` on."""
    data = [*jax.random.key_data(key), *divmod(start, 2**32)]
    return jax.random.wrap_key_data(jnp.stack(data, dtype=jnp.uint32), impl=_FROM_A_START)


def _bits(data: jax.Array, width: int, shape: Sequence[int]) -> jax.Array:
    """Returns the random bits of a key that `_skip` has made, as uint32."""
    assert width == 32
    high, low = _positions(data[2], data[3], shape)
    first, second = jax_prng.threefry2x32_p.bind(data[0], data[1], high, low)
    return first ^ second


def _positions(high: jax.Array, low: jax.Array, shape: Sequence[int]) -> tuple[Any, Any]:
    """Returns the places of a shape's elements in a flat array, which begin with a given one."""
    # They are integers of 64 bits, which jax lacks by default, as two arrays of 32 bits.
    high, low = jnp.broadcast_to(high, shape), jnp.broadcast_to(low, shape)
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        times_high, times_low = divmod(math.prod(shape[axis + 1 :]), 2**32)
        more = _high_product(index, times_low) + index * np.uint32(times_high)
        added = low + index * np.uint32(times_low)
        high, low = high + more + (added < low).astype(jnp.uint32), added
    return high, low


def _high_product(x: jax.Array, y: int) -> jax.Array:
    """Returns the upper 32 bits of the products of uint32 numbers with a number below 2**32."""
    x_high, x_low = x >> 16, x & 0xFFFF
    y_high, y_low = map(np.uint32, divmod(y, 2**16))
    middle = x_high * y_low + ((x_low * y_low) >> 16)
    return x_high * y_high + (middle >> 16) + ((x_low * y_high + (middle & 0xFFFF)) >> 16)


def _unused(*_: Any) -> Any:
    raise NotImplementedError("These keys draw numbers, and nothing else.")


_FROM_A_START = jax_prng.define_prng_impl(
    key_shape=(4,),
    seed=_unused,
    split=_unused,
    random_bits=_bits,
    fold_in=_unused,
    name="threefry2x32_from_a_start",
)
