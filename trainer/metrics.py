"""The metrics a config can name: each factory returns a class of clu.metrics.

`from_model_output(outputs=, batch=, loss=, mask=)` of that class accumulates one batch, without the
examples or positions whose mask is 0; `merge` adds the values of two batches; `compute` returns the
metric. Outputs [batch, positions, classes] have a value for each position, as in `trainer.losses`.
Outputs may be a `trainer.logits.ChunkedLogits` where a metric says so. A metric of your own is
passed what the model returns; it calls `outputs.whole()`, or `outputs.map(...)` to save memory.
"""

import math
from collections.abc import Callable
from typing import Any

import clu.metrics
import flax.struct
import jax
import jax.numpy as jnp

from trainer.logits import ChunkedLogits
from trainer.losses import check_array, check_outputs, over_features, per_position, pick

__all__ = [
    "accuracy",
    "bits_per_byte",
    "mean_absolute_error",
    "mean_squared_error",
    "perplexity",
    "top_k_accuracy",
]


def accuracy(labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the fraction of examples whose largest output is at the index of the label.

    Args:
        labels: key of the labels in the batch: integers [batch, ...], or probabilities [batch, ...,
            classes], of which the largest is the label. Outputs are [batch, ..., classes], or a
            ChunkedLogits.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> metric = metrics.accuracy()
        >>> outputs, labels = jnp.array([[2.0, 1.0], [3.0, 0.0]]), jnp.array([0, 1])
        >>> metric.from_model_output(outputs=outputs, batch={"label": labels}).compute().tolist()
        0.5
    """

    def correct(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        check_outputs(outputs, batch, "metrics.accuracy")
        classes = _classes(outputs, pick(batch, labels, "metrics.accuracy"))
        found = outputs.argmax(axis=-1).astype(classes.dtype)
        return per_position((found == classes).astype(jnp.float32))

    return _LargerIsBetter.from_fun(correct)


def top_k_accuracy(k: int = 5, labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the fraction of examples whose label is among the k largest outputs.

    Equal outputs are ordered by their indices, the lower one first, as in `accuracy`.

    Args:
        k: how many of the largest outputs to compare with the label, at least 1.
        labels: key of the labels in the batch, and outputs, as in `accuracy`.

    Raises:
        ValueError: `k` is not positive. `from_model_output` raises it if `k` is larger than the
            number of classes.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> metric = metrics.top_k_accuracy(k=2)
        >>> outputs, labels = jnp.array([[5.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), jnp.array([1, 2])
        >>> metric.from_model_output(outputs=outputs, batch={"label": labels}).compute().tolist()
        0.5
    """
    if k < 1:
        raise ValueError(f"metrics.top_k_accuracy needs k to be at least 1, but got {k}.")

    def correct(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        check_outputs(outputs, batch, "metrics.top_k_accuracy")
        if k > outputs.shape[-1]:
            raise ValueError(
                f"metrics.top_k_accuracy counts the {k} largest outputs, but the model returns "
                f"{outputs.shape[-1]}."
            )
        classes = _classes(outputs, pick(batch, labels, "metrics.top_k_accuracy"))
        chunked = isinstance(outputs, ChunkedLogits)
        found = outputs.map(among, classes) if chunked else among(outputs, classes)
        return per_position(found.astype(jnp.float32))

    def among(outputs: jax.Array, classes: jax.Array) -> jax.Array:
        classes = classes[..., None]
        at_label = jnp.take_along_axis(outputs, classes, axis=-1)
        not_before = jnp.arange(outputs.shape[-1], dtype=classes.dtype) >= classes
        # Counting the outputs behind the label makes a row with NaN at its label wrong: comparisons
        # with NaN are False.
        behind = (outputs < at_label) | ((outputs == at_label) & not_before)
        return (~behind).sum(axis=-1) < k

    return _LargerIsBetter.from_fun(correct)


@flax.struct.dataclass
class _SmallerIsBetter(clu.metrics.Average):
    smaller_is_better = True  # the plan reads it


@flax.struct.dataclass
class _LargerIsBetter(clu.metrics.Average):
    smaller_is_better = False


@flax.struct.dataclass
class _Perplexity(_SmallerIsBetter):
    def compute(self) -> Any:
        return jnp.exp(super().compute())


def perplexity() -> type[clu.metrics.Metric]:
    """Returns the exponential of the mean loss of all tokens that count.

    As a metric of evaluation it is the perplexity of the text if the loss is
    `losses.softmax_cross_entropy` without label smoothing. In `train_metrics` the loss is that of
    the step, with its label smoothing and z-loss.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> metric, losses = metrics.perplexity(), jnp.log(jnp.array([[2.0, 8.0]]))
        >>> print(metric.from_model_output(loss=losses).compute().round(4))
        4.0
    """
    return _Perplexity.from_output("loss")


def bits_per_byte(bytes: str = "bytes") -> type[clu.metrics.Metric]:
    """Returns the loss of all tokens that count, in bits, over the bytes of their text.

    It can compare models with different tokenizers; a loss per token cannot. The loss should be as
    for `perplexity`. Tokens without text, such as the end of a text, have a loss and 0 bytes.

    Args:
        bytes: key of the numbers of bytes that the labels stand for, integers [batch, positions].

    Raises:
        ValueError: `from_model_output` raises it if the batch has no such key, or if these numbers
            and the losses differ in shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> metric, losses = metrics.bits_per_byte(), jnp.log(jnp.array([[2.0, 8.0]]))
        >>> batch = {"bytes": jnp.array([[1, 3]])}
        >>> print(metric.from_model_output(loss=losses, batch=batch).compute().round(4))
        1.0
    """

    @flax.struct.dataclass
    class BitsPerByte(_SmallerIsBetter):
        @classmethod
        def from_model_output(cls, *, loss: Any, batch: Any, mask: Any = None, **_: Any) -> Any:
            sizes = pick(batch, bytes, "metrics.bits_per_byte")
            if sizes.shape != loss.shape:
                raise ValueError(
                    f"metrics.bits_per_byte needs {bytes!r} in the shape of the losses, "
                    f"{loss.shape}, but the batch has {sizes.shape}."
                )
            average: Any = clu.metrics.Average
            losses, counts = (average.from_model_output(x, mask) for x in (loss, sizes))
            return cls(**{"total": losses.total / math.log(2), "count": counts.total})

    return BitsPerByte


def mean_squared_error(targets: str = "target") -> type[clu.metrics.Metric]:
    """Returns the mean squared error of the outputs.

    Args:
        targets: key of the targets in the batch, in the shape of the outputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> metric = metrics.mean_squared_error()
        >>> outputs, targets = jnp.array([[2.0], [1.0]]), jnp.array([[0.0], [1.0]])
        >>> metric.from_model_output(outputs=outputs, batch={"target": targets}).compute().tolist()
        2.0
    """
    return _mean_error("metrics.mean_squared_error", targets, jnp.square)


def mean_absolute_error(targets: str = "target") -> type[clu.metrics.Metric]:
    """Returns the mean absolute error of the outputs.

    Args:
        targets: key of the targets in the batch, in the shape of the outputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> metric = metrics.mean_absolute_error()
        >>> outputs, targets = jnp.array([[2.0], [1.0]]), jnp.array([[0.0], [1.0]])
        >>> metric.from_model_output(outputs=outputs, batch={"target": targets}).compute().tolist()
        1.0
    """
    return _mean_error("metrics.mean_absolute_error", targets, jnp.abs)


def _mean_error(name: str, targets: str, size: Callable[..., jax.Array]) -> Any:
    """Returns the metric `name`: the mean of `size` of the differences from a field."""

    def error(*, outputs: Any, batch: Any, **_: Any) -> jax.Array:
        check_array(outputs, batch, name)
        wanted = jnp.asarray(pick(batch, targets, name)).astype(jnp.float32)
        return over_features(size(outputs.astype(jnp.float32) - wanted))

    return _SmallerIsBetter.from_fun(error)


def _classes(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    labels = jnp.asarray(labels)
    # Labels with an axis of classes are probabilities or one-hot vectors.
    return labels if labels.ndim < outputs.ndim else jnp.argmax(labels, axis=-1)
