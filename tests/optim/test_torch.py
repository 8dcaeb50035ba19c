"""The optimizers that torch.optim and packages for PyTorch also have: 50 steps agree to 1e-6.

The cases, and where the definitions differ and why, are in torch_cases.py; `ALONE` says what only
torch has. Torch and the packages are a test extra; what is absent is skipped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.cosine import COSINE, STEPS
from tests.programs import adan_by_the_paper
from tests.torch_cases import DIFFERENT, SAME, Case, difference

torch = pytest.importorskip("torch", reason="torch is not installed: `make torch` adds it.")
pytestmark = pytest.mark.torch
t = torch.optim

ALONE = {
    "ASGD": "optax has no averaged SGD with torch's schedule of steps; an EMA of the parameters is"
    " an option of the training loop",
    "SparseAdam": "it is for sparse gradients, which JAX does not have",
}


def differences(case: Case) -> list[float]:
    """Measures at constant learning rates and, where they can follow one, under a cosine."""
    package = case.package.split(".")[0]
    pytest.importorskip(package, reason=f"{package} is not installed: `make torch` adds it.")
    return [difference(case, cosine) for cosine in ((False,) if case.constant else (False, True))]


@pytest.mark.parametrize("name", SAME)
def test_an_optimizer_agrees_with_torch_at_constant_rates_and_under_a_cosine(name):
    assert max(differences(SAME[name])) < 1e-6


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_documented_difference_to_torch_still_exists(name):
    assert max(differences(DIFFERENT[name])) > 1e-5, "They agree now: move the row to SAME."


def test_our_restatement_of_adan_agrees_with_pytorch_optimizer():
    package = pytest.importorskip("pytorch_optimizer", reason="`make torch` adds it.")
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal((4, 7)), rng.standard_normal((STEPS, 4, 7)) + 0.5
    weights, seen = torch.tensor(start.copy(), requires_grad=True), []
    optimizer = package.Adan([weights], weight_decay=0.1)
    for g, rate in zip(grads, 0.02 * COSINE, strict=True):
        optimizer.param_groups[0]["lr"], weights.grad = rate, torch.tensor(g.copy())
        optimizer.step()
        seen.append(weights.detach().numpy().copy())
    expected = [*adan_by_the_paper(start, grads, 0.02 * COSINE, 0.98, 0.92, 0.99, 1e-8, 0.1)]
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-12)


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
    cases = {**DIFFERENT, **SAME}.items()
    known = {name.split(",")[0] for name, case in cases if case.package == "torch.optim"}
    known |= set(ALONE) | {"LBFGS"}
    there = {
        name
        for name, thing in vars(t).items()
        if isinstance(thing, type) and issubclass(thing, t.Optimizer) and thing is not t.Optimizer
    }
    assert known == there
    assert all(case.why for case in DIFFERENT.values())
