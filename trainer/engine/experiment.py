"""Defines an experiment, the complete description of a run, and builds it from a config."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import flax.linen as nn
import jax
import optax

import optim
from trainer import models
from trainer.config import Builder, Call, Config, ConfigError, Units, join, leaves, wording
from trainer.config.build import call_hint
from trainer.data.absent import DataAbsent
from trainer.data.mixture import mixture
from trainer.engine import contracts, every
from trainer.engine.datasets import best_row, split_sizes, train_batches, whole_splits
from trainer.engine.diagnostics import Diagnostic, check_diagnostics
from trainer.engine.mesh import DataShard
from trainer.engine.precision import Roles, in_roles, roles_of
from trainer.messages import joined
from trainer.protocols import Batch, Dataset, Loss, Model
from trainer.writers import check_names

if TYPE_CHECKING:  # the types of an experiment's fields
    Steps = int
    AnyModel = Model
    AnyDataset = Dataset
    AnyLoss = Loss
    AnyOptimizer = optim.Optimizer
else:  # the types that a config may pass; the builder reads these annotations
    from optim.schedules import Steps

    AnyModel = models.Model | nn.Module
    AnyDataset = Any
    AnyLoss = Callable[..., jax.Array]
    AnyOptimizer = partial | optim.Optimizer | optax.GradientTransformation

_2_PERCENT: Any = "2%"
_10_PERCENT: Any = "10%"
_MOST_STEPS = 2**31 - 1  # State.step is int32
_LARGEST = 2**63 - 1  # XLA stores sizes as int64
_COUNTS = ("steps", "log_every", "save_every", "microbatches", "steps_per_call", "keep_latest")
_URL = re.compile(r"((gs|s3)://[a-z0-9][a-z0-9._-]+[a-z0-9](/[^/?#@\s]+)*|file://(/[^/?#\s]+)+)/?")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Describes a run completely; each field is an argument of the config's root.

    Attributes:
        model: a `trainer.protocols.Model`, such as a `models.Model`, or a flax linen module, which
            reads `batch["image"]`.
        data: the data set, a `trainer.protocols.Dataset`, such as a `data.ArrayDataset`.
        loss: `loss(outputs, batch)`, a `trainer.protocols.Loss`.
        optimizer: an `optim.optimizer` of groups, or a single optimizer for all parameters.
        steps: number of updates, at least 1.
        seed: seed of the parameters, the order of the data and dropout, in [0, 2**32).
        data_seed: seed of the order and the augmentation of the data, in [0, 2**32); None for
            `seed`.
        metrics: metric name -> a clu metric, computed over every split of the data set that is
            evaluated, in addition to the loss.
        train_metrics: metric name -> a clu metric, computed over the training batch of the logged
            step, from the outputs that its loss is computed from, and logged as "train/<name>".
        diagnostics: what is computed of the update of each logged step, by group, and logged as
            "<name>/<group>": "update_rms", "weight_rms", "update_ratio", "gradient_cosine",
            "weight_cosine", "spectral_norm", "stable_rank" and "rotation", as
            `engine.diagnostics.GroupUpdate` defines them, and "clipped", the share of the steps
            since the last row whose gradients clip_norm scaled down; or "all" of these.
            "gradient_square" and "gradient_noise", which have to be named, are those of
            `diagnostics.compute_noise`, and "noise_scale" is these two and
            `diagnostics.NoiseScale`. They do not change what is trained, and take about the time of
            one more step for each row, or of two with the last three; "clipped" alone takes none.
        precision: dtype of the parameters and of the model's computation: "float32"; "bfloat16";
            or "mixed" for float32 parameters and bfloat16 computation. Or a mapping of roles to
            dtypes, such as {"parameters": "bfloat16", "master": "float32", "states": {"mu":
            "bfloat16"}}: `parameters` and `compute`; `reductions`, in which gradients are added
            over the devices that split a batch; `master`, the copies of bfloat16 parameters that
            the optimizer updates, or "none"; and `states`, as in `optim.optimizer`. Losses, norms,
            sums over microbatches and the optimizer always compute in at least float32.
        mesh: axis name ("data", "fsdp", "tensor") -> number of devices, -1 for all that the others
            leave; None splits the batch over all devices.
        sharding: pattern of parameters -> the axes of the mesh that split their last dimensions,
            a word for each: an axis, several joined by "+", or "-" for none, as in
            {"head/kernel": "fsdp tensor"}. The first pattern that matches a whole path decides.
            Other parameters have the defaults of the model, and "fsdp" splits their longest
            dimension that is left.
        microbatches: number of microbatches that a batch is split into; the step averages their
            gradients.
        steps_per_call: the most steps that are computed at once, at least 1; the host logs, saves
            and reacts to signals between two such blocks. None chooses a power of two from the
            operations of a step and the kind of device. It does not change what is computed, and
            may change when a run continues.
        ema_decay: decay of the exponential moving average of the parameters that evaluation uses
            (Polyak and Juditsky 1992), in [0, 1); None evaluates the parameters themselves, or the
            `readout` of the optimizer.
        warm_start: starts with the parameters of another run: {"from": its folder, "rename":
            rules, ...}, see `warm_start.WarmStart`; or continues it: {"from": its folder, "step":
            N, "continue": True, ...}, see `continuation.Continuation`. None initializes the
            parameters.
        log_every: steps between two rows of metrics.
        eval_every: steps between two evaluations; or a mapping from the step from which on an
            interval holds to the interval: {0: 125, 90%: 25} evaluates after each multiple of 125,
            and in the last tenth of the run of 25. The last step is always evaluated.
        eval_splits: the splits that are evaluated, such as ["validation"]; None for all that the
            data set has.
        save_every: steps between two checkpoints.
        keep_latest: number of the newest checkpoints to keep.
        checkpoints: URL below which a new run saves its checkpoints, in a folder of its own:
            "gs://BUCKET/PATH", "s3://BUCKET/PATH" or "file:///PATH". Credentials come from the
            environment. None saves them in the folder of the run.
        best_metric: the metric, such as "accuracy", whose best checkpoint is kept as well: of the
            validation split if the data set has one, or else of the test split, of which the plan
            warns. "validation/accuracy" and "eval/accuracy" name the split, and "code/accuracy" a
            part of it. None keeps the newest.
        best_mode: whether the best value is the largest ("max") or the smallest ("min"). The plan
            warns of "max" for the loss and for a metric whose class has `smaller_is_better = True`,
            and of "min" for the accuracy and one whose class has `smaller_is_better = False`.
        on_nonfinite: the reaction to a loss or gradient that is not finite: "halt" stops the run;
            "skip" keeps the parameters of the step before; "rollback" restores the state before the
            step and continues with the next batch.
        max_consecutive_skips: with on_nonfinite="skip", the run ends as diverged at the last of so
            many steps in a row that were skipped. 0 and None skip any number of steps.
        watchdog: a line is logged if a block of steps takes longer, for each of its steps, than
            this multiple of the median step, above 1: at most one a minute, or one for each worker
            of a sweep. After five minutes without any progress, or with `--trace`, the stacks of
            all threads follow it. None disables it.
        hooks: functions called every `log_every` steps and after the last step, as
            `hook(step, metrics, params)`: the number of finished steps, the metrics of the last of
            them (name -> float), and the parameters after it. A hook must copy the parameters that
            it keeps. Objects with a method `bind` are hooks, too, such as `hooks.samples`, which
            continues a text after each evaluation; see `trainer.hooks.HookContext`.
        writers: destinations of the metrics besides metrics.jsonl: "tensorboard", "console",
            "wandb", "mlflow", or a writer of clu, such as "clu.SummaryWriter". The terminal shows
            losses, metrics, learning rates and the time left; "console:grad_norm,speed" also what
            it names, and "console:all" everything.

    Raises:
        ValueError: a field is out of its range, or does not fit another.
    """

    model: AnyModel
    data: AnyDataset
    loss: AnyLoss
    optimizer: AnyOptimizer
    steps: Steps
    seed: int = 0
    data_seed: int | None = None
    metrics: Mapping[str, type] = field(default_factory=dict)
    train_metrics: Mapping[str, type] = field(default_factory=dict)
    diagnostics: Sequence[Diagnostic] | Literal["all"] = ()
    precision: Literal["float32", "bfloat16", "mixed"] | Mapping[str, Any] = "float32"
    mesh: Mapping[str, int] | None = None
    sharding: Mapping[str, str] | None = None
    microbatches: int = 1
    steps_per_call: int | None = None
    ema_decay: float | None = None
    warm_start: Mapping[str, Any] | None = None
    log_every: Steps = _2_PERCENT
    eval_every: Steps | Mapping[Steps, Steps] = _10_PERCENT
    eval_splits: Sequence[str] | None = None
    save_every: Steps = _10_PERCENT
    keep_latest: int = 2
    checkpoints: str | None = None
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    on_nonfinite: Literal["halt", "skip", "rollback"] = "halt"
    max_consecutive_skips: int | None = 10
    watchdog: float | None = 20.0
    hooks: Sequence[Callable[..., Any]] = ()
    writers: Sequence[str] = ("tensorboard", "console")

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if (value := getattr(self, name)) is None and name == "steps_per_call":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}.")
        if (for_steps := getattr(self.data, "for_steps", None)) is not None:
            # A frozen dataclass does not allow self.data = ...
            with contracts.calling("data"):
                object.__setattr__(self, "data", for_steps(self.steps))
        if (self.max_consecutive_skips or 0) < 0:
            raise ValueError(
                "max_consecutive_skips must be at least 1, or 0 or None for any number, got "
                f"{self.max_consecutive_skips}."
            )
        if (fault := every.wrong(self.eval_every)) is not None:
            raise ValueError(f"eval_every {fault}.")
        for name, seed in (("seed", self.seed), ("data_seed", self.data_seed)):
            # The state keeps it as uint32.
            if seed is not None and not 0 <= seed < 2**32:
                raise ValueError(f"{name} must be between 0 and 2**32 - 1, got {seed}.")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be at least 0 and less than 1, got {self.ema_decay}.")
        if self.data.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches is {self.microbatches}, which does not divide the batch size "
                f"{self.data.batch_size}."
            )
        # In this form, NaN is refused, too.
        if self.watchdog is not None and not self.watchdog > 1:
            raise ValueError(
                f"watchdog must be above 1, as a multiple of the median step, got {self.watchdog}."
            )
        _ = self.splits, self.best_row  # raise ValueError for a split or metric that does not exist
        if self.checkpoints is not None and not _URL.fullmatch(self.checkpoints):
            raise ValueError(
                f"checkpoints is {self.checkpoints!r}, and must be gs://BUCKET/PATH, "
                "s3://BUCKET/PATH or file:///PATH; or None, for the folder of the run."
            )
        try:
            check_names(self.writers)
        except ConfigError as error:
            raise ValueError(f"writers is {list(self.writers)}. {error}") from None
        if not callable(self.loss):
            raise ValueError(f"loss must be a function of (outputs, batch), got {self.loss!r}.")
        object.__setattr__(self, "model", as_model(self.model))
        contracts.check_language(self.model, self.data)
        object.__setattr__(self, "optimizer", in_roles(as_optimizer(self.optimizer), self.roles))
        if self.ema_decay is not None and self.optimizer.readout is not None:
            raise ValueError(
                f"ema_decay is {self.ema_decay}, and the optimizer has a readout: both average the "
                f"parameters for evaluation. Remove one of them."
            )
        check_diagnostics(
            self.diagnostics, self.optimizer.clip_norm, self.data.batch_size, self.microbatches
        )
        self._check_hooks()

    def _check_hooks(self) -> None:
        """Raises ValueError for a hook that does not fit; see `trainer.hooks.HookContext`."""
        for index, hook in enumerate(self.hooks):
            if not callable(hook) and not hasattr(hook, "bind"):
                raise ValueError(
                    f"hooks[{index}] must be a function of (step, metrics, params), got {hook!r}."
                )
            if not hasattr(hook, "bind"):
                try:
                    inspect.signature(hook).bind(1, {}, None)
                except TypeError:
                    raise ValueError(
                        f"hooks[{index}] must be a function of (step, metrics, params), and "
                        f"{hook!r} does not take three arguments."
                    ) from None
                except ValueError:  # a function without a signature, of C
                    pass
            if (at := getattr(hook, "at", "log")) not in ("log", "evaluation"):
                raise ValueError(f"hooks[{index}].at must be 'log' or 'evaluation', got {at!r}.")
            if hasattr(hook, "check"):
                try:
                    hook.check(self)
                except ValueError as error:
                    raise ValueError(f"hooks[{index}] does not fit: {error}") from error

    def unchecked(self, **fields: Any) -> "Experiment":
        """Returns a copy with other values of fields, which are not checked: they may be traced."""
        made = copy.copy(self)
        vars(made).update(fields)
        return made

    @property
    def roles(self) -> Roles:
        """The dtypes that `precision` stands for."""
        return roles_of(self.precision)

    def evaluates(self, step: int) -> bool:
        """Returns whether there is an evaluation after a step, which is at least 1."""
        return step == self.steps or every.is_due(self.eval_every, step)

    @property
    def first_step(self) -> int:
        """The step of the state with which the run begins: 0, or that of the run it continues."""
        options = self.warm_start or {}
        step = options.get("step") if options.get("continue") is True else 0
        return step if isinstance(step, int) else 0  # a mistake, which `Continuation` refuses

    def units_of(self, config: Config) -> Units:
        """Returns the converter of a config with this model and these data; see `units_of`."""
        return units_of(config, self.data, lambda: count_parameters(self.model, self.data))

    @property
    def seed_of_data(self) -> int:
        """The seed that the data set is passed: `data_seed`, or `seed` if that is None."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def best_row(self) -> str | None:
        """The name in metrics.jsonl of `best_metric`, such as "eval/accuracy"."""
        if self.best_metric is None:
            return None
        return best_row(self.best_metric, ["loss", *self.metrics], self.splits)

    @property
    def splits(self) -> dict[str, int | None]:
        """The splits that are evaluated, or their parts, as `split_sizes` returns those of data."""
        sizes = split_sizes(self.data)
        wanted = whole_splits(sizes) if self.eval_splits is None else self.eval_splits
        if not wanted or not set(wanted) <= set(whole_splits(sizes)):
            raise ValueError(
                f"eval_splits is {list(wanted)}, but the data set has {joined(whole_splits(sizes))}"
                " to evaluate: name one of them, or remove eval_splits to evaluate all. With"
                " data.validation=0.1 data sets of Lockstep have a validation split."
            )
        return {x: size for x, size in sizes.items() if x.partition("/")[0] in wanted}

    def batches(self, batch_index: int, shard: DataShard | None = None) -> Iterator[Batch]:
        """Returns a part of each training batch, from an index on (from 0).

        None is the part of this process, one of as many as there are processes. So is any part of a
        data set that cannot be asked for one.
        """
        return train_batches(self.data, batch_index, self.seed_of_data, shard)


def as_model(configured: Any) -> Model:
    """Converts the model of a config, a flax linen module perhaps, to a model."""
    return models.from_linen(configured) if isinstance(configured, nn.Module) else configured


def as_optimizer(configured: Any) -> optim.Optimizer:
    """Converts the optimizer of a config to an `optim.Optimizer`."""
    if isinstance(configured, partial) and configured.func is optim.optimizer:
        return configured()
    if isinstance(configured, partial | optax.GradientTransformation):
        return optim.optimizer({"all": optim.group(".*", configured)})
    return configured


def build_experiment(
    config: Config, vocabulary: Sequence[str] = (), declared: bool = False
) -> Experiment:
    """Builds a config's experiment, with step counts as integers; raises ConfigError."""
    # With `declared`, a data set that is not on this machine is replaced by its declared shapes;
    # such an experiment can be planned and compiled, but not run.
    builder = Builder(config, vocabulary)
    builder.check()
    # Before the rest, because '3 epochs' anywhere else is converted by its number of examples.
    data = _build_data(builder, config.root.kwargs.get("data"), declared)
    units = units_of(config, data, lambda: count_parameters(as_model(builder.build("model")), data))
    return builder.build("", units=units, overrides={"data": data})


def _build_data(builder: Builder, node: Any, declared: bool) -> Any:
    if isinstance(node, str):
        text = f"experiment takes a data set for 'data', and was given {wording.describe(node)}."
        try:
            text += call_hint(Call(builder.function(node).name))
        except ConfigError as error:
            text += f" A data set is a call. {error}"
        raise ConfigError(text, builder.config.sources["data"])
    return _built_data(builder, node, "data", declared)


def _built_data(builder: Builder, node: Any, path: str, declared: bool) -> Any:
    """Builds the data set at a path, or returns what is declared of it."""
    overrides = {}
    # Of the data sets that have others, a mixture alone plans with what these declare: the shapes
    # of a data set inside of another may differ from those of the outer one.
    if declared and isinstance(node, Call) and builder.function(node.name).call is mixture:
        parts = node.kwargs.get("parts")
        for name, part in parts.items() if isinstance(parts, dict) else ():
            below = join(join(path, "parts"), name)
            overrides[below] = _built_data(builder, part, below, declared)
    try:
        return builder.build(path, overrides=overrides)
    except ConfigError as error:
        absent = error.__cause__
        name = node.name if isinstance(node, Call) else None
        if declared and isinstance(absent, DataAbsent) and absent.name == name:
            return absent.declared
        raise


def units_of(config: Config, data: Any, parameters: Callable[[], int]) -> Units:
    """Returns the converter of numbers of steps with a unit, such as '3 epochs'."""
    # `parameters` counts those of the model, if a unit needs that.
    contracts.check_data(data, config.root.kwargs["data"], config.sources.get("data"))
    configured = config.root.kwargs.get("steps")
    # `steps` itself may be '3 epochs', but not a share of the steps.
    tokens = contracts.tokens_per_example(data)
    without_total = Units(None, data.batch_size, data.num_examples, tokens, parameters)
    source = config.sources.get("steps")
    total = None if configured is None else without_total.steps(configured, source)
    if total is not None and not 1 <= total <= _MOST_STEPS:
        was = "" if configured == total else f", {configured!r}"
        raise ConfigError(
            f"steps is {total}{was}, but must be at least 1 and at most 2**31 - 1.", source
        )
    return dataclasses.replace(without_total, total_steps=total)


def count_parameters(model: Model, data: Dataset) -> int:
    """Returns how many parameters a model has for the batches of a data set; nothing is drawn."""
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in data.element_spec.items()}
    with contracts.calling("model"):
        params, _ = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), batch)
    return sum(x.size for x in jax.tree.leaves(params))


def with_place(
    error: Exception, config: Config | None, places: Sequence[str] = ("model",)
) -> ConfigError:
    """Returns an error as a ConfigError with the file and line of the mistake."""
    # `config` is None if the experiment was not built from one. `places` are paths of it, of which
    # the first that it has is at fault if the error names none.
    for path, value in leaves(config.root) if config else ():
        # Such an integer raises an error inside of jax that does not name it.
        if isinstance(value, int) and value > _LARGEST:
            text = f"{path} is {value}, and a size in a program is at most 2**63 - 1: lower it."
            return ConfigError(text, config.sources[path] if config else None)
    if isinstance(error, contracts.ComponentError):
        places = _upwards(error.component)
    elif isinstance(error, ConfigError):
        return error
    if isinstance(error, optim.GroupError):
        argument = error.argument or "optimizer"
        # Without groups, the optimizer's arguments are directly below `optimizer`.
        places = [*_upwards(f"optimizer.groups.{error.group}.{argument}"), *_upwards(argument)]
        if argument == "states":
            places = [*_upwards("precision.states"), *places]
        places += _upwards(f"optimizer.{argument}")
        # The most specific place that the config has.
        places = sorted(places, key=lambda place: -place.count("."))
    place = next((place for place in places if config and place in config.sources), None)
    text = str(error)
    if isinstance(error, optim.GroupError) and (line := wording.location(error)):
        text = f"{text.rstrip('.')}{line}"
    source = config.source_of_error(place, text) if config and place is not None else None
    return ConfigError(text, source)


def _upwards(path: str) -> list[str]:
    """Returns a dotted path and its prefixes, the longest first."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(len(names), 0, -1)]
