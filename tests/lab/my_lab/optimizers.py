"""An optimizer and a schedule."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax


def sign_momentum(
    learning_rate: optax.ScalarOrSchedule, momentum: float = 0.9, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Steps by the sign of a running mean of the gradients."""
    return optax.chain(
        optax.ema(momentum, debias=False),
        optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def sawtooth(peak: float, period: Annotated[int, "steps"]) -> Callable[[Any], jax.Array]:
    """Falls from the peak to a tenth of it in every period, and starts again."""

    def value(step: Any) -> jax.Array:
        part = (jnp.asarray(step) % period).astype(jnp.float32) / period
        return peak * (1.0 - 0.9 * part)

    return value


def terse(learning_rate, beta=0.9, weight_decay=0):
    """Is SGD with momentum and decay, by an author who annotates nothing."""
    return optax.chain(
        optax.trace(beta),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def oddly_annotated(learning_rate: jax.Array, weight_decay: jax.Array | None = None):
    """Annotates its floats with what no config can give."""
    return terse(learning_rate, weight_decay=0.0 if weight_decay is None else weight_decay)
