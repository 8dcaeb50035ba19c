"""Composes optax's parts into an optimizer, as optax.chain does, from a config."""

from collections.abc import Sequence

import optax


def chain(
    transformations: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Applies transformations one after the other.

    `optax.chain` takes them as positional arguments, which a config cannot name.

    Args:
        transformations: such as [optax.scale_by_adam(), optax.scale_by_learning_rate(1e-3)]; the
            last one turns the direction downhill.

    Returns:
        The composition; extra arguments go to each part that takes them.
    """
    return optax.chain(*transformations)
