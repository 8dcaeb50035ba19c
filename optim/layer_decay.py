"""Slows the lower layers down: layer-wise learning-rate decay."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.parts import refuse_parts
from optim.transformations import SlowParams

# States that hold where the parameters are, were or will be, or for how long a step was searched:
# with a step scaled behind an optimizer's back they would tell of parameters that never were.
_COUNT_ON_THEIR_STEP = (
    *(SlowParams, optax.contrib.ScheduleFreeState, optax.contrib.SAMState),
    *(optax.contrib.MechanicState, optax.contrib.COCOBState),
    *(optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState),
)


def refuse_states(state: Any) -> None:
    """Refuses optimizers whose steps cannot be scaled from outside; raises ValueError."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _COUNT_ON_THEIR_STEP))
    if any(isinstance(part, _COUNT_ON_THEIR_STEP) for part in found):
        raise ValueError(
            "layer_decay scales the steps of the lower layers, and this optimizer counts on its "
            "own step being made. Leave layer_decay out, or give every layer a group with its own "
            "learning rate."
        )


def layer_scales(named: Mapping[str, Any], decay: float) -> dict[str, Any]:
    """Computes each parameter's factor for layer-wise learning-rate decay.

    With L layers, a parameter of layer i (from 0) has the factor decay ** (L - i), the embedding
    decay ** (L + 1), and what comes after the layers 1 (Clark et al. 2020, arXiv:2003.10555).

    Args:
        named: path name -> array. `embed...` is the embedding; `blocks/...` are layers stacked
            along the first axis, `block_<i>/...` one layer; every other path comes after the
            layers.
        decay: the factor from one layer to the one below it.

    Returns:
        Path name -> float, or an array of shape (L, 1, ...) for stacked layers. Factors of 1 are
        left out.

    Raises:
        ValueError: no parameter belongs to a layer; those of the stacked layers differ in their
            number; or inside shard_map a parameter is there in parts.
    """
    refuse_parts(None, (named, ()), "layer_decay")
    blocks = {path: x for path, x in named.items() if path.startswith("blocks/")}
    stacked = {x.shape[0] if x.ndim else 0 for x in blocks.values()}
    if len(stacked) > 1:
        told = [f"{path} {tuple(x.shape)}" for path, x in blocks.items()]
        raise ValueError(
            f"layer_decay takes the first axis of every parameter under blocks/ for its layers, "
            f"and these differ in it: {', '.join(told)}. Keep what the layers share elsewhere."
        )
    single = {int(m[1]) for path in named if (m := re.match(r"block_(\d+)/", path))}
    layers = max(stacked | {i + 1 for i in single}, default=0)
    if not layers:
        raise ValueError(
            "layer_decay needs parameters called blocks/... (stacked) or block_0/..., block_1/...; "
            f"these are {', '.join(sorted({path.split('/')[0] for path in named}))}."
        )
    scales: dict[str, Any] = {}
    for path, x in named.items():
        if path in blocks:
            powers = [decay ** (layers - i) for i in range(layers)]
            dtype = jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
            scales[path] = jnp.asarray(powers, dtype).reshape((layers,) + (1,) * (x.ndim - 1))
        elif m := re.match(r"block_(\d+)/", path):
            scales[path] = decay ** (layers - int(m[1]))
        elif path.startswith("embed"):
            scales[path] = decay ** (layers + 1)
    return scales
