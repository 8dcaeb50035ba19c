"""Widths of models.gpt: with base_width, activations keep their size as the width grows (muP)."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from tests import runs, short
from tests.laws_table import ROWS
from trainer import models
from trainer.engine.width import divisor, width_warnings
from trainer.models.attention import CausalAttention
from trainer.models.layers import Mlp

WIDTHS = (64, 128, 256, 512)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 32)).astype(np.int32)}


# In half of the time, because these programs compute for a moment only.


def gpt(width: int, base_width: int | None, **more: Any) -> models.Model:
    # Without qk-norm, which would hide what the scale of the attention scores is for.
    arguments = {"depth": 2, "num_heads": 4, "qk_norm": False, "scan_layers": False} | more
    return models.gpt(64, width, remat="none", base_width=base_width, **arguments)


def activations_of(model: models.Model) -> Callable[[Any], dict[str, np.ndarray]]:
    """Compiles what gives, for parameters, what attention and perceptrons add, and the logits."""

    @jax.jit
    def forward(params: Any) -> dict[str, jax.Array]:
        seen: dict[str, Any] = {}

        def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            result, module = call(*args, **kwargs), context.module
            if context.method_name == "__call__" and isinstance(module, Mlp | CausalAttention):
                seen["/".join(module.path)] = result
            return result

        with nn.intercept_methods(record):
            outputs = model.apply(params, {}, BATCH, key=None, train=False)[0]
        return {**seen, "logits": outputs.whole()}

    return lambda params: {name: np.asarray(x) for name, x in forward(params).items()}


def size(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


ADAM = functools.partial(optax.adam, 0.01)
RMS_MUON = functools.partial(optim.muon, 0.01, scale="match_rms_adamw")


def by_mup(width: int, base_width: int | None) -> optim.Optimizer:
    """Adam, with a learning rate of the hidden kernels that is divided where there is a base."""
    m = width / base_width if base_width else None
    hidden = optim.group("block.*kernel", ADAM, width_scaling=m)
    return optim.optimizer({"hidden": hidden, "rest": optim.group(".*", ADAM)})


def train(
    width: int, base_width: int | None, tx: optim.Optimizer, steps: int = 5
) -> dict[str, tuple[float, ...]]:
    """Returns the size of activations: at first, of their change in some steps, and at last."""
    model = gpt(width, base_width)

    def loss(params: Any) -> jax.Array:
        logits = model.apply(params, {}, BATCH, key=None, train=True)[0].whole()
        chosen = jnp.asarray(BATCH["tokens"])[:, 1:, None]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), chosen, -1).mean()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        return tx.update(jax.grad(loss)(params), state, params)

    params = jax.jit(model.init)(jax.random.key(0), BATCH)[0]
    activations = activations_of(model)
    first, state = activations(params), tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    last = activations(params)
    return {x: (size(first[x]), size(last[x] - first[x]), size(last[x])) for x in first}


def sizes_by_width(
    base_width: int | None, widths: tuple[int, ...], optimizer: Any = by_mup
) -> dict[str, np.ndarray]:
    """Returns the three sizes of `train`, [widths, 3]."""
    found = [train(width, base_width, optimizer(width, base_width)) for width in widths]
    assert len(found[0]) == 5
    return {name: np.array([x[name] for x in found]) for name in found[0]}


@pytest.mark.long
def test_with_base_width_activations_keep_their_size_over_widths():
    for name, sizes in sizes_by_width(64, WIDTHS).items():
        first, change, last = sizes.T
        assert max(change) / min(change) < 1.6, name
        assert max(last) / min(last) < 1.6, name
        if name == "logits":
            # They start smaller in wider models, as 1 / sqrt(m); what they learn does not.
            np.testing.assert_allclose(first * np.sqrt(np.array(WIDTHS) / 64), first[0], rtol=0.1)
        else:
            assert max(first) / min(first) < 1.6, name


@pytest.mark.long
def test_without_base_width_steps_of_adam_grow_with_the_width():
    found = sizes_by_width(None, (64, 512))
    for name, sizes in found.items():
        change = sizes[:, 1]
        assert change[-1] > 2.5 * change[0], name


@pytest.mark.long
def test_muon_keeps_the_size_of_changes_over_widths_unless_it_matches_the_size_of_adams():
    def muon(recipe: Any, power: float) -> Any:
        def make(width: int, base_width: int) -> optim.Optimizer:
            scaling = (width / base_width) ** power if power else None
            hidden = optim.group("block.*kernel", recipe, width_scaling=scaling)
            return optim.optimizer({"hidden": hidden, "rest": optim.group(".*", ADAM)})

        return make

    def growth(recipe: Any, power: float = 0.0) -> list[float]:
        found = sizes_by_width(64, (64, 512), muon(recipe, power))
        return [x[1, 1] / x[0, 1] for name, x in found.items() if name != "logits"]

    assert all(0.8 < x < 1.25 for x in growth(functools.partial(optim.muon, 0.02)))
    plain = growth(RMS_MUON)
    assert all(x > 1.05 for x in plain) and max(plain) > 1.6
    assert all(0.8 < x < 1.25 for x in growth(RMS_MUON, 0.5))


def warnings_of(optimizer: optim.Optimizer, width: int = 256, **more: Any) -> list[str]:
    model = gpt(width, 64, **more)
    assert model.width_scaling is not None
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)[0]
    return width_warnings(optimizer, params, model.width_scaling)


@pytest.mark.long
@short.parametrize("scan_layers", [True, False], ids=["stacked", "separate"])
def test_the_plan_warns_of_a_learning_rate_that_is_not_divided(scan_layers: bool):
    def warned(recipe: Any, scaling: float | None, match: str = "block.*kernel") -> str:
        hidden = optim.group(match, recipe, width_scaling=scaling)
        groups = {"hidden": hidden, "rest": optim.group(".*", ADAM)}
        if match == ".*":
            del groups["rest"]
        return " ".join(warnings_of(optim.optimizer(groups), scan_layers=scan_layers))

    adamw = functools.partial(optax.adamw, 0.01)
    text = warned(adamw, None)
    assert "In group 'hidden', optax.adamw updates block" in text and "4 times as wide" in text
    assert "Set width_scaling: 4 in the group" in text
    cautious = functools.partial(optim.cautious, adamw)
    assert "Set width_scaling: 4 in the group" in warned(cautious, 2.0)
    assert "a group of these kernels alone" in warned(adamw, None, ".*")
    assert "a group of these kernels alone" in warned(adamw, 4.0, ".*")
    assert not warned(adamw, 4.0) and not warned(cautious, 4.0)
    muon = functools.partial(optim.muon, 0.02)
    assert not warned(muon, None) and "Remove width_scaling" in warned(muon, 4.0)
    assert "Set width_scaling: 2 in the group" in warned(RMS_MUON, None)
    assert not warned(RMS_MUON, 2.0)
    # Of others it is not known, and frozen kernels have no learning rate.
    assert not warned(functools.partial(optim.soap, 0.01), None)
    assert not warned(functools.partial(optim.frozen), None)


# Optimizers by how the spectral norm of an update grows with the width, by their papers: with the
# width itself if each element has the size of the learning rate, and not at all if the update is
# orthogonal. Of the rest it is not known: updates have the size of the gradients or of the weights,
# or of a learning rate that the optimizer finds.
GROWTH = {
    4.0: """optax.adabelief optax.adam optax.adamax optax.adamaxw optax.adamw optax.adan
        optax.amsgrad optax.lion optax.nadam optax.nadamw optax.optimistic_adam optax.radam
        optax.optimistic_adam_v2 optax.rmsprop optax.rprop optax.sign_sgd optax.signum optax.yogi
        optax.contrib.acprop optax.contrib.ademamix optax.contrib.adopt optim.mars
        optax.contrib.schedule_free_adamw optim.cautious optim.grams optim.chain/(parts.laprop)
        optim.chain/(adam,/decay) optim.chain/(parts.adam/with/Nesterov,/decay)""",
    1.0: "optim.muon optax.contrib.muon",
    None: """optax.sgd optax.lamb optax.lars optax.fromage optax.novograd optax.noisy_sgd
        optax.adafactor optax.contrib.prodigy optax.contrib.dadapt_adamw optax.contrib.sophia
        optim.chain/(parts.prodigy) optim.chain/(NorMuonH)""",
}
KNOWN = {row.name: row.recipe for row in ROWS}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of optimistic_adam
@short.parametrize(
    ("name", "factor"),
    [
        (name.replace("/", " "), factor)
        for factor, names in GROWTH.items()
        for name in names.split()
    ],
    lambda case: case[1],
)
def test_it_is_measured_how_the_updates_of_an_optimizer_grow_with_the_width(name, factor):
    assert divisor(KNOWN[name], 4.0) == factor


def test_a_learning_rate_that_begins_at_zero_is_no_size_of_updates():
    schedule = optax.linear_schedule(0.0, 1e-3, 100)
    assert divisor(functools.partial(optax.adamw, schedule, weight_decay=0.1), 4.0) == 4
    assert divisor(functools.partial(optim.cautious, functools.partial(optax.adamw, schedule)), 4.0)


@pytest.mark.long
def test_the_plan_shows_the_divided_learning_rate(capsys: Any):
    command = ["explain", "--config=configs/adamw_gpt.gin", "--set", "model.width=256", "--set"]
    command += ["model.base_width=64"]
    told = runs.printed(capsys, *command)
    assert "warning: In group 'matrices', optax.adamw updates blocks/attn/out/kernel" in told
    told = runs.printed(capsys, *command, "--set", "optimizer.groups.matrices.width_scaling=4")
    assert "warning" not in told and "optimizer.groups.matrices: width_scaling 4" in told
    assert "learning_rate: peak 0.000495 at" in told  # 1.98e-3 / 4


def test_base_width_changes_nothing_at_that_width():
    plain, same = (gpt(64, base) for base in (None, 64))
    params, other = (jax.jit(x.init)(jax.random.key(0), BATCH)[0] for x in (plain, same))
    jax.tree.map(np.testing.assert_array_equal, params, other)
    found, expected = (activations_of(x)(params) for x in (same, plain))
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.long
def test_head_and_embedding_start_alike_at_all_widths():
    def deviations(width: int) -> list[float]:
        params = jax.jit(gpt(width, 64, tied=False).init)(jax.random.key(0), BATCH)[0]
        return [float(np.std(x)) for x in (params["embed"]["embedding"], params["head"]["kernel"])]

    np.testing.assert_allclose(deviations(256), [0.02, 1 / 8], rtol=0.03)
    np.testing.assert_allclose(deviations(64), [0.02, 1 / 8], rtol=0.03)


def test_more_heads_of_the_same_size_keep_their_scale():
    """Attention scores are divided by the head's size, or its root at the base's."""

    def scale(num_heads: int, **more: Any) -> float:
        scales = []

        def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if isinstance(context.module, CausalAttention):
                scales.append(context.module.scale)
            return call(*args, **kwargs)

        model = gpt(256, 64, num_heads=num_heads, **more)
        with nn.intercept_methods(record):
            jax.eval_shape(model.init, jax.random.key(0), BATCH)
        return scales[0]

    assert scale(4) == 4 / 64  # sqrt(16) at the base, 64 here
    assert scale(16, base_head_dim=16) == 16**-0.5
