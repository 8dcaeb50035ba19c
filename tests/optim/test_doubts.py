"""Which parameters get a warning: those whose last two axes are not the matrix of their layer."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optim
from optim.declarations import Declaration, declarations
from optim.layouts import layouts, rules
from tests.programs import to_flax
from trainer import models
from trainer.config import load, override
from trainer.engine.experiment import build_experiment
from trainer.engine.plan import make_plan
from trainer.engine.program import Program

MUON = partial(optim.muon, 0.02)


def shapes(tree: Any) -> Any:
    """Turns tuples, arrays and shapes into shapes with a dtype."""
    leaf = lambda x: isinstance(x, tuple) or hasattr(x, "shape")  # noqa: E731
    size = lambda x: tuple(getattr(x, "shape", x))  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(size(x), "float32"), tree, is_leaf=leaf)


def declared(params: Any, recipe: partial = MUON) -> Declaration:
    """Plans a model whose kernels are updated by one optimizer, and all else by AdamW."""
    groups = {
        "kernels": optim.group(".*/(kernel|weight|w)", recipe, min_ndim=2),
        "rest": optim.group(".*", partial(optax.adamw, 1e-3)),
    }
    # A vector, so that the second group is never empty.
    params = {"model": shapes(params), "rest": shapes({"scale": (7,)})}
    [found] = declarations(optim.optimizer(groups).init, params)
    return found


def doubts(params: Any, recipe: partial = MUON) -> list[str]:
    return list(declared(params, recipe).doubts)


def linen(module: nn.Module, *inputs: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


class Stem(nn.Module):
    """Two convolutions whose names do not say what they are."""

    layer: Any
    window: tuple[int, ...]
    name_of_first: str = "stem"
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = self.layer(16, self.window, use_bias=self.use_bias, name=self.name_of_first)(x)
        x = self.layer(32, self.window, use_bias=self.use_bias, name="second")(nn.LayerNorm()(x))
        return nn.Dense(10)(x)


WINDOWS = [(3, 3), (2, 2), (4, 4), (1, 7), (16, 16), (3, 3, 3), (5,)]


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layer", [nn.Conv, nn.ConvTranspose])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_convolutions_without_a_telling_name_get_a_warning(window, layer, use_bias):
    x = jnp.ones((1, *(16 for _ in window), 3))
    params = linen(Stem(layer, window, use_bias=use_bias), x)
    [text] = doubts(params)
    preset = {1: "conv1d", 2: "conv", 3: "conv3d"}[len(window)]
    assert f"'{preset}'}}" in text and "(and 1 like it)" in text
    spec = {r"model/(stem|second)/kernel": preset}
    assert not doubts(params, partial(MUON, matrices=spec))
    assert not doubts(params, partial(MUON, matrices="dense"))


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
def test_the_patches_of_a_vit_get_a_warning_with_how_much_longer_their_updates_are(use_bias):
    patches = Stem(nn.Conv, (16, 16), "patch_embed", use_bias)
    params = {"patch_embed": {"kernel": (16, 16, 3, 768), **({"bias": (768,)} if use_bias else {})}}
    [text] = doubts(params)
    assert "model/patch_embed/kernel [16x16x3x768]: 256 matrices of 3x768." in text
    assert "about 16 times as long as with 'conv'." in text
    assert "patch_embed/kernel" in doubts(linen(patches, jnp.ones((1, 256, 256, 3))))[0]


@pytest.mark.long
def test_the_lengths_that_warnings_compare_are_those_of_orthogonal_updates():
    # Of gradients whose matrices have equal singular values under either layout: both are exact.
    rng = np.random.default_rng(0)
    shape = (2, 2, 4, 16)

    def frobenius(matrices: Any, gradient: np.ndarray) -> float:
        tx = optim.muon(
            1.0,
            0.0,
            nesterov=False,
            ns_steps=30,
            matrices=matrices,
            ns_coefficients="polar_express",
        )
        updates: Any = tx.update({"w": gradient}, tx.init({"w": gradient}))[0]
        return float(jnp.linalg.norm(updates["w"].ravel()))

    square = np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(np.float32)
    wide = np.stack([np.linalg.qr(rng.standard_normal((16, 4)))[0].T for _ in range(4)])
    longer = frobenius("dense", wide.reshape(shape).astype(np.float32))
    usual = frobenius("conv", square.reshape(shape))
    [text] = doubts({"stem": {"kernel": shape, "bias": (16,)}})
    assert f"about {longer / usual:.3g} times as long" in text


def test_1x1_convolutions_and_dense_layers_get_no_warning():
    for layer in (nn.Conv, nn.ConvTranspose):
        for use_bias in (True, False):
            assert not doubts(linen(Stem(layer, (1, 1), use_bias=use_bias), jnp.ones((1, 8, 8, 3))))


def test_kernels_of_pytorch_get_the_layout_of_pytorch():
    for bias in (True, False):
        layers = {"proj": (768, 3, 16, 16), "conv1": (64, 32, 3, 3), "conv2": (64, 64, 3, 3)}
        params = {
            name: {"weight": shape, **({"bias": shape[:1]} if bias else {})}
            for name, shape in layers.items()
        }
        [text] = doubts(params)
        spec = "out in height width -> (in height width) out"
        assert repr(spec) in text and "(and 2 like it)" in text
    weight = np.arange(8 * 4 * 3 * 3).reshape(8, 4, 3, 3)
    [theirs] = layouts({"w": weight}, rules(spec), "").values()
    [ours] = layouts({"w": to_flax(weight)}, rules("conv"), "").values()
    assert theirs.matrices == ours.matrices == (1, 36, 8)


class Depthwise(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(2):
            channels = x.shape[-1]
            x = nn.Conv(channels, (3, 3), feature_group_count=channels, name=f"each_{i}")(x)
            x = nn.Conv(16, (1, 1), name=f"mix_{i}")(x)
        return x


def test_depthwise_convolutions_get_a_warning_under_every_layout_but_dense():
    params = linen(Depthwise(), jnp.ones((1, 8, 8, 3)))
    for matrices in (None, {r".*/each_\d/kernel": "conv"}):
        [text] = doubts(params, partial(MUON, matrices=matrices))
        assert "depthwise" in text and "(and 1 like it)" in text and "optax.adamw" in text
    assert not doubts(params, partial(MUON, matrices="dense"))
    assert "depthwise" in doubts({"dw": {"kernel": (3, 3, 1, 64)}})[0]
    # The first layer of a model that reads gray images has one channel, too.
    gray = linen(Stem(nn.Conv, (3, 3)), jnp.ones((1, 8, 8, 1)))
    [text] = doubts(gray)
    assert "depthwise" not in text
    assert not doubts(gray, partial(MUON, matrices={".*(stem|second)/kernel": "conv"}))


# ---- Heads


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
def test_attention_kernels_of_any_name_get_a_warning(use_bias):
    def layer(*shape: int) -> dict[str, tuple[int, ...]]:
        bias = shape[1:] if shape[0] == 768 else shape[-1:]
        return {"kernel": shape} | ({"bias": bias} if use_bias else {})

    into, out = layer(768, 12, 64), layer(12, 64, 768)
    [query, last] = doubts({"attn": {"k_proj": into, "o_proj": out, "q_proj": into}})
    assert "k_proj/kernel [768x12x64] (and 1 like it)" in query and "'attention_query'" in query
    assert "o_proj/kernel [12x64x768]:" in last and "'attention_out'" in last
    assert "about 3.46 times as long" in last
    fused = {"kernel": (768, 3, 12, 64)} | ({"bias": (3, 12, 64)} if use_bias else {})
    assert len(doubts({"attn": {"qkv": fused}})) == 1


def test_flaxs_attention_gets_one_warning():
    linen_one = linen(nn.MultiHeadDotProductAttention(num_heads=4), jnp.ones((1, 2, 64)))
    build = lambda: nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))  # noqa: E731
    nnx_one = nnx.state(nnx.eval_shape(build), nnx.Param)
    for params in (linen_one, nnx_one):
        [text] = doubts({"attn": params})
        assert "attn/key/kernel [64x4x16] (and 3 like it)" in text and "'attention'" in text
        assert not doubts({"attn": params}, partial(MUON, matrices="attention"))


# ---- Stacked layers


class Block(nn.Module):
    attention: bool
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        y = nn.LayerNorm(use_bias=False)(x)
        if self.attention:
            attend = nn.MultiHeadDotProductAttention(4, use_bias=self.use_bias, name="attn")
            y = attend(y)
        y = nn.Dense(256, use_bias=self.use_bias, name="up")(y)
        return x + nn.Dense(64, use_bias=self.use_bias, name="down")(y), None


def scanned(block: nn.Module, axis: int, layers: int, x: Any) -> Any:
    scan: Any = nn.scan(
        type(block), variable_axes={"params": axis}, split_rngs={"params": True}, length=layers
    )
    fields = {
        name: getattr(block, name) for name in ("attention", "use_bias") if hasattr(block, name)
    }
    return {"layers": linen(scan(**fields), x, None)}


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layers", [3, 4, 12])
def test_layers_stacked_on_the_first_axis_get_no_warning(layers, use_bias):
    params = scanned(Block(False, use_bias), 0, layers, jnp.ones((1, 8, 64)))
    assert params["layers"]["up"]["kernel"].shape == (layers, 64, 256)
    assert not doubts(params)


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layers", [3, 12])
def test_layers_stacked_on_the_second_axis_get_a_warning(layers, use_bias):
    params = scanned(Block(False, use_bias), 1, layers, jnp.ones((1, 8, 64)))
    assert params["layers"]["up"]["kernel"].shape == (64, layers, 256)
    [text] = doubts(params)
    assert f"{layers} layers" in text and "(and 1 like it)" in text
    spec = "in layers out -> layers in out"
    assert repr(spec) in text
    right = declared(params, partial(MUON, matrices=spec))
    assert not right.doubts and right.layouts["model/layers/up/kernel"].matrices == (
        layers,
        64,
        256,
    )
    with_heads = scanned(Block(True, use_bias), 1, layers, jnp.ones((1, 8, 64)))
    assert any("attn/key/kernel" in text for text in doubts(with_heads))


class ConvBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return nn.LayerNorm()(nn.Conv(16, (3, 3), use_bias=False, name="mix")(x)), None


def test_stacked_attention_and_stacked_convolutions_get_the_warnings_of_single_ones():
    [text] = doubts(scanned(Block(True), 0, 3, jnp.ones((1, 8, 64))))
    assert "attn/key/kernel [3x64x4x16] (and 3 like it)" in text and "'attention'" in text
    [text] = doubts(scanned(ConvBlock(), 0, 5, jnp.ones((1, 8, 8, 16))))
    assert "mix/kernel [5x3x3x16x16]: 45 matrices" in text and "'conv'}" in text


def test_experts_and_fused_kernels_get_no_warning():
    experts = {"up": {"kernel": (8, 64, 256)}, "down": {"kernel": (8, 256, 64)}}
    assert not doubts({"experts": experts, "router": {"kernel": (64, 8)}})
    assert not doubts({"attn": {"qkv": {"kernel": (3, 64, 64)}, "out": {"kernel": (64, 64)}}})


# ---- The plan


def test_shipped_models_get_no_warning():
    tokens = {"tokens": np.zeros((1, 8), np.int32)}
    images = {"image": np.zeros((1, 8, 8, 1), np.float32)}
    for scan in (True, False):
        for model, batch in (
            (models.gpt(64, 32, depth=3, num_heads=2, scan_layers=scan), tokens),
            (
                models.gpt(
                    64,
                    32,
                    depth=5,
                    num_heads=2,
                    activation="swiglu",
                    num_kv_heads=1,
                    scan_layers=scan,
                ),
                tokens,
            ),
            (models.vit(width=32, depth=3, num_heads=2, scan_layers=scan), images),
            (models.mlp(width=32, depth=4, scan_layers=scan), images),
        ):
            params = jax.eval_shape(model.init, jax.random.key(0), batch)[0]
            assert not doubts(params), model


@pytest.mark.long
def test_the_plan_marks_what_the_config_does_not_name():
    plain = load(["configs/muon_vit.yaml"])
    named = override(plain, ["optimizer.groups.matrices.optimizer.matrices=dense"])
    for config, mark in ((plain, " *"), (named, "")):
        matrices = make_plan(Program(build_experiment(config)), config).matrices
        assert matrices.cells["blocks/attn/qkv/kernel"] == f"12 of 64x64{mark}"
        assert any(line.startswith("* ") for line in matrices.lines) == bool(mark)
        assert not matrices.warnings
