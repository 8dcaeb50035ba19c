"""Says what one training step computes, as a pure function of the state and a batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optim
from optim.checks import needing, needs_examples
from optim.norms import all_finite
from optim.paths import flatten, unflatten
from trainer.experiment import Experiment
from trainer.given import calling, example_losses

Batch = Mapping[str, Any]

# What sets the noise of stochastic rounding, and of single examples, apart from the model's.
_ROUNDING, _EXAMPLES = 0x5EED, 0x5EEE

RUN_KEYS = ("seed", "rollback")  # what `State.hyper` holds besides lifted floats


class State(NamedTuple):
    """All that changes in a run, and all that a checkpoint saves.

    Attributes:
        step: finished updates, int32 scalar.
        params: the parameters, a nested dict of arrays.
        model_state: what the model changes without gradients, such as batch statistics.
        opt_state: an `optim.OptimizerState`.
        ema: the average of the parameters that the optimizer would evaluate, in at least float32;
            an empty dict without `ema_decay`.
        hyper: what trials of a sweep differ in: "seed", uint32, and lifted floats, float32; and,
            where a run may roll back, "rollback", int32 [4], see `nonfinite.Counters`.
    """

    step: Any
    params: Any
    model_state: Any
    opt_state: Any
    ema: Any
    hyper: dict[str, Any]


def train_step(
    experiment: Experiment, optimizer: optim.Optimizer, state: State, batch: Batch
) -> tuple[State, dict[str, Any]]:
    """Makes one update, as a pure function.

    Args:
        experiment: the model, the loss, and how to compute with them.
        optimizer: the optimizer; its floats may be traced.
        state: the state before.
        batch: name -> array, the first axis the examples.

    Returns:
        The state after, with the same avals; and the metrics of the step: "train/loss",
        "grad_norm", "learning_rate/<group>", "<argument>/<group>" for every other argument that
        follows a schedule, "finite", whether loss, gradients and the parameters after the step
        are, and "skipped" or "rollbacks", how many were not, where the run goes on then.
    """
    key = jax.random.fold_in(jax.random.key(state.hyper["seed"]), state.step + 1)
    (loss, model_state), grads = _gradients(experiment, optimizer, state, batch, key)
    norm = optax.tree.norm(wide(grads)).astype(jnp.float32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def value_fn(params: Any) -> Any:
        if experiment.microbatches > 1:
            raise ValueError(
                f"It evaluates the loss of the whole batch at other parameters, and with "
                f"microbatches={experiment.microbatches} a batch is never whole. Set microbatches "
                f"to 1, or choose an optimizer that needs only gradients."
            )
        return _loss(experiment, params, state.model_state, batch, key)[0]

    params, opt_state = optimizer.update(
        {**grads, **_example_gradients(experiment, optimizer, state, batch, key)},
        state.opt_state,
        state.params,
        skip=~finite if experiment.on_nonfinite == "skip" else None,
        key=jax.random.fold_in(key, _ROUNDING),
        value=loss,
        value_fn=value_fn,
        obj_fn=value_fn,
        grad_fn=lambda params, *_: jax.tree.map(jnp.conj, jax.grad(value_fn)(params)),
    )
    metrics = {"train/loss": loss, "grad_norm": norm}
    ema = state.ema
    if experiment.ema_decay is not None:
        ema = _average(experiment.ema_decay, ema, optimizer.eval_params(opt_state, params))
    if experiment.on_nonfinite == "skip":
        skipped = optimizer.skipped(opt_state)
        finite = skipped == optimizer.skipped(state.opt_state)  # the parameters after it, too
        model_state, ema = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (model_state, ema),
            (state.model_state, state.ema),
        )
        metrics["skipped"] = skipped
    else:
        finite &= all_finite(optimizer.trainable(params))
    if "rollback" in state.hyper:
        metrics["rollbacks"] = state.hyper["rollback"][0]
    metrics["finite"] = finite
    metrics |= _scheduled(optimizer, optimizer.position(state.opt_state))
    return State(
        step=state.step + 1,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        ema=ema,
        hyper=state.hyper,
    ), metrics


def _gradients(
    experiment: Experiment, optimizer: optim.Optimizer, state: State, batch: Batch, key: Any
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Differentiates the loss by the trainable parameters, one microbatch after the other."""
    parts = experiment.microbatches
    named = flatten(state.params)
    free = optimizer.trainable(state.params)

    def objective(free: Any, model_state: Any, batch: Batch, key: Any) -> tuple[Any, Any]:
        params = unflatten(state.params, {**named, **free})
        return _loss(experiment, params, model_state, batch, key)

    def differentiate(*args: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        out, grads = jax.value_and_grad(objective, has_aux=True)(*args)
        return out, jax.tree.map(jnp.conj, grads)  # of complex numbers; optax wants steepest ascent

    if parts == 1:
        return differentiate(free, state.model_state, batch, key)

    def one(carry: Any, part: Any) -> tuple[Any, None]:
        loss, model_state, grads = carry
        piece, index = part
        key_of_part = jax.random.fold_in(key, index)
        (value, model_state), more = differentiate(free, model_state, piece, key_of_part)
        return (loss + value, model_state, jax.tree.map(jnp.add, grads, wide(more))), None

    start = (jnp.zeros(()), state.model_state, jax.tree.map(jnp.zeros_like, wide(free)))
    pieces = (_split(batch, parts), jnp.arange(parts))
    (loss, model_state, grads), _ = jax.lax.scan(one, start, pieces)
    return (loss / parts, model_state), jax.tree.map(lambda g: g / parts, grads)


def _example_gradients(
    experiment: Experiment, optimizer: optim.Optimizer, state: State, batch: Batch, key: Any
) -> dict[str, Any]:
    """Differentiates the loss of every example, for the groups whose optimizer wants that.

    Returns:
        Path -> gradients, [batch, ...]; empty where no optimizer does.
    """
    wanting = needing(optimizer.groups, needs_examples)
    if not wanting:
        return {}
    if experiment.microbatches > 1 or jax.tree.leaves(state.model_state):
        group, name = next(iter(wanting.items()))
        raise optim.GroupError(
            f"In group {group!r}, {name} needs the gradient of every example by itself. It takes "
            f"microbatches=1, and a model whose state does not mix the examples (no BatchNorm).",
            group,
            "optimizer",
        )
    named, labels = flatten(state.params), flatten(optimizer.label(state.params))
    own = {path: x for path, x in named.items() if labels[path] in wanting}

    def objective(own: Any, example: Any, key: Any) -> Any:
        params = unflatten(state.params, {**named, **own})
        one = {name: x[None] for name, x in example.items()}
        return _loss(experiment, params, state.model_state, one, key)[0]

    size = next(iter(batch.values())).shape[0]
    keys = jax.random.split(jax.random.fold_in(key, _EXAMPLES), size)
    grads = jax.vmap(jax.grad(objective), (None, 0, 0))(own, dict(batch), keys)
    return jax.tree.map(jnp.conj, grads)


def _loss(
    experiment: Experiment, params: Any, model_state: Any, batch: Batch, key: Any
) -> tuple[Any, Any]:
    """Computes the mean loss of a batch, float32, and the model state after it."""
    outputs, new_state = apply_model(experiment, params, model_state, batch, key=key, train=True)
    losses = example_losses(experiment.loss, outputs, batch)
    new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
    return jnp.mean(losses.astype(jnp.float32)), new_state


def apply_model(
    experiment: Experiment, params: Any, model_state: Any, batch: Batch, **kwargs: Any
) -> tuple[Any, Any]:
    """Applies the model at the experiment's precision; see `models.Model.apply`."""
    if experiment.precision != "float32":
        params, batch = cast_floats(params, jnp.bfloat16), cast_floats(batch, jnp.bfloat16)
    with calling("model"):
        outputs, new_state = experiment.model.apply(params, model_state, batch, **kwargs)
    return outputs, new_state


def _average(decay: float, ema: Any, params: Any) -> Any:
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), ema, params)


def _scheduled(optimizer: optim.Optimizer, position: Any) -> dict[str, Any]:
    """Tells every group's learning rate, and whatever else follows a schedule."""
    now = optimizer.hyperparameters(position)
    return {
        f"{name}/{group}": jnp.asarray(value, jnp.float32)
        for group, values in now.items()
        for name, value in values.items()
        if name == "learning_rate" or callable(optimizer.schedules(group)[name])
    }


def _split(batch: Batch, parts: int) -> dict[str, Any]:
    """Deals the examples to microbatches, so that each device keeps the examples it has."""
    return {
        name: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        for name, x in batch.items()
    }


def wide(tree: Any) -> Any:
    """Casts the leaves to at least float32."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Casts the floating leaves."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
