"""What an optimizer of matrices asks: whole, real matrices, and exact products of them.

A matrix is the last two axes of a parameter, [inputs, outputs]; every axis before is batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def require_matrices(params: Any, optimizer: str) -> None:
    """Refuses parameters that are no matrices.

    Args:
        params: a pytree of arrays.
        optimizer: the name that the error gives to the optimizer, such as "optim.muon".

    Raises:
        ValueError: a leaf has fewer than two axes, or is complex; the sentence names it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if jnp.ndim(leaf) < 2:
            raise ValueError(
                f"{optimizer} moves matrices, and the parameter {name!r} has shape"
                f" {jnp.shape(leaf)}: give it to another group, for example one with optax.adamw."
            )
        if jnp.iscomplexobj(leaf):
            raise ValueError(
                f"{optimizer} moves real matrices, and the parameter {name!r} has dtype"
                f" {leaf.dtype}: give it to another group, for example one with optax.adamw."
            )


def gather(x: jax.Array, optimizer: str) -> jax.Array:
    """Makes matrices whole, where a sharding of the last two axes is part of their type.

    Under jit with automatic axes the compiler gathers what it must. With explicit axes it asks for
    our word: the last two axes are gathered; batch axes stay sharded.

    Args:
        x: the matrices.
        optimizer: the name that the error gives to the optimizer.

    Returns:
        The same values.

    Raises:
        ValueError: inside shard_map, `x` differs from device to device, so that it may be a part of
            a matrix, and its norm a part of the norm.
    """
    aval = jax.typeof(x)
    if aval.manual_axis_type.varying:
        axes = ", ".join(sorted(map(str, aval.manual_axis_type.varying)))
        raise ValueError(
            f"Inside shard_map, {optimizer} got a gradient or a parameter that differs along the"
            f" mesh axis {axes}, and cannot know whether it is a whole matrix: average the gradient"
            " over that axis (jax.lax.pmean) and keep the parameter replicated, or leave shard_map"
            " and use jit with named shardings."
        )
    if AxisType.Explicit not in aval.sharding.mesh.axis_types:
        return x
    spec = tuple(aval.sharding.spec)
    spec = spec + (None,) * (x.ndim - len(spec))
    whole = PartitionSpec(*spec[:-2], None, None)
    return jax.sharding.reshard(x, NamedSharding(aval.sharding.mesh, whole))


def scatter(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `gather`: shards matrices as others are, where the sharding is part of their type."""
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else x


def everywhere(x: jax.Array) -> jax.Array:
    """Replicates matrices whose sharding is part of their type: QR refuses even sharded batches."""
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if explicit else x


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies matrices, exact to their dtype: a GPU's TensorFloat-32 is too coarse for roots."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -2, -1)
