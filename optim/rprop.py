"""Rprop: steps that know only the sign of the gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import descend, map_parts, scalar, wide, wide_zeros

__all__ = ["RpropState", "rprop"]


class RpropState(NamedTuple):
    """What Rprop remembers.

    Attributes:
        size: the size of each element's step, in learning rates.
        last: the last gradient, 0 where it had turned.
    """

    size: Any
    last: Any


def rprop(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eta_minus: float = 0.5,
    eta_plus: float = 1.2,
    min_size: float = 1e-4,
    max_size: float = 5e3,
) -> optax.GradientTransformationExtraArgs:
    """Steps along the gradient's sign, longer while it stays and shorter when it turns (Rprop).

    Each element of a parameter has a size s, 1 at first, and with the gradient g and the last one h

        g * h > 0   s <- s * eta_plus,   step by -learning_rate * s * sign(g)
        g * h < 0   s <- s * eta_minus,  no step, and g counts as 0 next time
        g * h = 0                        step by -learning_rate * s * sign(g)

    where s is always kept in [min_size, max_size]. This is torch.optim.Rprop, with sizes in
    learning rates. (optax.rprop 0.2.8 makes each step one update late.) It is for full batches:
    noise turns the sign of small gradients.

    Args:
        learning_rate: the first step, a float, a traced scalar or a schedule.
        eta_minus: the factor of a size when the gradient turns.
        eta_plus: the factor of a size when it stays.
        min_size: the least size, in learning rates.
        max_size: the largest size, in learning rates.

    Returns:
        The optimizer.

    Reference: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation Learning:
      The RPROP Algorithm, ICNN 1993
    """

    def init(params: Any) -> RpropState:
        sizes = jax.tree.map(lambda p: jnp.ones_like(wide_zeros(p)), params)
        return RpropState(sizes, jax.tree.map(wide_zeros, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RpropState]:
        del params

        def one(g: jax.Array, size: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
            g = wide(g)
            size, last = size.astype(g.dtype), last.astype(g.dtype)
            turn = jnp.sign(g) * jnp.sign(last)
            eta = jnp.where(turn > 0, scalar(eta_plus, g), scalar(eta_minus, g))
            size = jnp.where(turn == 0, size, size * eta)
            size = jnp.clip(size, scalar(min_size, g), scalar(max_size, g))
            g = jnp.where(turn < 0, 0, g)
            return size * jnp.sign(g), size, g

        steps, sizes, lasts = map_parts(one, 3, updates, state.size, state.last)
        return steps, RpropState(sizes, lasts)

    return descend(optax.GradientTransformation(init, update), learning_rate)
