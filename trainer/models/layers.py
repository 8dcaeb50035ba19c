"""Layers that the models share: linear layers, norms, a stack of equal layers; and initial values.

Each layer computes in the dtype of its parameters, and statistics and softmaxes in float32, or in
float64 for parameters in float64. A model whose parameters are cast to bfloat16 therefore computes
in bfloat16, without implicit promotion.

The initial values are drawn for a whole model by a single PRNG program. Drawing each parameter by
itself compiles one PRNG program per parameter, which takes half of a small model's cold start. Here
a parameter only declares its mean and standard deviation (flax keeps them with the value, as it
does with the axis names of a partitioned parameter), and `one_draw` fills all parameters from one
long array of random numbers. On a mesh, where all parameters may be larger than the memory of a
device, each device draws its part of that array for itself.

An initializer takes a PRNG key and a shape, and returns a `Drawn` with an array of that shape,
float32 unless the initializer was made for another dtype. `one_draw` ignores the numbers of the
array, and so the key.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import axes_scan, lift
from flax.linen import transforms
from jax.extend import random as jax_prng
from jax.typing import DTypeLike

from optim.division import is_divided
from optim.dtypes import widen
from optim.paths import fullmatch
from trainer.config.wording import known_names, listing
from trainer.constraints import constrain, device

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


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.nn.gelu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
}
"""What `Mlp` applies to its hidden units, or, with "swiglu", to the gate they are multiplied by."""

SAVED = "attended"
"""The name of what a backward pass needs of attention besides queries, keys and values."""

REMAT: Mapping[str, Callable[..., bool] | None] = {
    "products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
    "none": None,
}
"""What the backward pass of a stack does not recompute: products with kernels and what
`causal_attention` saves, nothing, or all."""

KERNEL_INPUTS = "kernel_inputs"  # the name of an observation; see `from_linen`

# In a scan: the collections whose arrays have a layer axis, and the keys that differ by layer.
_STACKED = ("params", "cache", "intermediates", "attention_logits", KERNEL_INPUTS)
_SPLIT = ("params", "dropout")

_LARGE = 2**14  # elements; for smaller kernels the order of the products costs no time


def rows_times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies the last axis of x, [..., inputs], by a matrix, in the dtype of the matrix."""
    # The other axes are flattened before the product: with three axes XLA's CPU compiler computes
    # the gradient from a transposed copy, and the backward pass takes 2.8 times as long.
    flat = x.astype(kernel.dtype).reshape(-1, x.shape[-1])
    inputs, outputs = kernel.shape
    if inputs > outputs and kernel.size >= _LARGE and device().platform == "cpu":
        # Then the kernel's gradient is computed as the transpose of a product whose first matrix is
        # the narrower one, which takes 0.7 of the time on a CPU.
        kernel = jax.lax.optimization_barrier(kernel.T).T
    return (flat @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
    """Multiplies the last axis by `kernel` [inputs, features] and adds `bias` [features]."""

    features: int
    use_bias: bool = True
    initial: Initializer = matrix
    # of the kernel's axes; see `trainer.constraints`
    roles: tuple[str | None, str | None] = (None, None)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., inputs] to [..., features]."""
        kernel = self.param("kernel", self.initial, (x.shape[-1], self.features))
        x = rows_times(x, constrain(kernel, *self.roles))
        x = constrain(x, "batch", *[None] * (x.ndim - 2), self.roles[1])
        if self.use_bias:
            x = x + self.param("bias", zeros, (self.features,)).astype(x.dtype)
        return x


class LayerNorm(nn.Module):
    """Normalizes the last axis to mean 0 and variance 1 in float32, then multiplies by `scale`."""

    # There is no bias, as in Dehghani et al., "Scaling Vision Transformers to 22 Billion
    # Parameters" (arXiv:2302.05442).

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., features] to an array of the same shape and dtype."""
        scale = self.param("scale", ones, (x.shape[-1],))
        wide = widen(x)
        wide = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(wide).mean(axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(variance + self.epsilon)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


class RmsNorm(nn.Module):
    """Divides the last axis by its root mean square in float32, then multiplies by `scale`."""

    # Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).

    # added to the mean square; None for the machine epsilon of the dtype in which it is computed,
    # 1.19e-7 for float32, as in torch.nn.functional.rms_norm
    epsilon: float | None = 1e-6
    use_scale: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., features] to an array of the same shape and dtype."""
        scale = self.param("scale", ones, (x.shape[-1],)) if self.use_scale else None
        wide = widen(x)
        epsilon = float(jnp.finfo(wide.dtype).eps) if self.epsilon is None else self.epsilon
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon)
        wide = wide.astype(x.dtype)
        return wide if scale is None else wide * scale.astype(x.dtype)


class Mlp(nn.Module):
    """The two-layer perceptron of a block."""

    hidden: int  # number of hidden units
    # a name in ACTIVATIONS; "swiglu" multiplies the hidden units by the SiLU of a third product,
    # `gate/kernel` (Shazeer, arXiv:2002.05202)
    activation: str = "gelu"
    last: Initializer = matrix  # of `down/kernel`
    first: Initializer = matrix  # of the other kernels
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, tokens, width] to an array of the same shape."""
        activation = ACTIVATIONS[self.activation]
        columns, rows = (None, "hidden"), ("hidden", None)
        # The hidden units of all tokens are rows: a TPU's compiler then computes the activation
        # within the products, and a step of GPT-124M takes 0.95 of the cycles that it estimates.
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        hidden = Linear(self.hidden, self.use_bias, self.first, columns, name="up")(x)
        if self.activation == "swiglu":
            gate = Linear(self.hidden, self.use_bias, self.first, columns, name="gate")(x)
            hidden = hidden * activation(gate)
        else:
            hidden = activation(hidden)
        rows_out = Linear(shape[-1], self.use_bias, self.last, rows, name="down")(hidden)
        return rows_out.reshape(shape)


class BatchNorm(nn.Module):
    """Normalizes features by batch statistics in training, by running ones in evaluation."""

    # The running statistics, `mean` and `var` [features] in the collection `batch_stats`, and the
    # outputs are float32. Training uses the statistics of the whole batch, over all devices.

    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [..., features] to a float32 array of the same shape."""
        shape = (x.shape[-1],)
        scale, bias = self.param("scale", ones, shape), self.param("bias", zeros, shape)
        running_mean = self.variable("batch_stats", "mean", zeros, None, shape)
        running_var = self.variable("batch_stats", "var", ones, None, shape)
        wide = x.astype(jnp.float32)
        mean, var = running_mean.value, running_var.value
        if train:
            axes = tuple(range(x.ndim - 1))
            new_mean = wide.mean(axis=axes)
            # The biased variance, as in flax, also in the average, which is unbiased in torch.
            new_var = jnp.square(wide - new_mean).mean(axis=axes)
            if not self.is_initializing():
                running_mean.value = self.momentum * mean + (1 - self.momentum) * new_mean
                running_var.value = self.momentum * var + (1 - self.momentum) * new_var
            mean, var = new_mean, new_var
        wide = (wide - mean) * jax.lax.rsqrt(var + self.epsilon)
        return wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)


class Block(nn.Module):
    """Applies attention and a perceptron, each to a norm and with a residual."""

    # The parts are made with a name.
    attention: Callable[..., nn.Module]
    mlp: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    dropout: float
    residual_multiplier: float = 1.0  # of what both add

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, *given: Any) -> jax.Array:
        """Maps [batch, tokens, width] to an array of the same shape; attention takes `given`."""
        drop = nn.Dropout(self.dropout, deterministic=not train)

        def add(x: jax.Array, result: jax.Array) -> jax.Array:
            result = result if self.residual_multiplier == 1 else self.residual_multiplier * result
            return constrain(x + drop(result), "batch", None, None)

        x = add(x, self.attention(name="attn")(self.norm(name="attn_norm")(x), *given))
        mlp = self.mlp(name="mlp")
        return add(x, mlp(self.norm(name="mlp_norm")(x)))


def run_stack(
    make: Callable[..., nn.Module],
    call: Callable[[nn.Module, jax.Array], jax.Array],
    x: jax.Array,
    depth: int,
    scan_layers: bool,
    remat: str | Sequence[str] | None = None,
) -> jax.Array:
    """Applies equal layers one after the other, within an `@nn.compact` method."""
    # A scan has a layer `blocks` with a layer axis. `remat` None is "products" for a scan, else
    # "none". "products" saves only products with kernels for the backward pass: elementwise
    # operations cost less than writing their results. On a CPU, a ViT's step took 0.43 of the time.
    remat = remat or ("products" if scan_layers else "none")
    policies = [remat] * depth if isinstance(remat, str) else remat
    if not scan_layers:
        for index, policy in enumerate(policies):
            # prevent_cse: the compiler could merge the recomputation with the forward pass.
            x = _recomputing(call, policy, prevent_cse=True)(make(name=f"block_{index}"), x)
        return x
    blocks = make(name="blocks")
    segments = [(policy, len([*same])) for policy, same in itertools.groupby(policies)]
    if len(segments) > 1 and not blocks.is_initializing():
        return _scan_segments(blocks, call, x, segments)

    def step(layer: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return call(layer, x), None

    # Within a scan, the compiler cannot merge the recomputation with the forward pass: barriers
    # against that are unnecessary.
    scan = nn.scan(
        _recomputing(step, policies[0], prevent_cse=False),
        variable_axes=dict.fromkeys(_STACKED, 0),
        split_rngs=dict.fromkeys(_SPLIT, True),
        length=depth,
    )
    return scan(blocks, x, None)[0]


def _recomputing(call: Callable[..., Any], policy: str, prevent_cse: bool) -> Callable[..., Any]:
    """Returns a function of a layer whose backward pass computes again what a policy says."""
    saved = REMAT[policy]
    return call if saved is None else nn.remat(call, policy=saved, prevent_cse=prevent_cse)


def _scan_segments(
    blocks: nn.Module,
    call: Callable[[nn.Module, jax.Array], jax.Array],
    x: jax.Array,
    segments: Sequence[tuple[str, int]],
) -> jax.Array:
    """Scans over stacked layers with a program for each segment, (policy, number of layers)."""
    # Layers get the parts of the arrays in `blocks`, and the keys, that one `nn.scan` over all of
    # them would give them, which has one program only.
    depth = sum(length for _, length in segments)
    ends = list(itertools.accumulate(length for _, length in segments))

    def transform(*given: Any) -> Any:
        *bodies, scope, x = given

        def scan(inside: Any, outcome: Any, variables: Any, keys: Any, x: Any) -> tuple[Any, Any]:
            # inside(variables, keys) is the scope of a layer, and outcome(scope) what it wrote.
            keys = lift.tree_map_rngs(lambda key: jax.random.split(key, depth), keys)
            counters = dict(scope.rng_counters)  # of the keys that were made of a key
            results = []
            for body, (_, length), end in zip(bodies, segments, ends, strict=True):
                counts = dict(counters)

                def step(_: Any, x: Any, own: Any, body: Any = body, counts: Any = counts) -> Any:
                    layer = inside(*own)
                    layer.rng_counters = counts  # instead of those that the segment before left
                    return (), body(layer, x), outcome(layer)

                own = jax.tree.map(operator.itemgetter(slice(end - length, end)), (variables, keys))
                _, x, result = axes_scan.scan(step, in_axes=(0,), out_axes=0)((), x, own)
                results.append(result)
            return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)

        return lift.pack(scan, (_STACKED,), (_STACKED,), (_SPLIT,), name="scan")(scope, x)

    bodies = tuple(_recomputing(call, policy, prevent_cse=False) for policy, _ in segments)
    return transforms.lift_direct_transform(transform, bodies, blocks, x, multi_scope=False)


def policies_of(
    model: str, remat: str | Mapping[str, str] | None, depth: int
) -> str | tuple[str, ...] | None:
    """Returns the policies of `depth` layers, as `run_stack` takes them; raises ValueError.

    Example:
        >>> policies_of("models.gpt", {"block_[01]": "full", ".*": "none"}, 3)
        ('full', 'full', 'none')
    """
    # `remat` is a name in REMAT; None; or pattern of a layer's whole name -> a name in REMAT, of
    # which the first that matches a layer holds. The layers are block_0, block_1, ..., also where
    # they are stacked.
    for policy in remat.values() if isinstance(remat, Mapping) else (remat,):
        if policy is not None and policy not in REMAT:
            hint = known_names(str(policy), REMAT)
            raise ValueError(f"{model} got {policy!r} for remat, which does not exist. {hint}")
    if not isinstance(remat, Mapping):
        return remat
    names = [f"block_{index}" for index in range(depth)]
    found: dict[str, str] = {}
    for text, policy in remat.items():
        try:
            pattern = re.compile(text)
        except (re.error, TypeError) as error:
            raise ValueError(f"{model} got the remat pattern {text!r}: {error}.") from None
        matched = [name for name in names if fullmatch(pattern, name)]
        if not set(matched) - found.keys():
            why = "earlier patterns match all that it matches" if matched else "it matches no layer"
            raise ValueError(
                f"{model} got the remat pattern {text!r}, but {why}. A pattern matches a whole "
                f"name; the layers are {listing(names)}."
            )
        found = {**dict.fromkeys(matched, policy), **found}
    if lost := [name for name in names if name not in found]:
        raise ValueError(
            f"{model} got remat={dict(remat)!r}, which has no policy for {listing(lost)}. Add a "
            f"last pattern '.*', such as '.*': 'none'."
        )
    return tuple(found[name] for name in names)


def near_divisors(number: int, near: int, even: bool = False) -> str:
    """Returns the divisors of a number that are nearest to another, below and above, in words.

    With `even`, they divide it into even parts. The text is empty if there are none.

    Example:
        >>> near_divisors(128, 5), near_divisors(6, 4, even=True)
        ('4 or 8', '3')
    """
    fits = [n for n in range(1, number + 1) if number % n == 0 and not (even and number // n % 2)]
    below, above = [n for n in fits if n < near][-1:], [n for n in fits if n > near][:1]
    return " or ".join(map(str, below + above))
