"""What our own optimizers share: the last link of the chain, and what a matrix optimizer asks.

An optimizer of ours computes a direction. `descend` turns it into updates with a learning rate and
decoupled weight decay, so that the arithmetic of that last step exists once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

__all__ = ["DescentState", "descend"]


class DescentState(NamedTuple):
    """What `descend` remembers.

    Attributes:
        count: the number of updates so far, int32; an empty tuple where no schedule needs it.
        direction: the state of the direction.
    """

    count: Any
    direction: Any


def descend(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Follows a direction downhill: update = -learning_rate * (direction + weight_decay * params).

    Args:
        direction: turns gradients into directions of ascent, in at least float32.
        learning_rate: a float, a traced scalar or a schedule.
        weight_decay: likewise; multiplied by the learning rate, as in AdamW.

    Returns:
        The optimizer; its updates have the parameters' dtypes.
    """
    direction = optax.with_extra_args_support(direction)
    scheduled = callable(learning_rate) or callable(weight_decay)
    decays = not (isinstance(weight_decay, float | int) and weight_decay == 0)

    def init(params: Any) -> DescentState:
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        return DescentState(count, direction.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, DescentState]:
        if params is None and decays:
            raise ValueError("Weight decay needs parameters: call update(updates, state, params).")
        steps, inner = direction.update(updates, state.direction, params, **extra)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        decay = weight_decay(state.count) if callable(weight_decay) else weight_decay

        def one(step: jax.Array, like: jax.Array) -> jax.Array:
            if decays:
                step = step + scalar(decay, step) * like.astype(step.dtype)
            return (-scalar(rate, step) * step).astype(like.dtype)

        moves = jax.tree.map(one, steps, updates if params is None else params)
        count = optax.safe_increment(state.count) if scheduled else ()
        return moves, DescentState(count, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def scalar(value: ArrayLike, like: jax.Array) -> jax.Array:
    """Casts a hyperparameter, perhaps traced, to the dtype of the array it multiplies."""
    return jnp.asarray(value, like.dtype)


def wide(x: jax.Array) -> jax.Array:
    """Casts bfloat16 and float16 to float32, because bfloat16(0.999) is 1."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def wide_zeros(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Makes zeros like a parameter, in a given dtype or at least float32."""
    return jnp.zeros_like(x, dtype=dtype or jnp.promote_types(x.dtype, jnp.float32))


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


def on_whole_matrices(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, optimizer: str
) -> jax.Array:
    """Applies a function of matrices that must see them whole, whatever their sharding.

    Under jit with automatic axes the compiler gathers what it must. With explicit axes we say it:
    the last two axes are gathered before, and sharded again after; batch axes stay sharded.

    Args:
        function: maps [..., m, n] to the same shape, each matrix by itself.
        x: the matrices.
        optimizer: the name that the error gives to the optimizer.

    Returns:
        What the function returns, sharded like `x`.

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
    sharding = aval.sharding
    spec = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
    if AxisType.Explicit not in sharding.mesh.axis_types or spec[-2:] == (None, None):
        return function(x)
    gathered = NamedSharding(sharding.mesh, PartitionSpec(*spec[:-2], None, None))
    return jax.sharding.reshard(function(jax.sharding.reshard(x, gathered)), sharding)
