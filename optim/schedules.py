"""Schedules: functions of the step, with lengths that a config may write as '5%' or '3 epochs'.

Here is only what optax lacks; optax's own schedules are usable by their names. Each factory
returns a callable ``step -> scalar`` of JAX's default float type (float32; float64 under x64). The
step is a Python int, a NumPy integer or a (traced) JAX integer, and counts the updates made before
this one: the first update of a run uses the value at step 0. Float arguments may be traced scalars.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

__all__ = ["Steps", "piecewise", "rsqrt", "warmup_cosine", "warmup_stable_decay"]

Steps = Annotated[int | str, "steps"]
"""A number of steps; in a config also '5%', '3 epochs' or '1_000_000 examples'.

What tells a config so is the word "steps": a function of yours says Annotated[int, "steps"]."""

Schedule = Callable[[Any], jax.Array]


def warmup_cosine(
    peak_value: float,
    warmup_steps: Steps = 0,
    decay_steps: Steps = "100%",
    init_value: float = 0.0,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Returns a linear warm-up followed by a cosine decay.

    With ``w = warmup_steps`` and ``T = decay_steps``, the value at step ``t`` is

        t < w        init + (peak - init) * t / w
        w <= t < T   end + (peak - end) * (0.5 * (1 + cos(pi * (t - w) / (T - w)))) ** exponent
        T <= t       end

    which is ``optax.warmup_cosine_decay_schedule``. With a warm-up the first update uses
    ``init_value``, so under the default of 0 it moves nothing. Where the warm-up is all there is
    (``w = T``, as of '5%' in a run of one step) it ends in ``end_value``, past the peak.

    Args:
        peak_value: the value at step ``warmup_steps``, if ``decay_steps`` is larger.
        warmup_steps: the length of the warm-up, in steps; 0 for none.
        decay_steps: the step at which the decay ends, so it counts the warm-up too; at least 1.
        init_value: the value at step 0, where there is a warm-up.
        end_value: the value from step ``decay_steps`` on.
        exponent: the power to which the cosine is raised.

    Raises:
        ValueError: a length is negative, the whole is 0, or the warm-up is longer than the whole.

    Reference: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983
    """
    warmup = _length("warmup_steps", warmup_steps)
    total = _length("decay_steps", decay_steps)
    if warmup > total or total == 0:
        raise ValueError(
            f"warmup_steps is {warmup} and decay_steps is {total}, but decay_steps counts the"
            " warm-up too: make decay_steps larger than warmup_steps."
        )

    def schedule(step: Any) -> jax.Array:
        rising = _between(init_value, peak_value, _fraction(step, 0, warmup))
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * _fraction(step, warmup, total)))
        falling = _between(end_value, peak_value, falling ** _float(exponent))
        return jnp.where(jnp.asarray(step) < warmup, rising, falling)

    return schedule


def warmup_stable_decay(
    peak_value: float,
    warmup_steps: Steps = 0,
    decay_steps: Steps = "10%",
    total_steps: Steps = "100%",
    init_value: float = 0.0,
    end_value: float = 0.0,
    shape: str = "linear",
) -> Schedule:
    """Returns a linear warm-up, then a constant, then a decay at the end (WSD, trapezoid).

    With ``w = warmup_steps``, ``d = decay_steps``, ``T = total_steps`` and, within the decay,
    ``x = (t - (T - d)) / d``, the value at step ``t`` is

        t < w            init + (peak - init) * t / w
        w <= t < T - d   peak
        T - d <= t < T   end + (peak - end) * f(x)
        T <= t           end   (peak, if d is 0)

    where ``f(x)`` is ``1 - x`` (linear), ``1 - sqrt(x)`` (sqrt) or ``0.5 * (1 + cos(pi * x))``
    (cosine). In a run of one step, where '5%' is one step too, the warm-up comes before the decay.

    Args:
        peak_value: the value between warm-up and decay.
        warmup_steps: the length of the warm-up, in steps; 0 for none.
        decay_steps: the length of the decay, in steps; 0 for none.
        total_steps: the step at which the decay ends.
        init_value: the value at step 0, where there is a warm-up.
        end_value: the value from step ``total_steps`` on, where there is a decay.
        shape: 'linear', 'sqrt' or 'cosine'.

    Raises:
        ValueError: a length is negative, warm-up and decay together are longer than the whole, or
          the shape is unknown.

    References: Hu et al., MiniCPM, https://arxiv.org/abs/2404.06395; Hägele et al., Scaling Laws
      and Compute-Optimal Training Beyond Fixed Training Durations (the sqrt shape),
      https://arxiv.org/abs/2405.18392
    """
    warmup = _length("warmup_steps", warmup_steps)
    decay = asked = _length("decay_steps", decay_steps)
    total = _length("total_steps", total_steps)
    if (decay := _after(warmup, decay, total)) is None:
        raise ValueError(
            f"warmup_steps is {warmup} and decay_steps is {asked}, together more than total_steps,"
            f" which is {total}: shorten one of the two."
        )
    shapes = {
        "linear": lambda x: 1.0 - x,
        "sqrt": lambda x: 1.0 - jnp.sqrt(x),
        "cosine": lambda x: 0.5 * (1.0 + jnp.cos(jnp.pi * x)),
    }
    fall = shapes[_choice("shape", shape, shapes)]

    def schedule(step: Any) -> jax.Array:
        rising = _between(init_value, peak_value, _fraction(step, 0, warmup))
        falling = fall(_fraction(step, total - decay, total)) if decay else 1.0
        falling = _between(end_value, peak_value, _float(falling))
        return jnp.where(jnp.asarray(step) < warmup, rising, falling)

    return schedule


def rsqrt(
    peak_value: float,
    warmup_steps: Steps = 0,
    timescale: Steps = 10_000,
    cooldown_steps: Steps = 0,
    total_steps: Steps = "100%",
    init_value: float = 0.0,
    end_value: float = 0.0,
) -> Schedule:
    """Returns a linear warm-up followed by an inverse square root, with an optional cool-down.

    With ``w = warmup_steps``, ``c = cooldown_steps`` and ``T = total_steps``, the value at step
    ``t`` is

        t < w            init + (peak - init) * t / w
        w <= t < T - c   r(t) = peak / sqrt(1 + (t - w) / timescale)
        T - c <= t < T   end + (r(t) - end) * (T - t) / c
        T <= t           end   (r(t), if c is 0: then T has no part in the schedule)

    In a run of one step, where '5%' is one step too, the warm-up comes before the cool-down.
    With ``timescale = warmup_steps`` this is ``peak * sqrt(w / t)``, the Transformer's schedule.

    Args:
        peak_value: the value at step ``warmup_steps``.
        warmup_steps: the length of the warm-up, in steps; 0 for none.
        timescale: after the warm-up, the steps in which the value falls to ``peak / sqrt(2)``.
        cooldown_steps: the length of the final linear factor, in steps; 0 for none.
        total_steps: the step at which the cool-down ends.
        init_value: the value at step 0, where there is a warm-up.
        end_value: the value from step ``total_steps`` on, where there is a cool-down.

    Raises:
        ValueError: a length is negative, the timescale is 0, or warm-up and cool-down together are
          longer than the whole.

    References: Vaswani et al., https://arxiv.org/abs/1706.03762; Zhai et al., Scaling Vision
      Transformers (timescale and cool-down), https://arxiv.org/abs/2106.04560
    """
    warmup = _length("warmup_steps", warmup_steps)
    scale = _length("timescale", timescale)
    cooldown = asked = _length("cooldown_steps", cooldown_steps)
    if scale == 0:
        raise ValueError(
            "timescale is 0, but the steps after the warm-up are divided by it: give"
            " a positive number of steps."
        )
    total = _length("total_steps", total_steps) if cooldown else warmup
    if (cooldown := _after(warmup, cooldown, total)) is None:
        raise ValueError(
            f"warmup_steps is {warmup} and cooldown_steps is {asked}, together more than"
            f" total_steps, which is {total}: shorten one of the two."
        )

    def schedule(step: Any) -> jax.Array:
        rising = _between(init_value, peak_value, _fraction(step, 0, warmup))
        after = _float(jnp.maximum(jnp.asarray(step) - warmup, 0))
        falling = _float(peak_value) / jnp.sqrt(1.0 + after / scale)
        if cooldown:
            left = 1.0 - _fraction(step, total - cooldown, total)
            falling = _between(end_value, falling, left)
        return jnp.where(jnp.asarray(step) < warmup, rising, falling)

    return schedule


def piecewise(
    boundaries: Sequence[Steps],
    values: Sequence[float],
    interpolation: str = "constant",
) -> Schedule:
    """Returns a schedule that goes through given values at given steps.

    With boundaries ``b[0] < b[1] < ...`` and ``b[-1] = 0``, the value at step ``t`` in
    ``b[i - 1] <= t < b[i]`` is, with ``x = (t - b[i - 1]) / (b[i] - b[i - 1])``,

        constant   v[i]
        linear     v[i] + (v[i + 1] - v[i]) * x
        cosine     v[i] + (v[i + 1] - v[i]) * 0.5 * (1 - cos(pi * x))

    and the last value from the last boundary on. So 'constant' jumps to ``v[i + 1]`` at step
    ``b[i]``, and the other two arrive there at that step.

    Args:
        boundaries: steps, positive and increasing.
        values: one more than there are boundaries; the first is the value at step 0.
        interpolation: 'constant', 'linear' or 'cosine'.

    Raises:
        ValueError: the boundaries are not positive and increasing, the number of values is not the
          number of boundaries plus one, or the interpolation is unknown.
    """
    ends = [_length(f"boundaries[{i}]", b) for i, b in enumerate(boundaries)]
    starts = [0, *ends[:-1]]
    if any(end <= start for start, end in zip(starts, ends, strict=False)):
        raise ValueError(f"boundaries is {ends}, but boundaries are positive and increasing steps.")
    if len(values) != len(ends) + 1:
        raise ValueError(
            f"There are {len(ends)} boundaries and {len(values)} values, but each boundary"
            f" separates two values: give {len(ends) + 1} values."
        )
    shapes = {
        "constant": lambda x: jnp.zeros_like(x),
        "linear": lambda x: x,
        "cosine": lambda x: 0.5 * (1.0 - jnp.cos(jnp.pi * x)),
    }
    rise = shapes[_choice("interpolation", interpolation, shapes)]

    def schedule(step: Any) -> jax.Array:
        value = _float(values[-1])
        for i in reversed(range(len(ends))):
            x = rise(_fraction(step, starts[i], ends[i]))
            piece = _between(values[i], values[i + 1], x)
            value = jnp.where(jnp.asarray(step) < ends[i], piece, value)
        return value

    return schedule


def _after(warmup: int, last: int, total: int) -> int | None:
    """Returns the length of what follows the warm-up at the end, or None where it has no room."""
    last = 1 - warmup if total == max(warmup, last) == 1 else last
    return last if warmup + last <= total else None


def _float(value: ArrayLike) -> jax.Array:
    return jnp.asarray(value, jnp.result_type(float))


def _between(start: ArrayLike, end: ArrayLike, fraction: jax.Array) -> jax.Array:
    return _float(start) + (_float(end) - _float(start)) * fraction


def _fraction(step: Any, begin: int, end: int) -> jax.Array:
    """Returns how much of begin..end is over at this step, from 0 to 1."""
    if begin == end:
        return _float(jnp.asarray(step) >= end)
    # Subtracting as integers keeps steps exact beyond float32's 2**24.
    return _float(jnp.clip(jnp.asarray(step) - begin, 0, end - begin)) / (end - begin)


def _length(name: str, steps: Steps) -> int:
    if isinstance(steps, str):
        raise ValueError(
            f"{name} is {steps!r}, but units are resolved only in a config, where the length of"
            " the run is known: give a whole number of steps."
        )
    try:
        length = operator.index(steps)
    except TypeError:
        length = -1
    if isinstance(steps, bool) or length < 0:
        raise ValueError(
            f"{name} is {steps!r}, but a number of steps is a whole number, 0 or more."
        )
    return length


def _choice(name: str, value: str, choices: dict[str, Any]) -> str:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but it is one of {', '.join(choices)}.")
    return value
