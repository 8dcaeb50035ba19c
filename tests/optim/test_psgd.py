"""PSGD against the program of modded-nanogpt's optimizer track, with our random matrices."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import parts
from optim.parts.psgd import probes
from tests.programs import psgd_by_modded_nanogpt, psgd_step
from tests.recorded import Recorded, rate

FIGURES = np.load(Path(__file__).with_name("psgd_figures.npz"))
ROTATED = np.load(Path(__file__).with_name("psgd_rotated_figures.npz"))
SHAPES = {"a": (3, 5), "b": (4, 4), "c": (6, 2), "stack": (2, 3, 4)}  # [inputs, outputs]
STEPS = 100
# A cosine with warm-up.
_T = np.arange(STEPS)
RATES = 0.025 * np.where(
    _T < 10, (_T + 1) / 10, 0.5 * (1 + np.cos(np.pi * (_T - 10) / (STEPS - 9)))
)


def problem() -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws the first parameters, and gradients [steps, *shape] of full rank and unequal scales."""
    rng = np.random.default_rng(5)
    start, grads = {}, {}
    for name, shape in SHAPES.items():
        start[name] = rng.standard_normal(shape)
        rows, columns = (np.exp(rng.standard_normal(size)) for size in shape[-2:])
        noise = rng.standard_normal((STEPS, *shape)) + 0.3
        grads[name] = noise * rows[:, None] * columns
    return start, grads


START, GRADS = problem()


@cache
def draws(name: str, seed: int = 0) -> list[Any]:
    """Returns the random matrices: for each step, of each matrix (z, noise), [outputs, inputs].

    z are ours. The noise, which changes gradients by rounding errors, we do not have.
    """
    noise = np.random.default_rng(1).standard_normal((STEPS, *SHAPES[name]))
    with jax.enable_x64(True):
        like = jnp.zeros(SHAPES[name]).reshape(-1, *SHAPES[name][-2:])
        place = sorted(SHAPES).index(name)
        drawn = [np.asarray(probes(seed, t, place, like)) for t in range(STEPS)]
    return [
        list(zip(matrices(z, name), matrices(e, name), strict=True))
        for z, e in zip(drawn, noise, strict=True)
    ]


def matrices(x: Any, name: str) -> list[Any]:
    """Lists the matrices of a parameter as torch has them, [outputs, inputs]."""
    return [one.T for one in np.reshape(x, (-1, *SHAPES[name][-2:]))]


@cache
def reference(name: str, layer: int, change: float = 0.0) -> list[Any]:
    """Returns the restated program's states (weights, mean, q0, q1) after every step.

    `change` is the size of a relative change of each element of the gradients.
    """
    signs = np.random.default_rng(6).choice([-1, 1], (STEPS, *SHAPES[name]))
    grads = [matrices(g, name)[layer] for g in GRADS[name] * (1 + change * signs)]
    drawn = [one[layer] for one in draws(name)]
    return psgd_by_modded_nanogpt(matrices(START[name], name)[layer], grads, RATES, drawn)


LAYERS = [(name, layer) for name, shape in SHAPES.items() for layer in range(1 + (len(shape) > 2))]


def chain(rate: Any, momentum: float = 0.95, **options: Any) -> Any:
    first = [optax.ema(momentum), parts.psgd(**options), parts.match_norm()]
    return optim.chain(rate, first, [parts.pin_radius()])


def far(found: Any, expected: Any) -> float:
    """Returns the largest difference, relative to the largest element."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_the_restated_program_is_the_original(name: str, layer: int):
    """The figures are those of PSGDKron in train_psgd.py, after every tenth step.

    The file is in modded-nanogpt's records/track_3_optimization, 2026-05-27. It ran with float64 in
    place of float32, one process, and the matrices of `draws` in place of torch.randn_like.
    """
    states = reference(name, layer)[9::10]
    for i, key in ((0, "weights"), (2, "q0"), (3, "q1")):
        found = np.stack([state[i] for state in states])
        assert far(found, FIGURES[f"{key}_{name}_{layer}"]) < 1e-8


def ours_from(rows: dict[str, Any], t: int) -> Any:
    """Returns our parameters and state from the program's states after t steps of all matrices."""

    def ours(item: int) -> dict[str, Any]:
        stacks = {name: np.stack([state[item] for state in of]) for name, of in rows.items()}
        return {name: jnp.asarray(x if SHAPES[name][2:] else x[0]) for name, x in stacks.items()}

    turned = partial(jax.tree.map, lambda x: jnp.swapaxes(x, -2, -1))
    weights, mean, outputs, inputs = turned(ours(0)), turned(ours(1)), ours(2), ours(3)
    state = chain(0.1).init(weights)
    count = jnp.asarray(t, jnp.int32)
    psgd = state.before[1]._replace(count=count, left=inputs, right=outputs)
    before = (optax.EmaState(count, mean), psgd, *state.before[2:])
    return weights, state._replace(before=before)


OPTIONS = {
    "default": ({}, {}),
    "slow": ({"precond_lr": 0.3, "init_scale": 0.7}, {}),
    "seed": ({"seed": 3}, {}),
    "gradient": ({"whiten": "gradient"}, {"raw": True}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", OPTIONS)
def test_each_of_100_steps_is_that_of_the_program_from_its_state(case: str):
    ours, theirs = OPTIONS[case]
    kept = {name: x for name, x in ours.items() if name in ("precond_lr", "init_scale")}
    with jax.enable_x64(True):
        step = jax.jit(lambda rate, *args: chain(rate, **ours).update(*args))
        old = {name: [None] * len(matrices(x, name)) for name, x in START.items()}
        params: Any = jax.tree.map(jnp.asarray, START)
        state = chain(0.1, **ours).init(params)
        for t in range(STEPS):
            for name, rows in old.items():
                drawn = draws(name, ours.get("seed", 0))[t]
                for i, g in enumerate(matrices(GRADS[name][t], name)):
                    begin = rows[i] or (
                        matrices(START[name], name)[i],
                        np.zeros_like(g),
                        None,
                        None,
                    )
                    rows[i] = psgd_step(begin, t + 1, g, RATES[t], *drawn[i], **kept, **theirs)
            grads = {name: jnp.asarray(g[t]) for name, g in GRADS.items()}
            updates, state = step(RATES[t], grads, state, params)
            params = optax.apply_updates(params, updates)
            expected, state_of = ours_from(old, t + 1)
            for name in SHAPES:
                assert far(params[name], expected[name]) < 1e-8, (name, t)
                for side in ("left", "right"):
                    mine, wanted = (getattr(x.before[1], side)[name] for x in (state, state_of))
                    assert far(mine, wanted) < 1e-8, (name, side, t)
            params, state = expected, state_of


def free_run() -> float:
    """Returns the largest relative difference of a matrix after 100 steps."""
    with jax.enable_x64(True):
        params: Any = jax.tree.map(jnp.asarray, START)
        state = chain(0.1).init(params)
        step = jax.jit(lambda rate, *args: chain(rate).update(*args))
        for t in range(STEPS):
            grads = {name: jnp.asarray(g[t]) for name, g in GRADS.items()}
            updates, state = step(RATES[t], grads, state, params)
            params = optax.apply_updates(params, updates)
    return max(
        far(matrices(params[name], name)[layer], FIGURES[f"weights_{name}_{layer}"][-1])
        for name, layer in LAYERS
    )


_BEFORE = [partial(optax.ema, 0.95), partial(parts.psgd), partial(parts.match_norm)]
RECORDED = {
    "psgd": Recorded(
        partial(optim.chain, rate, _BEFORE, [partial(parts.pin_radius)]),
        "class PSGDKron of modded-nanogpt's train_psgd.py, of its optimizer track",
        free_run,
        1e-8,
        "100 steps with our random matrices; the program adds 1e-10 to norms, and changes the"
        " elements of gradients by about their rounding errors; relative to the largest element",
    )
}


@pytest.mark.long
def test_a_free_run_of_100_steps_ends_where_the_program_does():
    """A change of the gradients by 1e-12 changes the program by less than 1e-8, so that it can."""
    for name, layer in LAYERS:
        expected = FIGURES[f"weights_{name}_{layer}"][-1]
        assert far(expected, matrices(START[name], name)[layer]) > 0.3
        assert far(reference(name, layer, change=1e-12)[-1][0], expected) < 1e-8
    assert free_run() < RECORDED["psgd"].bound


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("default", {"precond_lr": 0.1}),
        ("other", {"precond_lr": 0.3, "init_scale": 0.7, "damping": 0.1, "bound_decay": 0.5}),
    ],
)
def test_the_default_geometry_of_psgd_torch_agrees_with_its_program(case: str, options: Any):
    """100 steps in float64, without a state of the program; every tenth is compared.

    The figures are those of KronWhiten of psgd.py in lixilinx/psgd_torch, with
    preconditioner_max_skew and grad_clip_max_amps infinite, torch.randn_like and torch.randn in
    place of which are the matrices of `probes` and `vectors`, and no balancing (torch.rand is 0.5).
    Of its arguments, preconditioner_init_scale is the square of ours. A change of the gradients by
    1e-12 changes the weights by at most 4e-13.
    """
    with jax.enable_x64(True):
        part = [parts.psgd(geometry="Q0.5EQ1.5", **options)]
        params: Any = jax.tree.map(jnp.asarray, START)
        state, found = optim.chain(0.1, part).init(params), []
        step = jax.jit(lambda rate, *args: optim.chain(rate, part).update(*args))
        for t in range(STEPS):
            grads = {name: jnp.asarray(g[t]) for name, g in GRADS.items()}
            updates, state = step(RATES[t], grads, state, params)
            params = optax.apply_updates(params, updates)
            found.append(params)
    for name, layer in LAYERS:
        ours = np.stack([x[name] for x in found[9::10]]).reshape(10, -1, *SHAPES[name][-2:])
        expected = ROTATED[f"{case}_{name}_{layer}"]
        first = START[name].reshape(-1, *SHAPES[name][-2:])[layer]
        assert np.abs(expected[-1] - first).max() > 0.3
        np.testing.assert_allclose(ours[:, layer], expected, rtol=0, atol=1e-10)


@pytest.mark.long
def test_damping_bounds_directions_in_that_geometry():
    """Of gradients of 0, which do not bound the factors."""
    found = {}
    for damping in (1.0, 0.1):
        part = parts.psgd(precond_lr=0.5, geometry="Q0.5EQ1.5", damping=damping, init_scale=1.0)
        zeros, update = jnp.zeros((3, 3)), jax.jit(part.update)
        state: Any = part.init(zeros)
        for _ in range(200):
            _, state = update(zeros, state)
        factors = state.left @ state.right
        found[damping] = float(jnp.linalg.norm(factors.T @ factors))
    assert 0.5 < found[1.0] < 20 and 5 < found[0.1] / found[1.0] < 20


@pytest.mark.long
def test_the_factors_whiten_what_they_are_fitted_to():
    """The elements of D then have mean squares of 1, whatever the scales of the gradients."""
    shape, rng = (4, 6), np.random.default_rng(0)
    scales = np.exp(rng.standard_normal((4, 1)) + rng.standard_normal(6))
    part = parts.psgd(precond_lr=0.05)
    state, update, squares = part.init(jnp.zeros(shape)), jax.jit(part.update), np.zeros(shape)
    for t in range(3000):
        found, state = update(jnp.asarray(scales * rng.standard_normal(shape), jnp.float32), state)
        squares += np.square(found) * (t >= 2000) / 1000
    np.testing.assert_allclose(squares, 1, atol=0.3)
    assert scales.max() / scales.min() > 10


def test_random_matrices_depend_on_seed_step_and_place():
    like = jnp.zeros((2, 3, 4))
    drawn = [probes(*key, like) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len({x.tobytes() for pair in drawn for x in np.asarray(pair)}) == 8
    np.testing.assert_array_equal(probes(0, jnp.int32(1), 0, like), drawn[2])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="whiten must be one of update, gradient, got 'grad'"):
        parts.psgd(whiten="grad")
    with pytest.raises(ValueError, match=r"geometry must be one of EQ, Q0\.5EQ1\.5, got 'QEQ'"):
        parts.psgd(geometry="QEQ")  # pyright: ignore[reportArgumentType]
    for options in ({"damping": 1e-3}, {"bound_decay": 0.5}):
        with pytest.raises(ValueError, match="damping and bound_decay belong to the geometry"):
            parts.psgd(**options)
    with pytest.raises(ValueError, match=r"optim\.parts\.psgd.*'bias'"):
        parts.psgd().init({"bias": jnp.zeros(3)})
    part, params = parts.psgd(whiten="gradient"), {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match=r"is a part of optim\.chain"):
        part.update(params, part.init(params), params)
