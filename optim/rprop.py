"""Rprop: steps that depend only on the sign of the gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.descent import Updated, map_unzip, scalar
from optim.dtypes import wide_zeros, widen


class RpropState(NamedTuple):
    """The state of Rprop."""

    size: optax.Params  # the size of each element's step
    last: optax.Params  # the last gradient, 0 where its sign had changed


def rprop(
    learning_rate: float = 0.01,
    eta_minus: float = 0.5,
    eta_plus: float = 1.2,
    min_step_size: float = 1e-6,
    max_step_size: float = 50.0,
) -> optax.GradientTransformationExtraArgs:
    """Grows each step while the gradient keeps its sign, else shrinks it (Rprop).

    Each element of a parameter has a step size s, initially learning_rate. With the gradient g and
    the previous gradient h,

        g * h > 0   s <- s * eta_plus,   step by -s * sign(g)
        g * h < 0   s <- s * eta_minus,  no step, and h is 0 at the next update
        g * h = 0                        step by -s * sign(g)

    where s is clipped to [min_step_size, max_step_size]. This is torch.optim.Rprop, whose
    arguments are etas=(eta_minus, eta_plus) and step_sizes=(min_step_size, max_step_size), with
    the names of optax.rprop. (optax.rprop 0.2.8 applies each step one update late.) Use it with
    full batches: the noise of minibatches changes the sign of small gradients.

    Args:
        learning_rate: the first step size, a float or a traced scalar. It cannot be a schedule,
            because later step sizes are computed from it.
        eta_minus: the factor of a step size when the gradient changes its sign.
        eta_plus: the factor of a step size when the gradient keeps its sign.
        min_step_size: the smallest step size.
        max_step_size: the largest step size.

    Returns:
        The optimizer.

    Raises:
        ValueError: if the learning rate is a schedule.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optim
        >>> tx = optim.rprop(learning_rate=0.5)
        >>> params = jnp.zeros(2)
        >>> updates, state = tx.update(jnp.array([3.0, -0.1]), tx.init(params), params)
        >>> updates.tolist()
        [-0.5, 0.5]
        >>> updates, state = tx.update(jnp.array([2.0, 0.1]), state, params)
        >>> print(np.asarray(updates).round(3))  # 1.2 * step; no step after a sign change
        [-0.6 -0. ]

    Reference: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation Learning:
      The RPROP Algorithm, ICNN 1993
    """
    if callable(learning_rate):
        raise ValueError(
            "learning_rate of optim.rprop is the first step size, from which later ones are"
            " computed, and cannot be a schedule: give it a number."
        )

    def init(params: optax.Params) -> RpropState:
        zeros = jax.tree.map(wide_zeros, params)
        return RpropState(jax.tree.map(lambda x: x + scalar(learning_rate, x), zeros), zeros)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Updated:
        def one(
            g: jax.Array, size: jax.Array, last: jax.Array, like: jax.Array
        ) -> tuple[jax.Array, ...]:
            g = widen(g)
            size, last = size.astype(g.dtype), last.astype(g.dtype)
            # Signs, because the product of two small gradients underflows to 0.
            turn = jnp.sign(g) * jnp.sign(last)
            eta = jnp.where(turn > 0, scalar(eta_plus, g), scalar(eta_minus, g))
            size = jnp.where(turn == 0, size, size * eta)
            # Clipped at a turn of 0 as well, as in torch: the first size may be outside the limits.
            size = jnp.clip(size, scalar(min_step_size, g), scalar(max_step_size, g))
            g = jnp.where(turn < 0, 0, g)
            return (-size * jnp.sign(g)).astype(like.dtype), size, g

        like = updates if params is None else params
        steps, sizes, lasts = map_unzip(one, 3, updates, state.size, state.last, like)
        return steps, RpropState(sizes, lasts)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))
