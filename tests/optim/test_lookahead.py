"""Lookaheads and readouts against the programs of their authors, closed forms and optax."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim

FIGURES = np.load(Path(__file__).with_name("lookahead_figures.npz"))
NAMES = ("embed", "w", "b")
STEPS = 60


def cool(peak: float) -> Any:
    """A flat rate and then a cool-down, as in the programs."""
    return lambda t: peak * jnp.minimum(1.0, 1.5 * (1 - t.astype(float) / STEPS))


def groups() -> dict[str, optim.Group]:
    adamw = partial(optax.adamw, learning_rate=cool(0.05), b1=0.8, b2=0.95, weight_decay=0.1)
    sgd = partial(optax.sgd, learning_rate=cool(0.03), momentum=0.9)
    return {"matrices": optim.group("w", sgd), "aux": optim.group(".*", adamw)}


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "scheduled": (
        dict(
            lookahead=optim.ema_nesterov(0.9, 0.9, start=9, stop=45, scheduled_by="aux"),
            readout=optim.weight_ema(7, start=30, stop=52, blend=0.6, exclude="embed"),
        ),
        True,
    ),
    "given": (dict(lookahead=optim.ema_nesterov(0.6, 0.8)), False),
    "muloco": (dict(lookahead=optim.outer_nesterov(0.7, 0.6, every=4)), True),
    "snoo": (dict(lookahead=optim.outer_nesterov(0.68, 0.37, every=7)), True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_lookahead_agrees_with_its_authors_program(name: str):
    """The figures were computed in float64 by these programs, around torch's AdamW and SGD.

    scheduled and given: class EMA_Nesterov of train_gpt_cwd_SOTA.py in modded-nanogpt's
    records/track_3_optimization (2026-06-19); scheduled: also its statements for the tail-EMA, of
    all but "embed". muloco: class NesterovOuterOptimizer of train_gpt_simple_muloco_normuonh.py
    (2026-05-04). snoo: class Snoo of records/track_2_medium/2025-09-16_Snoo, whose count began at
    1, so that the first outer step comes after k updates and not after one. bfloat16 and float32
    were replaced by float64. Gradients are noise; but for `given`, plus those of a quadratic at the
    parameters that the model holds.
    """
    options, curved = CASES[name]
    optimizer = optim.optimizer(groups(), **options)
    with jax.enable_x64(True):
        update = jax.jit(optimizer.update)
        params = {n: jnp.asarray(FIGURES[f"start_{n}"]) for n in NAMES}
        state = optimizer.init(params)
        places = {int(t): i for i, t in enumerate(FIGURES["at"])}
        # The weights without a readout, to compare both.
        plain = optim.optimizer(groups(), lookahead=options["lookahead"])
        for t in range(STEPS):
            held, grads = params, {n: jnp.asarray(FIGURES[f"noise_{n}"][t]) for n in NAMES}
            if curved:
                grads = {
                    n: 0.3 * g + FIGURES[f"bowl_{n}"] * (held[n] - 0.5) for n, g in grads.items()
                }
            params, state = update(grads, state, held)
            if t not in places:
                continue
            found = {
                "held": held,
                "weights": plain.eval_params(state._replace(readout=()), params),
                "read": optimizer.eval_params(state, params),
            }
            for what, values in found.items():
                for n in NAMES:
                    key = f"{name}_{what}_{n}"
                    if key in FIGURES:
                        wanted = FIGURES[key][places[t]]
                        np.testing.assert_allclose(values[n], wanted, rtol=0, atol=1e-13)
