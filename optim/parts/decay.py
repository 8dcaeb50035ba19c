"""Parts that make weights smaller."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.descent import scalar
from optim.parts.base import Part

__all__ = ["cautious_decay"]


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
    inner = optax.with_extra_args_support(around or optax.identity())

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        if "learning_rate" not in extra:
            raise ValueError(
                "parts.cautious_decay is a part of optim.chain, which passes it the learning rate:"
                " name it in `after`."
            )
        steps, state = inner.update(updates, state, params, **extra)

        def decay(given: jax.Array, step: jax.Array, w: jax.Array) -> jax.Array:
            kept = 1 - scalar(extra["learning_rate"], w) * scalar(rate, w)
            return (w + step) * jnp.where(given * w < 0, kept, 1) - w

        return jax.tree.map(decay, updates, steps, params), state

    return Part(inner.init, update, name="parts.cautious_decay", place="after", around=around)
