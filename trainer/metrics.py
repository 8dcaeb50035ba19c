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
from trainer.losses import (
    check_array,
    check_outputs,
    check_shape,
    over_features,
    per_position,
    pick,
)

__all__ = [
    "accuracy",
    "average_precision",
    "bits_per_byte",
    "f1",
    "mean_absolute_error",
    "mean_squared_error",
    "perplexity",
    "precision",
    "recall",
    "roc_auc",
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


def recall(label: int = 1, labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the fraction of a class's examples whose largest output is that of the class.

    It is 0 if the split has no example of the class.

    Args:
        label: the number of the class.
        labels: key of the labels in the batch, and outputs, as in `accuracy`.

    Raises:
        ValueError: `from_model_output` raises it if the outputs have no such class.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> outputs, labels = jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([1, 1])
        >>> metric = metrics.recall(label=1)
        >>> metric.from_model_output(outputs=outputs, batch={"label": labels}).compute().tolist()
        0.5
    """
    return _of_class("metrics.recall", label, labels, lambda hits, _, of_class: (hits, of_class))


def precision(label: int = 1, labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the fraction of the class, among the examples whose largest output is that class.

    It is 0 if no example has its largest output there. For arguments and errors, see `recall`.
    """
    return _of_class("metrics.precision", label, labels, lambda hits, answers, _: (hits, answers))


def f1(label: int = 1, labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the harmonic mean of the precision and the recall of a class; see `recall`."""
    return _of_class("metrics.f1", label, labels, lambda hits, *sides: (2 * hits, sum(sides)))


def _of_class(name: str, label: int, labels: str, parts: Callable[..., Any]) -> Any:
    """Returns a metric that is a ratio, whose two numbers `parts` computes from three counts."""

    # They are the examples of the class that are answered with it, all that are, and all of it.
    def count(outputs: jax.Array, is_class: jax.Array, weights: jax.Array) -> jax.Array:
        answered = outputs.argmax(axis=-1) == label
        both = answered & is_class
        return jnp.stack([weights.sum(where=x) for x in (both, answered, is_class)])

    def ratio(*counts: jax.Array) -> jax.Array:
        over, under = parts(*counts)
        return over / jnp.maximum(under, 1.0)

    return _of_counts(name, label, labels, (3,), count, ratio)


def roc_auc(label: int = 1, labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the area under the ROC curve (receiver operating characteristic) of a class.

    It is the probability that an example of the class has a larger score than one of another class,
    where equal scores count half. A score is the logarithm of the odds of the class by the softmax
    of the outputs. It is rounded to bfloat16, so that batches add up: scores that differ by less
    than 0.4% may count as equal. NaN if the split has no example of the class, or no other. For the
    arguments and errors, see `recall`.

    Example:
        >>> import jax.numpy as jnp
        >>> from trainer import metrics
        >>> outputs = jnp.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
        >>> batch = {"label": jnp.array([0, 1, 0])}
        >>> metrics.roc_auc().from_model_output(outputs=outputs, batch=batch).compute().tolist()
        0.5
    """

    def area(others: jax.Array, of_class: jax.Array) -> jax.Array:
        below = jnp.cumsum(others) - others / 2
        return jnp.sum(of_class * below) / (others.sum() * of_class.sum())

    return _of_scores("metrics.roc_auc", label, labels, area)


def average_precision(label: int = 1, labels: str = "label") -> type[clu.metrics.Metric]:
    """Returns the mean of the precision at each example of a class, from the largest score down.

    It summarizes the curve of precision and recall without interpolation; for the scores and the
    arguments, see `roc_auc`. NaN if the split has no example of the class.
    """

    def mean(others: jax.Array, of_class: jax.Array) -> jax.Array:
        hits, found = (jnp.cumsum(x[::-1]) for x in (of_class, others + of_class))
        return jnp.sum(of_class[::-1] * hits / jnp.maximum(found, 1)) / of_class.sum()

    return _of_scores("metrics.average_precision", label, labels, mean)


def _of_scores(name: str, label: int, labels: str, statistic: Callable[..., Any]) -> Any:
    """Returns a statistic of the scores of the examples of a class and of all others."""

    def count(outputs: jax.Array, is_class: jax.Array, weights: jax.Array) -> jax.Array:
        logits = outputs.astype(jnp.float32)
        rest = jnp.where(jnp.arange(logits.shape[-1]) == label, -jnp.inf, logits)
        score = logits[..., label] - jax.nn.logsumexp(rest, axis=-1)
        # The bits of a float, of which the first is its sign, in the order of the numbers.
        bits = jax.lax.bitcast_convert_type(score.astype(jnp.bfloat16), jnp.uint16)
        place = jnp.where(bits >= 2**15, 2**16 - 1 - bits, bits + 2**15)
        return jnp.zeros(shape, jnp.float32).at[is_class.astype(int), place].add(weights)

    shape = (2, 2**16)  # scores of other classes and of the class, by their bits
    return _of_counts(name, label, labels, shape, count, statistic)


def _of_counts(
    name: str, label: int, labels: str, shape: tuple[int, ...], count: Any, statistic: Any
) -> Any:
    """Returns a metric: the statistic of the sums over the batches of what `count` returns."""

    # It takes the outputs, which examples are of the class, and 1 for those that count.
    @flax.struct.dataclass
    class OfCounts(clu.metrics.Metric):
        counts: jax.Array
        smaller_is_better = False

        @classmethod
        def empty(cls) -> Any:
            return cls(jnp.zeros(shape, jnp.float32))

        @classmethod
        def from_model_output(cls, *, outputs: Any, batch: Any, mask: Any = None, **_: Any) -> Any:
            check_array(outputs, batch, name)
            if not 0 <= label < (size := outputs.shape[-1]):
                raise ValueError(
                    f"{name} has label={label}, but the model has {size} outputs: classes 0 to"
                    f" {size - 1}."
                )
            classes = _classes(outputs, pick(batch, labels, name))
            weights = jnp.ones(classes.shape, jnp.float32)
            if mask is not None:
                weights *= mask.reshape(mask.shape + (1,) * (classes.ndim - mask.ndim))
            return cls(count(outputs, classes == label, weights))

        def merge(self, other: Any) -> Any:
            return type(self)(self.counts + other.counts)

        def compute(self) -> Any:
            return statistic(*self.counts)

    return OfCounts


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
        wanted = jnp.asarray(pick(batch, targets, name))
        check_shape(wanted, outputs.shape, outputs.shape, targets, name)
        return over_features(size(outputs.astype(jnp.float32) - wanted.astype(jnp.float32)))

    return _SmallerIsBetter.from_fun(error)


def _classes(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    labels = jnp.asarray(labels)
    # Labels with an axis of classes are probabilities or one-hot vectors.
    return labels if labels.ndim < outputs.ndim else jnp.argmax(labels, axis=-1)
