"""MARS: AdamW whose gradient is corrected by the change since the last step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import bias_correction, descend, map_parts, scalar, wide, wide_zeros

__all__ = ["MarsState", "mars"]


class MarsState(NamedTuple):
    """What MARS remembers.

    Attributes:
        count: the number of updates so far, int32.
        mean: the mean of the corrected gradients.
        variance: the mean of their squares.
        last: the last gradient.
    """

    count: jax.Array
    mean: Any
    variance: Any
    last: Any


def mars(
    learning_rate: optax.ScalarOrSchedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.99,
    gamma: float = 0.025,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Reduces the variance of AdamW's gradients by their last change (MARS-AdamW, approximate).

    With the gradient g, the last one h (0 at first) and c = g + gamma * b1 / (1 - b1) * (g - h),
    scaled to norm 1 if it is longer, AdamW takes c for its gradient. The norm is that of a whole
    parameter, stacked layers together. h is the gradient of the last batch at the last parameters,
    as in the authors' default; their exact variant evaluates the last parameters on this batch.

    The authors use it for matrices, and AdamW for the rest: give each a group.

    Args:
        learning_rate: a float, a traced scalar or a schedule.
        b1: the decay of the mean of corrected gradients.
        b2: the decay of the mean of their squares.
        gamma: the scale of the correction; at 0 this is AdamW with clipped gradients.
        eps: added to the root of the squares.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Returns:
        The optimizer.

    Reference: Yuan et al., MARS: Unleashing the Power of Variance Reduction for Training Large
      Models, https://arxiv.org/abs/2411.10438
    """

    def init(params: Any) -> MarsState:
        zeros = [jax.tree.map(wide_zeros, params) for _ in range(3)]
        return MarsState(jnp.zeros((), jnp.int32), *zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MarsState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))

        def one(g: jax.Array, *moments: jax.Array) -> tuple[jax.Array, ...]:
            g = wide(g)
            mean, variance, last = (x.astype(g.dtype) for x in moments)
            keep1, keep2 = scalar(b1, g), scalar(b2, g)
            c = g + scalar(gamma, g) * keep1 / (1 - keep1) * (g - last)
            c = c / jnp.maximum(jnp.linalg.norm(jnp.ravel(c)), 1)
            mean = keep1 * mean + (1 - keep1) * c
            variance = keep2 * variance + (1 - keep2) * c * c
            root = jnp.sqrt(variance / bias_correction(b2, count, g)) + scalar(eps, g)
            step = mean / bias_correction(b1, count, g) / root
            news = (mean, variance, g)
            return step, *(n.astype(o.dtype) for n, o in zip(news, moments, strict=True))

        steps, *parts = map_parts(one, 4, updates, *state[1:])
        return steps, MarsState(count, *parts)

    return descend(optax.GradientTransformation(init, update), learning_rate, weight_decay)
