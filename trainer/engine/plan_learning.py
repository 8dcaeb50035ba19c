"""Finds what makes a run learn nothing, or measure something else, before its first step.

Updates that move up the loss, a learning rate that is 0 for most of the run, a loss without a
gradient, arguments that change nothing, and metrics that count padding.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.factories import instantiate, map_floats, name_of, parameters, recipes_within
from optim.paths import flatten
from trainer.config import Call, Config
from trainer.config.vocabulary import RUN
from trainer.engine.contracts import Batch
from trainer.engine.flops import reading
from trainer.engine.padding import size_of
from trainer.engine.program import Program
from trainer.engine.splits import split_sizes

_LONGEST = 6  # elements along an axis of the arrays on which updates are measured
_STEPS = 8  # SAM moves up the loss at every other one, and optax.MultiSteps waits for some
_SMALL = 1e-3  # of its peak: a learning rate that changes next to nothing

Values = Mapping[str, tuple[np.ndarray, np.ndarray]]  # argument -> steps, values


def update_warnings(
    optimizer: optim.Optimizer, params: Any, sampled: Mapping[str, Values]
) -> Iterator[str]:
    """Yields a sentence for each group whose updates climb, or are parameters and not changes."""
    # `sampled` is from `plan.sample`.
    labels = flatten(optimizer.label(params))
    for name, group in optimizer.groups.items():
        shapes = {path: x.shape for path, x in flatten(params).items() if labels[path] == name}
        asked = not group.is_frozen and not _is_known(group.optimizer)
        if asked and (wrong := wrong_update(group.optimizer, shapes, sampled[name])) is not None:
            yield f"The first updates of the group {name!r} ({name_of(group.optimizer)}) {wrong}"


def _is_known(recipe: Any) -> bool:
    """Returns whether a recipe is an optimizer of optax or ours, and has no part of a user's."""
    within = list(recipes_within(recipe))
    whole = bool(within) and "learning_rate" in parameters(within[0].func)
    return whole and all(RUN.has(name_of(each)) for each in within)


def wrong_update(recipe: Any, shapes: Mapping[str, tuple[int, ...]], values: Values) -> str | None:
    """Measures first updates of small arrays; returns the end of a sentence, or None."""
    # Random gradients are given, and the same with the other sign: half the difference of the two
    # updates comes from the gradients, and half their sum from the parameters alone, as weight
    # decay does. Nothing is known of an optimizer that needs more than gradients.
    random = np.random.default_rng(0)

    def draw() -> dict[str, Any]:
        # One parameter for each number of axes.
        chosen = {len(shape): (path, shape) for path, shape in shapes.items()}.values()
        sizes = {path: [min(n, _LONGEST) for n in shape] for path, shape in chosen}
        return {path: np.asarray(random.normal(size=n), np.float32) for path, n in sizes.items()}

    params, grads = draw(), draw()
    try:
        # A plan uses no accelerator.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            along, against = _moves(recipe, params, grads, values)
    except Exception:  # whatever an optimizer raises that does not get the value of the loss
        return None
    for path, p in params.items():
        with np.errstate(all="ignore"):  # a large weight decay may overflow
            odd, even = (along[path] - against[path]) / 2, (along[path] + against[path]) / 2
            growth, climb = (even * p).sum() / (p * p).sum(), (odd * grads[path]).sum()
        if growth > 0.5 and np.allclose(even, growth * p, rtol=0.05):
            return (
                f"have the parameter {path} itself in them, so that it doubles at each step: an "
                "update is added to the parameters. Return the change alone."
            )
        if climb > 0:
            return (
                f"move {path} along its gradient, up the loss: an update is added to the "
                "parameters. Multiply it by minus the learning rate, as "
                "optax.scale_by_learning_rate does."
            )
    return None


def _moves(recipe: Any, params: Any, grads: Any, values: Values) -> tuple[Any, Any]:
    """Returns the sums of the first updates for some gradients, and for their negatives."""

    def number(path: str, value: Any) -> Any:
        if not callable(value):
            return value
        known = values.get(path) or values[path.split(".")[-1]]
        return float(np.max(known[1]))  # a warm-up begins at 0

    def move(sign: Any) -> Any:
        given = jax.tree.map(lambda g: sign * g, grads)

        def step(carry: Any, _: None) -> tuple[Any, None]:
            params, state, total = carry
            updates, state = tx.update(given, state, params)
            params, total = (jax.tree.map(jnp.add, x, updates) for x in (params, total))
            return (params, state, total), None

        first = jax.tree.map(jnp.asarray, params)
        start = first, tx.init(first), jax.tree.map(jnp.zeros_like, first)
        return jax.lax.scan(step, start, length=_STEPS)[0][2]

    with warnings.catch_warnings(action="ignore"):
        tx = instantiate(map_floats(recipe, number), 0, jnp.float32)
        moved = jax.jit(move)
        return jax.device_get((moved(1.0), moved(-1.0)))


def rate_warnings(sampled: Mapping[str, Values]) -> list[str]:
    """Returns a sentence for each group whose learning rate is about 0 for most of the run."""
    found = []
    for group, arguments in sampled.items():
        for name, (steps, values) in arguments.items():
            peak = int(np.argmax(values))
            low = values[peak:] < _SMALL * values[peak]
            if name.split(".")[-1] == "learning_rate" and low.sum() > len(values) / 2:
                last = int(steps[peak:][~low][-1]) + 1
                found.append(
                    f"In group {group!r}, {name} has its peak {values[peak]:.4g} at step "
                    f"{steps[peak] + 1:,}, and after step {last:,} of {steps[-1] + 1:,} it is less "
                    "than a thousandth of it: most of the run changes next to nothing. Give the "
                    "schedule the length of the run."
                )
    return found


def step_warnings(program: Program, config: Config | None) -> Iterator[str]:
    """Yields sentences if updates do not depend on the batch, or on an argument of a user's."""
    state, batch = program.abstract_state(), program.feed.abstract_batch()
    traced = program.trace(state)
    after, metrics = jax.tree.map(lambda _: False, traced.out_info)
    params = after._replace(params=jax.tree.map(lambda _: True, after.params))
    shown = jax.tree.map(lambda _: True, metrics)

    def from_batch(asked: Any) -> bool:
        return any(reading(traced, asked)[1][-len(batch) :])

    # A loss of the parameters alone reads no batch, either.
    if not from_batch((params, metrics)) and from_batch((after, shown)):
        yield (
            "The updates do not depend on the batch, and the loss does: its gradient is 0, and"
            " nothing is learned. The loss does not read the outputs of the model, or only through"
            " a function without a derivative, such as argmax, round or a comparison."
        )
    whole = jax.tree.map(lambda _: True, after)._replace(hyperparams=False)
    equations, _ = reading(traced, (whole, metrics))
    place = len(jax.tree.leaves(state[: state._fields.index("hyperparams")]))
    inputs = traced.jaxpr.jaxpr.invars[place]
    # `Inputs.insert` takes each of them from the array; a single one is not sliced.
    used = {
        each.params.get("start_indices", (0,))[0]
        for each in equations
        if any(x is inputs for x in each.invars)
    }
    for index, path in enumerate(program.inputs.values):
        call_path, _, name = path.rpartition(".")
        if index in used or config is None or not {path, call_path} <= config.sources.keys():
            continue
        call = config.at(call_path)
        if isinstance(call, Call) and not RUN.has(call.name):
            yield (
                f"No update depends on {path}: {call.name} does not use its argument {name!r}, and"
                " a search over it would compare equal runs."
            )


def mask_warnings(program: Program, first: Mapping[str, Batch]) -> list[str]:
    """Returns a sentence for each metric that counts the padding of a split."""
    # `first` has the first batch of each split, from `Evaluation.check`.
    sizes = split_sizes(program.experiment.data)
    padded = [
        split
        for split, batch in first.items()
        if (sizes[split] or 0) % size_of(batch) or not np.all(batch["mask"])
    ]
    return [
        f"The metric {name!r} does not use its argument `mask`, and batches of the {padded[0]} "
        "split have padding, which it counts as examples: let from_model_output take `mask`, which "
        "is 0 for padding, and weight by it, as clu.metrics.Average does."
        for name in program.evaluation.unmasked
        if padded
    ]
