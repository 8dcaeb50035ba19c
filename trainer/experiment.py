"""Holds everything a run is, before it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import flax.linen as nn
import jax
import optax

import optim
from trainer import models
from trainer.config import Builder, Call, Config, ConfigError, Units, refusals
from trainer.writers import check_names

if TYPE_CHECKING:  # what an experiment holds
    Steps = int
    AnyOptimizer = optim.Optimizer
else:  # what a config may give
    from optim.schedules import Steps

    AnyOptimizer = partial | optim.Optimizer | optax.GradientTransformation

_2_PERCENT: Any = "2%"
_10_PERCENT: Any = "10%"
_MOST_STEPS = 2**31 - 1  # steps are int32 in a program


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Names everything a run needs; each field is an argument of the config's root.

    Attributes:
        model: a `models.Model`, or a flax linen module, which reads `batch["image"]`.
        data: where batches come from, as from `data.ArrayDataset`: element_spec, batch_size,
            num_examples, train(step, seed), evaluate(). Every batch is an array of its own; it is
            made read-only as it is taken. In training every example counts, and no array is called
            "mask". A batch of evaluation has a "mask", float32 [batch], 1 for an example and 0 for
            filling; it may be 0 throughout, as long as some batch has an example.
        loss: `loss(outputs, batch)`, the losses of the examples, float32 [batch].
        optimizer: an `optim.optimizer` of groups, or a single optimizer for every parameter.
        steps: how many updates to make, at least 1.
        seed: where the parameters, the order of the data and dropout come from.
        metrics: metric name -> a clu metric, computed over the test split beside the loss.
        precision: "float32"; "bfloat16" keeps and computes in bfloat16; "mixed" keeps float32
            parameters and computes in bfloat16. Losses, norms and the optimizer stay float32.
        mesh: axis name -> devices ("data", "fsdp"); None splits the batch over all devices.
        microbatches: how many parts to split a batch into; their gradients are averaged in one
            step.
        ema_decay: evaluates an exponential moving average of the parameters with this decay
            (Polyak and Juditsky 1992); None evaluates the parameters themselves.
        warm_start: begins with another run's parameters: {"from": its folder, "rename": rules}, and
            more; see `warm_start.WarmStart`. None begins with the model's own.
        log_every: steps between two lines of metrics.
        eval_every: steps between two passes over the test split.
        save_every: steps between two checkpoints.
        keep_latest: how many of the newest checkpoints to keep.
        best_metric: the metric, such as "accuracy", whose best checkpoint is kept too; None keeps
            none.
        best_mode: whether the best is the largest ("max") or the smallest ("min").
        on_nonfinite: what a loss or a gradient that is not finite does: "halt" stops the run,
            "skip" leaves the parameters as they were for that step, "rollback" goes back to the
            state before that step and on with the next batch.
        watchdog: how many times the median a step may take before the stacks of all threads are
            printed; None never looks.
        writers: where the metrics go besides metrics.jsonl: "tensorboard", "console", or one of
            clu's own, such as "clu.SummaryWriter".
    """

    model: models.Model | nn.Module
    data: Any
    loss: Callable[..., jax.Array]
    optimizer: AnyOptimizer
    steps: Steps
    seed: int = 0
    metrics: Mapping[str, type] = field(default_factory=dict)
    precision: Literal["float32", "bfloat16", "mixed"] = "float32"
    mesh: Mapping[str, int] | None = None
    microbatches: int = 1
    ema_decay: float | None = None
    warm_start: Mapping[str, Any] | None = None
    log_every: Steps = _2_PERCENT
    eval_every: Steps = _10_PERCENT
    save_every: Steps = _10_PERCENT
    keep_latest: int = 2
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    on_nonfinite: Literal["halt", "skip", "rollback"] = "halt"
    watchdog: float | None = 20.0
    writers: Sequence[str] = ("tensorboard", "console")

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "log_every",
            "eval_every",
            "save_every",
            "microbatches",
            "keep_latest",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it counts from 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it lies between 0 and 2**32 - 1.")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; it lies in [0, 1).")
        if self.data.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches is {self.microbatches}, which does not divide the batch size "
                f"{self.data.batch_size}."
            )
        if self.watchdog is not None and not self.watchdog > 1:
            raise ValueError(
                f"watchdog is {self.watchdog}; it is a multiple of the median step, above 1."
            )
        if self.best_metric is not None and self.best_metric not in {"loss", *self.metrics}:
            raise ValueError(
                f"best_metric is {self.best_metric!r}; the metrics there are "
                f"{', '.join(['loss', *self.metrics])}."
            )
        try:
            check_names(self.writers)
        except ConfigError as error:
            raise ValueError(f"writers is {list(self.writers)}. {error}") from None
        if not callable(self.loss):
            raise ValueError(f"loss is {self.loss!r}; it is a function of (outputs, batch).")
        if isinstance(self.model, nn.Module):
            object.__setattr__(self, "model", models.from_linen(self.model))
        object.__setattr__(self, "optimizer", as_optimizer(self.optimizer))


def as_optimizer(given: Any) -> optim.Optimizer:
    """Turns what a config gives as its optimizer into one.

    Args:
        given: an `optim.Optimizer`; a partial of `optim.optimizer`; or a partial of any other
            optimizer, or an optax transformation, which then moves every parameter.

    Returns:
        The optimizer.
    """
    if isinstance(given, partial) and given.func is optim.optimizer:
        return given()
    if isinstance(given, partial | optax.GradientTransformation):
        return optim.optimizer({"all": optim.group(".*", given)})
    return given


def build_experiment(config: Config, vocabulary: Sequence[str] = ()) -> Experiment:
    """Builds the experiment that a config describes.

    Args:
        config: what `trainer.config.load` read.
        vocabulary: packages beyond ours whose public functions the config may name.

    Returns:
        The experiment, every step count resolved.

    Raises:
        ConfigError: a mistake in the config, with its place.
    """
    builder = Builder(config, vocabulary)
    builder.check()
    data = builder.build("data")
    units = _units(config, data)
    return builder.build("", units=units, given={"data": data})


def optimizer_builder(
    config: Config, vocabulary: Sequence[str], data: Any
) -> Callable[[Mapping[str, Any]], optim.Optimizer]:
    """Gives the function that builds the optimizer again with some of its floats replaced.

    Args:
        config: what `trainer.config.load` read.
        vocabulary: packages beyond ours whose public functions the config may name.
        data: the experiment's data set, which step units need.

    Returns:
        A function from {"optimizer.groups.rest.optimizer.learning_rate": scalar, ...} to the
        optimizer. The scalars may be traced, so that trials that differ in them are one program.
    """
    builder = Builder(config, vocabulary)
    units = _units(config, data)

    def build(values: Mapping[str, Any]) -> optim.Optimizer:
        return as_optimizer(builder.build("optimizer", units=units, given=dict(values)))

    return build


def _units(config: Config, data: Any) -> Units:
    node = config.root.kwargs["data"]
    for name in ("batch_size", "num_examples", "train", "evaluate", "element_spec"):
        if not hasattr(data, name):
            raise ConfigError(
                f"{config.sources.get('data', '')}: the data set {_name(node)} has no {name!r}. "
                f"A data set has element_spec, batch_size, num_examples, "
                f"train(step, seed) and evaluate(); see trainer/data."
                + (refusals.call_it(node) if isinstance(node, Call) and node.partial else "")
            )
    given = config.root.kwargs.get("steps")
    without_total = Units(None, data.batch_size, data.num_examples)
    source = config.sources.get("steps")
    total = None if given is None else without_total.steps(given, source)
    if total is not None and not 1 <= total <= _MOST_STEPS:
        was = "" if given == total else f", {given!r}"
        raise ConfigError(
            f"steps is {total}{was}; a run makes at least 1 step and at most 2**31 - 1.", source
        )
    return Units(total, data.batch_size, data.num_examples)


def _name(node: Any) -> str:
    return node.name if isinstance(node, Call) else repr(node)
