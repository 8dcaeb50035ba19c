"""Functions of all parameters at once: clipping by the global norm, and a test for finiteness."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim.factories import evaluate
from optim.tracing import require_whole


def all_finite(by_path: Mapping[str, jax.Array]) -> jax.Array:
    """Returns whether all numbers of some arrays are finite, as a boolean scalar."""
    # jnp.stack raises for an empty list: without trainable parameters, all are finite.
    finite = [jnp.isfinite(x).all() for x in by_path.values()]
    return jnp.stack(finite or [jnp.ones((), bool)]).all()


def clip(
    grads: dict[str, jax.Array], clip_norm: optax.ScalarOrSchedule, step: ArrayLike
) -> dict[str, jax.Array]:
    """Scales all gradients by one scalar, so that their global norm is at most `clip_norm`."""
    # Raises ValueError if its schedule fails; inside shard_map, if a gradient is sharded.
    require_whole(optax.tree.norm, (grads, ()), "clip_norm")
    norm = optax.tree.norm(grads)
    bound = jnp.asarray(evaluate(clip_norm, step, "clip_norm"), norm.dtype)
    # One scalar, so that no `where` reads the gradients. Gradients of 0 give 1 and not 0 / 0,
    # because clip_norm is positive. A norm that is NaN makes all gradients NaN, as in optax.
    scale = jnp.where(norm < bound, jnp.ones_like(norm), bound / norm)
    # g.real: a complex gradient is scaled by a real number.
    return {path: g * scale.astype(g.real.dtype) for path, g in grads.items()}
