"""Optax's schedules with traced floats, against optax with the numbers themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optim.optax_schedules import traceable

STEPS = np.arange(0, 130)

# name -> arguments; the floats among them are traced. Shares of a one-cycle schedule become numbers
# of steps, so that they are given as `fixed`.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("constant_schedule", {"value": 0.3}, {}),
    (
        "polynomial_schedule",
        {"init_value": 1.0, "end_value": 0.1, "power": 2.0},
        {"transition_steps": 50, "transition_begin": 7},
    ),
    ("linear_schedule", {"init_value": 1.0, "end_value": 0.1}, {"transition_steps": 50}),
    ("cosine_decay_schedule", {"init_value": 0.3, "alpha": 0.1}, {"decay_steps": 100}),
    (
        "warmup_constant_schedule",
        {"init_value": 0.01, "peak_value": 0.3},
        {"warmup_steps": 10},
    ),
    *(
        (
            "warmup_cosine_decay_schedule",
            {"init_value": 0.1, "peak_value": peak, "end_value": 0.02, "exponent": 1.5},
            {"warmup_steps": warmup, "decay_steps": 100},
        )
        for peak in (0.3, 0.0)
        for warmup in (10, 0)
    ),
    *(
        (
            "exponential_decay",
            {"init_value": 0.5, "decay_rate": rate, **end},
            {"transition_steps": 20, "transition_begin": 5, "staircase": staircase},
        )
        for rate in (0.5, 1.1, 0.0)
        for staircase in (False, True)
        for end in ({}, {"end_value": 0.2}, {"end_value": 0.9})
    ),
    ("exponential_decay", {"init_value": 0.5, "decay_rate": 0.5}, {"transition_steps": 0}),
    (
        "warmup_exponential_decay_schedule",
        {"init_value": 0.0, "peak_value": 0.5, "decay_rate": 0.8, "end_value": 0.1},
        {"warmup_steps": 10, "transition_steps": 20, "transition_begin": 3},
    ),
    (
        "piecewise_constant_schedule",
        {"init_value": 0.5, "boundaries_and_scales": {60: 0.0, 10: 0.3, 30: 2.0}},
        {},
    ),
    ("piecewise_constant_schedule", {"init_value": 0.5}, {}),
    *(
        (
            "piecewise_interpolate_schedule",
            {"init_value": 0.5, "boundaries_and_scales": {60: 0.5, 10: 0.3, 30: 2.0}},
            {"interpolate_type": kind},
        )
        for kind in ("linear", "cosine")
    ),
    ("piecewise_interpolate_schedule", {"init_value": 0.5}, {"interpolate_type": "linear"}),
    (
        "linear_onecycle_schedule",
        {"peak_value": 0.5, "div_factor": 20.0, "final_div_factor": 1e3},
        {"transition_steps": 100, "pct_start": 0.29, "pct_final": 0.8},
    ),
    (
        "cosine_onecycle_schedule",
        {"peak_value": 0.5, "div_factor": 20.0, "final_div_factor": 1e3},
        {"transition_steps": 100, "pct_start": 0.29},
    ),
    (
        "sgdr_schedule",
        {
            "cosine_kwargs": [
                {"init_value": 0.0, "peak_value": 0.5, "warmup_steps": 5, "decay_steps": 40},
                {"init_value": 0.1, "peak_value": 0.3, "warmup_steps": 5, "decay_steps": 60},
            ]
        },
        {},
    ),
]


def _is_float(x: Any) -> bool:
    return isinstance(x, float)


@pytest.mark.parametrize(
    ("name", "floats", "fixed"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_a_schedule_of_traced_floats_has_the_values_of_optax(name, floats, fixed):
    factory = getattr(optax, name)
    reference = factory(**floats, **fixed)
    want = [float(reference(int(step))) for step in STEPS]
    leaves, structure = jax.tree.flatten(floats)
    given = [x for x in leaves if _is_float(x)]

    def values(traced: Any, steps: Any) -> Any:
        now = iter(traced)
        arguments = structure.unflatten([next(now) if _is_float(x) else x for x in leaves])
        schedule = traceable(factory)(**arguments, **fixed)
        return jax.vmap(lambda step: jnp.asarray(schedule(step), float))(steps)

    got = jax.jit(values)(jnp.asarray(given), STEPS)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-7)


def test_every_schedule_of_optax_is_tried():
    public = {name for name in dir(optax.schedules) if name[0].islower()}
    made = {name for name in public if name.endswith(("_schedule", "_decay"))}
    assert made <= {name for name, _, _ in CASES}
    # They join or inject others, and have no floats of their own.
    assert public - made == {"inject_hyperparams", "inject_stateful_hyperparams", "join_schedules"}


def test_other_functions_are_returned_as_they_are():
    assert traceable(optax.cosine_decay_schedule) is optax.cosine_decay_schedule
    assert traceable(print) is print
