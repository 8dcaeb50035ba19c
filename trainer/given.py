"""Calls what the user gave, the model, the loss, the metrics and the data set, and says whose
mistake it is where they do not do what such a part must do.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics

from trainer.config import ConfigError, blame, refusals

Batch = Mapping[str, Any]


class PartError(ConfigError):
    """A mistake in what the user gave; `part` is the root's argument: "model", "loss", ..."""

    def __init__(self, part: str, message: str):
        super().__init__(message)
        self.part = part


@contextmanager
def calling(part: str) -> Iterator[None]:
    """Turns whatever a part raises into a PartError that names the line of the user's code."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise PartError(part, f"{refusals.said(error)}{blame.place(error)}") from error


def check_model(model: Any) -> None:
    """Refuses what is no model; raises PartError."""
    if not all(callable(getattr(model, name, None)) for name in ("init", "apply")):
        raise PartError(
            "model",
            f"model is {_kind(model)}; a model is a `models.Model`, with init(key, batch) and "
            f"apply(params, model_state, batch, *, key, train), or a flax linen module.",
        )


def example_losses(loss: Any, outputs: Any, batch: Batch) -> Any:
    """Computes the losses of the examples, [batch]; raises PartError for anything else."""
    with calling("loss"):
        losses = loss(outputs, batch)
    size = next(iter(batch.values())).shape[0]
    shape, dtype = getattr(losses, "shape", None), getattr(losses, "dtype", None)
    if shape != (size,) or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise PartError(
            "loss",
            f"The loss gives one float for each example, of shape ({size},) here, and this one "
            f"gave {_kind(losses)}. The mean over the examples is taken outside of it.",
        )
    return losses


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def check_batch(batch: Any, spec: Mapping[str, Any], processes: int) -> None:
    """Refuses a batch that is not what the data set announced; raises PartError.

    Args:
        batch: what the data set yielded, this process's part.
        spec: its element_spec, of the whole batch.
        processes: how many processes share a batch.
    """
    if not isinstance(batch, Mapping) or batch.keys() != spec.keys():
        told = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else _kind(batch)
        raise PartError(
            "data",
            f"The data set announced {', '.join(spec)} in its element_spec, and gave {told}.",
        )
    for name, wanted in spec.items():
        x = batch[name]
        shape = (wanted.shape[0] // processes, *wanted.shape[1:])
        if getattr(x, "shape", None) != shape or x.dtype != wanted.dtype:
            raise PartError(
                "data",
                f"The data set announced {name} as {wanted.dtype}{list(shape)} in its "
                f"element_spec, and gave {_kind(x)}.",
            )


def check_eval_batch(batch: Any) -> Batch:
    """Refuses a batch of evaluation whose mask is missing or does not fit; raises PartError.

    Args:
        batch: what the data set's `evaluate()` yielded, this process's part.

    Returns:
        The batch.
    """
    if not isinstance(batch, Mapping) or "mask" not in batch or len(batch) == 1:
        told = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else _kind(batch)
        told = "no batch" if batch is None else told
        raise PartError(
            "data",
            "The data set's evaluate() gives batches with a 'mask', float32 [batch], 1 for an "
            f"example and 0 for filling, beside the arrays. It gave {told}.",
        )
    arrays = {name: x for name, x in batch.items() if name != "mask"}
    sizes = {x.shape[0] if getattr(x, "shape", ()) else None for x in arrays.values()}
    if len(sizes) > 1 or None in sizes:
        told = ", ".join(f"{name} as {_kind(x)}" for name, x in arrays.items())
        raise PartError(
            "data",
            "The data set's evaluate() gives arrays with the same number of examples on their "
            f"first axes. It gave {told}.",
        )
    mask, size = batch["mask"], sizes.pop()
    if getattr(mask, "shape", None) != (size,) or mask.dtype != np.float32:
        raise PartError(
            "data",
            f"The data set's evaluate() gave a 'mask' of {_kind(mask)}, and it must be "
            f"float32[{size}] beside arrays of {size} examples: 1 for an example and 0 for "
            "filling.",
        )
    values = np.asarray(mask)
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
        raise PartError(
            "data",
            f"The data set's evaluate() gave a 'mask' with the value {wrong[0]:.6g}. It must be 1 "
            "for an example and 0 for filling; weights belong into the loss and the metrics.",
        )
    return batch


def endless(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches of a data set; raises PartError where they end."""
    yield from batches
    raise PartError("data", "The data set's train(step, seed) ended: it yields without end.")


class Tally:
    """Counts the loss and the metrics over the batches of a split.

    The count is a dict, metric name -> clu metric.

    Args:
        metrics: metric name -> a class of `clu.metrics`.

    Raises:
        PartError: what is no such class, or a name that is not to be had.
    """

    def __init__(self, metrics: Mapping[str, Any]):
        if not isinstance(metrics, Mapping):
            raise PartError("metrics", f"metrics is {_kind(metrics)}; it is a dict by name.")
        for name, metric in metrics.items():
            if name == "loss":
                raise PartError("metrics", "metrics names 'loss', which is there by itself.")
            if not (isinstance(metric, type) and issubclass(metric, clu_metrics.Metric)):
                raise PartError(
                    "metrics",
                    f"The metric {name!r} is {_kind(metric)}; a metric is a class of clu.metrics, "
                    f"such as `metrics.accuracy` makes when it is called.",
                )
        self._metrics = {"loss": clu_metrics.Average.from_output("loss"), **metrics}

    def empty(self) -> dict[str, Any]:
        """Begins to count."""
        with calling("metrics"):
            return {name: metric.empty() for name, metric in self._metrics.items()}

    def add(self, total: Mapping[str, Any], outputs: Any, batch: Batch, loss: Any) -> dict:
        """Counts a batch; examples whose mask is 0 do not count."""
        given = {"outputs": outputs, "logits": outputs, "labels": batch.get("label")}
        given |= {"batch": batch, "loss": loss, "mask": batch["mask"]}
        with calling("metrics"):
            return {
                name: total[name].merge(metric.from_model_output(**given))
                for name, metric in self._metrics.items()
            }

    def results(self, total: Mapping[str, Any]) -> dict[str, float]:
        """Computes the loss and the metrics; raises PartError where no example was counted."""
        if int(total["loss"].count) == 0:
            raise PartError(
                "data",
                "The data set's evaluate() gave no example: it yielded no batch, or every 'mask' "
                "was 0 throughout. There is nothing to compute the loss and the metrics of.",
            )
        with calling("metrics"):
            return {name: float(total[name].compute()) for name in self._metrics}
