"""Parts of Adam's family against the programs of their authors, optax and closed forms.

The programs in `tests/programs.py` and prodigyopt are compared with in test_references.py and
test_torch.py, for 50 steps each.
"""

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
from tests import compiled_programs
from tests.recorded import Recorded, largest, made, rate

FIGURES = np.load(Path(__file__).with_name("adam_figures.npz"))
LEAVES = ("kernel", "bias", "scale")  # [3, 5], [4] and []
RATES = FIGURES["rate"]  # a cosine with warm-up


def figures(name: str) -> dict[str, Any]:
    return {leaf: FIGURES[f"{name}_{leaf}"] for leaf in LEAVES}


def train(make: Any, rates: Any = RATES, start: Any = None) -> list[Any]:
    """Trains in float64 on the recorded gradients; returns the parameters after every step.

    `make` takes a learning rate, and returns the optimizer.
    """
    with jax.enable_x64(True):
        params: Any = jax.tree.map(jnp.asarray, figures("start") if start is None else start)
        state = make(rates[0]).init(params)
        step = jax.jit(lambda rate, *args: make(rate).update(*args))
        seen = []
        for t, rate in enumerate(rates):
            grads = {leaf: jnp.asarray(FIGURES[f"grads_{leaf}"][t]) for leaf in LEAVES}
            updates, state = step(rate, grads, state, params)
            params = optax.apply_updates(params, updates)
            seen.append(params)
        return seen


def difference(name: str) -> float:
    """Trains on the recorded gradients; returns the largest difference after the last step."""
    part = made(RECORDED[name].optimizer.args[1])
    found = train(lambda now: optim.chain(now, part))[-1]
    for leaf, expected in figures(name).items():
        assert np.abs(expected - FIGURES[f"start_{leaf}"]).max() > 0.02
    return max(largest(found[leaf], expected) for leaf, expected in figures(name).items())


# The results were computed in float64, from the same start and gradients: record_46 (2026-06-19)
# with casts to float32 made casts to float64; laprop with torch's present order of arguments.
RECORDED = {
    name: Recorded(
        partial(optim.chain, rate, [part]), program, partial(difference, name), 1e-14, remarks
    )
    for name, part, program, remarks in [
        (
            "record_46",
            partial(parts.adam, 0.8, 0.95, 1e-10, bias_correction=False),
            "class Adam of modded-nanogpt's train_gpt_cwd_SOTA.py, record 46 of its optimizer"
            " track",
            "of kernels, biases and a scalar",
        ),
        (
            "laprop",
            partial(parts.laprop, 0.8, 0.95, 1e-6),
            "laprop.py of LaProp's authors (github.com/Z-T-WANG/LaProp-Optimizer)",
            "",
        ),
    ]
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_part_agrees_with_its_authors_program(name: str):
    """In float64; see `RECORDED` for the programs."""
    assert difference(name) < RECORDED[name].bound


@pytest.mark.parametrize("nesterov", [False, True])
def test_adam_with_bias_correction_is_that_of_optax(nesterov: bool):
    ours = parts.adam(0.8, 0.95, 1e-6, nesterov=nesterov)
    theirs = optax.scale_by_adam(0.8, 0.95, 1e-6, nesterov=nesterov)
    found, expected = (
        train(lambda rate, part=part: optim.chain(rate, [part]))[-1] for part in (ours, theirs)
    )
    for leaf in LEAVES:
        np.testing.assert_allclose(found[leaf], expected[leaf], rtol=0, atol=1e-14)


def test_adam_without_a_mean_is_a_part_of_optax():
    """Of an average, of RMSProp, and with sums in place of averages of AdaGrad."""
    rms = optax.scale_by_rms(0.95, 1e-6, eps_in_sqrt=False, bias_correction=True)
    later = parts.adam(None, 0.95, 1e-6, squares="gradient")
    for ours, theirs in (
        ([optax.ema(0.8), later], optax.scale_by_adam(0.8, 0.95, 1e-6)),
        ([parts.adam(None, 0.95, 1e-6)], rms),
        ([parts.adam(None, 1.0, 0.0)], optax.scale_by_rss(0.0, 0.0)),
    ):
        found, expected = (
            train(lambda rate, own=own: optim.chain(rate, own))[-1] for own in (ours, [theirs])
        )
        for leaf in LEAVES:
            np.testing.assert_allclose(found[leaf], expected[leaf], rtol=0, atol=1e-14)


def test_adam_without_bias_correction_begins_with_other_lengths():
    """The first direction is (1 - b1) / sqrt(1 - b2) of the sign, twice that with Nesterov's b1."""
    for nesterov, share in ((False, 0.2), (True, 0.2 + 0.8 * 0.2)):
        part = parts.adam(0.8, 0.96, 0.0, bias_correction=False, nesterov=nesterov)
        found = train(lambda rate, part=part: optim.chain(rate, [part]), RATES[:1])[0]
        for leaf in LEAVES:
            signs = np.sign(FIGURES[f"grads_{leaf}"][0])
            expected = FIGURES[f"start_{leaf}"] - RATES[0] * share / 0.2 * signs
            np.testing.assert_allclose(found[leaf], expected, rtol=0, atol=1e-14)


def test_decay_is_that_of_adamw_and_corrected_that_of_its_square():
    adam = optax.scale_by_adam()
    for peak, theirs in (
        (None, lambda rate: optax.adamw(rate, weight_decay=0.3)),
        (0.02, lambda rate: optax.adamw(rate, weight_decay=0.3 * rate / 0.02)),
    ):
        chain = lambda rate, peak=peak: optim.chain(rate, [adam], [parts.decay(0.3, peak)])  # noqa: E731
        found, expected = train(chain)[-1], train(theirs)[-1]
        for leaf in LEAVES:
            np.testing.assert_allclose(found[leaf], expected[leaf], rtol=0, atol=1e-14)


def test_laprop_rests_while_the_learning_rate_is_zero():
    rates = np.concatenate([np.zeros(3), RATES[:4], np.zeros(1)])
    seen = train(lambda rate: optim.chain(rate, [parts.laprop()]), rates)
    for leaf in LEAVES:
        np.testing.assert_array_equal(seen[2][leaf], FIGURES[f"start_{leaf}"])
        np.testing.assert_array_equal(seen[7][leaf], seen[6][leaf])
        assert np.isfinite(seen[6][leaf]).all() and (seen[6][leaf] != seen[2][leaf]).all()


def test_prodigy_begins_anew_after_steps_of_rate_zero():
    """As in the authors' program, such a step changes nothing; optax.contrib.prodigy gives NaN."""
    part = parts.prodigy(estim_lr0=0.01, weight_decay=0.1)
    late = train(lambda rate: optim.chain(rate, [part]), [0.0, 0.0, 1.0])
    for leaf in LEAVES:
        np.testing.assert_array_equal(late[1][leaf], FIGURES[f"start_{leaf}"])
        # The first step of Adam: the sign of the gradient, whatever steps of rate 0 were before.
        signs, start = np.sign(FIGURES[f"grads_{leaf}"][2]), FIGURES[f"start_{leaf}"]
        expected = start - 0.01 * (0.1 / np.sqrt(0.001) * signs + 0.1 * start)
        np.testing.assert_allclose(late[2][leaf], expected, atol=1e-5)
    theirs = train(lambda rate: optax.contrib.prodigy(rate, estim_lr0=0.01), [0.0, 0.0, 1.0])
    assert np.isnan(theirs[2]["kernel"]).all()


def test_prodigy_waits_for_the_first_gradient():
    """As in the authors' program, even the weight decay does."""
    tx = optim.chain(1.0, [parts.prodigy(weight_decay=0.1)])
    params = {"w": jnp.ones(2)}
    found: Any = tx.update({"w": jnp.zeros(2)}, tx.init(params), params)
    updates, state = found
    np.testing.assert_array_equal(updates["w"], np.zeros(2))
    jax.tree.map(np.testing.assert_array_equal, state, tx.init(params))


@pytest.mark.parametrize("make", [parts.laprop, parts.prodigy, lambda: parts.decay(0.1)])
def test_a_part_that_needs_the_learning_rate_is_refused_outside_of_a_chain(make: Any):
    part, params = make(), {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"parts\.\w+ is a part of optim.chain"):
        part.update(params, part.init(params), params)


@pytest.mark.parametrize("make", [parts.prodigy, lambda: parts.decay(0.1)])
def test_a_part_that_needs_the_parameters_asks_for_them(make: Any):
    part, params = make(), {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"parts\.\w+ needs parameters"):
        part.update(params, part.init(params), learning_rate=0.1)


# The dtype of the averages.


def test_averages_in_bfloat16_are_those_of_torchs_fused_adamw(torch):
    draw = np.random.default_rng(0)
    start, grads = draw.normal(size=(40, 8)), draw.normal(size=(20, 40, 8))
    b1, b2, eps, decay, rate = 0.8, 0.95, 1e-10, 0.1, 0.05
    weights = torch.nn.Parameter(torch.tensor(start).bfloat16())
    adamw = torch.optim.AdamW([weights], rate, (b1, b2), eps, decay, fused=True)
    part = partial(parts.adam, b1, b2, eps, state_dtype="bfloat16")
    recipe = partial(optim.chain, rate, [part], [partial(parts.decay, decay)])
    optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
    params = {"w": jnp.asarray(start, jnp.bfloat16)}
    state = optimizer.init(params)
    # About rounding: compiled as users do, which rounds once where torch does.
    update = jax.jit(optimizer.update, compiler_options=compiled_programs.as_users())
    for grad in grads:
        weights.grad = torch.tensor(grad).bfloat16()
        adamw.step()
        params, state = update({"w": jnp.asarray(grad, jnp.bfloat16)}, state, params)
    theirs = adamw.state[weights]
    averages = {x.shape: [] for x in jax.tree.leaves(state)}
    for x in jax.tree.leaves(state):
        averages[x.shape].append(x)
    for mine, other in zip(
        [params["w"], *averages[start.shape]],
        [weights.detach(), theirs["exp_avg"], theirs["exp_avg_sq"]],
        strict=True,
    ):
        assert mine.dtype == jnp.bfloat16 and other.dtype == torch.bfloat16
        mine, other = np.asarray(mine, np.float32), other.float().numpy()
        # Sums in another order are rounded to another neighbor now and then.
        assert np.mean(mine == other) > 0.97
        np.testing.assert_allclose(mine, other, rtol=2**-7)


def test_an_unknown_dtype_of_the_averages_is_refused():
    with pytest.raises(ValueError, match="bfloat16, float16, float32, float64, got 'bf16'"):
        parts.adam(state_dtype="bf16")


def test_arguments_of_adam_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="nesterov averages into the mean: give b1, or remove"):
        parts.adam(None, nesterov=True)
    with pytest.raises(ValueError, match="squares must be one of update, gradient, got 'grad'"):
        parts.adam(squares="grad")  # pyright: ignore[reportArgumentType]
    part = parts.adam(squares="gradient")
    with pytest.raises(ValueError, match=r"parts\.adam is a part of optim\.chain, which passes it"):
        part.update(jnp.ones(3), part.init(jnp.ones(3)))


def test_a_sum_of_squares_is_allowed_and_a_growing_one_is_not():
    def grouped(b2: float) -> Any:
        chain = partial(optim.chain, 0.1, [partial(parts.adam, 0.9, b2)])
        return optim.optimizer({"all": optim.group(".*", chain)}).init({"w": jnp.ones(2)})

    grouped(1.0)
    with pytest.raises(ValueError, match=r"b2 of .*parts\.adam must be in \[0, 1\], as"):
        grouped(1.5)
