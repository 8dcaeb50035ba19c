"""What is computed over all parameters at once: the norm that clips, and whether all is finite."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from optim.parts import refuse_parts


def all_finite(named: Mapping[str, Any]) -> Any:
    """Tells whether every number of some arrays is finite, as a boolean scalar."""
    return jnp.stack([jnp.isfinite(x).all() for x in named.values()] or [jnp.ones((), bool)]).all()


def clip(grads: dict[str, Any], clip_norm: Any, step: Any) -> dict[str, Any]:
    """Scales all gradients by one scalar, so that their global norm is at most `clip_norm`."""
    refuse_parts(optax.tree.norm, (grads, ()), "clip_norm")
    norm = optax.tree.norm(grads)
    bound = jnp.asarray(clip_norm(step) if callable(clip_norm) else clip_norm, norm.dtype)
    scale = jnp.where(norm < bound, jnp.ones_like(norm), bound / norm)
    return {path: g * scale.astype(g.real.dtype) for path, g in grads.items()}
