"""The values of hyperparameters over a run, in the plan."""

from dataclasses import replace

import pytest

import optim
from trainer.config import load
from trainer.engine.plan import Hyperparameter, make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import load_located


def test_the_plan_lists_the_values_of_every_hyperparameter(tmp_path):
    (tmp_path / "run.yaml").write_text(
        """
model: !models.mlp {width: 8, depth: 1}
data: !data.digits
loss: !losses.softmax_cross_entropy
steps: 40
optimizer: !optim.optimizer
  clip_norm: !schedules.piecewise {values: [2.0, 0.5], boundaries: [30]}
  groups:
    kernels: !optim.group
      match: .*kernel
      optimizer: !optax.adamw
        learning_rate: !schedules.warmup_cosine {peak_value: 0.02, warmup_steps: 10}
        b2: 0.95
        weight_decay: !schedules.piecewise {values: [0.1, 0.1], boundaries: [5]}
    rest: !optim.group {match: .*, optimizer: !optim.frozen }
"""
    )
    read = load([tmp_path / "run.yaml"])
    plan = make_plan(load_located(read), read)
    found = plan.hyperparameters["kernels"]
    # Step N is the N-th update, which takes the schedule's value at N - 1.
    rate = found["learning_rate"]
    last = float(optim.schedules.warmup_cosine(0.02, warmup_steps=10, decay_steps=40)(39))
    assert (rate.peak_step, rate.first, rate.constant) == (11, 0.0, False)
    assert (rate.peak, rate.final) == pytest.approx((0.02, last))
    assert found["b2"] == Hyperparameter(0.95, 1, 0.95, 0.95, True)
    assert found["weight_decay"].constant and found["weight_decay"].peak == pytest.approx(0.1)
    assert plan.hyperparameters[""]["clip_norm"] == Hyperparameter(2.0, 1, 2.0, 0.5, False)
    assert set(plan.hyperparameters) == {"kernels", ""}
    assert str(rate) == f"peak 0.02 at step 11, final {last:.4g}"
    assert str(found["b2"]) == "0.95 constant"
    one = replace(plan, steps=1, batch_size=1, tokens=1)
    assert "\n1 step of 1 example of 1 token, 1 token in all, on 1 cpu\n" in render_plan(one)
    text = render_plan(plan)
    assert f"  learning_rate: peak 0.02 at step 11, final {last:.4g}\n" in text
    assert "  constant: b1 0.9, b2 0.95, eps 1e-08, eps_root 0, weight_decay 0.1\n" in text
    assert "Hyperparameters of all groups:\n  clip_norm: peak 2 at step 1, final 0.5\n" in text
