"""Checks that the model, the loss, the metrics and the data set keep their contracts.

The contracts are the protocols of trainer/protocols.py. A component that breaks one is reported by
name, with the line of the user's code where it raised.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from clu import metrics as clu_metrics

import optim
from optim.checks import observations_read
from trainer import protocols
from trainer.config import Call, ConfigError, Source, Tree, wording
from trainer.config.build import call_hint, exception_text
from trainer.data.dtypes import dtype_fault, value_fault
from trainer.protocols import Batch


class ComponentError(ConfigError):
    """A mistake in one component of an experiment."""

    # `component` is the field of the experiment, such as "model" or "train_metrics", or a path
    # below one, such as "model.num_heads" or "sharding.head/kernel".

    def __init__(self, component: str, message: str):
        super().__init__(message)
        self.component = component


# Errors about the components that have most of the checks.
data_error = partial(ComponentError, "data")
loss_error = partial(ComponentError, "loss")


@contextmanager
def calling(component: str) -> Iterator[None]:
    """Converts an exception of a component to a ComponentError with the line of the user's code."""
    try:
        yield
    # A mistake that is described already, perhaps by a nested `calling`.
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # helpers of scripts exit
        text = f"{exception_text(error)}{wording.location(error)}"
        raise ComponentError(component, text) from error


def check_components(experiment: Any) -> None:
    """Checks an experiment's components before one is called; raises ComponentError."""
    model, spec = experiment.model, experiment.data.element_spec
    if not all(callable(getattr(model, name, None)) for name in ("init", "apply")):
        raise ComponentError(
            "model",
            f"model is {form_of(model)}; it must be a flax linen module or have "
            f"{protocols.members(protocols.Model)}; see trainer/protocols.py.",
        )
    check_metrics(experiment.train_metrics, "train_metrics")
    for name, x in spec.items():
        if (fault := dtype_fault(x.dtype)) is not None:
            text = f"The element_spec of the data set has {name!r}, {form_of(x)}, {fault}."
            raise data_error(text)
    if "mask" in spec:
        size = experiment.data.batch_size
        _check_mask(spec["mask"], size, "The element_spec of the data set has")


def check_data(data: Any, node: Tree, source: Source | None) -> None:
    """Raises ConfigError for a data set that lacks an attribute of the protocol."""
    for name in ("batch_size", "num_examples", "train", "evaluate", "element_spec"):
        if not hasattr(data, name):
            call = node if isinstance(node, Call) else None
            raise ConfigError(
                f"The data set {call.name if call else repr(node)} has no {name!r}. A data set "
                f"must have {protocols.members(protocols.Dataset)}; see trainer/protocols.py."
                + (call_hint(call) if call and call.partial else ""),
                source,
            )


def check_observations(model: Any, optimizer: optim.Optimizer) -> None:
    """Raises GroupError if a part of the optimizer reads what the model does not observe."""
    known = getattr(model, "observations", {})
    for name, (group, part) in observations_read(optimizer.groups).items():
        if isinstance(why := known.get(name, "the model does not say that it observes it"), str):
            raise optim.GroupError(
                f"In group {group!r}, {part} reads {name!r} of the model's forward pass, but {why}."
                " Choose another optimizer, or a model that observes it, such as models.gpt with"
                " qk_norm=False.",
                group,
                "optimizer",
            )


def check_language(model: Any, data: Any) -> None:
    """Raises ValueError if a language model lacks tokens or positions for a data set."""
    # What the model or the data set does not say is not checked.
    language = getattr(model, "language", None)
    vocab_size = getattr(data, "vocab_size", None)
    if language is None:
        return
    length = tokens_per_example(data)
    if vocab_size is not None and vocab_size > language.vocab_size:
        raise ValueError(
            f"The data set has {vocab_size} different tokens, but the model knows "
            f"{language.vocab_size}. Set the model's vocab_size to at least {vocab_size}."
        )
    if length is not None and length > language.max_length:
        raise ValueError(
            f"The data set has sequences of {length} tokens, but the model takes at most "
            f"{language.max_length}. Set the model's max_length to at least {length}, or choose a "
            "smaller length of the data set."
        )


def check_metrics(metrics: Any, field: str) -> None:
    """Raises ComponentError for a metric that is not a Metric class or is called "loss"."""
    if not isinstance(metrics, Mapping):
        text = f"{field} is {form_of(metrics)}; it must be a dict from names to metrics."
        raise ComponentError(field, text)
    for name, metric in metrics.items():
        if name == "loss":
            text = f"{field} has an entry 'loss', which is always computed; use another name."
            raise ComponentError(field, text)
        if not (isinstance(metric, type) and issubclass(metric, clu_metrics.Metric)):
            raise ComponentError(
                field,
                f"The metric {name!r} is {form_of(metric)}; it must be a class of clu.metrics, "
                f"such as a call of `metrics.accuracy` returns, with "
                f"{protocols.members(protocols.Metric)}.",
            )
        # Of the class itself: a base class that is a tree of arrays makes no tree of a subclass.
        if not vars(metric).keys() & {"__dataclass_fields__", "tree_flatten"}:
            raise ComponentError(
                field,
                f"The metric {name!r} is of class {metric.__name__}, which jax does not know as a "
                "tree of arrays: write @flax.struct.dataclass above the class.",
            )


def tokens_per_example(data: Any) -> int | None:
    """Returns the tokens of an example of a data set of texts; None if it does not say."""
    tokens = getattr(data, "tokens_per_example", None)
    whole = isinstance(tokens, int | np.integer) and not isinstance(tokens, bool)
    if tokens is not None and not (whole and tokens >= 1):
        raise data_error(
            f"tokens_per_example of the data set is {tokens!r}. It must be the number of tokens of "
            "an example, an integer of at least 1, or None.",
        )
    return None if tokens is None else int(tokens)


def form_of(value: Any) -> str:
    """Describes a value in a message: dtype and shape of an array, the type of anything else."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_batch(batch: Any, spec: Mapping[str, Any], shards: int) -> None:
    """Raises ComponentError if `batch`, one of `shards`, does not fit the whole batch's `spec`."""
    # A dict first: a question about an abstract class takes longer, and each batch is asked.
    if not isinstance(batch, dict | Mapping) or batch.keys() != spec.keys():
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else form_of(batch)
        raise data_error(
            f"The element_spec of the data set has {', '.join(spec)}, but it yielded {found}.",
        )
    for name, wanted in spec.items():
        x = batch[name]
        shape = (wanted.shape[0] // shards, *wanted.shape[1:])
        if getattr(x, "shape", None) != shape or x.dtype != wanted.dtype:
            part = "" if shards == 1 else f" in each of {shards} parts"
            raise data_error(
                f"The element_spec of the data set has {name} as {wanted.dtype}{list(shape)}{part}"
                f", but it yielded {form_of(x)}.",
            )
    if "mask" in batch:
        _check_mask_values(batch["mask"], "The data set's train() yielded")


def check_values(batch: Batch, method: str) -> None:
    """Raises ComponentError for a dtype that jax lacks, or a value 32 bits cannot hold."""
    # Only for first batches: reading all values of each one would slow every step.
    for name, x in batch.items():
        if (fault := dtype_fault(x.dtype) or value_fault(x)) is not None:
            text = f"The data set's {method} yielded {name!r}, {form_of(x)}, {fault}."
            raise data_error(text)


def check_eval_batch(batch: Any) -> Batch:
    """Returns this process's shard of an evaluation batch; ComponentError if it does not fit."""
    if not isinstance(batch, Mapping) or "mask" not in batch or len(batch) == 1:
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else form_of(batch)
        found = "no batch" if batch is None else found
        raise data_error(
            "The data set's evaluate() must yield batches with a 'mask', float32 [batch], 1 for an "
            f"example and 0 for padding, beside the arrays. It yielded {found}.",
        )
    arrays = {name: x for name, x in batch.items() if name != "mask"}
    # -1 for what has no axes.
    sizes = {x.shape[0] if getattr(x, "shape", ()) else -1 for x in arrays.values()}
    if len(sizes) > 1 or -1 in sizes:
        found = ", ".join(f"{name} as {form_of(x)}" for name, x in arrays.items())
        raise data_error(
            "The data set's evaluate() must yield arrays with the same number of examples on their "
            f"first axes. It yielded {found}.",
        )
    _check_mask(batch["mask"], sizes.pop(), "The data set's evaluate() yielded")
    _check_mask_values(batch["mask"], "The data set's evaluate() yielded")
    return batch


def _check_mask(mask: Any, size: int, who: str) -> None:
    """Raises ComponentError if a mask of `size` examples has another shape or dtype."""
    shape = tuple(getattr(mask, "shape", ()))
    if len(shape) not in (1, 2) or shape[:1] != (size,) or mask.dtype != np.float32:
        raise data_error(
            f"{who} a 'mask' of {form_of(mask)}. It must be float32[{size}] or "
            f"float32[{size}, positions] beside arrays of {size} examples: 1 for an example or "
            "position that counts, and 0 for padding.",
        )


def _check_mask_values(mask: Any, who: str) -> None:
    values = np.asarray(mask)
    if (wrong := values[(values != 0) & (values != 1)]).size:
        raise data_error(
            f"{who} a 'mask' with the value {wrong[0]:.6g}. It must be 1 for an example that "
            "counts and 0 for padding; weights belong in the loss and the metrics.",
        )


def endless(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches of a data set; raises ComponentError if they end."""
    yield from batches
    raise data_error("The data set's train(batch_index, seed) ended. It must not.")
