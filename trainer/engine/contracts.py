"""Checks that the model, the loss, the metrics and the data set keep their contracts.

A component that does not is reported by name, with the line of the user's code where it raised.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics

from trainer.config import ConfigError, blame, build_errors

# Field name -> array (numpy's, jax's or traced), whose first axis counts the examples.
Batch = Mapping[str, Any]


class ComponentError(ConfigError):
    """A mistake in one component of an experiment.

    Args:
        component: "model", "data", "loss" or "metrics".
        message: whole sentences.

    Attributes:
        component: the argument.
    """

    def __init__(self, component: str, message: str):
        super().__init__(message)
        self.component = component


@contextmanager
def calling(component: str) -> Iterator[None]:
    """Converts an exception of a component to a ComponentError with the line of the user's code."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = f"{build_errors.exception_text(error)}{blame.location(error)}"
        raise ComponentError(component, text) from error


def check_model(model: Any) -> None:
    """Raises ComponentError if `model` does not have the methods of a `models.Model`."""
    if not all(callable(getattr(model, name, None)) for name in ("init", "apply")):
        raise ComponentError(
            "model",
            f"model is {_kind(model)}; it must be a `models.Model`, with init(key, batch) and "
            f"apply(params, model_state, batch, *, key, train), or a flax linen module.",
        )


def example_losses(loss: Any, outputs: Any, batch: Batch) -> Any:
    """Computes the losses of the examples of a batch.

    Args:
        loss: the experiment's loss.
        outputs: the model's outputs for the batch.
        batch: field name -> array.

    Returns:
        Floating-point losses [batch].

    Raises:
        ComponentError: the loss raises, or it returns anything but one float per example.
    """
    with calling("loss"):
        losses = loss(outputs, batch)
    size = next(iter(batch.values())).shape[0]
    shape, dtype = getattr(losses, "shape", None), getattr(losses, "dtype", None)
    if shape != (size,) or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ComponentError(
            "loss",
            f"A loss must return one float for each example, of shape ({size},) here, but this one "
            f"returned {_kind(losses)}. Do not average over the examples: the step does.",
        )
    return losses


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def check_batch(batch: Any, spec: Mapping[str, Any], processes: int) -> None:
    """Checks a training batch against the element_spec of its data set.

    Args:
        batch: this process's shard of a batch, as the data set yielded it.
        spec: the data set's element_spec, of the whole batch.
        processes: the number of processes that share a batch.

    Raises:
        ComponentError: the fields, a shape or a dtype differ.
    """
    if not isinstance(batch, Mapping) or batch.keys() != spec.keys():
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else _kind(batch)
        raise ComponentError(
            "data",
            f"The element_spec of the data set has {', '.join(spec)}, but it yielded {found}.",
        )
    for name, wanted in spec.items():
        x = batch[name]
        shape = (wanted.shape[0] // processes, *wanted.shape[1:])
        if getattr(x, "shape", None) != shape or x.dtype != wanted.dtype:
            raise ComponentError(
                "data",
                f"The element_spec of the data set has {name} as {wanted.dtype}{list(shape)}, but "
                f"it yielded {_kind(x)}.",
            )


def check_eval_batch(batch: Any) -> Batch:
    """Checks the mask of an evaluation batch.

    Args:
        batch: this process's shard of a batch, as the data set's `evaluate()` yielded it.

    Returns:
        The batch.

    Raises:
        ComponentError: the mask is missing, has another size or dtype than required, or has values
            other than 0 and 1; or the arrays differ in their numbers of examples.
    """
    if not isinstance(batch, Mapping) or "mask" not in batch or len(batch) == 1:
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else _kind(batch)
        found = "no batch" if batch is None else found
        raise ComponentError(
            "data",
            "The data set's evaluate() must yield batches with a 'mask', float32 [batch], 1 for an "
            f"example and 0 for padding, beside the arrays. It yielded {found}.",
        )
    arrays = {name: x for name, x in batch.items() if name != "mask"}
    sizes = {x.shape[0] if getattr(x, "shape", ()) else None for x in arrays.values()}
    if len(sizes) > 1 or None in sizes:
        found = ", ".join(f"{name} as {_kind(x)}" for name, x in arrays.items())
        raise ComponentError(
            "data",
            "The data set's evaluate() must yield arrays with the same number of examples on their "
            f"first axes. It yielded {found}.",
        )
    mask, size = batch["mask"], sizes.pop()
    if getattr(mask, "shape", None) != (size,) or mask.dtype != np.float32:
        raise ComponentError(
            "data",
            f"The data set's evaluate() yielded a 'mask' of {_kind(mask)}. It must be "
            f"float32[{size}] beside arrays of {size} examples: 1 for an example and 0 for "
            "padding.",
        )
    values = np.asarray(mask)
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
        raise ComponentError(
            "data",
            f"The data set's evaluate() yielded a 'mask' with the value {wrong[0]:.6g}. It must be "
            "1 for an example and 0 for padding; weights belong in the loss and the metrics.",
        )
    return batch


def endless(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches of a data set; raises ComponentError if they end."""
    yield from batches
    raise ComponentError("data", "The data set's train(batch_index, seed) ended. It must not.")


def _metric_error(name: str, metric: Any, keywords: Mapping[str, Any], error: Exception) -> str:
    """Returns an error message that compares a metric's keywords with those that it is passed.

    Args:
        name: the metric's name in the config.
        metric: a class of `clu.metrics`.
        keywords: the arguments of the call.
        error: the exception that the metric raised.
    """
    parameters = inspect.signature(metric.from_model_output).parameters.values()
    reads = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    shown = f"{metric.__module__}.{metric.__qualname__}"
    said = build_errors.exception_text(error).rstrip(".")
    text = f"The metric {name!r} cannot be computed: {said}{blame.location(error)}."
    if reads and "<locals>" not in shown:
        text += f"\n{shown} reads the keywords {', '.join(reads)}."
    outputs, batch = keywords["outputs"], keywords["batch"]
    fields = ", ".join(f"{key} {_kind(x)}" for key, x in batch.items() if key != "mask")
    model = "the model's outputs"
    if isinstance(outputs, Mapping):
        model += f", with the fields {', '.join(map(str, outputs))}"
    else:
        model += f", {_kind(outputs)}"
    text += (
        f"\nA metric is passed the keywords outputs and logits ({model}), labels (the field "
        f"'label' of the batch), batch, loss and mask.\nThe batch has the fields {fields}."
    )
    if "label" not in batch:
        text += (
            " None is called 'label'. The argument `labels` of metrics.accuracy names the field "
            "that it reads."
        )
    return text


class MetricAccumulator:
    """Accumulates the loss and the metrics over the batches of a split.

    The accumulated value is a dict, metric name -> clu metric.

    Args:
        metrics: metric name -> a class of `clu.metrics`.

    Raises:
        ComponentError: a value is not a Metric class, or a metric has the reserved name "loss".
    """

    def __init__(self, metrics: Mapping[str, Any]):
        if not isinstance(metrics, Mapping):
            text = f"metrics is {_kind(metrics)}; it must be a dict from names to metrics."
            raise ComponentError("metrics", text)
        for name, metric in metrics.items():
            if name == "loss":
                text = "metrics has an entry 'loss', which is always computed; use another name."
                raise ComponentError("metrics", text)
            if not (isinstance(metric, type) and issubclass(metric, clu_metrics.Metric)):
                raise ComponentError(
                    "metrics",
                    f"The metric {name!r} is {_kind(metric)}; it must be a class of clu.metrics, "
                    f"such as a call of `metrics.accuracy` returns.",
                )
        self._metrics = {"loss": clu_metrics.Average.from_output("loss"), **metrics}

    def empty(self) -> dict[str, Any]:
        """Returns the value before any batch."""
        with calling("metrics"):
            return {name: metric.empty() for name, metric in self._metrics.items()}

    def add(self, total: Mapping[str, Any], outputs: Any, batch: Batch, loss: Any) -> dict:
        """Returns the value with a batch added; examples whose mask is 0 do not count."""
        keywords = {"outputs": outputs, "logits": outputs, "labels": batch.get("label")}
        keywords |= {"batch": batch, "loss": loss, "mask": batch["mask"]}
        counted = {}
        for name, metric in self._metrics.items():
            try:
                counted[name] = total[name].merge(metric.from_model_output(**keywords))
            except ConfigError:
                raise
            except Exception as error:
                raise ComponentError(
                    "metrics", _metric_error(name, metric, keywords, error)
                ) from error
        return counted

    def results(self, total: Mapping[str, Any]) -> dict[str, float]:
        """Computes the loss and the metrics; raises ComponentError if no example was counted."""
        if int(total["loss"].count) == 0:
            raise ComponentError(
                "data",
                "The data set's evaluate() yielded no example: either no batch, or only batches "
                "whose 'mask' is all 0. The loss and the metrics cannot be computed.",
            )
        with calling("metrics"):
            return {name: float(total[name].compute()) for name in self._metrics}
