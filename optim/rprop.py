"""Rprop: steps that know only the sign of the gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import map_parts, scalar, wide, wide_zeros

__all__ = ["RpropState", "rprop"]


class RpropState(NamedTuple):
    """What Rprop remembers.

    Attributes:
        size: the size of each element's step.
        last: the last gradient, 0 where it had turned.
    """

    size: Any
    last: Any


def rprop(
    learning_rate: float = 0.01,
    eta_minus: float = 0.5,
    eta_plus: float = 1.2,
    min_step_size: float = 1e-6,
    max_step_size: float = 50.0,
) -> optax.GradientTransformationExtraArgs:
    """Steps along the gradient's sign, longer while it stays and shorter when it turns (Rprop).

    Each element of a parameter has a step size s, learning_rate at first, and with the gradient g
    and the last one h

        g * h > 0   s <- s * eta_plus,   step by -s * sign(g)
        g * h < 0   s <- s * eta_minus,  no step, and g counts as 0 next time
        g * h = 0                        step by -s * sign(g)

    where s is always kept in [min_step_size, max_step_size]. This is torch.optim.Rprop, whose
    arguments are etas=(eta_minus, eta_plus) and step_sizes=(min_step_size, max_step_size), with
    the names of optax.rprop. (optax.rprop 0.2.8 makes each step one update late.) It is for full
    batches: noise turns the sign of small gradients.

    Args:
        learning_rate: the first step size, a float or a traced scalar. Later ones come from it, so
            that it has no schedule.
        eta_minus: the factor of a step size when the gradient turns.
        eta_plus: the factor of a step size when it stays.
        min_step_size: the least step size.
        max_step_size: the largest step size.

    Returns:
        The optimizer.

    Raises:
        ValueError: the learning rate is a schedule.

    Reference: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation Learning:
      The RPROP Algorithm, ICNN 1993
    """
    if callable(learning_rate):
        raise ValueError(
            "learning_rate of optim.rprop is the first step size, from which all later ones come:"
            " give it a number, and no schedule."
        )

    def init(params: Any) -> RpropState:
        zeros = jax.tree.map(wide_zeros, params)
        sizes = jax.tree.map(lambda x: x + scalar(learning_rate, x), zeros)
        return RpropState(sizes, zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RpropState]:
        def one(
            g: jax.Array, size: jax.Array, last: jax.Array, like: jax.Array
        ) -> tuple[jax.Array, ...]:
            g = wide(g)
            size, last = size.astype(g.dtype), last.astype(g.dtype)
            turn = jnp.sign(g) * jnp.sign(last)
            eta = jnp.where(turn > 0, scalar(eta_plus, g), scalar(eta_minus, g))
            size = jnp.where(turn == 0, size, size * eta)
            size = jnp.clip(size, scalar(min_step_size, g), scalar(max_step_size, g))
            g = jnp.where(turn < 0, 0, g)
            return (-size * jnp.sign(g)).astype(like.dtype), size, g

        like = updates if params is None else params
        steps, sizes, lasts = map_parts(one, 3, updates, state.size, state.last, like)
        return steps, RpropState(sizes, lasts)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))
