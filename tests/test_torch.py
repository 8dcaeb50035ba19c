"""The optimizers that torch.optim also has, against it: 50 steps in float64 agree to 1e-6.

`SAME` says with which arguments they agree, `DIFFERENT` where the definitions part and why, and
`ALONE` what only torch has. Torch is a test extra; where it is absent, this file is skipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optim.muon import muon
from optim.rprop import rprop

torch = pytest.importorskip("torch", reason="torch is not installed: `make torch` adds it.")
pytestmark = pytest.mark.torch

STEPS = 50


class Case(NamedTuple):
    """One comparison.

    Attributes:
        theirs: makes a torch optimizer from parameters.
        ours: makes an optax optimizer.
        why: what differs, in a case of `DIFFERENT`; a remark on the arguments in one of `SAME`.
        matrices: whether there are only matrices, which torch keeps as [outputs, inputs].
    """

    theirs: Callable[[list[Any]], Any]
    ours: Callable[[], Any]
    why: str = ""
    matrices: bool = False


t = torch.optim
SAME = {
    "SGD": Case(lambda p: t.SGD(p, 0.1), lambda: optax.sgd(0.1)),
    "SGD, momentum": Case(
        lambda p: t.SGD(p, 0.1, momentum=0.9), lambda: optax.sgd(0.1, momentum=0.9)
    ),
    "SGD, Nesterov and weight decay": Case(
        lambda p: t.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda: optax.chain(
            optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9, nesterov=True)
        ),
        "torch's weight_decay is L2: it enters the momentum",
    ),
    "Adam": Case(lambda p: t.Adam(p, 0.01), lambda: optax.adam(0.01)),
    "Adam, weight decay": Case(
        lambda p: t.Adam(p, 0.01, weight_decay=0.1),
        lambda: optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01)),
        "torch's weight_decay is L2 here, and decoupled in AdamW",
    ),
    "AdamW": Case(
        lambda p: t.AdamW(p, 0.01, (0.8, 0.95), 1e-6, 0.1),
        lambda: optax.adamw(0.01, 0.8, 0.95, 1e-6, weight_decay=0.1),
    ),
    "Adamax": Case(lambda p: t.Adamax(p, 0.01), lambda: optax.adamax(0.01)),
    "NAdam": Case(
        lambda p: t.NAdam(p, 0.01, momentum_decay=1e9),
        lambda: optax.nadam(0.01),
        "torch's momentum schedule is off at an endless momentum_decay",
    ),
    "RAdam": Case(
        lambda p: t.RAdam(p, 0.01, eps=0.0),
        lambda: optax.radam(0.01, eps=0.0),
        "torch adds eps before the bias correction, optax after it",
    ),
    "Adagrad": Case(
        lambda p: t.Adagrad(p, 0.1, eps=0.0, initial_accumulator_value=0.1),
        lambda: optax.adagrad(0.1, initial_accumulator_value=0.1, eps=0.0),
        "torch adds eps to the root, optax under it; torch's accumulator begins at 0 by default",
    ),
    "Adadelta": Case(
        lambda p: t.Adadelta(p, 0.5, 0.9, 1e-6), lambda: optax.adadelta(0.5, 0.9, 1e-6)
    ),
    "RMSprop": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9),
        lambda: optax.rmsprop(0.01, 0.9, eps_in_sqrt=False),
        "optax adds eps under the root by default",
    ),
    "RMSprop, centered, momentum": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, centered=True, momentum=0.8),
        lambda: optax.rmsprop(0.01, 0.9, eps_in_sqrt=False, centered=True, momentum=0.8),
    ),
    "Rprop": Case(lambda p: t.Rprop(p, 0.01), lambda: rprop(0.01)),
    "Rprop, limits": Case(
        lambda p: t.Rprop(p, 0.1, (0.4, 1.5), (0.02, 0.15)),
        lambda: rprop(0.1, 0.4, 1.5, 0.02, 0.15),
    ),
    "Rprop, a limit below the first step": Case(
        lambda p: t.Rprop(p, 0.1, step_sizes=(1e-5, 0.05)),
        lambda: rprop(0.1, max_step_size=0.05),
    ),
    "Adafactor": Case(
        lambda p: t.Adafactor(p, 0.01),
        lambda: optax.adafactor(0.01, min_dim_size_to_factor=1),
        "torch factors matrices of any size, and caps the learning rate at 1 / sqrt(step)",
    ),
    "Muon": Case(
        lambda p: t.Muon(p, 0.02, 0.1, 0.9),
        lambda: muon(0.02, 0.9, weight_decay=0.1),
        "with torch's cast to bfloat16 taken out",
        matrices=True,
    ),
    "Muon, match_rms_adamw": Case(
        lambda p: t.Muon(p, 0.02, 0.0, 0.9, nesterov=False, adjust_lr_fn="match_rms_adamw"),
        lambda: muon(0.02, 0.9, nesterov=False, scale="match_rms_adamw"),
        "with torch's cast to bfloat16 taken out",
        matrices=True,
    ),
}

DIFFERENT = {
    "Adam, amsgrad": Case(
        lambda p: t.Adam(p, 0.01, amsgrad=True),
        lambda: optax.amsgrad(0.01),
        "torch takes the maximum before the bias correction, optax after it",
    ),
    "NAdam, momentum schedule": Case(
        lambda p: t.NAdam(p, 0.01),
        lambda: optax.nadam(0.01),
        "torch warms the momentum up (Dozat's schedule), optax keeps it constant",
    ),
    "RMSprop, defaults": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, 1e-3),
        lambda: optax.rmsprop(0.01, 0.9, 1e-3),
        "torch adds eps to the root, optax under it",
    ),
    "Adagrad, defaults": Case(
        lambda p: t.Adagrad(p, 0.1),
        lambda: optax.adagrad(0.1),
        "torch's accumulator begins at 0 with eps=1e-10 outside the root, optax's at 0.1 with"
        " eps=1e-7 under it",
    ),
    "Rprop, optax's": Case(
        lambda p: t.Rprop(p, 0.01),
        lambda: optax.rprop(0.01),
        "optax 0.2.8 makes each step one update late",
    ),
    "Adafactor, weight decay": Case(
        lambda p: t.Adafactor(p, 0.01, weight_decay=0.1),
        lambda: optax.adafactor(0.01, min_dim_size_to_factor=1, weight_decay_rate=0.1),
        "torch multiplies the decay by the learning rate, optax does not",
    ),
    "Muon, optax's": Case(
        lambda p: t.Muon(p, 0.02, 0.0, 0.9),
        lambda: optax.contrib.muon(0.02, beta=0.9),
        "optax corrects the bias of the momentum and of the gradient before Nesterov mixes them",
        matrices=True,
    ),
}

ALONE = {
    "ASGD": "optax has no averaged SGD with torch's schedule of steps; an EMA of the parameters is"
    " an option of the training loop",
    "SparseAdam": "it is for sparse gradients, which JAX does not have",
}


def problem(matrices: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 6), "v": (6, 3)} if matrices else {"w": (4, 6), "b": (5,)}
    draw = lambda: {k: rng.standard_normal(s) for k, s in shapes.items()}  # noqa: E731
    return draw(), [{k: g + 0.3 for k, g in draw().items()} for _ in range(STEPS)]


def ours(case: Case) -> dict[str, Any]:
    start, grads = problem(case.matrices)
    with jax.enable_x64(True):
        tx = case.ours()
        params: Any = jax.tree.map(jnp.asarray, start)
        state, update = tx.init(params), jax.jit(tx.update)
        for g in grads:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
        return {k: np.asarray(v) for k, v in params.items()}


def theirs(case: Case) -> dict[str, Any]:
    start, grads = problem(case.matrices)
    turn = np.transpose if case.matrices else np.copy
    params = {k: torch.tensor(turn(v).copy(), requires_grad=True) for k, v in start.items()}
    optimizer = case.theirs(list(params.values()))
    for g in grads:
        for k, p in params.items():
            p.grad = torch.tensor(turn(g[k]).copy())
        optimizer.step()
    return {k: turn(p.detach().numpy()) for k, p in params.items()}


def difference(case: Case) -> float:
    """Returns the largest difference relative to the largest parameter."""
    mine, other = ours(case), theirs(case)
    assert all(x.dtype == np.float64 for x in [*mine.values(), *other.values()])
    start = problem(case.matrices)[0]
    assert all(np.abs(mine[k] - start[k]).max() > 1e-3 for k in start)
    return max(np.abs(mine[k] - other[k]).max() / np.abs(other[k]).max() for k in mine)


@pytest.fixture
def muon_in_float64(monkeypatch):
    # torch.optim.Muon orthogonalizes in bfloat16 whatever it is given; a copy, since it then
    # divides in place.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


@pytest.mark.parametrize("name", SAME)
def test_agrees(name, muon_in_float64):
    assert difference(SAME[name]) < 1e-6


@pytest.mark.parametrize("name", DIFFERENT)
def test_still_differs(name, muon_in_float64):
    assert difference(DIFFERENT[name]) > 1e-5, "They agree now: move the row to SAME."


def test_muon_in_bfloat16_is_near():
    # 50 steps of 0.02 in bfloat16: the orthogonal factors agree to about a percent.
    assert 1e-6 < difference(SAME["Muon"]) < 0.02


def test_lbfgs():
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
