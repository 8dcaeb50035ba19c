"""The losses a config can name: each factory returns a function `loss(outputs, batch)`.

That function returns the losses of the examples, float32 [batch], computed in float32 whatever the
dtype of the outputs. If the outputs have an axis of positions (a sequence: [batch, positions,
classes]), it returns the losses of the positions, [batch, positions]. If they have more axes (an
image: [batch, height, width, classes]), the loss of an example is the mean over those axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from trainer.logits import ChunkedLogits
from trainer.protocols import Loss

__all__ = ["huber", "sigmoid_binary_cross_entropy", "softmax_cross_entropy", "squared_error"]

Input = Annotated[float, "input"]
"""A float that is an input of the compiled program, so that another value compiles nothing.

Annotate the floats of your own losses with it if they can be traced."""


def softmax_cross_entropy(
    label_smoothing: Input = 0.0, labels: str = "label", ignore_label: int | None = None
) -> Loss:
    """Returns the cross-entropy between the softmax of the outputs and the labels.

    Label smoothing follows Szegedy et al., "Rethinking the Inception Architecture"
    (arXiv:1512.00567). If the outputs are a `trainer.logits.ChunkedLogits`, the losses include its
    z-loss, and the mean of that over what counts is the aux value "z_loss".

    Args:
        label_smoothing: fraction of the probability that is spread evenly over all classes, in
            [0, 1).
        labels: key of the labels in the batch: integers [batch, ...] from 0 to classes - 1, or
            probabilities [batch, ..., classes]. Where the mask of the batch is 0, an integer may
            be any other. Where it counts, another integer is an error of the plan if the data are
            in memory; in a batch, its loss is NaN, which the run reports.
        ignore_label: the integer of examples, or of positions, without a label, such as -1: they
            count neither in the loss nor in any metric. None if all have one.

    Returns:
        A function of logits, [batch, ..., classes] or a ChunkedLogits, and a batch.

    Raises:
        ValueError: `label_smoothing` is outside [0, 1). The returned function raises it if the
            batch has no such key, if the shapes of logits and labels do not fit, or if labels of a
            ChunkedLogits are not integers.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import losses
        >>> loss = losses.softmax_cross_entropy()
        >>> print(loss(jnp.log(jnp.array([[0.25, 0.75]])), {"label": jnp.array([1])}).round(4))
        [0.2877]
    """
    # A traced value was checked as a number when the experiment was built.
    if isinstance(label_smoothing, int | float) and not 0 <= label_smoothing < 1:
        raise ValueError(
            "losses.softmax_cross_entropy needs 0 <= label_smoothing < 1, but got "
            f"{label_smoothing}."
        )

    return _CrossEntropy(label_smoothing, labels, ignore_label)


@dataclass(frozen=True)
class _CrossEntropy:
    """The loss of `softmax_cross_entropy`."""

    label_smoothing: Any
    class_labels: str
    ignore_label: int | None

    def __call__(self, outputs: Any, batch: Mapping[str, jax.Array]) -> Any:
        name, key = "losses.softmax_cross_entropy", self.class_labels
        target = pick(batch, key, name)
        if isinstance(outputs, ChunkedLogits):
            if not jnp.issubdtype(target.dtype, jnp.integer):
                raise ValueError(
                    f"{name} needs integer labels for a model that returns ChunkedLogits, but "
                    f"{key!r} is {target.dtype}. Compute the loss from `outputs.whole()` in a loss "
                    "of your own."
                )
            check_shape(target, outputs.shape[:-1], outputs.shape, key, name)
            return _chunked(outputs, target, self.label_smoothing, batch.get("mask"))
        check_outputs(outputs, batch, name)
        log_probabilities = jax.nn.log_softmax(outputs.astype(jnp.float32), axis=-1)
        if jnp.issubdtype(target.dtype, jnp.integer):
            check_shape(target, outputs.shape[:-1], outputs.shape, key, name)
            # A negative index would count from the last class.
            index = jnp.where(target < 0, outputs.shape[-1], target)[..., None]
            log_likelihood = jnp.take_along_axis(log_probabilities, index, axis=-1)[..., 0]
        else:
            check_shape(target, outputs.shape, outputs.shape, key, name)
            log_likelihood = jnp.sum(target.astype(jnp.float32) * log_probabilities, axis=-1)
        smoothing = self.label_smoothing
        # A traced value may be any; one that is known to be 0 needs no mean over the classes.
        if not isinstance(smoothing, int | float) or smoothing:
            uniform = jnp.mean(log_probabilities, axis=-1)
            log_likelihood = (1 - smoothing) * log_likelihood + smoothing * uniform
        return per_position(-log_likelihood)


def _chunked(outputs: ChunkedLogits, labels: Any, label_smoothing: Any, mask: Any) -> Any:
    """Returns the losses [batch, positions], with the aux value "z_loss" if there is a z-loss."""
    counts = None
    if mask is not None:
        counts = jnp.broadcast_to((mask if mask.ndim == 2 else mask[:, None]) > 0, labels.shape)
    values, z_loss = outputs.cross_entropy(labels, label_smoothing, counts)
    if not outputs.z_loss:
        return values
    weights = jnp.ones_like(values) if counts is None else counts.astype(jnp.float32)
    total = jnp.sum(jnp.where(weights > 0, z_loss, 0.0))
    return values, {"z_loss": total / jnp.maximum(jnp.sum(weights), 1.0)}


def sigmoid_binary_cross_entropy(labels: str = "label") -> Loss:
    """Returns the cross-entropy between the sigmoid of each output and its label.

    Args:
        labels: key of the labels in the batch: numbers from 0 to 1 in the shape of the outputs; or
            integers [batch, ...] for outputs [batch, ..., classes], which are one-hot encoded.

    Returns:
        A function of logits and a batch. It raises ValueError if the batch has no such key, or if
        the shapes of logits and labels do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import losses
        >>> loss = losses.sigmoid_binary_cross_entropy(labels="clicked")
        >>> print(loss(jnp.zeros((2, 1)), {"clicked": jnp.array([[1.0], [0.0]])}).round(4))
        [0.6931 0.6931]
    """

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        name = "losses.sigmoid_binary_cross_entropy"
        check_array(outputs, batch, name)
        target = pick(batch, labels, name)
        if jnp.issubdtype(target.dtype, jnp.integer) and target.shape == outputs.shape[:-1]:
            target = jax.nn.one_hot(target, outputs.shape[-1])
        check_shape(target, outputs.shape, outputs.shape, labels, name)
        logits, target = outputs.astype(jnp.float32), target.astype(jnp.float32)
        # log_sigmoid(-x) is log(1 - sigmoid(x)), without its cancellation for large x.
        likelihood = target * jax.nn.log_sigmoid(logits)
        return over_features(-likelihood - (1 - target) * jax.nn.log_sigmoid(-logits))

    return loss


def squared_error(targets: str = "target") -> Loss:
    """Returns the squared error, averaged over the features.

    Args:
        targets: key of the targets in the batch, in the shape of the outputs: [batch, features] or
            [batch, positions, features].

    Returns:
        A function of outputs and a batch. It raises ValueError if the batch has no such key, or if
        the shapes of outputs and targets differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import losses
        >>> loss = losses.squared_error()
        >>> loss(jnp.array([[1.0, 5.0]]), {"target": jnp.array([[1.0, 3.0]])}).tolist()
        [2.0]
    """

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        check_array(outputs, batch, "losses.squared_error")
        target = pick(batch, targets, "losses.squared_error")
        check_shape(target, outputs.shape, outputs.shape, targets, "losses.squared_error")
        return over_features(jnp.square(outputs.astype(jnp.float32) - target.astype(jnp.float32)))

    return loss


def huber(delta: float = 1.0, targets: str = "target") -> Loss:
    """Returns Huber's loss, averaged over the features.

    For an error e the loss is e²/2 if |e| <= delta, and delta (|e| - delta/2) otherwise. Huber,
    "Robust Estimation of a Location Parameter" (1964).

    Args:
        delta: the error at which the quadratic function continues as a linear one, positive.
        targets: key of the targets in the batch, in the shape of the outputs: [batch, features] or
            [batch, positions, features].

    Returns:
        A function of outputs and a batch. It raises ValueError if the batch has no such key, or if
        the shapes of outputs and targets differ.

    Raises:
        ValueError: `delta` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import losses
        >>> loss = losses.huber()
        >>> loss(jnp.array([[0.5], [3.0]]), {"target": jnp.zeros((2, 1))}).tolist()
        [0.125, 2.5]
    """
    if not delta > 0:
        raise ValueError(f"losses.huber needs a positive delta, but got {delta}.")

    def loss(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        check_array(outputs, batch, "losses.huber")
        target = pick(batch, targets, "losses.huber")
        check_shape(target, outputs.shape, outputs.shape, targets, "losses.huber")
        error = jnp.abs(outputs.astype(jnp.float32) - target.astype(jnp.float32))
        # Without a branch: e²/2 up to delta, and delta²/2 + delta (|e| - delta) above it.
        quadratic = jnp.minimum(error, delta)
        return over_features(0.5 * quadratic * quadratic + delta * (error - quadratic))

    return loss


def pick(batch: Mapping[str, jax.Array], key: str, name: str) -> jax.Array:
    """Returns a field of a batch; raises ValueError if it is missing or complex."""
    if key not in batch:
        raise ValueError(
            f"{name} reads {key!r} from the batch, but the data set has "
            f"{', '.join(repr(field) for field in sorted(batch) if field != 'mask')}."
        )
    field = jnp.asarray(batch[key])
    if jnp.iscomplexobj(field):
        raise ValueError(
            f"{name} reads {key!r} from the batch and computes with real numbers, but it is "
            f"{field.dtype}{list(field.shape)}. Store its real and imaginary parts as two arrays."
        )
    return field


def check_array(outputs: Any, batch: Mapping[str, jax.Array], name: str) -> None:
    """Raises ValueError, for the loss `name`, if the outputs are a ChunkedLogits or complex."""
    if isinstance(outputs, ChunkedLogits):
        raise ValueError(
            f"{name} needs outputs that are an array, but the model returns ChunkedLogits, which "
            "losses.softmax_cross_entropy, metrics.accuracy, metrics.top_k_accuracy, "
            "metrics.perplexity and metrics.bits_per_byte can read. Use one of these, or call "
            "`outputs.whole()` in a function of your own."
        )
    check_outputs(outputs, batch, name)


def check_outputs(outputs: Any, batch: Mapping[str, jax.Array], name: str) -> None:
    """Raises ValueError if the outputs are complex, or a single number for all examples."""
    # Outputs that are not an array are not checked.
    if isinstance(outputs, jax.Array) and outputs.ndim == 0:
        raise ValueError(
            f"{name} takes the outputs of each example, [batch, ...], but the model returned "
            f"{outputs.dtype}[], a single number. Do not average or sum over the batch."
        )
    if not isinstance(outputs, jax.Array) or not jnp.iscomplexobj(outputs):
        return
    fields = ", ".join(f"{key!r} {x.dtype}" for key, x in batch.items() if jnp.iscomplexobj(x))
    raise ValueError(
        f"{name} takes real outputs, but the model returned {outputs.dtype}{list(outputs.shape)}"
        f"{f' (the batch has {fields})' if fields else ''}. Return real numbers, such as their "
        "absolute values, or the real and the imaginary parts side by side."
    )


def check_shape(
    target: jax.Array, wanted: tuple[int, ...], outputs: tuple[int, ...], key: str, name: str
) -> None:
    """Raises ValueError if a target does not have the shape that the model's outputs need."""
    if target.shape == wanted:
        return
    hint = ""
    if target.shape == outputs[:-1]:
        hint = f" Labels that are numbers of classes are integers, and these are {target.dtype}."
    elif len(outputs) > target.ndim + 1:
        hint = " Axes too many of the outputs come from inputs that the model does not flatten."
    raise ValueError(
        f"{name} needs {key!r} of shape {wanted} for outputs of shape {outputs}, but the batch has"
        f" {target.shape}.{hint}"
    )


def per_position(values: jax.Array) -> jax.Array:
    """Averages values [batch, ...] over the axes behind the batch, unless there is only one."""
    return values if values.ndim == 2 else values.mean(axis=tuple(range(1, values.ndim)))


def over_features(values: jax.Array) -> jax.Array:
    """Averages values [batch, features] or [batch, positions, features] over the last axis."""
    # Values of more axes are averaged over all of them but the batch.
    return values.mean(axis=-1 if values.ndim == 3 else tuple(range(1, values.ndim)))
