"""Computes one training step, as a pure function of the state and a batch.

Begin with `train_step`; `State` and `StepMetrics` are what goes in and comes out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import optim
from optim.bound import Updates, all_finite
from optim.checks import EXAMPLES, groups_needing, observations_read
from optim.dtypes import widen
from optim.layouts import Layout
from optim.parts.base import OBSERVATIONS
from optim.paths import flatten, unflatten
from trainer.constraints import APART
from trainer.engine import metric_sums
from trainer.engine.contracts import Batch, calling
from trainer.engine.diagnostics import OF_HALVES, compute, compute_noise
from trainer.engine.experiment import Experiment
from trainer.engine.mesh import batch_axes, batch_parts, size_of
from trainer.engine.metric_sums import TrainMetrics, train_metrics, train_rows, with_ignored
from trainer.engine.precision import in_precision, summed_apart

# Folded into the step's key, so that stochastic rounding and the gradients of single examples and
# of halves of a batch draw other random numbers than the model.
_ROUNDING, _EXAMPLES, _HALVES = 0x5EED, 0x5EEE, 0x5EEF
_MOST = 2**31 - 1  # the largest int32: no run skips as many steps


class State(NamedTuple):
    """The complete state of a run; a checkpoint saves all of it but `hyperparams`."""

    step: Any  # number of finished updates, int32
    params: Any  # a nested dict of arrays
    model_state: Any  # changed by the model without gradients, such as batch statistics
    opt_state: Any  # an `optim.OptimizerState`
    ema: Any  # moving average, in at least float32; an empty dict without `ema_decay`
    hyperparams: Any  # floats of the config, [inputs], in the order of `program.Inputs.values`
    # "seed", uint32; with on_nonfinite="rollback" also "rollback", int32 [4], see
    # `rollback.Counters`; with "skip" also "skips", int32: how many steps in a row were skipped
    run_state: dict[str, Any]


def train_step(experiment: Experiment, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
    """Computes one update and its metrics, on the devices that `mesh.ambient` makes known."""
    # Shapes, dtypes and weak types of the state do not change. The metrics are scalars:
    # "train/loss", "train/<name>" for aux values and train_metrics, "grad_norm",
    # "learning_rate/<group>" and "<argument>/<group>" for what follows a schedule, "finite"; and
    # "lookahead.step_size", "skipped", "rollbacks" and "proceed" where the options ask for them.
    # "skipped" and "rollbacks" count steps of the run. "finite" is of the loss and the gradients
    # and, unless on_nonfinite is "halt", of the new parameters: a run that halts checks those with
    # `Program.params_finite`, at some steps only, because that is cheaper.
    optimizer = experiment.optimizer
    found = _differentiate(experiment, optimizer, state, batch)
    finite, model_state = found.finite, found.model_state
    with jax.named_scope("optimizer"):
        params, opt_state = optimizer.update(
            found.passed,
            state.opt_state,
            state.params,
            skip=~finite if experiment.on_nonfinite == "skip" else None,
            key=jax.random.fold_in(found.key, _ROUNDING),
            **found.extra(),
        )
    metrics = {"train/loss": found.loss, **train_rows(found.computed), "grad_norm": found.norm}
    ema, run_state = state.ema, state.run_state
    if experiment.ema_decay is not None:
        decay, averaged = experiment.ema_decay, optimizer.eval_params(opt_state, params)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), ema, averaged)
    if experiment.on_nonfinite == "skip":
        skipped = optimizer.skipped(opt_state)
        # The optimizer also skips an update that makes parameters not finite.
        finite = skipped == optimizer.skipped(state.opt_state)
        model_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (model_state, ema),
            (state.model_state, state.ema),
        )
        skips = jnp.where(finite, 0, run_state["skips"] + 1)
        run_state = {**run_state, "skips": skips}
        metrics["skipped"] = skipped
        metrics["proceed"] = skips < (experiment.max_consecutive_skips or _MOST)
    elif experiment.on_nonfinite == "rollback":
        finite &= all_finite(optimizer.trainable(params))
    if "rollback" in state.run_state:
        metrics["rollbacks"] = state.run_state["rollback"][0]
    metrics["finite"] = finite
    metrics |= _scheduled(optimizer, optimizer.position(state.opt_state))
    if (displacement := optimizer.displacement(opt_state, params)) is not None:
        metrics["lookahead.step_size"] = jnp.asarray(displacement, jnp.float32)
    after = State(state.step + 1, params, model_state, opt_state, ema, state.hyperparams, run_state)
    return after, metrics


def diagnose_step(
    experiment: Experiment, state: State, batch: Batch, layouts: Mapping[str, Layout]
) -> dict[str, Any]:
    """Computes the diagnostics of the update that `train_step` would make."""
    # Returns "<name>/<group>" -> float32 scalar. `layouts` are from `diagnostics.find_layouts`.
    optimizer = experiment.optimizer
    found = _differentiate(experiment, optimizer, state, batch)
    with jax.named_scope("optimizer"):
        updates = optimizer.updates(found.passed, state.opt_state, state.params, **found.extra())
    split, asked = optimizer.bind(state.params).split, experiment.diagnostics
    values = compute(asked, updates, found.grads, layouts, split)
    if set(asked) & set(OF_HALVES):
        # One half after the other.
        halves = _split(batch, 2), jax.random.split(jax.random.fold_in(found.key, _HALVES))
        stacked = jax.lax.map(lambda x: _gradients(experiment, optimizer, state, *x)[1], halves)
        first, second = ({path: g[i] for path, g in stacked.items()} for i in (0, 1))
        values |= compute_noise(asked, first, second, size_of(batch), split)
    return values


class ShadowedStep(NamedTuple):
    """What two optimizers would do at one point of a run; see `shadow_step`."""

    loss: Any  # mean of the batch
    # path name -> gradient before clipping, of the parameters that one of the two updates
    grads: dict[str, Any]
    own: Updates  # of the run's optimizer
    other: Updates
    opt_state: Any  # of the other one after the step


def shadow_step(
    experiment: Experiment, other: optim.Optimizer, state: State, opt_state: Any, batch: Batch
) -> ShadowedStep:
    """Computes the update that `train_step` would make, and that of another optimizer beside it."""
    # `opt_state` is from the last `shadow_step`, or `init` for the first parameters of the run.
    optimizer, params = experiment.optimizer, state.params
    found = _differentiate(experiment, optimizer, state, batch)
    seen, read = (observations_read(each.groups).keys() for each in (optimizer, other))
    if read <= seen and optimizer.trainable(params).keys() == other.trainable(params).keys():
        passed = found.grads | _example_gradients(experiment, other, state, batch, found.key)
        theirs = found._replace(passed=passed)
    else:
        theirs = _differentiate(experiment, other, state, batch)
    with jax.named_scope("optimizer"):
        own = optimizer.updates(found.passed, state.opt_state, params, **found.extra())
    with jax.named_scope("shadow"):
        following, opt_state = other.follow(theirs.passed, opt_state, params, **theirs.extra())
    return ShadowedStep(found.loss, theirs.grads | found.grads, own, following, opt_state)


class _Differentiated(NamedTuple):
    """What a step knows before its update."""

    loss: Any  # mean of the batch
    model_state: Any  # after the step
    computed: TrainMetrics  # the metrics of the batch
    grads: dict[str, Any]  # path name -> gradient before clipping
    # as the optimizer receives them: [examples, ...] where it needs those of examples
    passed: dict[str, Any]
    norm: Any  # the global norm of `grads`
    finite: Any  # whether the loss and the norm are
    key: Any
    value_fn: Callable[[Any], Any]  # the loss of the batch, of the parameters

    def extra(self) -> dict[str, Any]:
        """Returns the arguments that some optimizers need besides gradients."""

        def grad_fn(params: Any, *_: Any) -> Any:
            return jax.tree.map(jnp.conj, jax.grad(self.value_fn)(params))

        functions = {"value_fn": self.value_fn, "obj_fn": self.value_fn, "grad_fn": grad_fn}
        observed = {OBSERVATIONS: self.computed.observed} if self.computed.observed else {}
        return {"value": self.loss, **functions, **observed}


def _differentiate(
    experiment: Experiment, optimizer: optim.Optimizer, state: State, batch: Batch
) -> _Differentiated:
    """Computes the loss of a step and the gradients that an optimizer needs."""
    # From 1 to 2**31: program.py folds in other numbers for the initial parameters.
    key = jax.random.fold_in(jax.random.key(state.run_state["seed"]), state.step + 1)
    found = _gradients(experiment, optimizer, state, batch, key, by_roles=True)
    (loss, (model_state, computed)), grads = found
    norm = optax.tree.norm(widen(grads)).astype(jnp.float32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def value_fn(params: Any) -> Any:
        if experiment.microbatches > 1:
            raise ValueError(
                f"It evaluates the loss of the whole batch at other parameters, but with "
                f"microbatches={experiment.microbatches} the batch is split. Set microbatches "
                f"to 1, or choose an optimizer that needs only gradients."
            )
        return _loss(experiment, params, state.model_state, batch, key)[0]

    passed = grads | _example_gradients(experiment, optimizer, state, batch, key)
    return _Differentiated(loss, model_state, computed, grads, passed, norm, finite, key, value_fn)


def _gradients(
    experiment: Experiment,
    optimizer: optim.Optimizer,
    state: State,
    batch: Batch,
    key: Any,
    by_roles: bool = False,
) -> tuple[tuple[Any, tuple[Any, TrainMetrics]], dict[str, Any]]:
    """Computes the gradients of the trainable parameters, averaged over the microbatches."""
    # They are added over devices in the dtype in which the model computes; `by_roles`, in that of
    # the experiment's precision for reductions. Returns (loss, (new model state, metrics of the
    # batch)), and the gradients by path.
    count = experiment.microbatches
    by_path = flatten(state.params)
    trainable = optimizer.trainable(state.params)
    # Of the whole batch: a microbatch with fewer examples that count has a smaller weight.
    share = metric_sums.mask_mean(with_ignored(experiment.loss, batch))
    observe = tuple(observations_read(optimizer.groups))

    def objective(trainable: Any, model_state: Any, batch: Batch, key: Any) -> tuple[Any, Any]:
        params = unflatten(state.params, {**by_path, **trainable})
        return _loss(experiment, params, model_state, batch, key, share, observe)

    def differentiate(*args: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        out, grads = jax.value_and_grad(objective, has_aux=True)(*args)
        # The conjugate is the direction of steepest ascent of complex parameters, as in optax.
        return out, jax.tree.map(jnp.conj, grads)

    mesh = jax.sharding.get_abstract_mesh()
    if by_roles and summed_apart(experiment.roles, mesh, state.model_state) > 1:
        differentiate = _apart(differentiate, mesh, experiment.model)
    if count == 1:
        return differentiate(trainable, state.model_state, batch, key)

    def one(carry: Any, indexed: Any) -> tuple[Any, TrainMetrics]:
        loss, model_state, grads = carry
        microbatch, index = indexed
        own_key = jax.random.fold_in(key, index)
        found, more = differentiate(trainable, model_state, microbatch, own_key)
        value, (model_state, computed) = found
        return (loss + value, model_state, jax.tree.map(jnp.add, grads, widen(more))), computed

    # Sums of many microbatches in bfloat16 would lose small terms.
    start = (jnp.zeros(()), state.model_state, jax.tree.map(jnp.zeros_like, widen(trainable)))
    microbatches = (_split(batch, count), jnp.arange(count))
    (loss, model_state, grads), stacked = jax.lax.scan(one, start, microbatches)
    grads = jax.tree.map(lambda g: g / count, grads)
    return (
        loss / count,
        (model_state, metric_sums.merge_microbatches(stacked, experiment.model)),
    ), grads


def _apart(differentiate: Callable[..., Any], mesh: AbstractMesh, model: Any) -> Callable[..., Any]:
    """Differentiates the examples of each device apart, and adds the gradients in float32."""
    # Otherwise the compiler adds over devices where a product has summed over the examples of one,
    # in the dtype of the product. Like microbatches, the devices draw their own random numbers.
    # Devices along "tensor" have the same examples and differentiate them together.
    count, axes = batch_parts(mesh), batch_axes(mesh)
    of_all = jax.vmap(differentiate, (None, None, 0, 0), axis_name=APART, spmd_axis_name=axes)

    def divide(x: Any) -> Any:
        places = PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, places))

    def by_device(trainable: Any, model_state: Any, batch: Batch, key: Any) -> Any:
        parts = {name: divide(x.reshape(count, -1, *x.shape[1:])) for name, x in batch.items()}
        keys = jax.random.split(key, count)
        (losses, (_, computed)), grads = of_all(trainable, model_state, parts, keys)
        grads = jax.tree.map(lambda g: g.mean(axis=0), widen(jax.tree.map(divide, grads)))
        return (
            losses.mean(),
            (model_state, metric_sums.merge_microbatches(computed, model)),
        ), grads

    return by_device


def _example_gradients(
    experiment: Experiment, optimizer: optim.Optimizer, state: State, batch: Batch, key: Any
) -> dict[str, Any]:
    """Computes the gradient of every example for groups whose optimizer needs them."""
    # Returns path -> gradients [batch, ...]; empty if no optimizer needs them.
    if not (wanting := groups_needing(optimizer.groups, EXAMPLES)):
        return {}
    if experiment.microbatches > 1 or jax.tree.leaves(state.model_state):
        group, name = next(iter(wanting.items()))
        raise optim.GroupError(
            f"In group {group!r}, {name} needs the gradient of every single example. That requires "
            f"microbatches=1, and a model without state that mixes examples, such as BatchNorm's.",
            group,
            "optimizer",
        )
    by_path, labels = flatten(state.params), flatten(optimizer.label(state.params))
    group_params = {path: x for path, x in by_path.items() if labels[path] in wanting}

    def objective(group_params: Any, example: Any, key: Any) -> Any:
        params = unflatten(state.params, {**by_path, **group_params})
        one = {name: x[None] for name, x in example.items()}
        return _loss(experiment, params, state.model_state, one, key)[0]

    keys = jax.random.split(jax.random.fold_in(key, _EXAMPLES), size_of(batch))
    grads = jax.vmap(jax.grad(objective), (None, 0, 0))(group_params, dict(batch), keys)
    return jax.tree.map(jnp.conj, grads)


def _loss(
    experiment: Experiment,
    params: Any,
    model_state: Any,
    batch: Batch,
    key: Any,
    share: Any = None,
    observe: tuple[str, ...] = (),
) -> tuple[Any, tuple[Any, TrainMetrics]]:
    """Computes the mean loss of a batch, float32, the updated model state and the metrics."""
    # `share` is the mean of the mask of the whole batch, of which `batch` may be a microbatch. It
    # is None if no metrics are needed, for a whole batch or a single example. `observe` are the
    # observations of the model that the optimizer reads.
    asked: dict[str, Any] = {"observe": observe} if observe else {}
    outputs, new_state, *observed = apply_model(
        experiment, params, model_state, batch, key=key, train=True, **asked
    )
    batch = with_ignored(experiment.loss, batch)
    losses = metric_sums.compute_losses(experiment.loss, outputs, batch)
    new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
    computed = TrainMetrics({}, {})
    if share is not None:
        computed = train_metrics(experiment.train_metrics, outputs, batch, losses, share)
        computed = computed._replace(observed=jax.lax.stop_gradient(dict(*observed)))
    return losses.mean(batch, share), (new_state, computed)


def apply_model(
    experiment: Experiment, params: Any, model_state: Any, batch: Batch, **kwargs: Any
) -> tuple[Any, ...]:
    """Applies the model in the experiment's precision: returns outputs and new model state."""
    # And, if `kwargs` has `observe`, the observations.
    params, batch = in_precision((params, batch), experiment.precision)
    with calling("model"):
        return experiment.model.apply(params, model_state, batch, **kwargs)


def output_shapes(experiment: Experiment, state: State, batch: Batch) -> Any:
    """Returns the shapes of what the model returns for a batch in evaluation; nothing is run."""
    given = state.params, state.model_state, batch
    return jax.eval_shape(lambda *x: apply_model(experiment, *x, key=None, train=False)[0], *given)


def _scheduled(optimizer: optim.Optimizer, position: Any) -> dict[str, Any]:
    """Computes each group's learning rate, and the other arguments that follow a schedule."""
    now = optimizer.hyperparameters(position)
    return {
        f"{name}/{group}": jnp.asarray(value, jnp.float32)
        for group, values in now.items()
        for name, value in values.items()
        if name == "learning_rate" or callable(optimizer.schedules(group)[name])
    }


def _split(batch: Batch, count: int) -> dict[str, Any]:
    """Splits a batch into microbatches without moving examples between devices."""
    return {
        # Microbatch i has the examples i, i + count, ...: each device has its share of all of them.
        name: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        for name, x in batch.items()
    }


@dataclass(frozen=True, eq=False)
class StepMetrics(Mapping[str, Any]):
    """The metrics of a step, or of each step of a block; a pytree of few arrays.

    Example:
        >>> metrics = StepMetrics.pack({"loss": jnp.float32(2), "finite": jnp.bool_(True)})
        >>> {name: value.item() for name, value in metrics.items()}
        {'loss': 2.0, 'finite': 1}
    """

    # A program that returned each metric as an array of its own would take longer to call than some
    # small models take to compute.

    # one array for each dtype, [..., metrics]; the leading axes count steps and trials
    arrays: tuple[Any, ...]
    names: tuple[tuple[str, ...], ...]  # of the metrics in each array

    @classmethod
    def pack(cls, metrics: Mapping[str, Any]) -> "StepMetrics":
        """Packs scalars by name, perhaps traced; booleans become integers."""
        by_dtype: dict[Any, dict[str, Any]] = {}
        for name, value in metrics.items():
            array = jnp.asarray(value)
            array = array.astype(jnp.int32) if array.dtype == bool else array
            by_dtype.setdefault(array.dtype, {})[name] = array
        return cls(
            tuple(jnp.stack(list(group.values())) for group in by_dtype.values()),
            tuple(tuple(group) for group in by_dtype.values()),
        )

    @classmethod
    def stack_on_host(cls, metrics: Sequence["StepMetrics"]) -> "StepMetrics":
        """Waits for metrics of consecutive steps; stacks them to numpy arrays [steps, metrics]."""
        # Each of them is of one step, or there is only one, with arrays [steps, metrics].

        # In one call, which starts all transfers before it waits for the first.
        host = jax.device_get([each.arrays for each in metrics])
        return cls(tuple(map(np.vstack, zip(*host, strict=True))), metrics[0].names)

    def column(self, name: str) -> Any:
        """Returns a metric without waiting for it, [...]; it may be traced."""
        array, index = self._find(name)
        return array[..., index]

    @property
    def proceeds(self) -> Any:
        """Whether a run goes on after each step: "proceed", or without it "finite", [...]."""
        return self.column("proceed" if "proceed" in set(self) else "finite")

    def _find(self, name: str) -> tuple[Any, int]:
        """Returns the array that has a metric, and its index in the last axis."""
        for array, names in zip(self.arrays, self.names, strict=True):
            if name in names:
                return array, names.index(name)
        raise KeyError(name)

    def __getitem__(self, name: str) -> np.ndarray:
        """Waits for the steps, and returns a metric, a numpy array [...]."""
        array, index = self._find(name)
        return np.asarray(array)[..., index]

    def __iter__(self) -> Iterator[str]:
        return (name for names in self.names for name in names)

    def __len__(self) -> int:
        return sum(map(len, self.names))


jax.tree_util.register_dataclass(StepMetrics, data_fields=["arrays"], meta_fields=["names"])
