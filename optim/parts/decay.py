"""Parts that make weights smaller."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.descent import Updated, scalar
from optim.factories import with_known_extras
from optim.parts.base import Part, passed

_shrinking = partial(Part, place="after", once=True, decays=True)


def cautious_decay(
    rate: float, around: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Decays the weights whose step makes them smaller (cautious weight decay).

    With the step S and the weights W, weights with S * W < 0 are multiplied by
    1 - learning_rate * rate after the step. It stands after the learning rate.

    Args:
        rate: the weight decay; a float, a traced scalar or, in a group, a schedule.
        around: a part that changes the step first, such as `pin_radius`: the weights are chosen by
            the step that it is given, and decay after the one that it returns.

    Returns:
        The part.

    Reference: https://arxiv.org/abs/2510.12402
    """
    inner = with_known_extras(around or optax.identity())

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        learning_rate = passed(extra, "learning_rate", "parts.cautious_decay", "after")
        steps, state = inner.update(updates, state, params, **extra)

        def decay(given: jax.Array, step: jax.Array, w: jax.Array) -> jax.Array:
            kept = 1 - scalar(learning_rate, w) * scalar(rate, w)
            return (w + step) * jnp.where(given * w < 0, kept, 1) - w

        return jax.tree.map(decay, updates, steps, params), state

    return _shrinking(inner.init, update, name="parts.cautious_decay", around=around)


def decay(rate: float, peak: float | None = None) -> optax.GradientTransformationExtraArgs:
    """Decays all weights by the learning rate (decoupled weight decay), or by its square.

    With the step S and the weights W, the step becomes S - learning_rate * rate * W, as in AdamW.
    With `peak`, the decay is multiplied by learning_rate / peak (corrected weight decay, AdamC):
    S - learning_rate^2 / peak * rate * W. Its paper proposes this for the weights of layers that a
    normalization follows, whose gradients otherwise grow while the learning rate falls. It stands
    after the learning rate.

    Args:
        rate: the weight decay; a float, a traced scalar or, in a group, a schedule.
        peak: the largest learning rate of the schedule; None for a decay that is not corrected.

    Returns:
        The part.

    Raises:
        ValueError: at the update, if it is called without parameters, or outside of `optim.chain`.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from optim import parts
        >>> params = jnp.array([10.0, -10.0])
        >>> for peak in (None, 0.4):
        ...     tx = optim.chain(0.1, [optax.identity()], [parts.decay(0.5, peak)])
        ...     print(tx.update(jnp.zeros(2), tx.init(params), params)[0])
        [-0.5  0.5]
        [-0.125  0.125]

    References: Loshchilov and Hutter, AdamW, https://arxiv.org/abs/1711.05101; Defazio, Why
      Gradients Rapidly Increase Near the End of Training, https://arxiv.org/abs/2506.02285
    """

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None:
            raise ValueError("parts.decay needs parameters: call update(updates, state, params).")
        learning_rate = passed(extra, "learning_rate", "parts.decay", "after")

        def shrink(step: jax.Array, w: jax.Array) -> jax.Array:
            lost = scalar(learning_rate, w) * scalar(rate, w)
            if peak is not None:
                lost = lost * (scalar(learning_rate, w) / scalar(peak, w))
            return step - lost * w

        return jax.tree.map(shrink, updates, params), state

    return _shrinking(lambda params: optax.EmptyState(), update, name="parts.decay")
