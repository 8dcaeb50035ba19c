"""Chains of parts against the programs of their authors, closed forms and `optim.muon`."""

import re
from collections.abc import Sequence
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
from optim.chain import _SCALE_FREE, PartNeeded
from optim.declarations import OptimizerWarning
from optim.factories import ArgumentError
from optim.parts.base import Need, Part
from tests import short
from tests.recorded import Recorded, largest, made, mu, rate
from trainer.engine.plan import find_matrices

FIGURES = np.load(Path(__file__).with_name("chain_figures.npz"))
KERNELS = range(3)  # [3, 5], [4, 4] and [6, 2]: [inputs, outputs]

POLAR = partial(parts.polar, [2.0, -1.5, 0.5], 12, norm="gram")
BRAKE = partial(parts.radial_brake, 0.5)
DRIFT = partial(parts.pin_radius, radial=True)


def chain_of(before: list[Any], after: list[Any]) -> partial:
    return partial(optim.chain, rate, before, after)


def difference(name: str) -> float:
    """Trains a case on the recorded gradients; returns the largest difference of a kernel."""
    _, before, after = RECORDED[name].optimizer.args
    with jax.enable_x64(True):
        params: Any = [jnp.asarray(FIGURES[f"start_{i}"]) for i in KERNELS]
        state = None
        for t, (now, momentum) in enumerate(zip(FIGURES["rate"], FIGURES["mu"], strict=True)):
            with_mu = [partial(parts.momentum, momentum) if x is MOMENTUM else x for x in before]
            tx = optim.chain(now, made(with_mu), made(after))
            state = tx.init(params) if state is None else state
            grads = [jnp.asarray(FIGURES[f"grads_{i}"][t]) for i in KERNELS]
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return max(largest(params[i], FIGURES[f"{name}_{i}"]) for i in KERNELS)


MOMENTUM = partial(parts.momentum, mu)
TRACK_3 = "class Muon of modded-nanogpt's train_gpt_cwd_SOTA.py, record 46 of its optimizer track"
# The results were computed in float64, from the same start and gradients: record_46 and one_floor
# (2026-06-19) with names of parameters that the program gives no SOAP; normuon: by
# SingleDeviceNorMuon of zichongli5/NorMuon; adamh: by scale_by_adamh of marin-community/marin.
# bfloat16 and float32 were replaced by float64 in them. Of torch's programs, which store
# [outputs, inputs], all kernels are transposed.
RECORDED = {
    name: Recorded(chain_of(before, after), program, partial(difference, name), bound, remarks)
    for name, before, after, program, bound, remarks in [
        (
            "record_46",
            [MOMENTUM, POLAR, BRAKE, partial(parts.floor, 0.3825, by="output")],
            [partial(parts.cautious_decay, 0.025, around=DRIFT)],
            TRACK_3,
            1e-13,
            "matrices without SOAP",
        ),
        (
            "one_floor",
            [MOMENTUM, POLAR, BRAKE, partial(parts.floor, 0.3825)],
            [DRIFT],
            TRACK_3,
            1e-13,
            "the same, with ROWFLOOR = False and CWD = 0",
        ),
        (
            "normuon",
            [
                *(
                    partial(parts.momentum, 0.9),
                    partial(parts.polar),
                    partial(parts.normalize, 0.8),
                ),
                partial(optax.add_decayed_weights, 0.1),
            ],
            [],
            "SingleDeviceNorMuon of NorMuon's authors (github.com/zichongli5/NorMuon)",
            2e-7,
            "the authors add 1e-7 to the norm of a matrix; here it is the smallest norm",
        ),
        (
            "adamh",
            [partial(optax.scale_by_adam, 0.9, 0.95), partial(parts.match_norm)],
            [partial(parts.pin_radius)],
            "AdamH, scale_by_adamh of marin-community/marin (Hyperball)",
            1e-13,
            "",
        ),
    ]
}


@short.parametrize("name", RECORDED)
def test_a_chain_agrees_with_its_authors_program(name: str):
    """In float64; see `RECORDED` for the programs."""
    assert difference(name) < RECORDED[name].bound


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def move(tx: Any, w: jax.Array, u: jax.Array, **extra: Any) -> jax.Array:
    return tx.update({"w": u}, tx.init({"w": w}), {"w": w}, **extra)[0]["w"]


def norms(x: jax.Array, axis: Any = (-2, -1)) -> Any:
    return np.linalg.norm(np.asarray(x, np.float64), axis=axis)


@short.parametrize(
    ("given", "before"),
    [
        ({}, [parts.momentum(0.9), parts.polar()]),
        (
            {"momentum_dtype": "bfloat16", "ns_dtype": "bfloat16", "scale": "match_rms_adamw"},
            [
                parts.momentum(0.9, dtype="bfloat16"),
                parts.polar(dtype="bfloat16", scale="match_rms_adamw"),
            ],
        ),
        (
            {"nesterov": False, "weight_decay": 0.1},
            [parts.momentum(0.9, False), parts.polar(), optax.add_decayed_weights(0.1)],
        ),
    ],
)
def test_momentum_and_polar_have_the_bits_of_muon(given: Any, before: Any):
    params = {"kernel": draw(3, 4, 6), "other": draw(5, 2, seed=1)}
    muon = optim.muon(0.02, momentum=0.9, **given)
    ours = optim.chain(0.02, before)
    states = [tx.init(params) for tx in (muon, ours)]
    for step in range(3):
        grads = jax.tree.map(lambda x, step=step: draw(*x.shape, seed=step + 2), params)
        found = [
            jax.jit(tx.update)(grads, state, params)
            for tx, state in zip((muon, ours), states, strict=True)
        ]
        jax.tree.map(np.testing.assert_array_equal, found[0][0], found[1][0])
        states = [state for _, state in found]


@pytest.mark.parametrize("norm", ["frobenius", "gram"])
def test_polar_maps_singular_values_by_its_polynomial(norm: str):
    """By numpy's decomposition; both norms bound the largest singular value."""
    x = np.asarray(draw(4, 7), np.float64)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (np.linalg.norm(s) if norm == "frobenius" else np.linalg.norm(s**2) ** 0.5)
    for _ in range(6):
        s = 2 * s - 1.5 * s**3 + 0.5 * s**5
    part = parts.polar([2.0, -1.5, 0.5], 6, norm=norm, scale="none")
    np.testing.assert_allclose(move(part, x, jnp.asarray(x)), (u * s) @ v, atol=2e-6)


def test_a_floor_lengthens_what_is_shorter_and_nothing_else():
    w, u = draw(4, 5), draw(4, 5, seed=1)
    for by, axes in (("matrix", (-2, -1)), ("output", -2)):
        before = norms(u, axes) / norms(w, axes)
        ratio = float(np.median(before)) * (1.1 if by == "matrix" else 1)
        after = norms(move(parts.floor(ratio, by=by), w, u), axes) / norms(w, axes)
        np.testing.assert_allclose(after, np.maximum(before, ratio), rtol=1e-6)


def test_a_brake_scales_what_is_parallel_to_the_weights():
    w, u = draw(4, 5), draw(4, 5, seed=1)
    for sign, factor in ((1, 0.25), (-1, 3.0)):  # inward, outward
        mixed = u - jnp.vdot(u, w) / jnp.vdot(w, w) * w + sign * 0.5 * w
        found = move(parts.radial_brake(outward=3.0, inward=0.25), w, mixed)
        np.testing.assert_allclose(found, mixed + (factor - 1) * sign * 0.5 * w, atol=1e-6)


def test_a_pin_keeps_the_norm_of_each_stacked_matrix():
    w, u = draw(3, 4, 5), draw(3, 4, 5, seed=1)
    after = w + move(optim.chain(0.3, [parts.match_norm()], [parts.pin_radius()]), w, u)
    np.testing.assert_allclose(norms(after), norms(w), rtol=1e-6)
    assert norms(after - w).min() > 0.1
    # To first order, `radial` follows the step: what remains is of second order in the rate.
    pinned = optim.chain(1e-3, [optax.identity()], [parts.pin_radius(radial=True)])
    after = w + move(pinned, w, u)
    free = w - 1e-3 * u
    assert np.abs(norms(after) - norms(free)).max() < 1e-5 < np.abs(norms(free) - norms(w)).min()


@pytest.mark.long
def test_an_initial_radius_is_that_before_the_first_step():
    w, u = draw(3, 4, 5), draw(3, 4, 5, seed=1)
    tx = optim.chain(0.3, [parts.match_norm()], [parts.pin_radius("initial")])
    params, state = {"w": w}, tx.init({"w": w})
    params = {"w": 2 * w}  # as if something else had moved the weights
    updates: Any = tx.update({"w": u}, state, params)[0]
    np.testing.assert_allclose(norms(params["w"] + updates["w"]), norms(w), rtol=1e-6)


def test_rms_is_what_was_asked_for_in_each_matrix():
    found = np.asarray(move(parts.match_rms(0.3), draw(2, 4, 5), draw(2, 4, 5, seed=1)), float)
    np.testing.assert_allclose(np.sqrt((found**2).mean(axis=(-2, -1))), 0.3, rtol=1e-6)


def test_a_mixture_weighs_the_gradients_by_their_age():
    """Each mean has weights (1 - decay) * decay**age: pull request 357 of modded-nanogpt."""
    grads = np.random.default_rng(0).normal(size=(12, 3))
    decays, weights, share = np.array([0.5, 0.8, 0.95]), np.array([0.5, 0.3, 0.4]), 0.9
    part = parts.momentum_mixture(tuple(decays), tuple(weights), share)
    with jax.enable_x64(True):
        state = part.init(jnp.zeros(3))
        found: Any = None
        for grad in grads:
            found, state = part.update(jnp.asarray(grad), state)
    ages = np.arange(len(grads))[::-1]
    kernel = sum(w * (1 - b) * b**ages for b, w in zip(decays, weights, strict=True))
    np.testing.assert_allclose(found, 0.1 * grads[-1] + share * kernel @ grads, rtol=1e-12)


def test_a_mixture_of_one_mean_is_momentum():
    grads = draw(5, 3)
    ours, plain = parts.momentum_mixture([0.9], [1.0], 0.9), parts.momentum(0.9)
    states = [ours.init(grads[0]), plain.init(grads[0])]
    for grad in grads:
        (a, states[0]), (b, states[1]) = ours.update(grad, states[0]), plain.update(grad, states[1])
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_cautious_decay_decays_where_the_step_shrinks_the_weight():
    w, u = draw(4, 5), draw(4, 5, seed=1)
    after = w + move(optim.chain(0.1, [optax.identity()], [parts.cautious_decay(0.5)]), w, u)
    free = w - 0.1 * u
    np.testing.assert_allclose(after, jnp.where(u * w > 0, free * 0.95, free), atol=1e-6)


def test_outputs_are_those_of_the_layout():
    """A kernel of attention [in, heads, head_dim] has heads * head_dim outputs."""
    w, u = draw(4, 2, 3), draw(4, 2, 3, seed=1)
    for part in (partial(parts.floor, 2.0, by="output"), parts.normalize):
        spec = "in heads head_dim -> in (heads head_dim)"
        found = move(part(matrices=spec), w, u)
        flat = move(part(), w.reshape(4, 6), u.reshape(4, 6))
        np.testing.assert_array_equal(found.reshape(4, 6), flat)


def test_a_part_receives_the_gradient_and_the_rate():
    seen: list[dict[str, Any]] = []

    def update(updates: Any, state: Any, params: Any = None, *, grad: Any, learning_rate: Any):
        seen.append({"grad": grad, "rate": learning_rate})
        return updates, state

    part = optax.GradientTransformationExtraArgs(lambda params: (), update)
    chain = optim.chain(lambda step: 0.5 + step, [optax.scale(2.0), part], [part])
    state, updates = chain.init({"w": jnp.zeros(2)}), {}
    for _ in range(2):
        found: Any = chain.update({"w": jnp.ones(2)}, state, {"w": jnp.zeros(2)})
        updates, state = found
    assert [float(one["rate"]) for one in seen] == [0.5, 0.5, 1.5, 1.5]
    assert all((one["grad"]["w"] == 1).all() for one in seen)
    np.testing.assert_array_equal(updates["w"], [-3.0, -3.0])


def shifted(place: Any) -> Part:
    """Makes a part that takes the gradient, and no other arguments than those that it names."""

    def update(updates: Any, state: Any, params: Any = None, *, grad: Any) -> Any:
        del params
        return jax.tree.map(jnp.add, updates, grad), state

    return Part(lambda params: (), update, name="my_lab.shifted", place=place)


def test_a_part_receives_only_the_arguments_that_it_names():
    chain = optim.chain(0.5, [optax.scale(2.0), shifted("before")])
    found = move(chain, jnp.zeros(2), jnp.asarray([1.0, 2.0]))
    np.testing.assert_array_equal(found, [-1.5, -3.0])


def test_a_part_without_further_arguments_stays_a_part_in_a_group():
    params = {"w": jnp.ones((2, 2))}

    def init(side: str) -> Any:
        both = {"before": [optax.identity()], "after": []}
        both[side] = [partial(shifted, "after")]
        chain = partial(optim.chain, 0.1, **both)
        return optim.optimizer({"all": optim.group(".*", chain)}).init(params)

    init("after")
    with pytest.raises(optim.GroupError, match="my_lab.shifted changes the step, and belongs in"):
        init("before")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: parts.polar(norm="nuclear"), "norm must be one of frobenius, gram"),
        (lambda: parts.polar(scale="big"), "scale must be one of"),
        (lambda: parts.polar(dtype="int8"), "dtype must be None or one of bfloat16"),
        (lambda: parts.momentum(dtype="fp32"), "dtype must be None or one of bfloat16"),
        (lambda: parts.floor(0.1, by="row"), "by must be one of matrix, output, got 'row'"),
        (lambda: parts.pin_radius("first"), "radius must be one of current, initial, got 'first'"),  # pyright: ignore
        (lambda: parts.pin_radius("initial", radial=True), "choose one"),
        (lambda: parts.momentum_mixture([0.9], [0.5, 0.5]), "got 1 decays and 2 weights"),
        (lambda: parts.momentum_mixture([], []), "got 0 decays"),
    ],
)
def test_unknown_words_are_refused(make: Any, words: str):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "part",
    [parts.polar, parts.normalize, partial(parts.floor, 0.1), parts.match_norm, parts.pin_radius],
)
def test_a_part_for_matrices_refuses_a_vector(part: Any):
    with pytest.raises(ValueError, match=r"optim\.parts\.\w+.*'?bias"):
        part().init({"bias": jnp.zeros(3)})


def test_a_decay_outside_of_a_chain_is_refused():
    with pytest.raises(ValueError, match="is a part of optim.chain"):
        move(parts.cautious_decay(0.1), draw(2, 2), draw(2, 2))


def test_a_chain_asks_for_parameters():
    chain = optim.chain(0.1, [optax.identity()])
    with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
        chain.update({"w": jnp.ones(2)}, chain.init({"w": jnp.zeros(2)}))


# Chains in which a part does nothing, or does again what another one did.


def one_by_one(part: Any, lengths: Sequence[float]) -> np.ndarray:
    """Returns what a transformation makes of updates that are these multiples of random ones."""
    params: Any = {"kernel": jnp.ones((3, 4))}
    moves: Any = params
    tx = optax.with_extra_args_support(part)
    state = tx.init(params)
    for step, length in enumerate(lengths):
        updates = {"kernel": length * jax.random.normal(jax.random.key(step), (3, 4))}
        moves, state = tx.update(updates, state, params, grad=updates, learning_rate=1.0)
        params = {"kernel": params["kernel"] - 0.01 * moves["kernel"]}
    return np.asarray(moves["kernel"])


LENGTHS = {
    "match_norm": (parts.match_norm(), "replaces"),
    "match_rms": (parts.match_rms(), "replaces"),
    "graft": (parts.graft(optax.scale_by_sign()), "replaces"),
    "polar": (parts.polar(), "ignores"),
    "normalize": (parts.normalize(), "keeps"),
    "momentum": (parts.momentum(0.9), "keeps"),
    "adam": (parts.adam(), "keeps"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_what_a_part_says_of_lengths_is_what_it_does(name: str):
    """Only what ignores or replaces lengths gives the same for a longer last update."""
    part, length = LENGTHS[name]
    assert part.length == length
    same = np.allclose(one_by_one(part, [1, 1, 1]), one_by_one(part, [1, 1, 7]), rtol=1e-4)
    assert same == (length in ("ignores", "replaces"))


@pytest.mark.long
def test_the_transformations_of_optax_that_ignore_lengths_are_known():
    """All that optax has without a required argument, in the third of three updates."""
    found = set()
    for name in dir(optax):
        make = getattr(optax, name)
        if (
            not name.startswith(("scale_by", "normalize"))
            or name == "scale_by_backtracking_linesearch"
        ):
            continue
        try:
            part = make()
            found_for = [one_by_one(part, [1, 1, x]) for x in (1.0, 7.0, 0.01)]
        except (TypeError, ValueError):  # it needs an argument, or the value of the loss
            continue
        if np.allclose(found_for, found_for[0], rtol=1e-3):
            found.add(name)
    assert found == set(_SCALE_FREE)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            ["match_norm", "match_rms"],
            [],
            "match_norm sets the lengths of directions, and parts.match",
        ),
        (["polar", "polar"], [], "parts.polar stands twice in `before`"),
        (["soap", "soap"], [], "parts.soap stands twice in `before`"),
        (
            ["match_norm", optax.scale_by_sign()],
            [],
            "and optax.scale_by_sign after it ignores them",
        ),
        (
            ["match_norm", optax.normalize_by_update_norm()],
            [],
            "optax.normalize_by_update_norm after",
        ),
        (["momentum"], [parts.decay(0.1), parts.decay(0.2)], "parts.decay stands twice in `after`"),
        ([], [], "The chain has no part"),
    ],
)
def test_a_chain_in_which_a_part_does_nothing_is_refused(before: Any, after: Any, words: str):
    made = [getattr(parts, x)() if isinstance(x, str) else x for x in before]
    with pytest.raises(ArgumentError, match=words):
        optim.chain(0.1, made, after)


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ([], [parts.decay(0.1), parts.cautious_decay(0.1)], "parts.decay (after.0)"),
        ([], [parts.cautious_decay(0.1, parts.decay(0.1))], "parts.cautious_decay (after.0)"),
        (
            [optax.add_decayed_weights(0.1)],
            [parts.decay(0.1)],
            "optax.add_decayed_weights (before.0)",
        ),
    ],
)
def test_a_chain_with_two_decays_is_a_warning(before: Any, after: Any, first: str):
    tx = optim.chain(0.1, [*before, parts.momentum()], after)
    with pytest.warns(OptimizerWarning, match=re.escape(f"{first} and ")):
        tx.init(jnp.ones((2, 2)))
    one = optim.optimizer({"all": optim.group(".*", tx)})
    assert first in find_matrices(one, {"kernel": jnp.ones((2, 2))}).warnings[0]


def test_a_chain_with_one_decay_is_none(recwarn: pytest.WarningsRecorder):
    optim.chain(0.1, [parts.momentum()], [parts.decay(0.1)]).init(jnp.ones((2, 2)))
    assert not recwarn.list


def test_a_part_may_set_lengths_that_another_one_raises():
    for before in ([parts.match_norm(), parts.floor(0.5)], [parts.momentum(), parts.momentum()]):
        optim.chain(0.1, before)


# Lines of the config, where a mistake is made.
BEFORE, AFTER, PIN = (
    "        before:\n",
    "        after:\n",
    "around: !parts.pin_radius {radial: true}",
)
LAST = AFTER + f"        - !parts.cautious_decay {{rate: 0.025, {PIN}}}\n"
KEPT = AFTER + "        - !parts.pin_radius {}\n"
CONFIG = """
model: !models.mlp {width: 16, depth: 2}
data: !data.digits {batch_size: 100}
loss: !losses.softmax_cross_entropy
steps: 4
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group
      match: blocks/.*/kernel
      optimizer: !optim.chain
        learning_rate: !schedules.power_cool {peak_value: 0.0375, end: 5, flat_until: 1}
        before:
        - !parts.momentum
          decay: !optax.linear_schedule {init_value: 0.85, end_value: 0.95, transition_steps: 3}
        - !parts.polar {polynomial: [2.0, -1.5, 0.5], steps: 12, norm: gram}
        - !parts.radial_brake {outward: 0.5}
        - !parts.floor {ratio: 0.3825, by: output}
        after:
        - !parts.cautious_decay {rate: 0.025, around: !parts.pin_radius {radial: true}}
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 0.001}}
"""


@pytest.mark.parametrize("i", range(3))
def test_balanced_polar_factors_agree_with_the_authors_program(i: int):
    """Float64, by zeropower_via_newtonschulz5 of train_gpt_simple_aurora_ema_ref.py (2026-05-25).

    It is in modded-nanogpt's records/track_3_optimization, and has _AURORA_K = 3 and
    _AURORA_BETA = 0.25. The kernels are [6, 2], [5, 3] and [4, 4], transposed there.
    """
    figures = np.load(Path(__file__).with_name("aurora_figures.npz"))
    options = {"norm": "gram", "scale": "none", "balance": 3, "balance_power": 0.25}
    with jax.enable_x64(True):
        part = parts.polar([2.0, -1.5, 0.5], 12, **options)
        gradient = jnp.asarray(figures[f"gradient_{i}"])
        found: Any = part.update(gradient, part.init(gradient), gradient)[0]
        np.testing.assert_allclose(found, figures[f"factor_{i}"], rtol=0, atol=1e-12)
    for wrong in ({"balance": 0}, {"balance_power": 0.25}):
        with pytest.raises(ValueError, match="needs balance to be at least 1, or None without"):
            parts.polar(**wrong)


def planned(tmp_path: Path, capsys: Any, *edits: Sequence[str]) -> str:
    from trainer.__main__ import main

    text = CONFIG
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "chain.yaml").write_text(text)
    code = main(["explain", f"--config={tmp_path / 'chain.yaml'}"])
    out, err = capsys.readouterr()
    assert code == (2 if err else 0), err
    return out + err


def test_a_config_names_parts_and_schedules_their_floats(tmp_path: Path, capsys: Any):
    told = planned(tmp_path, capsys)
    assert "blocks/linear/kernel  1x16x16  float32  matrices  optim.chain" in told
    assert "  decay: peak 0.95 at step 4, final 0.95\n" in told
    assert "In group 'matrices', optim.parts.polar works on 1 matrix of 16x16" in told
    assert "outputs of the model" not in told
    wide = planned(tmp_path, capsys, ("match: blocks/.*/kernel", "match: .*/kernel"))
    assert "head/kernel gives the 10 outputs of the model, and optim.parts.polar works on" in wide
    paths = "optimizer.groups.matrices.optimizer."
    for inputs in (
        "before.0.decay: end_value 0.95, init_value 0.85",
        "before.1.polynomial: 0 2, 1 -1.5, 2 0.5",
        "before.2: eps 1e-12, inward 1, outward 0.5",
        "before.3: eps 1e-08, ratio 0.3825",
        "after.0: rate 0.025",
        "after.0.around: eps 1e-08",
        "learning_rate: peak_value 0.0375, power 1.2",
    ):
        assert f"  {paths}{inputs}\n" in told


def test_the_plan_lists_the_parts_in_their_order(tmp_path: Path, capsys: Any):
    told = planned(tmp_path, capsys)
    assert told[told.index("Parts of") : told.index("Hyperparameters of group")].splitlines() == [
        "Parts of the update of group 'matrices', in their order:",
        "  parts.momentum: decay scheduled, nesterov true",
        "  parts.polar: polynomial [2, -1.5, 0.5], steps 12, norm gram, scale original",
        "  parts.radial_brake: outward 0.5, inward 1",
        "  parts.floor: ratio 0.3825, by output",
        "  times -learning_rate",
        "  parts.cautious_decay: rate 0.025",
        "    around parts.pin_radius: radius current, radial true",
    ]


@pytest.mark.long
def test_parts_without_polar_doubt_that_stacked_biases_are_matrices(tmp_path: Path, capsys: Any):
    without_polar = (
        "        - !parts.polar {polynomial: [2.0, -1.5, 0.5], steps: 12, norm: gram}\n",
        "",
    )
    told = planned(tmp_path, capsys, without_polar, ("match: blocks/.*/kernel", "match: blocks/.*"))
    assert told.count("works on the last two axes") == 1
    assert (
        "In group 'matrices', optim.parts.radial_brake works on the last two axes of"
        " blocks/linear/bias [1x16]: 1 matrix of 1x16. A bias or a scale is not a matrix"
    ) in told
    # Of parts with the same matrices, the plan names the first.
    told = planned(tmp_path, capsys)
    assert (
        told.count(" works on ") == told.count("optim.parts.polar works on 1 matrix of 16x16") == 1
    )


def test_a_part_of_outputs_refuses_a_vector_of_the_group(tmp_path: Path, capsys: Any):
    brake = "        - !parts.radial_brake {outward: 0.5}\n"
    polar = "        - !parts.polar {polynomial: [2.0, -1.5, 0.5], steps: 12, norm: gram}\n"
    edits = (brake, ""), (polar, ""), ("match: blocks/.*/kernel", "match: head/.*")
    told = planned(tmp_path, capsys, *edits)
    assert (
        "chain.yaml:10: optim.chain cannot update the group 'matrices'. optim.parts.floor" in told
    )
    assert "the parameter 'head/bias' has shape (10,): put it in another group" in told


@pytest.mark.long
def test_a_matrix_of_zeros_is_refused_where_its_norm_is_kept(tmp_path: Path, capsys: Any):
    gpt = "!models.gpt {width: 16, depth: 2, num_heads: 2, zero_init: true}"
    told = planned(
        tmp_path,
        capsys,
        ("!models.mlp {width: 16, depth: 2}", gpt),
        ("!data.digits {batch_size: 100}", "!data.text {batch_size: 4, length: 16}"),
        ("radial: true", "radial: false"),
    )
    assert "The parameter blocks/attn/out/kernel has a matrix of zeros at the first step" in told
    assert "chain.yaml:13" in told


def test_a_radius_that_follows_the_step_grows_from_zero():
    """So that record 46 can start with projections of zeros."""
    recipe = partial(
        optim.chain,
        0.1,
        [partial(optax.identity)],
        [partial(parts.pin_radius, radial=True)],
    )
    optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
    params: Any = {"w": jnp.zeros((2, 3))}
    state = optimizer.init(params)
    for _ in range(3):
        params, state = optimizer.update({"w": jnp.ones((2, 3))}, state, params)
    np.testing.assert_allclose(norms(params["w"]), 0.2 * 6**0.5, rtol=1e-4)


def test_a_matrix_of_zeros_is_refused_without_a_config():
    recipe = partial(optim.chain, 0.1, [partial(parts.match_norm)], [partial(parts.pin_radius)])
    stacked = jnp.stack([jnp.ones((2, 3)), jnp.zeros((2, 3))])
    optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
    with pytest.raises(optim.GroupError, match="The parameter w has a matrix of zeros"):
        optimizer.init({"w": stacked})
    optimizer.init({"w": stacked + 1, "empty": jnp.zeros((0, 2))})


def test_what_a_part_of_ones_own_says_that_it_keeps_is_checked():
    def pin(keeps_norm: bool, keeps_zeros: bool) -> optax.GradientTransformation:
        how: Any = {"place": "after", "keeps_norm": keeps_norm, "keeps_zeros": keeps_zeros}
        tx = optax.with_extra_args_support(optax.identity())
        return Part(tx.init, tx.update, name="lab.pin", **how)

    def started(*kept: bool) -> None:
        before = [partial(optax.add_decayed_weights, 0.1)]
        recipe = partial(optim.chain, 0.1, before, [partial(pin, *kept)])
        optim.optimizer({"all": optim.group(".*", recipe)}).init({"w": jnp.zeros((2, 3))})

    started(False, False)
    with pytest.raises(
        optim.GroupError, match="weight_decay of .*add_decayed_weights makes .* and lab.pin in"
    ):
        started(True, False)
    with pytest.raises(optim.GroupError, match="The parameter w has a matrix of zeros"):
        started(False, True)


def needy(name: str, *needs: Need, **kwargs: Any) -> Part:
    """Makes a part of one's own that does nothing."""
    tx = optax.with_extra_args_support(optax.identity())
    return Part(tx.init, tx.update, name=name, needs=needs, **kwargs)


def test_a_part_is_refused_whose_need_is_missing_or_stands_on_its_other_side():
    first = needy("lab.first")
    second = needy("lab.second", Need("lab.first", "before", "It reads what that one keeps."))
    optim.chain(0.1, [first, second])
    optim.chain(0.1, [first], [needy("lab.third", *second.needs, place="after")])
    with pytest.raises(PartNeeded, match=r"^lab.second needs, before it, lab.first; lab.first st"):
        optim.chain(0.1, [second, first])
    with pytest.raises(PartNeeded, match="lab.first; no part there says that it is one. It reads"):
        optim.chain(0.1, [optax.identity(), second])
    # What a part has inside of it works before it.
    optim.chain(0.1, [needy("lab.outer", *second.needs, around=first)])
    with pytest.raises(PartNeeded, match="lab.first stands after it") as error:
        optim.chain(0.1, [needy("lab.first", around=second)])
    assert error.value.argument == "before.0.around" and error.value.part == "lab.second"


def test_a_floor_by_output_is_content_with_any_part_that_keeps_norms():
    before = [parts.floor(0.3, by="output")]
    for pin in (
        parts.pin_radius(),
        parts.cautious_decay(0.1, around=parts.pin_radius(radial=True)),
        needy("lab.pin", place="after", keeps_norm=True),
    ):
        optim.chain(0.1, before, [parts.decay(0.1), pin] if pin.lets_decay else [pin])  # pyright: ignore
    optim.chain(0.1, [parts.floor(0.3)], [parts.decay(0.1)])
    with pytest.raises(PartNeeded, match="parts.floor needs, after it, a part that keeps the norm"):
        optim.chain(0.1, before, [parts.decay(0.1)])


def test_a_radius_that_follows_the_step_lets_weights_decay():
    """Without a gradient, weights become 1 - rate * decay times as long, before the rate or after.

    A radius that does not follow the step keeps their norm, and so such a chain is refused.
    """
    w = draw(4, 5)
    for before, after in (
        ([optax.add_decayed_weights(0.5)], []),
        ([optax.identity()], [parts.decay(0.5)]),
    ):
        tx = optim.chain(0.1, before, [*after, parts.pin_radius(radial=True)])
        np.testing.assert_allclose(w + move(tx, w, 0 * w), 0.95 * w, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ratio: 0.3825", "ration: 0.3825", "parts.floor has no argument 'ration'. Did you mean"),
        ("!parts.polar", "!parts.polr", "no function 'parts.polr'. Did you mean 'parts.polar'"),
        ("by: output", "by: row", "by must be one of matrix, output, got 'row'"),
        ("match: blocks/.*/kernel", "match: embed/.*", "optim.parts.polar"),
        (
            "ratio: 0.3825",
            "ratio: 3.825",
            "ratio of optim.parts.floor must be at most 1, got 3.825",
        ),
        (
            "-1.5, 0.5",
            "-1.5, 5.0",
            "diverges: 12 steps map a singular value between 0 and 1 beyond",
        ),
        ("[2.0, -1.5, 0.5], steps: 12", "[1.0, 2.5, 0.0], steps: 1", "between 0 and 1 to 3.5, and"),
        (
            "[2.0, -1.5, 0.5]",
            "[0.0, 0.0, 0.0]",
            "polynomial of optim.parts.polar makes updates va",
        ),
        ("[2.0, -1.5, 0.5], steps: 12", "[-1.0, 0.0, 0.0], steps: 3", "turns updates around: 3 st"),
        ("[2.0, -1.5, 0.5]", "jordon", "got 'jordon'. Did you mean 'jordan'?"),
        ("steps: 12", "steps: 0", "optim.parts.polar cannot be computed: steps must be an integer"),
        (
            BEFORE,
            BEFORE + "        - !optax.adam {learning_rate: 0.1}\n",
            "without a learning rate: optax.scale_by_adam.",
        ),
        (
            BEFORE,
            BEFORE + "        - !parts.graft {onto: !optim.muon {learning_rate: 0.1}}\n",
            "optim.muon in `before` of a chain multiplies by minus its own learning rate",
        ),
        (BEFORE, BEFORE + "        - !parts.pin_radius\n", "in `after`; it stands in `before`"),
        (AFTER, AFTER + "        - !parts.polar\n", "belongs in `before`; it stands in `after`"),
        (PIN, "around: !parts.polar", "belongs in `before`; it stands in `after`"),
        (
            AFTER,
            "        - !parts.polar\n" + AFTER,
            "parts.polar after it ignores them. Put parts.floor",
        ),
        (
            LAST,
            AFTER + "        - !parts.decay {rate: 1.0}\n        - !parts.pin_radius {}\n",
            "as its argument `around`",
        ),
        (AFTER, AFTER + "        - !parts.pin_radius\n", "Two parts of `after` keep the norms"),
        (
            LAST,
            "        - !optax.add_decayed_weights {weight_decay: 0.1}\n" + KEPT,
            "weight_decay of optax.add_decayed_weights makes weights smaller, and parts.pin_radius",
        ),
        (
            LAST,
            "        - !optax.chain {args: [!optax.add_decayed_weights {weight_decay: 0.1}]}\n"
            + KEPT,
            "weight_decay of optax.add_decayed_weights makes weights smaller, and parts.pin_radius",
        ),
        (
            LAST,
            "        - !parts.prodigy {weight_decay: 0.1}\n" + KEPT,
            "group 'matrices', weight_decay of optim.parts.prodigy makes weights smaller, and",
        ),
        (
            BEFORE,
            BEFORE + "        - !parts.prodigy {}\n",
            "parts.prodigy sets the lengths of directions, and parts.polar after it ignores them",
        ),
        (
            f", {PIN}",
            "",
            "the group 'matrices'. parts.floor needs, after it, a part that keeps the norms of the"
            " weights, such as parts.pin_radius; no part there says that it is one. With by='outp",
        ),
    ],
)
def test_mistakes_in_a_chain_are_named(old: str, new: str, words: str, tmp_path: Path, capsys: Any):
    told = planned(tmp_path, capsys, (old, new))
    assert words in told and "chain.yaml:" in told and "Traceback" not in told
