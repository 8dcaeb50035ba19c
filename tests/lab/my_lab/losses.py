"""A loss of the lab's own."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


def focal(gamma: float = 2.0, labels: str = "arm") -> Callable[..., jax.Array]:
    """Cross-entropy that counts what is right already by (1 - p) ** gamma of its weight."""

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        log_p = jax.nn.log_softmax(outputs.astype(jnp.float32))
        log_p = jnp.take_along_axis(log_p, batch[labels][:, None], axis=1)[:, 0]
        return -((1.0 - jnp.exp(log_p)) ** gamma) * log_p

    return loss
