"""Interpolation between steps, and checks of step counts, for `optim.schedules`."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def fit_after(warmup: int, last: int, total: int) -> int | None:
    """Fits the last phase of a schedule between the warm-up and the end.

    In a run of one step, where "5%" is one step for both, the warm-up has precedence.

    Args:
        warmup: the length of the warm-up, in steps.
        last: the length of the last phase, in steps.
        total: the length of the schedule, in steps.

    Returns:
        The length of the last phase, or None if it does not fit.

    Example:
        >>> fit_after(10, 20, total=100), fit_after(1, 1, total=1), fit_after(60, 50, total=100)
        (20, 0, None)
    """
    last = 1 - warmup if total == max(warmup, last) == 1 else last
    return last if warmup + last <= total else None


def default_float(value: ArrayLike) -> jax.Array:
    """Casts to the default float type: float32, or float64 under x64."""
    return jnp.asarray(value, jnp.result_type(float))


def interpolate(start: ArrayLike, end: ArrayLike, fraction: jax.Array) -> jax.Array:
    """Returns the value at a fraction of the way from `start` to `end`.

    Args:
        start: the value at fraction 0.
        end: the value at fraction 1.
        fraction: a scalar or an array.

    Returns:
        An array like `fraction`, in the default float type.

    Example:
        >>> import jax.numpy as jnp
        >>> float(interpolate(1.0, 3.0, jnp.asarray(0.25)))
        1.5
    """
    return default_float(start) + (default_float(end) - default_float(start)) * fraction


def fraction(step: ArrayLike, begin: int, end: int) -> jax.Array:
    """Returns the part of a phase that is over before a step.

    Args:
        step: an int or an integer scalar, which may be traced.
        begin: the first step of the phase.
        end: the step after the phase. If it is `begin`, the phase is over from this step on.

    Returns:
        (step - begin) / (end - begin), clipped to [0, 1], in the default float type.

    Example:
        >>> [float(fraction(step, 2, 6)) for step in (0, 2, 3, 6, 9)]
        [0.0, 0.0, 0.25, 1.0, 1.0]
    """
    if begin == end:
        return default_float(jnp.asarray(step) >= end)
    # Integers are subtracted because float32 does not represent steps above 2**24 exactly.
    return default_float(jnp.clip(jnp.asarray(step) - begin, 0, end - begin)) / (end - begin)


def step_count(name: str, steps: int | str) -> int:
    """Checks a number of steps.

    Args:
        name: the name of the argument, for the error message.
        steps: the number of steps.

    Returns:
        The number as an int.

    Raises:
        ValueError: if it is a string such as "5%", which only a config resolves, not an integer, or
            negative.
    """
    if isinstance(steps, str):
        raise ValueError(
            f"{name} is {steps!r}, but units are resolved only in a config, where the length of"
            " the run is known: give an integer number of steps."
        )
    try:
        length = operator.index(steps)
    except TypeError:
        length = -1
    # True is an integer for operator.index.
    if isinstance(steps, bool) or length < 0:
        raise ValueError(f"{name} must be an integer number of steps, at least 0, got {steps!r}.")
    return length


def choice(name: str, value: str, choices: dict[str, Any]) -> str:
    """Checks the name of a choice.

    Args:
        name: the name of the argument, for the error message.
        value: the argument.
        choices: a dict whose keys are the allowed names.

    Returns:
        `value`.

    Raises:
        ValueError: if it is not a key of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    return value
