"""Masks on the steps of another optimizer: Cautious and Grams."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optim.descent import scalar, wide
from optim.laws import compute_dtype
from optim.recipes import (
    at_step,
    float_paths,
    instantiate,
    learning_rate_of,
    map_floats,
    name_of,
)
from optim.tracing import reads

__all__ = ["MaskedState", "cautious", "grams"]


class MaskedState(NamedTuple):
    """What `cautious` and `grams` remember.

    Attributes:
        count: the number of updates so far, int32; an empty tuple where no schedule needs it.
        base: the state of the base optimizer.
    """

    count: Any
    base: Any


def cautious(
    base_optimizer: partial | optax.GradientTransformation,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    least_mean: float = 1e-3,
) -> optax.GradientTransformationExtraArgs:
    """Drops the parts of a step that go against the present gradient (Cautious).

    With the step u of another optimizer, without its weight decay, and the gradient g, elementwise,
    and the mean taken over a parameter,

        mask = 1 where u and g have opposite signs, else 0
        update = u * mask / max(mean(mask), least_mean) - learning_rate * weight_decay * parameter

    The weight decay is the base's own, with the base's learning rate and mask, or the one given
    here. So `cautious(partial(optax.adamw, learning_rate=..., weight_decay=...))` is the authors'
    C-AdamW.

    Args:
        base_optimizer: a `functools.partial` of the factory of any optimizer that takes gradients,
            such as optax.adamw. A finished transformation will do where it does not read the
            parameters, as weight decay does.
        weight_decay: decoupled weight decay for a base without its own, such as optax.adam, which
            is multiplied by the base's `learning_rate`. A float, a traced scalar or a schedule.
        least_mean: the smallest mean by which steps are divided.

    Returns:
        The optimizer.

    Raises:
        ValueError: there is weight decay, here or in the base, that cannot be multiplied by a
            learning rate or kept out of the mask: the base has no `learning_rate` or several, it
            has weight decay of its own as well, it is finished and reads the parameters, or its
            weight decay goes into its moments or norms (L2 regularization, LAMB). A traced weight
            decay of this last kind, which may be zero, is masked with the rest of the step. At
            update, there is weight decay and there are no parameters.

    Reference: Liang et al., Cautious Optimizers: Improving Training with One Line of Code,
      https://arxiv.org/abs/2411.16085
    """

    def mask(step: jax.Array, g: jax.Array) -> jax.Array:
        agrees = (jnp.sign(step) * jnp.sign(g.astype(step.dtype)) < 0).astype(step.dtype)
        return step * agrees / jnp.maximum(jnp.mean(agrees), scalar(least_mean, step))

    return _masked(base_optimizer, mask, weight_decay, "optim.cautious")


def grams(
    base_optimizer: partial | optax.GradientTransformation,
    weight_decay: optax.ScalarOrSchedule = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Takes the length of each step's element from another optimizer, its sign from the gradient.

    With the step u of another optimizer, without its weight decay, and the gradient g, elementwise
    (Grams),

        update = -sign(g) * |u| - learning_rate * weight_decay * parameter

    The weight decay is the base's own, with the base's learning rate and mask, or the one given
    here, as in `cautious`.

    Args:
        base_optimizer: a `functools.partial` of the factory of any optimizer that takes gradients,
            such as optax.adamw. A finished transformation will do where it does not read the
            parameters, as weight decay does.
        weight_decay: decoupled weight decay for a base without its own, such as optax.adam, which
            is multiplied by the base's `learning_rate`. A float, a traced scalar or a schedule.

    Returns:
        The optimizer.

    Raises:
        ValueError: as `cautious` does.

    Reference: Cao et al., Grams: Gradient Descent with Adaptive Momentum Scaling,
      https://arxiv.org/abs/2412.17107
    """

    def mask(step: jax.Array, g: jax.Array) -> jax.Array:
        return -jnp.sign(g.astype(step.dtype)) * jnp.abs(step)

    return _masked(base_optimizer, mask, weight_decay, "optim.grams")


def _masked(base: Any, mask: Any, weight_decay: Any, name: str) -> Any:
    decays = not _is_zero(weight_decay)
    if decays:
        _check_weight_decay(base, name)
    scheduled = _has_schedules(base) or callable(weight_decay)

    def init(params: Any) -> MaskedState:
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        return MaskedState(count, instantiate(base, 0, compute_dtype(params)).init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, MaskedState]:
        if params is None and decays:
            raise ValueError("Weight decay needs parameters: call update(updates, state, params).")
        step = state.count if scheduled else 0
        recipe = at_step(base, step, compute_dtype(updates if params is None else params))
        steps, decay, inner = _split(recipe, updates, state.base, params, extra, name)
        if decays:
            rate = learning_rate_of(recipe)
            given: Any = weight_decay(step) if callable(weight_decay) else weight_decay

            def own(u: jax.Array, p: jax.Array) -> jax.Array:
                u = wide(u)
                return -scalar(rate, u) * scalar(given, u) * p.astype(u.dtype)

            more = jax.tree.map(own, steps, params)
            decay = more if decay is None else jax.tree.map(jnp.add, decay, more)

        def one(u: jax.Array, g: jax.Array, *shrinking: jax.Array) -> jax.Array:
            out = mask(wide(u), g)
            for d in shrinking:
                out = out + d.astype(out.dtype)
            return out.astype(u.dtype)

        moves = jax.tree.map(one, steps, updates, *([] if decay is None else [decay]))
        return moves, MaskedState(optax.safe_increment(step) if scheduled else (), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _split(
    recipe: Any, updates: Any, state: Any, params: Any, extra: dict[str, Any], name: str
) -> tuple[Any, Any, Any]:
    """Runs a base without schedules; gives its steps, its weight decay apart, and its new state.

    Decoupled weight decay d adds d times something to an update and leaves the state alone, so the
    derivative by it, at d = 0, is that something, whatever is scaled and masked where in the base.
    """
    decays = _weight_decays(recipe)

    def run(decays: dict[str, Any]) -> tuple[Any, Any]:
        given = map_floats(recipe, lambda path, value: decays.get(path, value))
        return instantiate(given, 0, compute_dtype(updates)).update(updates, state, params, **extra)

    def slope(decays: dict[str, Any], direction: dict[str, Any]) -> Any:
        return jax.jvp(lambda d: run(d)[0], (decays,), (direction,))

    if not decays:
        steps, inner = run({})
        if not isinstance(recipe, partial) and params is not None:
            _check_finished(recipe, updates, state, params, extra, name)
        return steps, None, inner
    ones = {path: jnp.ones_like(value) for path, value in decays.items()}
    coupled = reads(lambda d: (slope(d, ones)[1], run(d)[1]), decays)
    if not coupled:
        zeros = {path: jnp.zeros_like(value) for path, value in decays.items()}
        steps, decay = slope(zeros, {path: jnp.asarray(x) for path, x in decays.items()})
        return steps, decay, run(zeros)[1]
    known = sorted(path for path in coupled if not isinstance(decays[path], Tracer))
    if known:
        raise ValueError(
            f"{name} masks steps without their weight decay, and {known[0]} of {name_of(recipe)} "
            f"cannot be kept out of the mask: it goes into the moments or norms of the optimizer. "
            f"Set it to 0, and give {name} the weight_decay."
        )
    steps, inner = run({})
    return steps, None, inner


def _check_weight_decay(base: Any, name: str) -> None:
    """Refuses a wrapper's weight decay where the base gives no one learning rate to it."""
    if not isinstance(base, partial):
        raise ValueError(
            f"{name} multiplies weight_decay by the learning rate of its base, which a finished "
            f"optax transformation does not show. Give the base as a functools.partial of its "
            f"factory: partial(optax.adam, learning_rate=...)."
        )
    # A traced one may be zero, and adds to the wrapper's where it is not.
    own = {path: x for path, x in _weight_decays(base).items() if not isinstance(x, jax.Array)}
    if own:
        path, value = next(iter(own.items()))
        told = "a schedule" if callable(value) else repr(value)
        raise ValueError(
            f"{name} got a weight_decay, and {name_of(base)} has weight_decay of its own: {path} "
            f"is {told}. Give one of them, and 0 to the other."
        )
    learning_rate_of(base)


def _check_finished(
    tx: Any, updates: Any, state: Any, params: Any, extra: dict[str, Any], name: str
) -> None:
    """Refuses a finished base that reads the parameters: its weight decay would be masked."""
    update: Callable[..., Any] = optax.with_extra_args_support(tx).update
    if reads(lambda p: update(updates, state, p["params"], **extra), {"params": params}):
        raise ValueError(
            f"The base of {name} is a finished optax transformation that reads the parameters: "
            f"if that is weight decay, it has to be kept out of the mask, and nobody can tell. "
            f"Give the base as a functools.partial of its factory: partial(optax.adamw, "
            f"learning_rate=..., weight_decay=...)."
        )


def _weight_decays(recipe: Any) -> dict[str, Any]:
    """Lists the weight decays of a recipe by their paths; those that are 0 are left out."""
    return {
        path: value
        for path, value in float_paths(recipe).items()
        if "weight_decay" in path.split(".")[-1] and not _is_zero(value)
    }


def _has_schedules(recipe: Any) -> bool:
    return any(map(callable, float_paths(recipe).values()))


def _is_zero(value: Any) -> bool:
    return value is None or isinstance(value, float | int) and value == 0
