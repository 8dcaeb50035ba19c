"""Computes the loss and the metrics of an experiment, over a training batch and over a split."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics

from trainer.config import ConfigError, wording
from trainer.config.build import exception_text
from trainer.engine import contracts
from trainer.engine.contracts import Batch, ComponentError, calling, check_metrics, form_of
from trainer.engine.examples import ExampleSums
from trainer.engine.mesh import size_of


class Losses(NamedTuple):
    """What a loss returned for a batch."""

    values: Any  # floating-point, [batch] or [batch, positions]
    aux: dict[str, Any]  # name -> real scalar; empty if the loss returned none

    def counted(self, batch: Batch) -> Any:
        """Returns the losses in float32, with 0 where the mask of the batch is 0."""
        values = self.values.astype(jnp.float32)
        if "mask" not in batch:
            return values
        mask = batch["mask"]
        if mask.ndim < values.ndim:
            mask = mask[:, None]
        # Not a product: the loss of a masked label such as -100 may be NaN.
        return jnp.where(mask > 0, values, 0.0)

    def mean(self, batch: Batch, share: Any = None) -> Any:
        """Returns the mean of the losses, weighted by the batch's mask if it has one."""
        # For a microbatch, `share` is the mean of the mask of the whole batch: the average of such
        # means over microbatches of equal size is then the weighted mean over the whole batch.

        # The mean over all losses, with 0 for those that do not count; the division corrects it.
        total = jnp.mean(self.counted(batch))
        if "mask" not in batch:
            return total
        share = mask_mean(batch) if share is None else share
        # 0 for a batch in which nothing counts, and not NaN.
        return total / jnp.maximum(share, jnp.finfo(jnp.float32).tiny)


def with_ignored(loss: Any, batch: Batch) -> Batch:
    """Returns a batch whose mask is also 0 where the label is the `ignore_label` of the loss."""
    ignored = getattr(loss, "ignore_label", None)
    if ignored is None or loss.class_labels not in batch:  # of which the loss itself complains
        return batch
    labels = batch[loss.class_labels]
    if labels.ndim > 2 or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise contracts.loss_error(
            f"The loss has the ignore_label {ignored}, which needs integer labels [batch] or "
            f"[batch, positions], but {loss.class_labels!r} is {form_of(labels)}.",
        )
    counts = (labels != ignored).astype(jnp.float32)
    mask = batch.get("mask", counts)
    if mask.ndim < counts.ndim:
        mask = mask[:, None]
    elif mask.ndim > counts.ndim:
        counts = counts[:, None]
    return {**batch, "mask": mask * counts}


def mask_mean(batch: Batch) -> Any:
    """Returns the mean of the mask of a batch, float32; 1 if it has no mask."""
    return jnp.mean(batch["mask"].astype(jnp.float32)) if "mask" in batch else jnp.float32(1)


def compute_losses(loss: Any, outputs: Any, batch: Batch) -> Losses:
    """Computes the losses of a batch's examples, or of their positions, and the aux values."""
    aux: Any = {}
    with calling("loss"):
        values: Any = loss(outputs, batch)
    if isinstance(values, tuple) and len(values) == 2:
        values, aux = values
    size = size_of(batch)
    shape = tuple(getattr(values, "shape", ()))
    fits = len(shape) in (1, 2) and shape[:1] == (size,) and 0 not in shape
    if not fits or not jnp.issubdtype(jnp.result_type(values), jnp.floating):
        raise contracts.loss_error(
            f"A loss must return floats of shape [batch] or [batch, positions], ({size},) or "
            f"({size}, positions) here, or a pair (losses, aux) of them and a dict of named "
            f"scalars, but this one returned {form_of(values)}. Do not average over the examples: "
            "the step does. See Loss in trainer/protocols.py.",
        )
    if shape == (size, size) and _grows(loss, outputs, batch, size):
        raise contracts.loss_error(
            f"The loss returned {form_of(values)}, and for a batch of {2 * size} it returns "
            f"({2 * size}, {2 * size}): it pairs every example with every other, as outputs "
            "[batch, 1] minus labels [batch] do. Give both the same shape, for example by "
            "outputs[:, 0]; losses of pairs that are meant are averaged over the second axis.",
        )
    if (mask := batch.get("mask")) is not None and mask.shape not in (shape, shape[:1]):
        raise contracts.data_error(
            f"The batch has a 'mask' of {form_of(mask)}, and the loss returned "
            f"{form_of(values)}. The mask must have the shape of the losses, or one number for "
            "each example.",
        )
    return Losses(values, _checked_aux(aux))


def _grows(loss: Any, outputs: Any, batch: Batch, size: int) -> bool:
    """Returns whether an example has more losses in a larger batch, by shapes alone."""
    # A sequence may have as many positions as a batch has examples.

    def twice(x: Any) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(x)
        larger = (2 * size, *shape[1:]) if shape[:1] == (size,) else shape
        return jax.ShapeDtypeStruct(larger, jnp.result_type(x))

    try:
        found = jax.eval_shape(loss, *jax.tree.map(twice, (outputs, batch)))
    except Exception:  # of a loss that knows the size of its batch
        return False
    return (found[0] if isinstance(found, tuple) else found).shape == (2 * size, 2 * size)


def _checked_aux(aux: Any) -> dict[str, Any]:
    if not isinstance(aux, Mapping) or not all(isinstance(name, str) for name in aux):
        names = f" with the keys {', '.join(map(repr, aux))}" if isinstance(aux, Mapping) else ""
        raise contracts.loss_error(
            f"A loss that returns a pair returns (losses, aux), where aux is a dict from names to "
            f"scalars, but the second value of this one is {form_of(aux)}{names}.",
        )
    scalars = {}
    for name, x in aux.items():
        # A Python number has no dtype and no shape.
        value = jnp.asarray(x) if isinstance(x, bool | int | float) else x
        dtype = getattr(value, "dtype", None)
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        real = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
        if not real or getattr(value, "shape", None) != ():
            raise contracts.loss_error(
                f"The loss returned the aux value {name!r} as {form_of(x)}. It must be a scalar, "
                "a real number of shape (): average it over the batch. Metrics take values of "
                "single examples.",
            )
        if name == "loss":
            raise contracts.loss_error(
                "The loss returned an aux value called 'loss', which is the name of the loss "
                "itself in the metrics. Use another name.",
            )
        scalars[name] = value.astype(jnp.float32)
    return scalars


_MASKS = 2**24  # the most elements of the masks of single examples at a time


def _check_names(aux: Mapping[str, Any], metrics: Mapping[str, Any], field: str) -> None:
    for name in aux:
        if name in metrics:
            raise contracts.loss_error(
                f"The loss returned an aux value called {name!r}, and {field} has an entry of this "
                "name. Rename one of them.",
            )


def _of_batch(
    metrics: Mapping[str, Any], field: str, outputs: Any, batch: Batch, loss: Any
) -> dict[str, Any]:
    """Computes each metric of one batch: name -> clu metric, to be merged with others."""
    # The metrics of clu, such as clu.metrics.Accuracy, read `logits` and `labels`.
    keywords = {"outputs": outputs, "logits": outputs, "labels": batch.get("label")}
    keywords |= {"batch": batch, "loss": loss, "mask": batch["mask"]}
    computed = {}
    for name, metric in metrics.items():
        try:
            computed[name] = metric.from_model_output(**keywords)
        except ConfigError:
            raise
        except Exception as error:
            raise ComponentError(field, _metric_error(name, metric, keywords, error)) from error
    return computed


class TrainMetrics(NamedTuple):
    """The aux values of the loss, the `train_metrics` and the observations of a batch."""

    # name -> scalar, times the share of the batch's mask in that of the whole batch
    aux: dict[str, Any]
    metrics: dict[str, Any]  # name -> clu metric
    # name -> path of a parameter -> array; see `trainer.protocols.Model`
    observed: Mapping[str, Mapping[str, Any]] = {}


def train_metrics(
    metrics: Mapping[str, Any], outputs: Any, batch: Batch, losses: Losses, share: Any
) -> TrainMetrics:
    """Computes aux values and metrics of a training batch from the outputs of its step."""
    # `batch` may be a microbatch; `share` is the mean of the mask of the whole batch.
    _check_names(losses.aux, metrics, "train_metrics")
    if (aux := losses.aux) and "mask" in batch:
        # `merge_microbatches` averages over microbatches, whose share of the examples that count
        # differs. The weight is 1 without microbatches.
        weight = mask_mean(batch) / jnp.maximum(share, jnp.finfo(jnp.float32).tiny)
        aux = {name: jnp.where(weight > 0, weight * x, 0.0) for name, x in aux.items()}
    if not metrics:
        return TrainMetrics(aux, {})
    if "mask" not in batch:
        batch = {**batch, "mask": jnp.ones(size_of(batch), jnp.float32)}
    # jax.value_and_grad traces everything that the objective returns under differentiation, and a
    # metric may use operations without a derivative.
    outputs, values = jax.lax.stop_gradient((outputs, losses.values.astype(jnp.float32)))
    return TrainMetrics(aux, _of_batch(metrics, "train_metrics", outputs, batch, values))


def merge_microbatches(stacked: TrainMetrics, model: Any) -> TrainMetrics:
    """Merges what was computed of microbatches, stacked on their first axes, of a model."""
    aux = {name: jnp.mean(x, axis=0) for name, x in stacked.aux.items()}
    observed = {
        name: {path: model.observations[name](x, axis=0) for path, x in found.items()}
        for name, found in stacked.observed.items()
    }
    if not stacked.metrics:
        return TrainMetrics(aux, {}, observed)

    def merge(total: Any, metrics: Any) -> tuple[Any, None]:
        return _merged("train_metrics", total, metrics), None

    # One by one in their order, by a loop that is traced once for any number of microbatches.
    first = jax.tree.map(lambda x: x[0], stacked.metrics)
    rest = jax.tree.map(lambda x: x[1:], stacked.metrics)
    return TrainMetrics(aux, jax.lax.scan(merge, first, rest)[0], observed)


def train_rows(computed: TrainMetrics) -> dict[str, Any]:
    """Returns the values of `train_metrics` by their names in metrics.jsonl, float32 scalars."""
    rows = {f"train/{name}": x for name, x in computed.aux.items()}
    for name, metric in computed.metrics.items():
        try:
            value = jnp.asarray(metric.compute(), jnp.float32)
        except Exception as error:
            said = exception_text(error).rstrip(".")
            raise ComponentError(
                "train_metrics",
                f"The metric {name!r} cannot be computed in a training step, in which jax traces "
                f"its compute(): {said}{wording.location(error)}.",
            ) from error
        if value.shape != ():
            raise ComponentError(
                "train_metrics",
                f"The metric {name!r} computes {form_of(value)} for a training batch, and must "
                "compute a scalar.",
            )
        rows[f"train/{name}"] = value
    return rows


class MetricAccumulator:
    """Accumulates the loss, its aux values and the metrics over the batches of a split."""

    # The accumulated value is a dict, metric name -> clu metric.

    def __init__(self, metrics: Mapping[str, Any]):
        check_metrics(metrics, "metrics")
        self._metrics = {"loss": clu_metrics.Average.from_output("loss"), **metrics}

    def empty(self, aux: Collection[str] = ()) -> dict[str, Any]:
        """Returns the value before any batch; `aux` has the names of the loss's aux values."""
        with calling("metrics"):
            total = {name: metric.empty() for name, metric in self._metrics.items()}
        return total | {name: _mean_of(0.0, 0.0) for name in aux}

    def add(self, total: Mapping[str, Any], outputs: Any, batch: Batch, losses: Losses) -> dict:
        """Returns the value with a batch added; what has the mask 0 does not count."""
        # Aux values that `total` lacks are added to it.
        _check_names(losses.aux, self._metrics, "metrics")
        values = losses.values.astype(jnp.float32)
        metrics = _of_batch(self._metrics, "metrics", outputs, batch, values)
        if losses.aux:
            weight = jnp.sum(batch["mask"])
            metrics |= {name: _mean_of(x, weight) for name, x in losses.aux.items()}
        return _merged("metrics", total, metrics)

    def merge(self, total: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of the batches of both."""
        return _merged("metrics", total, other)

    def of_examples(self, outputs: Any, batch: Batch, losses: Losses) -> dict[str, ExampleSums]:
        """Returns what each example adds to the loss and to the metrics that are means."""
        # Each is computed from the outputs of the whole batch, with a mask of 0 for all others.
        means = {name: metric for name, metric in self._metrics.items() if _is_mean(metric)}
        values, mask = losses.values.astype(jnp.float32), batch["mask"]
        places = jnp.arange(mask.shape[0])

        def only(place: Any) -> dict[str, Any]:
            own = (places == place).astype(mask.dtype).reshape(-1, *[1] * (mask.ndim - 1))
            return _of_batch(means, "metrics", outputs, {**batch, "mask": mask * own}, values)

        # Each mask has the size of the batch, so that those of a large one are not made at once.
        at_once = max(1, _MASKS // mask.size)
        alone = jax.lax.map(only, places, batch_size=min(at_once, len(places)))
        whole = _of_batch(means, "metrics", outputs, batch, values)
        return {
            name: ExampleSums(alone[name].total, alone[name].count, each.total, each.count)
            for name, each in whole.items()
        }

    def check_results(self, total: Mapping[str, Any]) -> None:
        """Raises ComponentError if a metric does not compute a scalar."""
        # `total` has the shapes of an accumulated value. A metric whose `compute` cannot be traced,
        # such as one that calls a function of numpy or scikit-learn, is not checked.
        for name, metric in total.items():
            try:
                found = jax.eval_shape(lambda metric: jnp.asarray(metric.compute()), metric)
            except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
                continue
            except Exception as error:
                said = exception_text(error).rstrip(".")
                where = wording.location(error) or _defined(type(metric), "compute")
                text = f"The metric {name!r} cannot be computed: {said}{where}."
                raise ComponentError("metrics", text) from error
            if found.shape != ():
                where = _defined(self._metrics.get(name, metric), "compute")
                raise ComponentError(
                    "metrics",
                    f"The metric {name!r} computes {form_of(found)}{where}, and must compute a "
                    "scalar, which is what a row of metrics.jsonl has. Average it, or write a "
                    "metric for each of its elements.",
                )

    def results(self, total: Mapping[str, Any]) -> dict[str, float]:
        """Computes the values; raises ComponentError if no example was counted."""
        if int(total["loss"].count) == 0:
            raise contracts.data_error(
                "The data set's evaluate() yielded no example: either no batch, or only batches "
                "whose 'mask' is all 0. The loss and the metrics cannot be computed.",
            )
        aux = [name for name in total if name not in self._metrics]
        with calling("metrics"):
            return {name: float(total[name].compute()) for name in [*self._metrics, *aux]}


def _merged(field: str, total: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics with those of another batch merged into them."""
    # What `total` lacks is returned as it is: while the evaluation is traced for the first time,
    # `total` has no aux values.
    merged = dict(added)
    for name in (name for name in added if name in total):
        with calling(field):
            merged[name] = total[name].merge(added[name])
        if not isinstance(merged[name], type(total[name]) | type(added[name])):
            raise ComponentError(
                field,
                f"merge() of the metric {name!r} returned {form_of(merged[name])}"
                f"{_defined(type(added[name]), 'merge')}. It must return the metric of both "
                f"batches, {form_of(added[name])}, such as `self.replace(...)`.",
            )
    return merged


def _defined(metric: Any, method: str) -> str:
    """Returns " (file:line)" of a metric's method, or "" if it has no source."""
    code = getattr(inspect.unwrap(getattr(metric, method)), "__code__", None)
    return "" if code is None else wording.place(code.co_filename, code.co_firstlineno)


def _is_mean(metric: type) -> bool:
    """Returns whether a metric is a total over a count, both of which are sums over examples."""
    average = clu_metrics.Average
    return issubclass(metric, average) and all(
        getattr(metric, name) is getattr(average, name) for name in ("compute", "merge")
    )


def _mean_of(value: Any, weight: Any) -> clu_metrics.Average:
    """Returns a weighted mean of one value, to be merged; a value of weight 0 may be NaN."""
    weight = jnp.asarray(weight, jnp.float32)
    average: Any = clu_metrics.Average  # a dataclass of flax, whose fields pyright does not see
    return average(total=jnp.where(weight > 0, weight * value, 0.0), count=weight)


def _metric_error(name: str, metric: Any, keywords: Mapping[str, Any], error: Exception) -> str:
    """Returns an error message that compares a metric's keywords with those that it is passed."""
    parameters = inspect.signature(metric.from_model_output).parameters.values()
    reads = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    shown = f"{metric.__module__}.{metric.__qualname__}"
    said = exception_text(error).rstrip(".")
    text = f"The metric {name!r} cannot be computed: {said}{wording.location(error)}."
    if reads and "<locals>" not in shown:
        text += f"\n{shown} reads the keywords {', '.join(reads)}."
    outputs, batch = keywords["outputs"], keywords["batch"]
    fields = ", ".join(f"{key} {form_of(x)}" for key, x in batch.items() if key != "mask")
    model = form_of(outputs)
    if isinstance(outputs, Mapping):
        model = f"with the fields {', '.join(map(str, outputs))}"
    text += (
        f"\nA metric is passed the keywords outputs and logits (the model's outputs, {model}), "
        "labels (the field 'label' of the batch), batch, loss and mask.\nThe batch has the fields "
        f"{fields}."
    )
    if "label" not in batch:
        text += (
            " None is called 'label'. The argument `labels` of metrics.accuracy names the field "
            "that it reads."
        )
    return text
