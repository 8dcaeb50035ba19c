"""Modules learn whether they train, under every name that their argument has in the field."""

from __future__ import annotations

import textwrap
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import short
from trainer import config, models
from trainer.engine.plan import make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import load_located
from trainer.models.model import KNOWN, describe_mode

KEY = jax.random.key(7)
BATCH = {"image": np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)}

# What flax's examples, big_vision, scenic, t5x and Hugging Face call it, and its value in training.
SPELLINGS = [
    ("train", True),
    ("training", True),
    ("is_training", True),
    ("is_train", True),
    ("enable_dropout", True),
    ("deterministic", False),
    ("use_running_average", False),
    ("eval", False),
    ("eval_mode", False),
    ("is_eval", False),
    ("inference", False),
    ("test", False),
    ("is_test", False),
]

SOURCE = """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, {argument}):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average={quiet}, momentum=0.5)(x)
        return nn.Dropout(0.5, deterministic={quiet})(x)
"""


def linen(argument: str, quiet: str) -> Any:
    """Makes the class of a module whose `__call__` takes one more argument."""
    scope: dict[str, Any] = {"nn": nn, "jax": jax, "__name__": __name__}
    exec(textwrap.dedent(SOURCE.format(argument=argument, quiet=quiet)), scope)
    return scope["Net"]


def equal(one: Any, two: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, two)


def check_against_flax(module: nn.Module, model: models.Model, in_training: dict, else_: dict):
    """Holds both modes of a model against flax itself, which is told what is right."""
    params, state = model.init(KEY, BATCH)
    variables = {"params": params, **state}
    outputs, after = model.apply(params, state, BATCH, key=KEY, train=True)
    expected, changed = module.apply(
        variables, BATCH["image"], **in_training, rngs={"dropout": KEY}, mutable=["batch_stats"]
    )
    equal((outputs, after), (expected, dict(changed)))
    assert 0.2 < np.mean(np.asarray(outputs) == 0) < 0.8  # dropped
    calm, same = model.apply(params, after, BATCH, key=None, train=False)
    equal(calm, module.apply({"params": params, **after}, BATCH["image"], **else_))
    equal(same, after)
    assert np.all(np.asarray(calm) != 0)


@short.parametrize(
    ("name", "value", "default"),
    [
        *((*spelling, "") for spelling in SPELLINGS),
        *(("is_training", True, default) for default in ("=False", "=True", ": bool = False")),
    ],
)
def test_a_linen_module_trains_and_evaluates_as_flax_does(name: str, value: bool, default: str):
    net = linen(f"{name}{default}", f"not {name}" if value else name)()
    model = models.from_linen(net)
    assert model.mode is not None
    assert (model.mode(True), model.mode(False)) == ({name: value}, {name: not value})
    check_against_flax(net, model, {name: value}, {name: not value})


def test_every_known_name_of_the_mode_argument_is_recognized():
    tried = dict(SPELLINGS)
    assert {name: KNOWN[name] for name in tried} == tried
    assert set(KNOWN) - set(tried) == {
        *("train_mode", "training_mode", "evaluation", "is_evaluation", "is_inference"),
        *("inference_mode", "testing", "is_testing", "test_mode"),
    }


@pytest.mark.parametrize(
    "argument",
    ["stochastic: bool", "stochastic=False", "*, stochastic=True", "stochastic: bool | None = None"]
    + ["stochastic: 'bool' = 0", "stochastic: 'bool | Elsewhere' = 0"],
)
def test_an_unknown_boolean_argument_is_refused_and_can_be_given(argument: str):
    net = linen(argument, "not stochastic")()
    with pytest.raises(ValueError, match=r"Net\.__call__.*'stochastic'.*train_kwargs.*eval_kwargs"):
        models.from_linen(net)
    model = models.from_linen(
        net, train_kwargs={"stochastic": True}, eval_kwargs={"stochastic": False}
    )
    check_against_flax(net, model, {"stochastic": True}, {"stochastic": False})


def test_an_explicit_mode_argument_overrides_a_known_name():
    net = linen("train", "not train")()
    model = models.from_linen(net, train_kwargs={"train": False})
    assert model.mode is not None and model.mode(True) == model.mode(False) == {"train": False}
    params, state = model.init(KEY, BATCH)
    _, after = model.apply(params, state, BATCH, key=KEY, train=True)
    equal(after, state)


@pytest.mark.parametrize(
    ("argument", "given", "words"),
    [
        ("train", {"train_kwargs": {"trian": True}}, ["'trian'", "'train'"]),
        ("scale=1.0", {"train_kwargs": {"scale": 2.0}}, ["'scale'", "in train_kwargs", "eval_"]),
        ("scale=1.0", {"eval_kwargs": {"scale": 2.0}}, ["'scale'", "in eval_kwargs", "train_"]),
        ("**kw", {"train_kwargs": {"train": True}}, ["'train'", "in train_kwargs", "eval_kwargs"]),
        ("train", {"inputs": ["image", "label"]}, ["'label'", "'train'", "by position"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(argument: str, given: Any, words: list[str]):
    with pytest.raises(ValueError) as caught:
        models.from_linen(linen(argument, "True")(), **given)
    for word in words:
        assert word in str(caught.value)


def test_a_boolean_input_is_not_taken_for_a_mode():
    model = models.from_linen(linen("flag: bool", "True")(), inputs=["image", "image"])
    assert model.mode is not None and model.mode(True) == {}


# nnx.


class Ring(nnx.Module):
    """Holds statistics and dropout in a part, and reads its own attribute or argument."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Asked(Ring):
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        x = self.norm(x, use_running_average=not is_training)
        return self.dropout(x, deterministic=not is_training)


class Attributed(Ring):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.is_training = False

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(x, use_running_average=not self.is_training)
        return self.dropout(x, deterministic=not self.is_training)


class Strange(Ring):
    def __call__(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        return self.dropout(x, deterministic=not stochastic)


@pytest.mark.parametrize("make", [Asked, Attributed, lambda rngs: Asked(rngs=rngs)])
def test_an_nnx_module_trains_and_evaluates_as_flax_does(make: Any):
    model = models.from_nnx(make)
    params, state = model.init(KEY, BATCH)
    outputs, after = model.apply(params, state, BATCH, key=KEY, train=True)
    assert 0.2 < np.mean(np.asarray(outputs) == 0) < 0.8
    bare = nnx.BatchNorm(6, momentum=0.5, rngs=nnx.Rngs(0))
    bare(jnp.asarray(BATCH["image"]), use_running_average=False)
    equal(after["norm"]["mean"], bare.mean[...])
    calm, _ = model.apply(params, after, BATCH, key=None, train=False)
    equal(calm, bare(jnp.asarray(BATCH["image"]), use_running_average=True))
    assert model.mode is not None and model.mode(True)["is_training"] is True
    assert model.mode(False)["is_training"] is False
    assert model.mode(True)["use_running_average"] is False


def test_an_unknown_boolean_argument_of_an_nnx_module_is_refused():
    with pytest.raises(ValueError, match=r"Strange\.__call__.*'stochastic'.*models\.from_nnx"):
        models.from_nnx(Strange).init(KEY, BATCH)
    given: Any = {"train_kwargs": {"stochastic": True}, "eval_kwargs": {"stochastic": False}}
    model = models.from_nnx(Strange, **given)
    params, state = model.init(KEY, BATCH)
    outputs, _ = model.apply(params, state, BATCH, key=KEY, train=True)
    assert np.any(np.asarray(outputs) == 0)


# The plan.


CONFIG = """
model: !models.{maker}
data: !data.digits {{batch_size: 32}}
loss: !losses.softmax_cross_entropy {{}}
optimizer: !optax.sgd {{learning_rate: 0.1}}
steps: 4
"""


@pytest.mark.parametrize(
    ("maker", "line"),
    [
        ("vit {width: 8, depth: 1}", "model: train=True in training, False in evaluation"),
        ("mlp {width: 8, depth: 1}", None),
    ],
)
def test_the_plan_shows_the_mode(tmp_path, maker: str, line: str | None):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(maker=maker))
    read = config.load([file])
    text = render_plan(make_plan(load_located(read), read))
    assert (line in text.splitlines()) if line else ("model:" not in text)


class Fixed(nn.Module):
    training: bool = False

    def __call__(self, x: jax.Array, debug: bool = False) -> jax.Array:
        return x


def test_the_plan_shows_the_mode_of_user_modules():
    def shown(model: models.Model) -> str:
        assert model.mode is not None
        return describe_mode(model.mode)

    module = linen("deterministic", "deterministic")()
    assert shown(models.from_linen(module)) == (
        "model: deterministic=False in training, True in evaluation"
    )
    assert shown(models.from_linen(nn.Dense(3))) == "model: the same in training and evaluation"
    quiet: Any = {"train_kwargs": {"debug": False}, "eval_kwargs": {"debug": False}}
    assert shown(models.from_linen(Fixed(), **quiet)) == (
        "model: training=False in training and evaluation; debug=False in training and evaluation"
    )
    assert "is_training=True in training, False in evaluation" in shown(models.from_nnx(Asked))
