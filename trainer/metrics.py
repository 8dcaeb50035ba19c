"""The metrics a config can name: each factory returns a class of clu.metrics.

A class counts one batch by `from_model_output(outputs=, batch=, loss=, mask=)`, where examples
whose mask is 0 do not count, adds batches by `merge`, and gives the number by `compute`.
"""

from __future__ import annotations

from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp

__all__ = ["accuracy", "mean_absolute_error", "mean_squared_error", "top_k_accuracy"]


def accuracy(labels: str = "label") -> type[clu.metrics.Metric]:
    """Makes the part of the examples whose largest output stands at the label.

    Args:
        labels: the batch's key of the labels, integers [batch, ...], or probabilities [batch, ...,
            classes] of which the largest counts. Outputs are [batch, ..., classes].
    """

    def right(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        classes = _classes(outputs, batch[labels])
        return _per_example(jnp.argmax(outputs, axis=-1).astype(classes.dtype) == classes)

    return clu.metrics.Average.from_fun(right)


def top_k_accuracy(k: int = 5, labels: str = "label") -> type[clu.metrics.Metric]:
    """Makes the part of the examples whose label is among the k largest outputs.

    Of equal outputs the one at the lower index counts as the larger, as in `accuracy`.

    Args:
        k: how many outputs count.
        labels: as for `accuracy`.

    Raises:
        ValueError: `k` is not positive; or, at the first call, larger than the number of classes.
    """
    if k < 1:
        raise ValueError(f"metrics.top_k_accuracy needs k to be at least 1, but got {k}.")

    def right(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        if k > outputs.shape[-1]:
            raise ValueError(
                f"metrics.top_k_accuracy counts the {k} largest outputs, but the model gives "
                f"{outputs.shape[-1]}."
            )
        classes = _classes(outputs, batch[labels])[..., None]
        chosen = jnp.take_along_axis(outputs, classes, axis=-1)
        not_before = jnp.arange(outputs.shape[-1], dtype=classes.dtype) >= classes
        # Counted this way round, a row with NaN at its label is wrong.
        behind = (outputs < chosen) | ((outputs == chosen) & not_before)
        return _per_example((~behind).sum(axis=-1) < k)

    return clu.metrics.Average.from_fun(right)


def mean_squared_error(targets: str = "target") -> type[clu.metrics.Metric]:
    """Makes the mean of the squared differences of outputs and targets.

    Args:
        targets: the batch's key of the targets, of the outputs' shape.
    """

    def error(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        return _per_example(jnp.square(_difference(outputs, batch[targets])))

    return clu.metrics.Average.from_fun(error)


def mean_absolute_error(targets: str = "target") -> type[clu.metrics.Metric]:
    """Makes the mean of the absolute differences of outputs and targets.

    Args:
        targets: the batch's key of the targets, of the outputs' shape.
    """

    def error(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        return _per_example(jnp.abs(_difference(outputs, batch[targets])))

    return clu.metrics.Average.from_fun(error)


def _difference(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return outputs.astype(jnp.float32) - jnp.asarray(targets).astype(jnp.float32)


def _classes(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    labels = jnp.asarray(labels)
    return labels if labels.ndim < outputs.ndim else jnp.argmax(labels, axis=-1)


def _per_example(values: jax.Array) -> jax.Array:
    return values.astype(jnp.float32).mean(axis=tuple(range(1, values.ndim)))
