"""The losses a config can name: each factory returns a function of outputs and batch.

That function gives one float32 number per example, [batch], computed in float32 whatever the
dtype of the outputs. Where outputs have more axes than batch and classes (a sequence, say), an
example's loss is the mean over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

__all__ = ["huber", "sigmoid_binary_cross_entropy", "softmax_cross_entropy", "squared_error"]

Loss = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]


def softmax_cross_entropy(label_smoothing: float = 0.0, labels: str = "label") -> Loss:
    """Makes the cross-entropy between the softmax of the outputs and the labels.

    Szegedy et al., "Rethinking the Inception Architecture" (arXiv:1512.00567), for the smoothing.

    Args:
        label_smoothing: part of the probability that is spread evenly over all classes, in [0, 1).
        labels: the batch's key of the labels: integers [batch, ...], or probabilities [batch, ...,
            classes]. Outputs are logits [batch, ..., classes].

    Raises:
        ValueError: `label_smoothing` is outside [0, 1); or, at the first call, shapes do not fit.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            "losses.softmax_cross_entropy needs 0 <= label_smoothing < 1, but got "
            f"{label_smoothing}."
        )

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        given = _pick(batch, labels, "losses.softmax_cross_entropy")
        log_probabilities = jax.nn.log_softmax(outputs.astype(jnp.float32), axis=-1)
        if jnp.issubdtype(given.dtype, jnp.integer):
            _check_shape(given.shape, outputs.shape[:-1], labels, "losses.softmax_cross_entropy")
            chosen = jnp.take_along_axis(log_probabilities, given[..., None], axis=-1)[..., 0]
        else:
            _check_shape(given.shape, outputs.shape, labels, "losses.softmax_cross_entropy")
            chosen = jnp.sum(given.astype(jnp.float32) * log_probabilities, axis=-1)
        if label_smoothing:
            even = jnp.mean(log_probabilities, axis=-1)
            chosen = (1 - label_smoothing) * chosen + label_smoothing * even
        return _per_example(-chosen)

    return loss


def sigmoid_binary_cross_entropy(labels: str = "label") -> Loss:
    """Makes the cross-entropy between the sigmoid of every output and its label.

    Args:
        labels: the batch's key of the labels, 0 to 1, of the outputs' shape; integers [batch, ...]
            against outputs [batch, ..., classes] are classes, each against all others.

    Raises:
        ValueError: at the first call, if shapes do not fit.
    """

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        given = _pick(batch, labels, "losses.sigmoid_binary_cross_entropy")
        if jnp.issubdtype(given.dtype, jnp.integer) and given.shape == outputs.shape[:-1]:
            given = jax.nn.one_hot(given, outputs.shape[-1])
        _check_shape(given.shape, outputs.shape, labels, "losses.sigmoid_binary_cross_entropy")
        logits, target = outputs.astype(jnp.float32), given.astype(jnp.float32)
        likelihood = target * jax.nn.log_sigmoid(logits)
        return _per_example(-likelihood - (1 - target) * jax.nn.log_sigmoid(-logits))

    return loss


def squared_error(targets: str = "target") -> Loss:
    """Makes the squared difference of outputs and targets, averaged over all axes but the batch's.

    Args:
        targets: the batch's key of the targets, of the outputs' shape.

    Raises:
        ValueError: at the first call, if shapes do not fit.
    """

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        given = _pick(batch, targets, "losses.squared_error")
        _check_shape(given.shape, outputs.shape, targets, "losses.squared_error")
        return _per_example(jnp.square(outputs.astype(jnp.float32) - given.astype(jnp.float32)))

    return loss


def huber(delta: float = 1.0, targets: str = "target") -> Loss:
    """Makes Huber's loss, averaged over all axes but the batch's.

    With e the difference of output and target it is e²/2 where |e| <= delta, and
    delta (|e| - delta/2) beyond. Huber, "Robust Estimation of a Location Parameter" (1964).

    Args:
        delta: where the parabola turns into a line, positive.
        targets: the batch's key of the targets, of the outputs' shape.

    Raises:
        ValueError: `delta` is not positive; or, at the first call, shapes do not fit.
    """
    if not delta > 0:
        raise ValueError(f"losses.huber needs a positive delta, but got {delta}.")

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        given = _pick(batch, targets, "losses.huber")
        _check_shape(given.shape, outputs.shape, targets, "losses.huber")
        error = jnp.abs(outputs.astype(jnp.float32) - given.astype(jnp.float32))
        near = jnp.minimum(error, delta)
        return _per_example(0.5 * near * near + delta * (error - near))

    return loss


def _pick(batch: Mapping[str, jax.Array], key: str, name: str) -> jax.Array:
    if key not in batch:
        raise ValueError(
            f"{name} reads {key!r} from the batch, but the data set gives "
            f"{', '.join(map(repr, sorted(batch)))}."
        )
    return jnp.asarray(batch[key])


def _check_shape(given: tuple[int, ...], wanted: tuple[int, ...], key: str, name: str) -> None:
    if given != wanted:
        raise ValueError(
            f"{name} needs {key!r} of shape {wanted} to fit the model's outputs, but the batch has "
            f"{given}."
        )


def _per_example(losses: jax.Array) -> jax.Array:
    return losses.mean(axis=tuple(range(1, losses.ndim)))
