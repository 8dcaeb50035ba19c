"""Compares the learning rates of a model that is scaled by muP with what muP asks of them.

How the updates of an optimizer grow with the width is measured, on matrices of two sizes, so that
it is known of every optimizer, of chains of parts and of those of a user.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.factories import instantiate, map_floats, name_of
from optim.paths import flatten, fullmatch
from trainer.models.model import WidthScaling

_WIDTHS = (16, 64)
_STEPS = 8  # optax.radam rectifies its steps from the sixth on
# Powers of the width with which the spectral norm of an update grows, for gradients of rank one and
# for random ones -> by which power muP divides the learning rate (Yang et al., arXiv:2203.03466,
# table 8). The elements of Adam's updates have the size of the learning rate, and add up over the
# inputs; an orthogonal update has one spectral norm at all widths, times the root of the width with
# scale="match_rms_adamw".
_POWERS = {(1.0, 0.5): 1.0, (0.0, 0.0): 0.0, (0.5, 0.5): 0.5}


def width_warnings(optimizer: optim.Optimizer, params: Any, widths: WidthScaling) -> list[str]:
    """Returns a sentence for each group whose rate for hidden kernels is not that of muP."""
    labels = flatten(optimizer.label(params))
    found = []
    for name, group in optimizer.groups.items():
        paths = [path for path, label in labels.items() if label == name]
        hidden = [path for path in paths if fullmatch(widths.hidden, path)]
        right = divisor(group.optimizer, widths.ratio) if hidden and not group.is_frozen else None
        given = 1.0 if group.width_scaling is None else group.width_scaling
        if right is None or abs(given - right) <= 0.01 * right and (right == 1 or hidden == paths):
            continue
        more = f" (and {len(hidden) - 1} more)" if len(hidden) > 1 else ""
        found.append(
            f"In group {name!r}, {name_of(group.optimizer)} updates {hidden[0]}{more}, hidden"
            f" kernels of a model that is {widths.ratio:.4g} times as wide as its base_width."
            f" {_advice(right, widths.ratio, hidden == paths)}"
        )
    return found


def divisor(recipe: Any, ratio: float) -> float | None:
    """Returns by what muP divides the learning rate of hidden kernels; None if it is not known."""
    # It is not if the size of the updates depends on that of the gradients, as with SGD, or of the
    # weights, or if the optimizer finds its learning rate itself or needs more than gradients.

    def number(path: str, value: Any) -> Any:
        return 1.0 if path.split(".")[-1] == "learning_rate" else value

    try:
        tx = instantiate(map_floats(recipe, number), 0, jnp.float32)
        small, large = (_norms(tx, width) for width in _WIDTHS)
    except Exception:  # whatever an optimizer raises that does not get the value of the loss
        return None
    if not np.allclose(large, large[:, :1], rtol=0.05):
        return None
    (aligned, *_), (scattered, *_) = np.log(large / small) / math.log(_WIDTHS[1] / _WIDTHS[0])
    for known, power in _POWERS.items():
        fits = abs(aligned - known[0]) < 0.13 and abs(scattered - known[1]) < 0.25
        # An optimizer whose updates are far from the learning rate, here 1, finds one by itself.
        if fits and 0.01 < large[0, 0] / _WIDTHS[1] ** power < 20:
            return ratio**power
    return None


def _norms(tx: Any, width: int) -> np.ndarray:
    """Returns spectral norms of updates of a square matrix, [2, 3]."""
    # The rows are for gradients of rank one and for random ones; the columns for weights of 0, for
    # gradients that are seven times as large, and for other weights.
    random = np.random.default_rng(0)
    vectors = random.choice([-1.0, 1.0], (2, width)) * random.uniform(0.5, 1.5, (2, width))
    kinds = np.outer(*vectors), random.normal(size=(width, width))
    lengths = random.uniform(0.5, 1.5, (_STEPS, 1, 1))

    @jax.jit
    def last(grads: jax.Array, weights: jax.Array) -> jax.Array:
        params = {"kernel": weights}

        def step(state: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
            updates, state = tx.update({"kernel": grad}, state, params)
            return state, updates["kernel"]

        return jax.lax.scan(step, tx.init(params), grads)[1][-1]

    def size(grad: np.ndarray, factor: float, weight: float) -> float:
        grads = jnp.asarray(factor * lengths * grad, jnp.float32)
        update = last(grads, jnp.full((width, width), weight, jnp.float32))
        return float(np.linalg.norm(np.asarray(update), 2))

    every = ((1.0, 0.0), (7.0, 0.0), (1.0, 0.01))
    return np.array([[size(grad, *each) for each in every] for grad in kinds])


def _advice(right: float, ratio: float, alone: bool) -> str:
    if right == 1:
        return (
            "muP does not divide the learning rate of this optimizer. Remove width_scaling from the"
            " group."
        )
    why = "muP divides the learning rate of such an optimizer by as much."
    if right != ratio:
        why = (
            "The updates of this optimizer grow with the root of the width, by which the learning"
            " rate is to be divided."
        )
    where = "the group" if alone else "a group of these kernels alone"
    return (
        f"{why} Set width_scaling: {right:.4g} in {where}, with the learning rate for base_width."
    )
