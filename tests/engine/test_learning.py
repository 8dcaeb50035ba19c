"""Warnings of runs that would learn nothing; see also tests/mistakes.py."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from tests import short
from tests.laws_table import ROWS, Row
from tests.mistakes import MISTAKES, answer, loss
from trainer.engine.plan_learning import rate_warnings, wrong_update

KERNEL, BIAS, SCALE = {"own/kernel": (5, 3)}, {"own/bias": (3,)}, {"own/scale": ()}
SHAPES: dict[str, Any] = {
    "all": KERNEL | BIAS | SCALE,
    "no scalar": KERNEL | BIAS,
    "matrices": {"kernels": (2, 5, 3)} | KERNEL,
    "complex": KERNEL,
}
# They pass on the gradients that they do not transform.
CLIMBS = ("optax.masked", "optax.conditionally_transform")
QUICK = ("optax.adamw", "optax.fromage", "optax.contrib.sam (transparent)", "optax.rprop")
ASKED = {row.name for row in short.covering(ROWS, [lambda row: row.family])} | {*QUICK, *CLIMBS}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.long)
        for row in ROWS
        if row.name in ASKED
    ],
)
def test_the_first_updates_of_each_family_go_down_and_with_the_other_sign_up(row: Row):
    def climbs(recipe: Any) -> bool:
        return "up the loss" in (wrong_update(recipe, SHAPES[row.params], {}) or "")

    assert climbs(row.recipe) == (row.name in CLIMBS)
    if row.name not in CLIMBS and not row.needs and not row.per_example:
        assert climbs(partial(optax.chain, row.recipe, partial(optax.scale, -1.0)))


def test_weight_decay_and_a_warm_up_from_0_are_no_climb():
    rate = optax.linear_schedule(0.0, 0.1, 1000)
    values = {"learning_rate": (np.arange(9), np.asarray([rate(step) for step in range(9)]))}
    down = partial(optax.adamw, learning_rate=rate, weight_decay=5.0)
    assert wrong_update(down, SHAPES["all"], values) is None
    up = partial(optax.chain, down, partial(optax.scale, -1.0))
    assert "up the loss" in (wrong_update(up, SHAPES["all"], values) or "")


def test_only_a_rate_that_is_0_for_most_of_the_run_is_warned_of():
    steps = np.arange(400)

    def warned(schedule: Any) -> list[str]:
        values = np.asarray([float(schedule(step)) for step in steps])
        return rate_warnings({"all": {"learning_rate": (steps, values)}})

    (text,) = warned(optax.cosine_decay_schedule(0.1, 100))
    assert "0.1 at step 1, and after step 98 of 400" in text
    for schedule in (
        optax.cosine_decay_schedule(0.1, 400),
        optax.cosine_decay_schedule(0.1, 210),
        optax.cosine_decay_schedule(0.1, 4, alpha=0.01),
        optax.linear_schedule(0.0, 0.1, 400),
        optax.constant_schedule(0.0),
    ):
        assert warned(schedule) == []


def test_a_loss_of_the_parameters_alone_has_a_gradient(tmp_path: Path):
    model = (
        "\n\nclass Valley:\n"
        "    def init(self, key, batch): return {'x': jnp.ones((1, 3))}, {}\n"
        "    def apply(self, params, state, batch, key, train):\n"
        "        return jnp.broadcast_to(params['x'], (len(batch['label']), 3)), state\n"
    )
    valley = loss("its gradient is 0", "return (outputs**2).sum(-1)", more=model, warns=True)
    old = "!models.mlp {width: 8, depth: 1, num_classes: 3, inputs: x}"
    valley = replace(valley, run=[*valley.run, (old, "!mine.Valley {}")])
    assert answer(valley, tmp_path)[0] == "silent"


def test_microbatches_do_not_hide_that_there_is_no_gradient(tmp_path: Path):
    halves = MISTAKES["loss of an argmax"]
    halves = replace(halves, run=[*halves.run, ("\nsteps: 4", "\nsteps: 4\nmicrobatches: 2")])
    assert answer(halves, tmp_path)[0] == "good"


@pytest.mark.parametrize("change", ["batch_size: 8", "mask"])
def test_a_metric_without_a_mask_is_no_warning_where_nothing_is_padded(change: str, tmp_path: Path):
    """96 examples make twelve batches of 8; a metric that reads the mask may have others."""
    padded = MISTAKES["metric that counts padding"]
    if change == "mask":
        told = replace(padded, code=padded.code.replace("loss.mean()", "(loss * _['mask']).sum()"))
    else:
        told = replace(padded, run=padded.run[:1])
    assert answer(told, tmp_path)[0] == "silent"
