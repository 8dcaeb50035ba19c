"""Compares the learning rates of a model that is scaled by muP with what muP asks of them."""

from typing import Any

import optax
import optax.contrib

import optim
from optim.factories import bound, name_of, recipes_within
from optim.paths import flatten
from optim.patterns import fullmatch
from trainer.models.model import WidthScaling

# Their updates have elements of about the size of the learning rate, whatever the width.
_ELEMENTWISE = (
    *(optax.adabelief, optax.adam, optax.adamax, optax.adamaxw, optax.adamw, optax.adan),
    *(optax.amsgrad, optax.lion, optax.nadam, optax.nadamw, optax.optimistic_adam),
    *(optax.optimistic_adam_v2, optax.radam, optax.rmsprop, optax.rprop, optax.sign_sgd),
    *(optax.signum, optax.yogi, optim.mars, optim.rprop),
    *(optax.contrib.acprop, optax.contrib.ademamix, optax.contrib.adopt),
    optax.contrib.schedule_free_adamw,
)


def width_warnings(optimizer: optim.Optimizer, params: Any, widths: WidthScaling) -> list[str]:
    """Returns a sentence for each group whose rate for hidden kernels is not that of muP."""
    labels = flatten(optimizer.label(params))
    found = []
    for name, group in optimizer.groups.items():
        paths = [path for path, label in labels.items() if label == name]
        hidden = [path for path in paths if fullmatch(widths.hidden, path)]
        right = _divisor(group.optimizer, widths.ratio) if hidden and not group.is_frozen else None
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


def _divisor(recipe: Any, ratio: float) -> float | None:
    """Returns by what the learning rate of hidden kernels is divided; None if it is not known.

    The activations of a layer then change alike at all widths (Yang et al., arXiv:2203.03466, table
    8): Adam's elements add up over the inputs, where an orthogonal update has spectral norm 1.
    """
    for inner in recipes_within(recipe):
        if inner.func is optim.muon:
            rms = bound(inner).arguments.get("scale") == "match_rms_adamw"
            return ratio**0.5 if rms else 1.0
        if inner.func in _ELEMENTWISE:
            return ratio
    return None


def _advice(right: float, ratio: float, alone: bool) -> str:
    if right == 1:
        return (
            "muP does not divide the learning rate of this optimizer. Remove width_scaling from the"
            " group."
        )
    why = "muP divides the learning rate of such an optimizer by as much."
    if right != ratio:
        why = (
            "scale='match_rms_adamw' multiplies the updates by the root of the width, by which the"
            " learning rate is to be divided."
        )
    where = "the group" if alone else "a group of these kernels alone"
    return (
        f"{why} Set width_scaling: {right:.4g} in {where}, with the learning rate for base_width."
    )
