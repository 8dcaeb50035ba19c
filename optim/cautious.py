"""Cautious and Grams: wrappers that mask the steps of another optimizer by the gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from optim import factories
from optim.descent import Updated, scalar
from optim.dtypes import compute_dtype, widen
from optim.factories import Recipe, float_paths, instantiate, learning_rate_of, name_of
from optim.tracing import reads


class MaskedState(NamedTuple):
    """The state of `cautious` and of `grams`."""

    count: ArrayLike | tuple[()]  # the number of updates so far, int32; () if no schedule needs it
    base: optax.OptState  # the state of the base optimizer


def cautious(
    base_optimizer: partial | optax.GradientTransformation,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    least_mean: float = 1e-3,
) -> optax.GradientTransformationExtraArgs:
    """Drops the elements of a step whose sign disagrees with the gradient (Cautious).

    With the step u of another optimizer, without its weight decay, and the gradient g, elementwise,
    where the mean is taken over a parameter,

        mask = 1 where u and g have opposite signs, else 0
        update = u * mask / max(mean(mask), least_mean) - learning_rate * weight_decay * parameter

    The weight decay is the one of the base, with the base's learning rate and mask, or the one
    given here. So `cautious(partial(optax.adamw, learning_rate=..., weight_decay=...))` is the
    authors' C-AdamW. Two programs of its authors differ: C-Lion multiplies the k elements of n that
    are kept by n / (k + 1), and C-Muon masks the momentum before it is orthogonalized.

    Args:
        base_optimizer: a `functools.partial` of the factory of any optimizer that takes gradients,
            such as optax.adamw. A finished transformation is accepted if it does not read
            the parameters, as weight decay would.
        weight_decay: decoupled weight decay for a base without its own, such as optax.adam, which
            is multiplied by the base's `learning_rate`. A float, a traced scalar or a schedule.
        least_mean: the smallest divisor; a smaller mean is replaced by it.

    Returns:
        The optimizer.

    Raises:
        ValueError: if weight decay, here or in the base, cannot be multiplied by a learning rate or
            separated from the masked step: the base has no `learning_rate` or several; weight decay
            is set both here and in the base; the base is a finished transformation that reads the
            parameters; or the weight decay of the base enters its moments or norms (L2
            regularization, LAMB). A traced weight decay of this last kind, which may be zero, is
            masked with the rest of the step. At update, if there is weight decay and `params` is
            None.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, optim
        >>> from functools import partial
        >>> tx = optim.cautious(partial(optax.sgd, learning_rate=1.0, momentum=0.9))
        >>> params = jnp.zeros(2)
        >>> updates, state = tx.update(jnp.array([1.0, 1.0]), tx.init(params), params)
        >>> updates, state = tx.update(jnp.array([1.0, -0.1]), state, params)
        >>> print(np.asarray(updates).round(3))  # -1.9 / mean(mask), and 0 for the changed sign
        [-3.8 -0. ]

    Reference: Liang et al., Cautious Optimizers: Improving Training with One Line of Code,
      https://arxiv.org/abs/2411.16085
    """

    def mask(step: jax.Array, g: jax.Array) -> jax.Array:
        # Signs, because the product of two small numbers underflows to 0.
        agrees = (jnp.sign(step) * jnp.sign(g.astype(step.dtype)) < 0).astype(step.dtype)
        return step * agrees / jnp.maximum(jnp.mean(agrees), scalar(least_mean, step))

    return _masked(base_optimizer, mask, weight_decay, "optim.cautious")


def grams(
    base_optimizer: partial | optax.GradientTransformation,
    weight_decay: optax.ScalarOrSchedule = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Combines the magnitude of another optimizer's step with the sign of the gradient (Grams).

    With the step u of another optimizer, without its weight decay, and the gradient g, elementwise,

        update = -sign(g) * |u| - learning_rate * weight_decay * parameter

    The weight decay is the one of the base, with the base's learning rate and mask, or the one
    given here, as in `cautious`.

    Args:
        base_optimizer: a `functools.partial` of the factory of any optimizer that takes gradients,
            such as optax.adamw. A finished transformation is accepted if it does not read
            the parameters, as weight decay would.
        weight_decay: decoupled weight decay for a base without its own, such as optax.adam, which
            is multiplied by the base's `learning_rate`. A float, a traced scalar or a schedule.

    Returns:
        The optimizer.

    Raises:
        ValueError: see `cautious`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, optim
        >>> from functools import partial
        >>> tx = optim.grams(partial(optax.sgd, learning_rate=1.0, momentum=0.9))
        >>> params = jnp.zeros(2)
        >>> updates, state = tx.update(jnp.array([1.0, 1.0]), tx.init(params), params)
        >>> updates, state = tx.update(jnp.array([1.0, -0.1]), state, params)
        >>> print(np.asarray(updates).round(3))
        [-1.9  0.8]

    Reference: Cao et al., Grams: Gradient Descent with Adaptive Momentum Scaling,
      https://arxiv.org/abs/2412.17107
    """

    def mask(step: jax.Array, g: jax.Array) -> jax.Array:
        return -jnp.sign(g.astype(step.dtype)) * jnp.abs(step)

    return _masked(base_optimizer, mask, weight_decay, "optim.grams")


def _masked(
    base: Recipe,
    mask: Callable[[jax.Array, jax.Array], jax.Array],
    weight_decay: optax.ScalarOrSchedule,
    name: str,
) -> optax.GradientTransformationExtraArgs:
    decays = not _is_zero(weight_decay)
    if decays:
        _check_weight_decay(base, name)
    scheduled = any(map(callable, [weight_decay, *float_paths(base).values()]))

    def init(params: optax.Params) -> MaskedState:
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        return MaskedState(count, instantiate(base, 0, compute_dtype(params)).init(params))

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None and decays:
            raise ValueError("Weight decay needs parameters: call update(updates, state, params).")
        step = state.count if scheduled else 0
        recipe = factories.at_step(base, step, compute_dtype(updates if params is None else params))
        steps, decay, inner = _split(recipe, updates, state.base, params, extra, name)
        if decays:
            rate = learning_rate_of(recipe)
            given: Any = weight_decay(step) if callable(weight_decay) else weight_decay

            def shrink(u: jax.Array, p: jax.Array) -> jax.Array:
                u = widen(u)
                return -scalar(rate, u) * scalar(given, u) * p.astype(u.dtype)

            more = jax.tree.map(shrink, steps, params)
            decay = more if decay is None else jax.tree.map(jnp.add, decay, more)

        def one(u: jax.Array, g: jax.Array, *shrinking: jax.Array) -> jax.Array:
            out = mask(widen(u), g)
            for d in shrinking:
                out = out + d.astype(out.dtype)
            return out.astype(u.dtype)

        moves = jax.tree.map(one, steps, updates, *([] if decay is None else [decay]))
        return moves, MaskedState(optax.safe_increment(step) if scheduled else (), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _split(
    recipe: Recipe, updates: Any, state: Any, params: Any, extra: dict[str, Any], name: str
) -> tuple[Any, Any, Any]:
    """Runs a base without schedules; returns its steps, its weight decay and its new state."""
    # Decoupled weight decay d adds d * v to an update and does not change the state. So v is the
    # derivative of the update by d at d = 0, however the base scales and masks it. The second
    # result is what weight decay adds to the steps, or None.
    decays = _weight_decays(recipe)

    def run(decays: dict[str, Any]) -> tuple[Any, Any]:
        given = factories.map_floats(recipe, lambda path, value: decays.get(path, value))
        return instantiate(given, 0, compute_dtype(updates)).update(updates, state, params, **extra)

    def slope(decays: dict[str, Any], direction: dict[str, Any]) -> Any:
        return jax.jvp(lambda d: run(d)[0], (decays,), (direction,))

    if not decays:
        steps, inner = run({})
        if not isinstance(recipe, partial) and params is not None:
            update: Callable[..., Any] = optax.with_extra_args_support(recipe).update
            if reads(lambda p: update(updates, state, p["params"], **extra), {"params": params}):
                raise ValueError(
                    f"The base of {name} is a finished optax transformation that reads the "
                    f"parameters: if it does so for weight decay, that would be masked, too. "
                    f"Give the base as a functools.partial of its factory: partial(optax.adamw, "
                    f"learning_rate=..., weight_decay=...)."
                )
        return steps, None, inner
    ones = {path: jnp.ones_like(value) for path, value in decays.items()}
    # Decoupled decay is linear: neither its derivative nor the state depends on it.
    if not (coupled := reads(lambda d: (slope(d, ones)[1], run(d)[1]), decays)):
        zeros = {path: jnp.zeros_like(value) for path, value in decays.items()}
        # The update at d = 0, and its derivative in the direction d, which is d * v.
        steps, decay = slope(zeros, {path: jnp.asarray(x) for path, x in decays.items()})
        return steps, decay, run(zeros)[1]
    # A traced weight decay may be 0, with nothing to separate, so it must pass.
    if known := sorted(path for path in coupled if not isinstance(decays[path], Tracer)):
        raise ValueError(
            f"{name} masks steps without their weight decay, and {known[0]} of {name_of(recipe)} "
            f"cannot be separated: it enters the moments or norms of the optimizer. "
            f"Set it to 0, and give {name} the weight_decay."
        )
    steps, inner = run({})
    return steps, None, inner


def _check_weight_decay(base: Recipe, name: str) -> None:
    """Raises ValueError if a wrapper's weight decay has no single learning rate in the base."""
    if not isinstance(base, partial):
        raise ValueError(
            f"{name} multiplies weight_decay by the learning rate of its base, which cannot be "
            f"read from a finished optax transformation. Give the base as a functools.partial of "
            f"its factory: partial(optax.adam, learning_rate=...)."
        )
    # A traced weight decay may be zero; if it is not, it is added to the wrapper's.
    decays = {path: x for path, x in _weight_decays(base).items() if not isinstance(x, jax.Array)}
    if decays:
        path, value = next(iter(decays.items()))
        described = "a schedule" if callable(value) else repr(value)
        raise ValueError(
            f"{name} got a weight_decay, and {name_of(base)} has one, too: {path} "
            f"is {described}. Set one of the two to 0."
        )
    learning_rate_of(base)


def _weight_decays(recipe: Recipe) -> dict[str, Any]:
    """Returns the weight decays of a recipe by their paths, without those that are 0."""
    return {
        path: value
        for path, value in float_paths(recipe).items()
        if "weight_decay" in path.split(".")[-1] and not _is_zero(value)
    }


def _is_zero(value: object) -> bool:
    return value is None or isinstance(value, float | int) and value == 0
