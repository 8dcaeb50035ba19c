"""An optimizer of yours: a function that returns an optax transformation."""

import jax
import jax.numpy as jnp
import optax


def sign_momentum(
    learning_rate: optax.ScalarOrSchedule, momentum: float = 0.9, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Steps by the sign of a running mean of the gradients.

    Every float argument can follow a schedule and be searched by a sweep; another value of one
    compiles nothing again. Compute with `jnp` on it, and do not ask `if momentum:` of it.
    """
    return optax.chain(
        optax.ema(momentum, debias=False),
        optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
