"""Schedules: functions of the step, whose lengths in a config may be '5%' or '3 epochs'.

Configs can also name the schedules of optax, which this module does not repeat. Each factory
returns a callable `step -> scalar` of JAX's default float type (float32; float64 under x64). The
step is a Python int, a NumPy integer or a (traced) JAX integer, and counts the updates made before
this one: the first update of a run uses the value at step 0. Float arguments may be traced scalars.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

__all__ = [
    "half_life",
    "Steps",
    "piecewise",
    "power_cool",
    "rsqrt",
    "warmup_cosine",
    "warmup_stable_decay",
]

Steps = Annotated[int | str, "steps"]
"""A number of steps; in a config also '5%', '3 epochs', '1_000_000 examples' or '10M tokens'.

A config recognizes the annotation "steps"; annotate your own functions with
Annotated[int, "steps"]."""

Schedule = Callable[[Any], jax.Array]


def warmup_cosine(
    peak_value: float,
    warmup_steps: Steps,
    decay_steps: Steps = "100%",
    init_value: float = 0.0,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Returns a schedule with a linear warm-up and a cosine decay.

    With `w = warmup_steps` and `T = decay_steps`, the value at step `t` is

        t < w        init + (peak - init) * t / w
        w <= t < T   end + (peak - end) * (0.5 * (1 + cos(pi * (t - w) / (T - w)))) ** exponent
        T <= t       end

    which is `optax.warmup_cosine_decay_schedule`. With a warm-up, the first update
    uses `init_value`, and with the default of 0 leaves the parameters unchanged. If `w = T`, as
    with '5%' in a run of one step, the value from step `T` on is `end_value`.

    Args:
        peak_value: the value at step `warmup_steps`, if `decay_steps` is larger.
        warmup_steps: the length of the warm-up, in steps. It has no default: write 0 for a decay
            from the first step on.
        decay_steps: the step at which the decay ends, counted from step 0; at least 1.
        init_value: the value at step 0, if there is a warm-up.
        end_value: the value from step `decay_steps` on.
        exponent: the power to which the cosine is raised.

    Raises:
        ValueError: if a length is negative, `decay_steps` is 0, or the warm-up is longer than
            `decay_steps`.

    Example:
        >>> from optim import schedules
        >>> schedule = schedules.warmup_cosine(1.0, warmup_steps=2, decay_steps=6)
        >>> [round(float(schedule(step)), 3) for step in range(7)]
        [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]

    Reference: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983
    """
    warmup = step_count("warmup_steps", warmup_steps)
    total = step_count("decay_steps", decay_steps)
    if warmup > total or total == 0:
        raise ValueError(
            f"warmup_steps is {warmup} and decay_steps is {total}, but decay_steps includes the"
            " warm-up: make decay_steps larger than warmup_steps."
        )

    def schedule(step: ArrayLike) -> jax.Array:
        rising = interpolate(init_value, peak_value, fraction(step, 0, warmup))
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * fraction(step, warmup, total)))
        falling = interpolate(end_value, peak_value, falling ** default_float(exponent))
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
    """Returns a schedule with a warm-up, a constant phase and a final decay (WSD, trapezoid).

    With `w = warmup_steps`, `d = decay_steps`, `T = total_steps` and, within the decay,
    `x = (t - (T - d)) / d`, the value at step `t` is

        t < w            init + (peak - init) * t / w
        w <= t < T - d   peak
        T - d <= t < T   end + (peak - end) * f(x)
        T <= t           end   (peak, if d is 0)

    where `f(x)` is `1 - x` (linear), `1 - sqrt(x)` (sqrt) or `0.5 * (1 + cos(pi * x))`
    (cosine). In a run of one step, '5%' is one step for both; then the decay is left out.

    Args:
        peak_value: the value between warm-up and decay.
        warmup_steps: the length of the warm-up, in steps; 0 for none.
        decay_steps: the length of the decay, in steps; 0 for none.
        total_steps: the step at which the decay ends.
        init_value: the value at step 0, if there is a warm-up.
        end_value: the value from step `total_steps` on, if there is a decay.
        shape: 'linear', 'sqrt' or 'cosine'.

    Raises:
        ValueError: if a length is negative, warm-up and decay together are longer than
            `total_steps`, or the shape is unknown.

    Example:
        >>> from optim import schedules
        >>> schedule = schedules.warmup_stable_decay(
        ...     1.0, warmup_steps=2, decay_steps=4, total_steps=8
        ... )
        >>> [float(schedule(step)) for step in range(9)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]

    References: Hu et al., MiniCPM, https://arxiv.org/abs/2404.06395; Hägele et al., Scaling Laws
      and Compute-Optimal Training Beyond Fixed Training Durations (the sqrt shape),
      https://arxiv.org/abs/2405.18392
    """
    warmup = step_count("warmup_steps", warmup_steps)
    decay = step_count("decay_steps", decay_steps)
    total = step_count("total_steps", total_steps)
    decay = fit_after(warmup, "decay_steps", decay, total)
    shapes = {
        "linear": lambda x: 1.0 - x,
        "sqrt": lambda x: 1.0 - jnp.sqrt(x),
        "cosine": lambda x: 0.5 * (1.0 + jnp.cos(jnp.pi * x)),
    }
    fall = shapes[choice("shape", shape, shapes)]

    def schedule(step: ArrayLike) -> jax.Array:
        rising = interpolate(init_value, peak_value, fraction(step, 0, warmup))
        falling = fall(fraction(step, total - decay, total)) if decay else 1.0
        falling = interpolate(end_value, peak_value, default_float(falling))
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
    """Returns a schedule with a warm-up, an inverse square root and an optional cool-down.

    With `w = warmup_steps`, `c = cooldown_steps` and `T = total_steps`, the value at step
    `t` is

        t < w            init + (peak - init) * t / w
        w <= t < T - c   r(t) = peak / sqrt(1 + (t - w) / timescale)
        T - c <= t < T   end + (r(t) - end) * (T - t) / c
        T <= t           end   (r(t), if c is 0; T is then unused)

    In a run of one step, '5%' is one step for both; then the cool-down is left out. With
    `timescale = warmup_steps` the value is `peak * sqrt(w / t)`, the Transformer's schedule.

    Args:
        peak_value: the value at step `warmup_steps`.
        warmup_steps: the length of the warm-up, in steps; 0 for none.
        timescale: the steps after the warm-up in which the value falls to `peak / sqrt(2)`; at
            least 1.
        cooldown_steps: the length of the final linear decay, in steps; 0 for none.
        total_steps: the step at which the cool-down ends.
        init_value: the value at step 0, if there is a warm-up.
        end_value: the value from step `total_steps` on, if there is a cool-down.

    Raises:
        ValueError: if a length is negative, the timescale is 0, or warm-up and cool-down together
            are longer than `total_steps`.

    Example:
        >>> from optim import schedules
        >>> schedule = schedules.rsqrt(1.0, warmup_steps=2, timescale=2)
        >>> [round(float(schedule(step)), 3) for step in (0, 1, 2, 4, 8)]
        [0.0, 0.5, 1.0, 0.707, 0.5]

    References: Vaswani et al., https://arxiv.org/abs/1706.03762; Zhai et al., Scaling Vision
      Transformers (timescale and cool-down), https://arxiv.org/abs/2106.04560
    """
    warmup = step_count("warmup_steps", warmup_steps)
    scale = step_count("timescale", timescale)
    cooldown = step_count("cooldown_steps", cooldown_steps)
    if scale == 0:
        raise ValueError(
            "timescale is 0, but the steps after the warm-up are divided by it: give"
            " a positive number of steps."
        )
    total = step_count("total_steps", total_steps) if cooldown else warmup
    cooldown = fit_after(warmup, "cooldown_steps", cooldown, total)

    def schedule(step: ArrayLike) -> jax.Array:
        rising = interpolate(init_value, peak_value, fraction(step, 0, warmup))
        # At least 0, because `where` computes the square root of the other side as well.
        after = default_float(jnp.maximum(jnp.asarray(step) - warmup, 0))
        falling = default_float(peak_value) / jnp.sqrt(1.0 + after / scale)
        if cooldown:
            left = 1.0 - fraction(step, total - cooldown, total)
            falling = interpolate(end_value, falling, left)
        return jnp.where(jnp.asarray(step) < warmup, rising, falling)

    return schedule


def power_cool(
    peak_value: float, end: Steps = "100%", flat_until: Steps = 0, power: float = 1.2
) -> Schedule:
    """Returns a schedule that is constant and then cools down along a power law (PowerCool).

    With `T = end` and `f = flat_until`, the value at step `t` is

        t < f        peak
        f <= t < T   peak * ((T - t) / (T - f)) ** power
        T <= t       0

    which is `min(peak, c * (T - t) ** power)` with `c = peak / (T - f) ** power`, as the entries of
    modded-nanogpt's optimizer track write it. There `T` lies beyond the last step of the run, so
    that the rate of the last step is not zero: give an integer larger than the number of steps.

    Args:
        peak_value: the value until step `flat_until`.
        end: the step at which the value would be 0; may be larger than the number of steps.
        flat_until: the step at which the cool-down begins.
        power: the exponent of the power law; 1 is a linear cool-down.

    Raises:
        ValueError: if `flat_until` is not less than `end`.

    Example:
        >>> from optim import schedules
        >>> schedule = schedules.power_cool(1.0, end=6, flat_until=2, power=2.0)
        >>> [float(schedule(step)) for step in range(7)]
        [1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0]

    Reference: https://github.com/KellerJordan/modded-nanogpt, records/track_3_optimization
    """
    last = step_count("end", end)
    if (flat := step_count("flat_until", flat_until)) >= last:
        raise ValueError(
            f"flat_until is {flat} and end is {last}, which leaves no step for the cool-down: make"
            " end larger than flat_until."
        )

    def schedule(step: ArrayLike) -> jax.Array:
        left = default_float(jnp.clip(last - jnp.asarray(step), 0, last - flat)) / (last - flat)
        return default_float(peak_value) * left ** default_float(power)

    return schedule


def half_life(peak_value: float, warmup_steps: Steps, init_value: float = 0.9) -> Schedule:
    """Returns a schedule for the decay of an average, whose half-life grows linearly (AdEMAMix).

    The half-life of an average with decay b is h = log(1/2) / log(b) updates. With
    `w = warmup_steps`, the value at step `t < w` is the decay of the half-life

        h(init) + (h(peak) - h(init)) * t / w

    and from step `w` on it is the peak. The paper uses it for `b3` of AdEMAMix, with `b1` as
    `init_value`, and optax.linear_schedule from 0 for `alpha`, both over the same steps. This is
    the schedule of the authors' program for optax; theirs for PyTorch counts steps from 1.

    Args:
        peak_value: the decay from step `warmup_steps` on, in (0, 1).
        warmup_steps: the length of the warm-up, in steps; 0 for none.
        init_value: the decay at step 0, in (0, 1).

    Example:
        >>> from optim import schedules
        >>> schedule = schedules.half_life(0.5 ** (1 / 9), warmup_steps=4, init_value=0.5)
        >>> for step in (0, 2, 4):  # half-lives of 1, 5 and 9 updates
        ...     print(round(float(schedule(step)) ** (1 + 2 * step), 6))
        0.5
        0.5
        0.5

    Reference: Pagliardini, Ablin and Grangier, The AdEMAMix Optimizer,
      https://arxiv.org/abs/2409.03137
    """
    warmup = step_count("warmup_steps", warmup_steps)

    def schedule(step: ArrayLike) -> jax.Array:
        init, peak = default_float(init_value), default_float(peak_value)
        half = jnp.log(default_float(0.5))
        life = interpolate(half / jnp.log(init), half / jnp.log(peak), fraction(step, 0, warmup))
        return jnp.where(jnp.asarray(step) < warmup, 0.5 ** (1 / life), peak)

    return schedule


def piecewise(
    boundaries: Sequence[Steps], values: Sequence[float], interpolation: str = "constant"
) -> Schedule:
    """Returns a schedule that interpolates between values at given steps.

    With boundaries `b[0] < b[1] < ...` and `b[-1] = 0`, the value at step `t` in
    `b[i - 1] <= t < b[i]` is, with `x = (t - b[i - 1]) / (b[i] - b[i - 1])`,

        constant   v[i]
        linear     v[i] + (v[i + 1] - v[i]) * x
        cosine     v[i] + (v[i + 1] - v[i]) * 0.5 * (1 - cos(pi * x))

    and from the last boundary on it is the last value. So 'constant' jumps to `v[i + 1]` at step
    `b[i]`, and the other two reach `v[i + 1]` at that step.

    Args:
        boundaries: steps, positive and increasing.
        values: floats, one more than there are boundaries; the first is the value at step 0.
        interpolation: 'constant', 'linear' or 'cosine'.

    Raises:
        ValueError: if the boundaries are not positive and increasing, the number of values is not
            the number of boundaries plus one, or the interpolation is unknown.

    Example:
        >>> from optim import schedules
        >>> schedule = schedules.piecewise([2, 4], [1.0, 0.5, 0.0], interpolation="linear")
        >>> [float(schedule(step)) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    ends = [step_count(f"boundaries[{i}]", b) for i, b in enumerate(boundaries)]
    starts = [0, *ends[:-1]]
    if any(end <= start for start, end in zip(starts, ends, strict=False)):
        raise ValueError(f"boundaries must be positive and increasing, got {ends}.")
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
    rise = shapes[choice("interpolation", interpolation, shapes)]

    def schedule(step: ArrayLike) -> jax.Array:
        value = default_float(values[-1])
        # The last assignment decides: the earliest piece whose end is after the step.
        for i in reversed(range(len(ends))):
            x = rise(fraction(step, starts[i], ends[i]))
            piece = interpolate(values[i], values[i + 1], x)
            value = jnp.where(jnp.asarray(step) < ends[i], piece, value)
        return value

    return schedule


def fit_after(warmup: int, name: str, last: int, total: int) -> int:
    """Returns the length of the last phase between warm-up and end; ValueError if it is too long.

    Example:
        >>> fit_after(10, "decay_steps", 20, total=100), fit_after(1, "decay_steps", 1, total=1)
        (20, 0)
        >>> fit_after(60, "decay_steps", 50, total=100)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: warmup_steps is 60 and decay_steps is 50, together more than total_steps, ...
    """
    # In a run of one step, where "5%" is one step for both, the warm-up has precedence.
    length = 1 - warmup if total == max(warmup, last) == 1 else last
    if warmup + length > total:
        raise ValueError(
            f"warmup_steps is {warmup} and {name} is {last}, together more than total_steps, which"
            f" is {total}: shorten one of the two."
        )
    return length


def default_float(value: ArrayLike) -> jax.Array:
    """Casts to the default float type: float32, or float64 under x64."""
    return jnp.asarray(value, jnp.result_type(float))


def interpolate(start: ArrayLike, end: ArrayLike, fraction: jax.Array) -> jax.Array:
    """Returns the value at a fraction of the way from `start` to `end`, in the default float type.

    Example:
        >>> float(interpolate(1.0, 3.0, jnp.asarray(0.25)))
        1.5
    """
    return default_float(start) + (default_float(end) - default_float(start)) * fraction


def fraction(step: ArrayLike, begin: int, end: int) -> jax.Array:
    """Returns (step - begin) / (end - begin), clipped to [0, 1], in the default float type.

    Example:
        >>> [float(fraction(step, 2, 6)) for step in (0, 2, 3, 6, 9)]
        [0.0, 0.0, 0.25, 1.0, 1.0]
    """
    if begin == end:  # the phase is over from this step on
        return default_float(jnp.asarray(step) >= end)
    # Integers are subtracted because float32 does not represent steps above 2**24 exactly.
    return default_float(jnp.clip(jnp.asarray(step) - begin, 0, end - begin)) / (end - begin)


def step_count(name: str, steps: int | str) -> int:
    """Returns a number of steps; raises ValueError unless it is an integer of at least 0."""
    # Strings such as "5%" are refused, too: only a config resolves them.
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
    """Returns `value`; raises ValueError if it is not a key of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    return value
