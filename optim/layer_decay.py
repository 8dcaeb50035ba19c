"""Slows the lower layers down: layer-wise learning-rate decay."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


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
        ValueError: no parameter belongs to a layer.
    """
    stacked = {x.shape[0] for path, x in named.items() if path.startswith("blocks/")}
    single = {int(m[1]) for path in named if (m := re.match(r"block_(\d+)/", path))}
    layers = max(stacked | {i + 1 for i in single}, default=0)
    if not layers:
        raise ValueError(
            "layer_decay needs parameters called blocks/... (stacked) or block_0/..., block_1/...; "
            f"these are {', '.join(sorted({path.split('/')[0] for path in named}))}."
        )
    scales: dict[str, Any] = {}
    for path, x in named.items():
        if path.startswith("blocks/"):
            powers = [decay ** (layers - i) for i in range(layers)]
            scales[path] = jnp.asarray(powers, jnp.float32).reshape((layers,) + (1,) * (x.ndim - 1))
        elif m := re.match(r"block_(\d+)/", path):
            scales[path] = decay ** (layers - int(m[1]))
        elif path.startswith("embed"):
            scales[path] = decay ** (layers + 1)
    return scales
