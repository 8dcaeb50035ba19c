"""Schedules against closed forms written in NumPy, and against optax."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optim import schedules

HALF: Any = 10.5
STEPS = [0, 1, 7, 9, 10, 11, 50, 69, 70, 71, 99, 100, 101, 1000]


def warmup(t, w, peak, init):
    return init + (peak - init) * t / w


def cosine(t, w=10, total=100, peak=0.3, init=0.1, end=0.02, exponent=1.5):
    if t < w:
        return warmup(t, w, peak, init)
    x = min((t - w) / (total - w), 1.0)
    return end + (peak - end) * (0.5 * (1 + math.cos(math.pi * x))) ** exponent


def stable(t, shape, w=10, d=30, total=100, peak=0.3, init=0.1, end=0.02):
    if t < w:
        return warmup(t, w, peak, init)
    if t < total - d:
        return peak
    x = min((t - (total - d)) / d, 1.0)
    factor = {"linear": 1 - x, "sqrt": 1 - math.sqrt(x), "cosine": (1 + math.cos(math.pi * x)) / 2}
    return end + (peak - end) * factor[shape]


def inverse_root(t, w=10, scale=40, c=30, total=100, peak=0.3, init=0.1, end=0.02):
    if t < w:
        return warmup(t, w, peak, init)
    value = peak / math.sqrt(1 + (t - w) / scale)
    if c and t >= total - c:
        value = end + (value - end) * max(total - t, 0) / c
    return value


def growing_half_life(t, w=10, peak=0.99, init=0.8):
    if t >= w:
        return peak
    first, last = (math.log(0.5) / math.log(decay) for decay in (init, peak))
    return 0.5 ** (1 / warmup(t, w, last, first))


COMMON = {"peak_value": 0.3, "warmup_steps": 10, "init_value": 0.1, "end_value": 0.02}
CASES = {
    "warmup_cosine": (schedules.warmup_cosine(**COMMON, decay_steps=100, exponent=1.5), cosine),
    **{
        shape: (
            schedules.warmup_stable_decay(**COMMON, decay_steps=30, total_steps=100, shape=shape),
            lambda t, shape=shape: stable(t, shape),
        )
        for shape in ["linear", "sqrt", "cosine"]
    },
    "half_life": (schedules.half_life(0.99, 10, 0.8), growing_half_life),
    "half_life, no warm-up": (schedules.half_life(0.99, 0), lambda t: 0.99),
    "rsqrt": (
        schedules.rsqrt(**COMMON, timescale=40, cooldown_steps=30, total_steps=100),
        inverse_root,
    ),
    "rsqrt forever": (
        schedules.rsqrt(0.3, 10, timescale=40, init_value=0.1),
        lambda t: inverse_root(t, c=0),
    ),
    "power cool": (
        schedules.power_cool(0.3, 100, 10, 1.5),
        lambda t: 0.3 * min(max(100 - t, 0) / 90, 1) ** 1.5,
    ),
    "piecewise constant": (
        schedules.piecewise([10, 70], [1.0, 0.5, 0.1]),
        lambda t: 1.0 if t < 10 else 0.5 if t < 70 else 0.1,
    ),
    "piecewise linear": (
        schedules.piecewise([10, 70], [1.0, 0.5, 0.1], "linear"),
        lambda t: np.interp(t, [0, 10, 70], [1.0, 0.5, 0.1]),
    ),
    "piecewise cosine": (
        schedules.piecewise([100], [1.0, 0.2], "cosine"),
        lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * min(t / 100, 1))) / 2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_schedules_equal_their_closed_form_for_every_kind_of_step(name):
    schedule, expected = CASES[name]
    jitted = jax.jit(schedule)
    for t in STEPS:
        for step in (t, np.int64(t), np.int32(t)):
            value = schedule(step)
            assert value.shape == () and value.dtype == jnp.float32 and not value.weak_type
            np.testing.assert_allclose(value, expected(t), rtol=1e-6)
        np.testing.assert_allclose(jitted(jnp.int32(t)), expected(t), rtol=1e-6)


def test_float_arguments_may_be_traced():
    def value(peak, init, end, exponent):
        return schedules.warmup_cosine(peak, 10, 100, init, end, exponent)(42)

    traced = jax.jit(value)(0.3, 0.1, 0.02, 1.5)
    np.testing.assert_allclose(traced, cosine(42), rtol=1e-6)
    many = jax.vmap(lambda p: schedules.piecewise([5], [p, 2 * p], "linear")(5))(jnp.arange(3.0))
    np.testing.assert_array_equal(many, [0.0, 2.0, 4.0])
    jax.jit(lambda p: schedules.warmup_stable_decay(p, 1, 2, 9)(3) + schedules.rsqrt(p, 1)(3))(0.1)


def test_schedules_are_exact_at_their_ends():
    for schedule, _ in [CASES["warmup_cosine"], CASES["sqrt"], CASES["rsqrt"]]:
        assert schedule(0) == np.float32(0.1)
        assert schedule(10) == np.float32(0.3)
        assert schedule(100) == schedule(10**9) == np.float32(0.02)


def test_steps_beyond_the_precision_of_float32_are_exact():
    # 2**24 + 1 is no float32; the difference to the boundary is.
    schedule = schedules.warmup_stable_decay(1.0, 0, 4, 2**24 + 4)
    assert [float(schedule(2**24 + i)) for i in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_schedules_agree_with_optax():
    ours = schedules.warmup_cosine(0.3, 10, 100, 0.1, 0.02, 2.0)
    theirs = optax.warmup_cosine_decay_schedule(0.1, 0.3, 10, 100, 0.02, 2.0)
    steps = schedules.piecewise([10, 70], [1.0, 0.5, 0.1])
    optax_steps = optax.piecewise_constant_schedule(1.0, {10: 0.5, 70: 0.2})
    line = schedules.piecewise([10, 70], [1.0, 0.5, 0.1], "linear")
    optax_line = optax.piecewise_interpolate_schedule("linear", 1.0, {10: 0.5, 70: 0.2})
    trapezoid = schedules.warmup_stable_decay(0.3, 10, 30, 100, 0.1, 0.02)
    optax_trapezoid = optax.join_schedules(
        [
            optax.linear_schedule(0.1, 0.3, 10),
            optax.constant_schedule(0.3),
            optax.linear_schedule(0.3, 0.02, 30),
        ],
        [10, 70],
    )
    for t in STEPS:
        np.testing.assert_allclose(ours(t), theirs(t), rtol=1e-5)
        np.testing.assert_allclose(steps(t), optax_steps(t), rtol=1e-6)
        np.testing.assert_allclose(line(t), optax_line(t), rtol=1e-6)
        np.testing.assert_allclose(trapezoid(t), optax_trapezoid(t), rtol=1e-5)


def test_the_transformer_schedule_agrees_with_the_paper():
    # Vaswani et al.: d**-0.5 * min(t**-0.5, t * w**-1.5), with its peak at t = w.
    schedule = schedules.rsqrt(128**-0.5 * 400**-0.5, 400, timescale=400)
    for t in [1, 100, 399, 400, 401, 10_000]:
        expected = 128**-0.5 * min(t**-0.5, t * 400**-1.5)
        np.testing.assert_allclose(schedule(t), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("peak", "factor", "flat_until", "tolerance"),
    [
        (0.3, 4.976805410800738e-05, 1487, 1e-13),  # the embedding
        (1 / 320, 5.184172302917436e-07, 1487, 1e-13),  # the head
        (0.01, 1.6589351369335795e-06, 1487, 1e-13),  # gains and biases
        (0.0375, 3.3169534699576625e-06, 514, 3e-4),  # matrices: their factor is for step 513.6
    ],
)
def test_power_cool_agrees_with_the_authors_program(peak, factor, flat_until, tolerance):
    """The constants of train_gpt_cwd_SOTA.py in modded-nanogpt's track 3, of 2026-06-19.

    Its function is min(initial_lr, power_c * max(0, t_end - step) ** power), with t_end 2900.
    """
    with jax.enable_x64(True):
        schedule = schedules.power_cool(peak, end=2900, flat_until=flat_until)
        for step in (0, 1, 513, 514, 1000, 1486, 1487, 1488, 2000, 2690, 2899, 2900, 2901, 5000):
            authors = min(peak, factor * max(0.0, 2900 - step) ** 1.2)
            np.testing.assert_allclose(schedule(step), authors, rtol=tolerance, atol=0)


def test_schedules_are_float64_under_x64():
    with jax.enable_x64(True):
        value = schedules.warmup_cosine(0.3, 10, 100, 0.1, 0.02, 1.5)(42)
        assert value.dtype == jnp.float64
        np.testing.assert_allclose(value, cosine(42), rtol=1e-14)


def test_a_schedule_without_warmup_begins_at_the_peak():
    assert schedules.warmup_cosine(0.5, 0, 10)(0) == 0.5
    assert schedules.warmup_stable_decay(0.5, 0, 0, 10)(10) == 0.5
    assert schedules.rsqrt(0.5)(0) == 0.5


def test_a_run_of_one_or_two_steps_has_room_for_a_warm_up():
    # What '5%', '10%' and '100%' of such runs come to.
    one = [
        schedules.warmup_cosine(0.3, 1, 1, 0.1, 0.02),
        schedules.warmup_stable_decay(0.3, 1, 1, 1, 0.1, 0.02),
        schedules.rsqrt(0.3, 1, 1, 1, 1, 0.1, 0.02),
    ]
    two = [
        schedules.warmup_cosine(0.3, 1, 2, 0.1, 0.02),
        schedules.warmup_stable_decay(0.3, 1, 1, 2, 0.1, 0.02),
        schedules.rsqrt(0.3, 1, 1, 1, 2, 0.1, 0.02),
    ]
    values = [[float(schedule(t)) for t in range(4)] for schedule in [*one, *two]]
    root = [0.3 / math.sqrt(1 + t) for t in range(3)]
    expected = [
        [0.1, 0.02, 0.02, 0.02],
        [0.1, 0.3, 0.3, 0.3],
        [0.1, *root],
        [0.1, 0.3, 0.02, 0.02],
        [0.1, 0.3, 0.02, 0.02],
        [0.1, 0.3, 0.02, 0.02],
    ]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    whole = schedules.warmup_cosine(0.3, 10, 10, 0.1, 0.02)
    np.testing.assert_allclose(
        [whole(t) for t in (0, 5, 9, 10, 11)], [0.1, 0.2, 0.28, 0.02, 0.02], rtol=1e-6
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: schedules.warmup_cosine(1.0, 0), "decay_steps is '100%'.*only in a config"),
        (lambda: schedules.warmup_cosine(1.0, "5%", 10), "warmup_steps is '5%'"),
        (lambda: schedules.warmup_cosine(1.0, -1, 10), "warmup_steps must be .* got -1"),
        (lambda: schedules.warmup_cosine(1.0, 11, 10), "larger than warmup_steps"),
        (lambda: schedules.warmup_cosine(1.0, 0, 0), "decay_steps is 0"),
        (lambda: schedules.warmup_stable_decay(1.0, 2, 0, 1), "warmup_steps is 2 and"),
        (lambda: schedules.power_cool(1.0), "end is '100%'.*only in a config"),
        (lambda: schedules.power_cool(1.0, 10, 10), "flat_until is 10 and end is 10, which leaves"),
        (lambda: schedules.warmup_stable_decay(1.0, 1, 1, 0), "together more than total"),
        (lambda: schedules.rsqrt(1.0, 1, cooldown_steps=2, total_steps=1), "cooldown_steps is 2"),
        (lambda: schedules.warmup_cosine(1.0, 0, HALF), "decay_steps must be .* got 10.5"),
        (lambda: schedules.warmup_cosine(1.0, True, 10), "warmup_steps must be .* got True"),
        (lambda: schedules.warmup_stable_decay(1.0, 60, 50, 100), "together more than total"),
        (lambda: schedules.warmup_stable_decay(1.0, 1, 5, 9, shape="cos"), "linear, sqrt, cosine"),
        (lambda: schedules.rsqrt(1.0, 10, timescale=0), "timescale is 0"),
        (lambda: schedules.rsqrt(1.0, 60, cooldown_steps=50, total_steps=100), "together more"),
        (lambda: schedules.rsqrt(1.0, 6, cooldown_steps=5), "total_steps is '100%'"),
        (lambda: schedules.piecewise([10, 10], [1, 2, 3]), "increasing"),
        (lambda: schedules.piecewise([0], [1, 2]), "positive"),
        (lambda: schedules.piecewise(["30%"], [1, 2]), r"boundaries\[0\] is '30%'"),
        (lambda: schedules.piecewise([10], [1, 2, 3]), "give 2 values"),
        (lambda: schedules.piecewise([10], [1, 2], "cubic"), "constant, linear, cosine"),
    ],
)
def test_contradicting_arguments_are_refused_with_a_sentence(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert str(error.value).endswith(".")
