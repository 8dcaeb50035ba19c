"""The parts of the package experiments/parts in a chain."""

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import parts
from tests import runs, short
from trainer.__main__ import main

DION = np.load(Path(__file__).with_name("dion_figures.npz"))
MUOWN = np.load(Path(__file__).with_name("muown_figures.npz"))
CIRCUIT = np.load(Path(__file__).with_name("circuit_figures.npz"))
NEWTON = np.load(Path(__file__).with_name("newton_figures.npz"))


def muown_problem() -> tuple[list[Any], list[Any], Any]:
    """Draws weights [inputs, outputs], one of them zeros, gradients [steps, ...], and rates."""
    rng, shapes, steps = np.random.default_rng(11), [(3, 5), (4, 4), (6, 2)], 60
    start = [rng.standard_normal(shape) * (i != 1) for i, shape in enumerate(shapes)]
    grads = [rng.standard_normal((steps, *shape)) + 0.3 for shape in shapes]
    t = np.arange(steps)
    cosine = 0.5 * (1 + np.cos(np.pi * (t - 5) / (steps - 4)))
    return start, grads, 0.02 * np.where(t < 5, (t + 1) / 5, cosine)


@pytest.mark.long
def test_muown_agrees_with_its_authors_program():
    """60 steps in float64, without a state of the program.

    The figures are those of MuownDP of the script at the head of a26c8aa2-...txt, in
    modded-nanogpt's records/track_3_optimization/results/20260508_muown, after every step, with
    float64 in place of bfloat16, one process, v_norm_schedule_steps=40, v_norm_target_scale=2.496,
    and 1e-30 in place of the 1e-7 that it adds to norms before the Newton-Schulz steps. A change of
    the gradients by 1e-12 changes the weights by at most 7e-13 of themselves.
    """
    from experiments.parts.muown import muown

    start, grads, rates = muown_problem()

    def chain(rate: Any) -> Any:
        return optim.chain(rate, [optax.identity()], [muown(target=2.496, steps=40)])

    with jax.enable_x64(True):
        params: Any = list(map(jnp.asarray, start))
        state, found = chain(0.1).init(params), []
        step = jax.jit(lambda rate, *args: chain(rate).update(*args))
        for t, rate in enumerate(rates):
            updates, state = step(rate, [jnp.asarray(g[t]) for g in grads], state, params)
            params = optax.apply_updates(params, updates)
            found.append(params)
    for i, first in enumerate(start):
        expected = MUOWN[f"weights_{i}"]
        assert np.abs(expected[-1] - first).max() > 0.2
        np.testing.assert_allclose(np.stack([x[i] for x in found]), expected, rtol=0, atol=1e-11)


def dion_problem() -> tuple[list[Any], list[Any], list[Any], Any]:
    """Draws weights [inputs, outputs], first bases, gradients [steps, ...], and rates."""
    rng, shapes, steps = np.random.default_rng(27), [(6, 8), (8, 4), (5, 5), (3, 7)], 64
    start = [rng.standard_normal(shape) for shape in shapes]
    bases = [rng.standard_normal((min(shape), 3)) for shape in shapes]
    grads = [rng.standard_normal((steps, *shape)) + 0.3 for shape in shapes]
    grads[1][:2] = 0
    t = np.arange(steps)
    cosine = 0.5 * (1 + np.cos(np.pi * (t - 5) / (steps - 4)))
    return start, bases, grads, 0.05 * np.where(t < 5, (t + 1) / 5, cosine)


@pytest.mark.long
def test_dion_agrees_with_its_authors_program():
    """64 steps in float64 from the first bases alone, without a later state of the program.

    The figures are every fourth step's weights of Dion of dion/dion_reference.py in microsoft/dion
    at 0a059a45, uncompiled, with float64 in place of float32, rank_fraction=3/min(shape), mu=0.9,
    weight_decay=0.1, qr_method="qr" and its first Q replaced by these. With "rcqr", its default,
    they differ by at most 2e-15. A change of the gradients by 1e-12 changes the weights by at most
    2e-12 of themselves. The first two gradients of a matrix are zero.
    """
    from experiments.parts.dion import dion

    start, bases, grads, rates = dion_problem()

    def chain(rate: Any) -> Any:
        return optim.chain(rate, [dion(rank=3, decay=0.9)], [parts.decay(0.1)])

    with jax.enable_x64(True):
        params: Any = list(map(jnp.asarray, start))
        state, found = chain(0.1).init(params), []
        assert [x.shape for x in state.before[0].bases] == [x.shape for x in bases]
        state = state._replace(
            before=(state.before[0]._replace(bases=list(map(jnp.asarray, bases))),)
        )
        step = jax.jit(lambda rate, *args: chain(rate).update(*args))
        for t, rate in enumerate(rates):
            updates, state = step(rate, [jnp.asarray(g[t]) for g in grads], state, params)
            params = optax.apply_updates(params, updates)
            found.append(params)
    for i, first in enumerate(start):
        expected = DION[f"weights_{i}"]
        assert np.abs(expected[-1] - first).max() > 0.2
        mine = np.stack([x[i] for x in found[3::4]])
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-11)


@pytest.mark.long
def test_dion_moves_stacked_matrices_as_it_moves_single_ones():
    from experiments.parts.dion import dion

    tx: Any = dion(rank=2)
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 3)), jnp.float32)
    state = tx.init({"w": grads})
    assert state.bases["w"].shape == (2, 3, 2)
    assert np.linalg.matrix_rank(state.bases["w"]).tolist() == [2, 2]
    moves, _ = tx.update({"w": grads}, state)
    for i in range(2):
        alone = type(state)({"w": jnp.zeros((4, 3))}, {"w": state.bases["w"][i]})
        single, _ = tx.update({"w": grads[i]}, alone)
        np.testing.assert_allclose(moves["w"][i], single["w"], rtol=0, atol=1e-6)


def newton_problem() -> tuple[list[Any], list[Any], list[Any], Any]:
    """Draws weights [inputs, outputs], gradients and inputs of kernels [steps, ...], and rates."""
    rng, shapes, steps = np.random.default_rng(15), [(6, 8), (6, 6), (24, 2)], 40
    start = [rng.standard_normal(shape) for shape in shapes]
    grads = [rng.standard_normal((steps, *shape)) + 0.3 for shape in shapes]
    shared, last = (rng.standard_normal((steps, 32, width)) for width in (6, 24))
    shared[..., 0] *= 3
    t = np.arange(steps)
    cosine = 0.5 * (1 + np.cos(np.pi * (t - 5) / (steps - 4)))
    rates = 0.05 * np.where(t < 5, (t + 1) / 5, cosine)
    return start, grads, [shared, shared, np.maximum(last, 0) ** 2], rates


@pytest.mark.long
def test_newton_muon_agrees_with_its_authors_program():
    """40 steps in float64 with eight new inverses, without a state of the program.

    The figures are every fourth step's weights of Muon of train_gpt_simple_newton_muon.py in
    modded-nanogpt's records/track_3_optimization/results/20260505_newton_muon at f411b3d3,
    uncompiled, with float64 in place of bfloat16 and float32, one process, refresh_interval=5,
    weight_decay=0.1, 1e-30 in place of the 1e-7 that it adds to norms before the Newton-Schulz
    steps, and its `accum_xtx_` called at these steps with these inputs; the third weight has its
    second moments in four blocks.
    """
    from experiments.parts.newton import newton

    start, grads, inputs, rates = newton_problem()

    def chain(rate: Any, blocks: int) -> Any:
        before = [newton(5, blocks=blocks), parts.momentum(0.95), parts.polar([2, -1.5, 0.5], 12)]
        return optim.chain(rate, before, [parts.decay(0.1)])

    for i, (first, gradients, x) in enumerate(zip(start, grads, inputs, strict=True)):
        blocks = 4 if i == 2 else 1
        with jax.enable_x64(True):
            params: Any = {"kernel": jnp.asarray(first)}
            state, found = chain(0.1, blocks).init(params), []

            @jax.jit
            def step(rate: Any, g: Any, x: Any, state: Any, params: Any, n: int = blocks) -> Any:
                seen = {"kernel_inputs": {"kernel": x.T @ x / len(x)}}
                return chain(rate, n).update({"kernel": g}, state, params, observations=seen)

            for t, rate in enumerate(rates):
                updates, state = step(rate, gradients[t], x[t], state, params)
                params = optax.apply_updates(params, updates)
                found.append(params["kernel"])
        expected = NEWTON[f"weights_{i}"]
        assert np.abs(expected[-1] - first).max() > 0.2
        np.testing.assert_allclose(np.stack(found[3::4]), expected, rtol=0, atol=1e-11)


def test_circuit_muon_agrees_with_its_authors_function():
    """Two layers with two heads of 3, in float64.

    The figures are what circuit_muon of the script at the head of 616cccc8-...txt, in
    modded-nanogpt's records/track_3_optimization/results/20260523_circuit_muon at f411b3d3, with
    float64 in place of float32, head_dim=3 and lam=0.05, makes of these arrays, transposed as torch
    has kernels.
    """
    from experiments.parts.circuit import circuit

    rng = np.random.default_rng(3)
    arrays = rng.standard_normal((4, 2, 6, 6)) * np.exp(rng.standard_normal((4, 2, 6, 1)))
    other = rng.standard_normal((2, 2, 2, 6, 6))
    updates: Any = {}
    weights: Any = {}
    for tree, at in ((updates, 0), (weights, 1)):
        queries_keys_values = np.concatenate([other[at], arrays[at][:, None]], 1)
        tree["attn"] = {"qkv": {"kernel": queries_keys_values}, "out": {"kernel": arrays[at + 2]}}
    part = circuit(num_heads=2, damping=0.05)
    with jax.enable_x64(True):
        updates, weights = jax.tree.map(jnp.asarray, (updates, weights))
        moved: Any = part.update(updates, part.init(weights), weights)[0]
        found = moved["attn"]
        np.testing.assert_array_equal(found["qkv"]["kernel"][:, :2], other[0])
        for layer in range(2):
            v, o = CIRCUIT[f"v_{layer}"], CIRCUIT[f"o_{layer}"]
            np.testing.assert_allclose(found["qkv"]["kernel"][layer, 2], v, rtol=0, atol=1e-12)
            np.testing.assert_allclose(found["out"]["kernel"][layer], o, rtol=0, atol=1e-12)
            assert min(np.abs(v - arrays[0][layer]).max(), np.abs(o - arrays[2][layer]).max()) > 0.1
    with pytest.raises(ValueError, match="couples kernels at qkv/kernel .* has w. Match both"):
        part.update({"w": jnp.ones((6, 6))}, optax.EmptyState(), {"w": jnp.ones((6, 6))})


@short.parametrize(
    ("name", "said"),
    [
        ("muown", "  experiments.parts.muown.muown: scale 0.2, target 1, steps 40, power 1.2"),
        ("dion", "  experiments.parts.dion.dion: rank 8, decay 0.95"),
        ("circuit-muon", "  experiments.parts.circuit.circuit: num_heads 2, damping 0.001"),
        ("newton-muon", "  experiments.parts.newton.newton: every 20, weight 0.05, damping 0.2"),
    ],
)
def test_what_the_command_names_runs(name: str, said: str, tmp_path: Path, capsys: Any) -> None:
    with contextlib.chdir(runs.ROOT):
        assert main(["optimizers", name]) == 2
        options = re.findall(r"--[a-z]+=[a-z./]+", capsys.readouterr().err.replace("\n", " "))
        options = [option.rstrip(".") for option in options]
        assert said in runs.printed(capsys, "explain", *options)
        assert main([*options, "--set=steps=4", f"--workdir={tmp_path / 'run'}"]) == 0
