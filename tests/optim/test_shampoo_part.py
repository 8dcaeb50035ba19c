"""Shampoo as a part against Distributed Shampoo, as modded-nanogpt's optimizer track runs it."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import parts
from tests import short

FIGURES = np.load(Path(__file__).with_name("shampoo_figures.npz"))
SHAPES = [(3, 5), (4, 4), (6, 2)]  # [inputs, outputs]
STEPS = 60
# A cosine with warm-up.
_T = np.arange(STEPS)
RATES = np.where(_T < 5, (_T + 1) / 5, 0.5 * (1 + np.cos(np.pi * (_T - 5) / (STEPS - 4))))


def problem() -> tuple[list[Any], list[Any]]:
    """Draws the first parameters, and gradients [steps, *shape] of full rank and unequal scales."""
    rng = np.random.default_rng(7)
    start, grads = [], []
    for shape in SHAPES:
        start.append(rng.standard_normal(shape))
        rows, columns = (np.exp(0.5 * rng.standard_normal(size)) for size in shape)
        noise = rng.standard_normal((STEPS, *shape)) + 0.3
        grads.append(noise * rows[:, None] * columns)
    return start, grads


START, GRADS = problem()


def grafted(rate: Any, b2: float, adam_eps: float, decay: float, begin: int, **options: Any) -> Any:
    shampoo = parts.shampoo(b2, **options)
    graft = parts.graft(parts.adam(0.9, b2, adam_eps), begin)
    return optim.chain(rate, [optax.ema(0.9), shampoo, graft], [parts.decay(decay)])


PINV: dict[str, Any] = {"eps": None, "tolerance": 0.0}
# The learning rate, and the chain at one.
CASES: dict[str, tuple[float, Any]] = {
    "result_21": (0.0015, lambda rate: grafted(rate, 0.95, 1e-10, 0.2, 5, every=5)),
    "result_35": (0.01, lambda rate: grafted(rate, 0.9, 1e-15, 0.1, 1, **PINV)),
    "half": (0.05, lambda rate: grafted(rate, 0.9, 1e-15, 0.1, 5, exponent=0.5, start=5, **PINV)),
    "one_sided": (0.05, lambda rate: grafted(rate, 0.9, 1e-15, 0.1, 1, sides="shorter", **PINV)),
    "textbook": (0.5, lambda rate: optim.chain(rate, [parts.shampoo(1.0, 1e-3)])),
}


@short.parametrize("name", CASES)
def test_a_chain_with_shampoo_agrees_with_the_program(name: str):
    """60 steps in float64, without a state of the program.

    The figures are those of class DistributedShampoo of the folder distributed_shampoo in
    modded-nanogpt's records/track_3_optimization/results/20260513_shampoo_1_4_power, with float64
    in place of float32 and SingleDeviceDistributedConfig(target_parameter_dimensionality=2), which
    keeps small matrices matrices. It was made by the lines of two scripts: that of result 21 in the
    same folder, and that of result 35, sh-origpinv-s3375-...txt beside it (whose own copy of the
    program is not in the repository): result_21, result_35, after every step. After every tenth:
    "half" and "one_sided" are result 35 with lr=0.05 and an inverse_exponent_override, {2: 0.5}
    with start_preconditioning_step=5, and of the shorter side {0: 0.5, 1: 0.0} or the reverse,
    {2: 0.25} for the square matrix; "textbook" is result 21 with lr=0.5, betas=(0.0, 1.0),
    epsilon=1e-3, precondition_frequency=1, weight_decay=0 and no grafting_config. A change of the
    gradients by 1e-12 changes the weights by at most 4e-12 of themselves.
    """
    peak, chain = CASES[name]
    with jax.enable_x64(True):
        step = jax.jit(lambda rate, *args: chain(rate).update(*args))
        params: Any = list(map(jnp.asarray, START))
        state, found = chain(0.1).init(params), []
        for t in range(STEPS):
            grads = [jnp.asarray(g[t]) for g in GRADS]
            updates, state = step(peak * RATES[t], grads, state, params)
            params = optax.apply_updates(params, updates)
            found.append(params)
    for i, start in enumerate(START):
        expected = FIGURES[f"{name}_{i}"]
        every = STEPS // len(expected)
        ours = np.stack([x[i] for x in found[every - 1 :: every]])
        moved = np.abs(expected[-1] - start).max()
        assert moved > 0.015
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-11 * moved)


def root_of(gram: Any, eps: float | None, exponent: float) -> Any:
    """Returns gram^-exponent, or that of the pseudo-inverse."""
    values, vectors = np.linalg.eigh(gram)
    if eps is None:
        kept = values > 1e-12 * values.max()
        return vectors[:, kept] * values[kept] ** -exponent @ vectors[:, kept].T
    return vectors * (values + eps) ** -exponent @ vectors.T


@pytest.mark.parametrize(
    ("options", "powers"),
    [
        ({"b2": 0.9, "eps": 0.1}, (0.25, 0.25)),
        ({"b2": 1.0, "eps": 0.1}, (0.25, 0.25)),
        ({"b2": 0.9, "eps": 0.1, "exponent": 0.5}, (0.5, 0.5)),
        ({"b2": 0.9, "eps": None, "exponent": 0.5}, (0.5, 0.5)),
        ({"b2": 0.9, "eps": None, "sides": "shorter"}, (0.5, 0.0)),
        ({"b2": 0.9, "eps": 0.1, "max_precond_dim": 5}, (0.5, 0.0)),
        ({"b2": 0.9, "eps": 0.1, "max_precond_dim": 3}, (0.0, 0.0)),
    ],
)
def test_two_updates_are_those_of_the_closed_form(options: dict[str, Any], powers: Any):
    """Of matrices [2, 4, 6], whose gradients, of rank 2, do not span either side."""
    rng = np.random.default_rng(1)
    grads = rng.standard_normal((2, 2, 4, 1)) * rng.standard_normal((2, 2, 1, 6))
    update = rng.standard_normal((2, 4, 6))
    part, b2 = parts.shampoo(**options), options["b2"]
    with jax.enable_x64(True):
        state, found = part.init(jnp.zeros((2, 4, 6))), None
        for g in grads:
            found, state = part.update(jnp.asarray(update), state, grad=jnp.asarray(g))
    weights = [1, 1] if b2 == 1 else np.array([b2, 1]) * (1 - b2) / (1 - b2**2)
    for i in range(2):
        pairs = list(zip(weights, grads[:, i], strict=True))
        left = sum(w * g @ g.T for w, g in pairs)
        right = sum(w * g.T @ g for w, g in pairs)
        expected = update[i]
        if powers[0]:
            expected = root_of(left, options["eps"], powers[0]) @ expected
        if powers[1]:
            expected = expected @ root_of(right, options["eps"], powers[1])
        np.testing.assert_allclose(np.asarray(found)[i], expected, rtol=1e-9, atol=1e-9)


def test_eigenvalues_up_to_the_tolerance_count_as_zero():
    values = np.array([1.0, 0.1, 0.01, 0.0])
    with jax.enable_x64(True):
        kept = {}
        for tolerance in (None, 0.0, 0.05, 0.5):
            part = parts.shampoo(eps=None, tolerance=tolerance, exponent=1.0)
            grad = jnp.asarray(np.diag(np.sqrt(values)))
            found, _ = part.update(jnp.eye(4), part.init(grad), grad=grad)
            kept[tolerance] = np.diag(found).round(9).tolist()
    assert kept == {
        None: [1, 100, 10000, 0],
        0.0: [1, 100, 10000, 0],
        0.05: [1, 100, 0, 0],
        0.5: [1, 0, 0, 0],
    }


def test_roots_are_computed_at_start_and_then_every_so_often():
    part = parts.shampoo(every=3, start=2)
    rng, changes, old = np.random.default_rng(2), [], np.eye(3)
    state, update = part.init(jnp.zeros((3, 3))), jnp.ones((3, 3))
    found: Any
    for _ in range(7):
        found, state = part.update(update, state, grad=jnp.asarray(rng.standard_normal((3, 3))))
        root = np.asarray(state.left_root)
        changes.append(bool((root != old).any()))
        np.testing.assert_allclose(found, root @ update @ state.right_root, rtol=1e-4, atol=1e-5)
        old = root
    assert changes == [False, True, True, False, False, True, False]


@pytest.mark.long
def test_it_is_the_one_optimizer_whose_parts_these_are():
    start, grads = {"w": START[0], "v": START[2]}, {"w": GRADS[0], "v": GRADS[2]}
    options = {"every": 3, "start": 2, "eps": 1e-6, "max_precond_dim": 5}
    whole = optim.shampoo(0.02, 0.9, 0.9, 1e-6, 0.1, 3, start=2, max_precond_dim=5, graft_eps=1e-8)
    ends = []
    with jax.enable_x64(True):
        for tx in (whole, grafted(0.02, 0.9, 1e-8, 0.1, 2, **options)):
            params: Any = jax.tree.map(jnp.asarray, start)
            state, update = tx.init(params), jax.jit(tx.update)
            for t in range(12):
                updates, state = update({k: g[t] for k, g in grads.items()}, state, params)
                params = optax.apply_updates(params, updates)
            ends.append(jax.tree.map(np.asarray, params))
    for name in start:
        assert np.abs(ends[0][name] - start[name]).max() > 0.05
        np.testing.assert_allclose(*(end[name] for end in ends), rtol=0, atol=1e-14)


@pytest.mark.long
@pytest.mark.parametrize("b2", [0.9, 1.0])
def test_a_chain_of_its_part_has_the_bits_of_shampoo(b2: float):
    """Of stacked matrices, one with a side that is too long, and one with two of them."""
    rng = np.random.default_rng(4)
    shapes = {"stacked": (2, 6, 9), "long": (7, 40), "longer": (33, 40)}
    start = {name: jnp.asarray(rng.standard_normal(s), jnp.float32) for name, s in shapes.items()}
    steps = [{k: jnp.asarray(rng.standard_normal(s)) for k, s in shapes.items()} for _ in range(9)]
    adam = parts.adam(None, b2, 1e-6, squares="gradient")
    part = parts.shampoo(b2, 1e-9, every=3, start=4, max_precond_dim=32, b1=0.8, graft=adam)
    whole = optim.shampoo(
        *(0.02, 0.8, b2, 1e-9, 0.0, 3), start=4, max_precond_dim=32, graft_eps=1e-6
    )
    ends = []
    for tx in (optim.chain(0.02, [part]), whole):
        params: Any = start
        state, update = tx.init(params), jax.jit(tx.update)
        for g in steps:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
        inner = state.direction if tx is whole else state.before[0]
        ends.append(jax.tree.leaves((params, inner)))
    for ours, theirs in zip(*ends, strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_array_equal(ours, theirs)


def test_grafted_shampoo_is_the_other_optimizer_where_no_side_is_preconditioned():
    start, grads = {"w": START[0], "v": START[2]}, {"w": GRADS[0], "v": GRADS[2]}
    graft = optax.scale_by_rms(0.9, eps_in_sqrt=False)
    ends = []
    with jax.enable_x64(True):
        for part in (parts.shampoo(max_precond_dim=1, graft=graft), graft):
            tx, params = optim.chain(0.02, [part]), jax.tree.map(jnp.asarray, start)
            state, update = tx.init(params), jax.jit(tx.update)
            for t in range(5):
                updates, state = update({k: g[t] for k, g in grads.items()}, state, params)
                params = optax.apply_updates(params, updates)
            ends.append(params)
    for name in start:
        np.testing.assert_allclose(*(end[name] for end in ends), rtol=0, atol=1e-14)


def test_grafting_takes_norms_of_each_matrix_and_before_start_all():
    rng = np.random.default_rng(3)
    update, grad = (jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32) for _ in range(2))
    part = parts.graft(optax.sgd(2.0), start=2)
    state = part.init(update)
    first: Any
    second: Any
    first, state = part.update(update, state, update, grad=grad)
    np.testing.assert_array_equal(first, -2 * grad)
    second, state = part.update(update, state, update, grad=grad)
    for i in range(2):
        ratio = np.linalg.norm(2 * grad[i]) / np.linalg.norm(update[i])
        np.testing.assert_allclose(second[i], ratio * update[i], rtol=1e-5)
    nothing, _ = part.update(0 * update, state, update, grad=grad)
    np.testing.assert_array_equal(nothing, 0)


def test_mistakes_are_named():
    for options, message in (
        ({"sides": "left"}, "sides must be one of both, shorter, got 'left'"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"start": 0}, "start must be at least 1, got 0"),
        ({"tolerance": 0.1}, "tolerance is that of pseudo-inverses: set eps to None"),
    ):
        with pytest.raises(ValueError, match=message):
            parts.shampoo(**options)
    with pytest.raises(ValueError, match="start must be at least 1, got 0"):
        parts.graft(parts.adam(), start=0)
    for name, grafted in (("graft", parts.graft), ("shampoo", partial(parts.shampoo, graft=None))):
        words = rf"parts\.{name} takes the norms of a direction, and parts\.decay changes the step"
        with pytest.raises(ValueError, match=words):
            grafted(**{"onto" if name == "graft" else "graft": parts.decay(0.1)})
    for whole in (optim.shampoo, optim.soap):  # by their own names, not those of their parts
        with pytest.raises(ValueError, match=rf"^optim\.{whole.__name__} updates matrices, but"):
            whole(0.1).init({"bias": jnp.zeros(3)})
    onto = parts.graft(parts.adam())
    for name, part in (("shampoo", parts.shampoo()), ("graft", onto)):
        with pytest.raises(ValueError, match=rf"optim\.parts\.{name}.*'bias'"):
            part.init({"bias": jnp.zeros(3)})
        params = {"w": jnp.ones((2, 2))}
        with pytest.raises(ValueError, match=rf"parts\.{name} is a part of optim\.chain"):
            part.update(params, part.init(params), params)
    with pytest.raises(ValueError, match=r"parts\.graft sets the lengths.*parts\.shampoo after it"):
        optim.chain(0.1, [onto, parts.shampoo()])
    with pytest.raises(ValueError, match=r"parts\.shampoo.*parts\.graft after it replaces them"):
        optim.chain(0.1, [parts.shampoo(graft=parts.adam()), onto])


def test_sums_are_allowed_and_decays_above_one_are_not():
    def grouped(b2: float) -> Any:
        chain = partial(optim.chain, 0.1, [partial(parts.shampoo, b2)])
        return optim.optimizer({"all": optim.group(".*", chain)}).init({"w": jnp.ones((2, 2))})

    grouped(1.0)
    with pytest.raises(ValueError, match=r"b2 of .*parts\.shampoo must be in \[0, 1\], as"):
        grouped(1.5)
