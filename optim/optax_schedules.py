"""Optax's schedules whose floats may be traced.

Some factories of optax's schedules branch in Python on the values of their floats, to check them or
to divide by one of them, and raise if it is traced. `traceable` returns a factory that takes the
same arguments and makes a schedule with the same values. It checks nothing: call optax's own
factory with the numbers first.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[Any], Any]


def traceable(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the factory of this module that replaces another, or the factory itself.

    Example:
        >>> factory = traceable(optax.exponential_decay)
        >>> halved = jax.jit(lambda rate: factory(1.0, transition_steps=1, decay_rate=rate)(2))
        >>> print(halved(0.5))
        0.25
    """
    try:
        return _FACTORIES.get(factory, factory)
    except TypeError:  # a callable without a hash
        return factory


def _exponential_decay(
    init_value: Any,
    transition_steps: int,
    decay_rate: Any,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Any = None,
) -> Schedule:
    if transition_steps <= 0:
        return lambda count: init_value
    begin = max(transition_begin, 0)

    def schedule(count: Any) -> jax.Array:
        power = (count - begin) / transition_steps
        power = jnp.floor(power) if staircase else power
        value = jnp.where(count - begin <= 0, init_value, init_value * jnp.power(decay_rate, power))
        if end_value is not None:
            lowest, highest = jnp.maximum(value, end_value), jnp.minimum(value, end_value)
            value = jnp.where(jnp.asarray(decay_rate) < 1.0, lowest, highest)
        # With a decay_rate of 0, optax's schedule is constant.
        return jnp.where(jnp.asarray(decay_rate) == 0, init_value, value)

    return schedule


def _warmup_exponential_decay(
    init_value: Any, peak_value: Any, warmup_steps: int, *decay: Any, **named: Any
) -> Schedule:
    # What follows are the arguments of the decay after its first one.
    rising = optax.linear_schedule(init_value, peak_value, warmup_steps)
    falling = _exponential_decay(peak_value, *decay, **named)
    return optax.join_schedules([rising, falling], [warmup_steps])


def _warmup_cosine_decay(
    init_value: Any,
    peak_value: Any,
    warmup_steps: int,
    decay_steps: int,
    end_value: Any = 0.0,
    exponent: Any = 1.0,
) -> Schedule:
    peak = jnp.asarray(peak_value)
    # As in optax, alpha is 0 for a peak of 0. The inner `where` avoids 0 / 0, because both sides of
    # the outer one are computed.
    alpha = jnp.where(peak == 0, 0.0, end_value / jnp.where(peak == 0, 1.0, peak))
    rising = optax.linear_schedule(init_value, peak_value, warmup_steps)
    falling = optax.cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return optax.join_schedules([rising, falling], [warmup_steps])


def _sgdr(cosine_kwargs: Iterable[Mapping[str, Any]]) -> Schedule:
    cycles = list(cosine_kwargs)
    # The steps at which a cycle ends and the next one begins.
    ends = [sum(each["decay_steps"] for each in cycles[: i + 1]) for i in range(len(cycles) - 1)]
    return optax.join_schedules([_warmup_cosine_decay(**each) for each in cycles], ends)


def _piecewise_constant(
    init_value: Any, boundaries_and_scales: Mapping[int, Any] | None = None
) -> Schedule:
    def schedule(count: Any) -> Any:
        value = init_value
        for boundary, scale in (boundaries_and_scales or {}).items():
            value = value * jnp.where(jnp.asarray(count) >= boundary, scale, 1.0)
        return value

    return schedule


def _piecewise_interpolate(
    interpolate_type: str, init_value: Any, boundaries_and_scales: Mapping[int, Any] | None = None
) -> Schedule:
    scales = boundaries_and_scales or {}
    boundaries = sorted(scales)
    factors = [init_value, *(scales[end] for end in boundaries)]

    def schedule(count: Any) -> jax.Array:
        values = jnp.cumprod(jnp.stack([jnp.asarray(x, float) for x in factors]))
        result = values[-1]
        for i in reversed(range(len(boundaries))):
            start = boundaries[i - 1] if i else 0
            # At least 1: the first boundary may be at step 0.
            share = (jnp.asarray(count) - start) / max(boundaries[i] - start, 1)
            if interpolate_type == "cosine":
                share = 0.5 * (1.0 - jnp.cos(jnp.pi * share))
            piece = values[i] + (values[i + 1] - values[i]) * share
            result = jnp.where(jnp.asarray(count) < boundaries[i], piece, result)
        return result

    return schedule


def _linear_onecycle(
    transition_steps: int,
    peak_value: Any,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: Any = 25.0,
    final_div_factor: Any = 1e4,
) -> Schedule:
    # The shares become numbers of steps, and cannot be traced.
    scales = {
        int(pct_start * transition_steps): div_factor,
        int(pct_final * transition_steps): 1.0 / div_factor,
        transition_steps: 1.0 / final_div_factor,
    }
    return _piecewise_interpolate("linear", peak_value / div_factor, scales)


def _cosine_onecycle(
    transition_steps: int,
    peak_value: Any,
    pct_start: float = 0.3,
    div_factor: Any = 25.0,
    final_div_factor: Any = 1e4,
) -> Schedule:
    scales = {
        int(pct_start * transition_steps): div_factor,
        # In contrast to the linear schedule, optax divides by both factors here.
        int(transition_steps): 1.0 / (div_factor * final_div_factor),
    }
    return _piecewise_interpolate("cosine", peak_value / div_factor, scales)


_FACTORIES: dict[Callable[..., Any], Callable[..., Any]] = {
    optax.cosine_onecycle_schedule: _cosine_onecycle,
    optax.exponential_decay: _exponential_decay,
    optax.linear_onecycle_schedule: _linear_onecycle,
    optax.piecewise_constant_schedule: _piecewise_constant,
    optax.piecewise_interpolate_schedule: _piecewise_interpolate,
    optax.sgdr_schedule: _sgdr,
    optax.warmup_cosine_decay_schedule: _warmup_cosine_decay,
    optax.warmup_exponential_decay_schedule: _warmup_exponential_decay,
}
