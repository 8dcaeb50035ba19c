"""Arithmetic that the optimizers of this package share.

An optimizer computes a direction; `descend` turns it into updates with a learning rate and
decoupled weight decay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.dtypes import widen

Updated = tuple[optax.Updates, Any]
"""The result of an optax transformation's update: the updates, and the new state."""


class DescentState(NamedTuple):
    """The state of `descend`."""

    count: ArrayLike | tuple[()]  # the number of updates so far, int32; () if no schedule needs it
    direction: optax.OptState  # the state of the direction


def descend(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    after_step: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer: update = -learning_rate * (direction + weight_decay * params)."""
    # With `after_step`, of the parameters after the step. `direction` makes directions of ascent of
    # gradients that are at least float32, and receives them as `grad`, too, as the parts of a chain
    # do; updates have the parameters' dtypes.
    direction = optax.with_extra_args_support(direction)
    # In a group, `adapter` has replaced schedules by their values, and there is no count to keep.
    scheduled = callable(learning_rate) or callable(weight_decay)
    # A schedule or a traced scalar may be 0, too, but is known only at the step.
    decays = not (isinstance(weight_decay, float | int) and weight_decay == 0)

    def init(params: optax.Params) -> DescentState:
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        return DescentState(count, direction.init(widen(params)))

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None and decays:
            raise ValueError("Weight decay needs parameters: call update(updates, state, params).")
        grads = widen(updates)
        given = {**extra, "grad": grads}
        steps, inner = direction.update(grads, state.direction, params, **given)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        decay = weight_decay(state.count) if callable(weight_decay) else weight_decay

        def one(step: jax.Array, like: jax.Array) -> jax.Array:
            if decays:
                if after_step:
                    step = step - scalar(rate, step) * scalar(decay, step) * step
                step = step + scalar(decay, step) * like.astype(step.dtype)
            return (-scalar(rate, step) * step).astype(like.dtype)

        moves = jax.tree.map(one, steps, updates if params is None else params)
        return moves, DescentState(optax.safe_increment(state.count) if scheduled else (), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def scalar(value: ArrayLike, like: jax.Array) -> jax.Array:
    """Casts a hyperparameter to the dtype of the array that it multiplies."""
    # Without the cast, a strongly typed float32 scalar would widen an array of a narrower dtype.
    return jnp.asarray(value, like.dtype)


def moving_average(
    mean: jax.Array, new: jax.Array, decay: ArrayLike, weight: ArrayLike | None = None
) -> jax.Array:
    """Returns decay * mean + weight * new in the dtype of `new`; None is 1 - decay."""
    # An optimizer whose argument is the weight passes both, because 1 - (1 - weight) is not
    # `weight` to the last bit.
    keep = scalar(decay, new)
    share = 1 - keep if weight is None else scalar(weight, new)
    return keep * mean.astype(new.dtype) + share * new


def bias_correction(decay: ArrayLike, count: ArrayLike, like: jax.Array) -> jax.Array:
    """Returns the divisor that corrects an average which started at 0: 1 - decay ** count."""
    # At count 0 the divisor would be 0; the average is 0 there as well.
    terms = jnp.maximum(jnp.asarray(count), 1).astype(like.dtype)
    return 1 - scalar(decay, like) ** terms


def average_or_add(old: jax.Array, new: jax.Array, decay: ArrayLike) -> jax.Array:
    """Returns decay * old + (1 - decay) * new, or the sum of both for a decay of 1."""
    keep = scalar(decay, new)
    return moving_average(old, new, keep, jnp.where(keep == 1, 1, 1 - keep))


def correction(decay: ArrayLike, count: ArrayLike, like: jax.Array) -> jax.Array:
    """Returns the divisor that corrects the bias of `average_or_add`; sums have none."""
    return jnp.where(scalar(decay, like) == 1, 1, bias_correction(decay, count, like))


def map_unzip(function: Callable[..., tuple[Any, ...]], length: int, tree: Any, *rest: Any) -> Any:
    """Maps a function that returns `length` items over trees; returns a tree for each item."""
    # The function takes a leaf of `tree` and the subtrees of `rest` at its path.

    # Not jax.tree.map with tuples as leaves, which would take tuples in `tree` for results.
    leaves, structure = jax.tree.flatten(tree)
    columns = [structure.flatten_up_to(other) for other in rest]
    rows = [function(*row) for row in zip(leaves, *columns, strict=True)]
    return tuple(structure.unflatten([row[i] for row in rows]) for i in range(length))
