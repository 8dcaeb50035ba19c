"""The cosine with warm-up under which optimizers are compared with the programs of others."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from optim.factories import float_paths, map_floats

STEPS = 50
_WARM_UP = 5

# What a learning rate is multiplied by at every step: it is at its peak at the fifth, and not 0 at
# the last.
_T = np.arange(STEPS)
COSINE = np.where(
    _T < _WARM_UP,
    (_T + 1) / _WARM_UP,
    0.5 * (1 + np.cos(np.pi * (_T - _WARM_UP) / (STEPS - _WARM_UP))),
)


def has_learning_rate(recipe: partial) -> bool:
    """Returns whether a recipe, or one inside it, has a learning rate."""
    return any(_is_rate(path) and x is not None for path, x in float_paths(recipe).items())


def with_cosine(recipe: partial) -> partial:
    """Multiplies all learning rates of a recipe, and of those inside it, by `COSINE`.

    Args:
        recipe: a partial of a factory; its learning rates are numbers or schedules.

    Returns:
        A recipe whose learning rates are schedules, in the precision of the parameters.
    """

    def change(path: str, x: Any) -> Any:
        if x is None or not _is_rate(path):
            return x
        rate: Any = x if callable(x) else lambda t: x
        return lambda t: rate(t) * jnp.asarray(COSINE)[t]

    return map_floats(recipe, change)


def _is_rate(path: str) -> bool:
    return path.split(".")[-1] == "learning_rate"
