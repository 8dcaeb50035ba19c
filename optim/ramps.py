"""Interpolation between steps, and checks of step counts, for `optim.schedules`."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def fit_after(warmup: int, last: int, total: int) -> int | None:
    """Returns the length of the last phase, or None if it does not fit after the warm-up.

    In a run of one step, where "5%" is one step for both, the warm-up has precedence.
    """
    last = 1 - warmup if total == max(warmup, last) == 1 else last
    return last if warmup + last <= total else None


def default_float(value: ArrayLike) -> jax.Array:
    """Casts to the default float type: float32, or float64 under x64."""
    return jnp.asarray(value, jnp.result_type(float))


def interpolate(start: ArrayLike, end: ArrayLike, fraction: jax.Array) -> jax.Array:
    """Returns the value at a fraction of the way from `start` to `end`."""
    return default_float(start) + (default_float(end) - default_float(start)) * fraction


def fraction(step: Any, begin: int, end: int) -> jax.Array:
    """Returns the fraction of begin..end before this step, from 0 to 1."""
    if begin == end:
        return default_float(jnp.asarray(step) >= end)
    # Integers are subtracted because float32 does not represent steps above 2**24 exactly.
    return default_float(jnp.clip(jnp.asarray(step) - begin, 0, end - begin)) / (end - begin)


def step_count(name: str, steps: int | str) -> int:
    """Returns a number of steps as an int; raises ValueError if it is not an integer from 0."""
    if isinstance(steps, str):
        raise ValueError(
            f"{name} is {steps!r}, but units are resolved only in a config, where the length of"
            " the run is known: give an integer number of steps."
        )
    try:
        length = operator.index(steps)
    except TypeError:
        length = -1
    if isinstance(steps, bool) or length < 0:
        raise ValueError(f"{name} must be an integer number of steps, at least 0, got {steps!r}.")
    return length


def choice(name: str, value: str, choices: dict[str, Any]) -> str:
    """Returns `value`; raises ValueError if it is not a key of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    return value
