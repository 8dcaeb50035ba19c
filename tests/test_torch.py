"""The optimizers that torch.optim also has, against it: 50 steps in float64 agree to 1e-6.

The cases, and where the definitions part and why, are in torch_cases.py; `ALONE` says what only
torch has. Torch is a test extra; where it is absent, this file is skipped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.torch_cases import DIFFERENT, SAME, STEPS, difference

torch = pytest.importorskip("torch", reason="torch is not installed: `make torch` adds it.")
pytestmark = [pytest.mark.torch, pytest.mark.laws]
t = torch.optim

ALONE = {
    "ASGD": "optax has no averaged SGD with torch's schedule of steps; an EMA of the parameters is"
    " an option of the training loop",
    "SparseAdam": "it is for sparse gradients, which JAX does not have",
}


@pytest.mark.parametrize("name", SAME)
def test_an_optimizer_agrees_with_torch(name):
    assert difference(SAME[name]) < 1e-6


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_documented_difference_to_torch_still_exists(name):
    assert difference(DIFFERENT[name]) > 1e-5, "They agree now: move the row to SAME."


def test_muon_agrees_with_torch_in_bfloat16():
    # 50 steps of 0.02 in bfloat16: the orthogonal factors agree to about a percent.
    assert 1e-6 < difference(DIFFERENT["Muon, bfloat16"]) < 0.02


def test_lbfgs_agrees_with_torch():
    rng = np.random.default_rng(0)
    root, start = rng.standard_normal((8, 8)), 0.01 * rng.standard_normal(8)
    matrix = root @ root.T / 8 + np.eye(8)
    weights, quadratic = torch.tensor(start, requires_grad=True), torch.tensor(matrix)
    optimizer = t.LBFGS(
        [weights], 0.05, max_iter=1, history_size=5, tolerance_grad=0, tolerance_change=0
    )

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * weights @ quadratic @ weights + 100 * torch.sum(weights**4)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)

    with jax.enable_x64(True):
        tx = optax.lbfgs(0.05, memory_size=5, linesearch=None)
        params: Any = jnp.asarray(start)
        loss = lambda w: 0.5 * w @ matrix @ w + 100 * jnp.sum(w**4)  # noqa: E731
        # Torch divides its first step by the gradient's 1-norm where that is above 1, optax by the
        # 2-norm: here neither does.
        assert np.abs(jax.grad(loss)(params)).sum() < 1

        def step(carry, _):
            updates, state = tx.update(jax.grad(loss)(carry[0]), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
    expected = weights.detach().numpy()
    assert 0.5 < np.abs(expected - start).max() / np.abs(start).max() < 1
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_every_torch_optimizer_is_classified():
    known = {name.split(",")[0] for name in [*SAME, *DIFFERENT]} | set(ALONE) | {"LBFGS"}
    there = {
        name
        for name, thing in vars(t).items()
        if isinstance(thing, type) and issubclass(thing, t.Optimizer) and thing is not t.Optimizer
    }
    assert known == there
    assert all(case.why for case in DIFFERENT.values())
