"""Masks on the steps of another optimizer: Cautious and Grams."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.descent import scalar, wide

__all__ = ["cautious", "grams"]


def cautious(
    base_optimizer: optax.GradientTransformation,
    weight_decay: float = 0.0,
    least_mean: float = 1e-3,
) -> optax.GradientTransformationExtraArgs:
    """Drops the parts of a step that go against the present gradient (Cautious).

    With the step u of another optimizer and the gradient g, elementwise, and the mean taken over a
    parameter,

        mask = 1 where u and g have opposite signs, else 0
        update = u * mask / max(mean(mask), least_mean) - weight_decay * parameter

    The authors mask AdamW's step without its weight decay: leave the base's at 0 and give it here.

    Args:
        base_optimizer: any optimizer that takes gradients, such as optax.adam.
        weight_decay: the part of the parameters that is taken off at each step, outside the mask
            and not multiplied by a learning rate; learning rate times decay makes C-AdamW. A
            schedule is for use in a group.
        least_mean: the least mean by which steps are divided.

    Returns:
        The optimizer; its state is the base's.

    Raises:
        ValueError: at update, there is weight decay and there are no parameters.

    Reference: Liang et al., Cautious Optimizers: Improving Training with One Line of Code,
      https://arxiv.org/abs/2411.16085
    """

    def mask(step: jax.Array, g: jax.Array) -> jax.Array:
        agrees = (jnp.sign(step) * jnp.sign(g.astype(step.dtype)) < 0).astype(step.dtype)
        return step * agrees / jnp.maximum(jnp.mean(agrees), scalar(least_mean, step))

    return _masked(base_optimizer, mask, weight_decay)


def grams(
    base_optimizer: optax.GradientTransformation, weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Takes the length of each step's element from another optimizer, its sign from the gradient.

    With the step u of another optimizer and the gradient g, elementwise (Grams),

        update = -sign(g) * |u| - weight_decay * parameter

    The authors mask AdamW's step without its weight decay: leave the base's at 0 and give it here.

    Args:
        base_optimizer: any optimizer that takes gradients, such as optax.adam.
        weight_decay: the part of the parameters that is taken off at each step, outside the mask
            and not multiplied by a learning rate. A schedule is for use in a group.

    Returns:
        The optimizer; its state is the base's.

    Raises:
        ValueError: at update, there is weight decay and there are no parameters.

    Reference: Cao et al., Grams: Gradient Descent with Adaptive Momentum Scaling,
      https://arxiv.org/abs/2412.17107
    """

    def mask(step: jax.Array, g: jax.Array) -> jax.Array:
        return -jnp.sign(g.astype(step.dtype)) * jnp.abs(step)

    return _masked(base_optimizer, mask, weight_decay)


def _masked(
    base_optimizer: optax.GradientTransformation, mask: Any, weight_decay: ArrayLike
) -> optax.GradientTransformationExtraArgs:
    base = optax.with_extra_args_support(base_optimizer)
    decays = not (isinstance(weight_decay, float | int) and weight_decay == 0)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        steps, state = base.update(updates, state, params, **extra)

        def one(step: jax.Array, g: jax.Array, *parameter: jax.Array) -> jax.Array:
            out = mask(wide(step), g)
            for p in parameter:
                out = out - scalar(weight_decay, out) * p.astype(out.dtype)
            return out.astype(step.dtype)

        if not decays:
            return jax.tree.map(one, steps, updates), state
        if params is None:
            raise ValueError("Weight decay needs parameters: call update(updates, state, params).")
        return jax.tree.map(one, steps, updates, params), state

    return optax.GradientTransformationExtraArgs(base.init, update)
