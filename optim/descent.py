"""The last link of our own optimizers, and the arithmetic they share.

An optimizer of ours computes a direction. `descend` turns it into updates with a learning rate and
decoupled weight decay, so that the arithmetic of that last step exists once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
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
    return x.astype(_wide_dtype(x))


def wide_zeros(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Makes zeros like a parameter, in a given dtype or at least float32."""
    return jnp.zeros_like(x, dtype=dtype or _wide_dtype(x))


def _wide_dtype(x: jax.Array) -> Any:
    return x.dtype if x.dtype.itemsize >= 4 else jnp.float32


def bias_correction(decay: ArrayLike, count: ArrayLike, like: jax.Array) -> jax.Array:
    """Tells how much of an average that started at zero is real: 1 - decay ** count, never 0.

    Args:
        decay: the decay of the average.
        count: the number of terms; 0 counts as 1, so that nothing is divided by zero.
        like: an array with the dtype of the result.
    """
    terms = jnp.maximum(jnp.asarray(count), 1).astype(like.dtype)
    return 1 - scalar(decay, like) ** terms


def map_parts(function: Callable[..., tuple[Any, ...]], parts: int, tree: Any, *rest: Any) -> Any:
    """Maps a function that returns several parts over trees, and returns a tree for each part.

    Args:
        function: takes a leaf of `tree` and what `rest` has at its place, and returns a tuple.
        parts: the length of that tuple.
        tree: the pytree whose leaves are visited.
        *rest: trees that begin with the structure of `tree`.

    Returns:
        A tuple of trees, one for each part.
    """
    leaves, structure = jax.tree.flatten(tree)
    columns = [structure.flatten_up_to(other) for other in rest]
    rows = [function(*row) for row in zip(leaves, *columns, strict=True)]
    return tuple(structure.unflatten([row[i] for row in rows]) for i in range(parts))
