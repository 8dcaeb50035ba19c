"""The models against torch, NumPy and themselves; the adapters for linen and nnx modules."""

import functools
import itertools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import short
from trainer import models
from trainer.models import layers
from trainer.models.vit import sincos2d

pytestmark = pytest.mark.usefixtures("strict_promotion")

KEY = jax.random.key(0)


def images(batch: int = 4, height: int = 8, width: int = 8, channels: int = 1) -> Any:
    random = np.random.default_rng(0)
    return {"image": random.normal(size=(batch, height, width, channels)).astype(np.float32)}


def start(model: models.Model, batch: Any, key: jax.Array = KEY) -> Any:
    return jax.jit(model.init)(key, batch)


def predict(model: models.Model, params: Any, state: Any, batch: Any) -> jax.Array:
    return jax.jit(functools.partial(model.apply, key=None, train=False))(params, state, batch)[0]


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): v.shape for k, v in leaves}


def numpy_tree(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


# Paths and shapes: configs match on them.


def test_vit_stacks_its_layers():
    model = models.vit(width=16, depth=3, num_heads=2, mlp_dim=24, num_classes=5, pool="cls")
    params, state = start(model, images())
    assert state == {}
    assert shapes(params) == {
        "embed/kernel": (4, 16),
        "embed/position": (17, 16),
        "embed/token": (16,),
        "blocks/attn/qkv/kernel": (3, 3, 16, 16),
        "blocks/attn/out/kernel": (3, 16, 16),
        "blocks/mlp/up/kernel": (3, 16, 24),
        "blocks/mlp/down/kernel": (3, 24, 16),
        "blocks/attn_norm/scale": (3, 16),
        "blocks/mlp_norm/scale": (3, 16),
        "norm/scale": (16,),
        "head/kernel": (16, 5),
        "head/bias": (5,),
    }


def test_unrolled_layers_have_their_own_names():
    batch = images()
    stacked = shapes(start(models.vit(width=16, depth=2), batch)[0])
    unrolled = shapes(start(models.vit(width=16, depth=2, scan_layers=False), batch)[0])
    for path, shape in stacked.items():
        if path.startswith("blocks/"):
            for layer in range(2):
                assert unrolled.pop(path.replace("blocks/", f"block_{layer}/")) == shape[1:]
        else:
            assert unrolled.pop(path) == shape
    assert not unrolled


def test_mlp_and_convnet_paths():
    assert shapes(start(models.mlp(width=12, depth=3), images())[0]) == {
        "embed/kernel": (64, 12),
        "embed/bias": (12,),
        "blocks/linear/kernel": (2, 12, 12),
        "blocks/linear/bias": (2, 12),
        "head/kernel": (12, 10),
        "head/bias": (10,),
    }
    params, state = start(models.convnet(widths=[4, 6], blocks_per_width=1), images())
    assert shapes(params) == {
        "block_0/conv/kernel": (3, 3, 1, 4),
        "block_0/norm/scale": (4,),
        "block_0/norm/bias": (4,),
        "block_1/conv/kernel": (3, 3, 4, 6),
        "block_1/norm/scale": (6,),
        "block_1/norm/bias": (6,),
        "head/kernel": (6, 10),
        "head/bias": (10,),
    }
    assert shapes(state) == {
        f"batch_stats/block_{i}/norm/{name}": (width,)
        for i, width in enumerate((4, 6))
        for name in ("mean", "var")
    }


@pytest.mark.long
@pytest.mark.parametrize("shape", [(8, 12, 1), (6, 4, 3)])
def test_the_size_of_images_comes_from_the_batch(shape: tuple[int, int, int]):
    batch = images(2, *shape)
    for model in (models.vit(width=16, depth=1), models.mlp(16), models.convnet((4, 4))):
        params, state = start(model, batch)
        assert predict(model, params, state, batch).shape == (2, 10)


# Initial values.


@pytest.mark.parametrize("scan_layers", [True, False])
def test_every_matrix_has_variance_one_over_its_rows(scan_layers: bool):
    params, _ = start(models.vit(width=64, depth=2, scan_layers=scan_layers), images())
    seen = []
    for path, kernel in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kernel = np.asarray(kernel)
        if name.endswith("kernel"):
            for matrix in kernel.reshape(-1, *kernel.shape[-2:]):
                within = 5 / np.sqrt(2 * matrix.size)  # five standard errors of the deviation
                assert matrix.std() * np.sqrt(len(matrix)) == pytest.approx(1, abs=within), name
                assert abs(matrix.mean()) * np.sqrt(len(matrix) * matrix.size) < 5, name
                seen.append(matrix.ravel()[:5].tolist())
        elif name.endswith("position"):
            assert kernel.std() == pytest.approx(0.02, rel=0.1)
        else:
            assert (kernel == float(name.endswith("scale"))).all(), name
    assert len(seen) == 2 * 6 + 2
    assert len(np.unique(seen, axis=0)) == len(seen)  # no two matrices alike


def test_convolutions_start_as_he_et_al():
    params, state = start(models.convnet((64,), 2), images())
    kernel = np.asarray(params["block_1"]["conv"]["kernel"])
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 64)), rel=0.02)
    assert (state["batch_stats"]["block_0"]["norm"]["var"] == 1).all()
    assert (state["batch_stats"]["block_0"]["norm"]["mean"] == 0).all()


def test_init_draws_once_whatever_the_depth():
    for model in (models.vit(depth=7, scan_layers=False), models.mlp(depth=5), models.convnet()):
        program = str(jax.make_jaxpr(model.init)(KEY, images()))
        assert program.count("random_bits") == 1
        assert "dot_general" not in program and "conv_general" not in program


def test_a_module_of_this_package_can_be_initialized_by_itself():
    """The declared distribution is the drawn one, when flax draws leaf by leaf."""
    drawn = layers.matrix(KEY, (3, 64, 64))
    assert np.asarray(drawn.value).std() == pytest.approx(1 / 8, rel=0.02)
    assert (drawn.mean, drawn.deviation) == (0.0, 1 / 8)


def test_init_is_traceable_and_depends_on_the_key_alone():
    model, batch = models.vit(width=16, depth=2), images()
    keys = jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(lambda key: model.init(key, batch)[0]))(keys)
    for number, key in enumerate(keys):
        alone = start(model, images(batch=9), key)[0]
        one = jax.tree.map(lambda leaf, number=number: leaf[number], together)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), one, alone)
    kernels = np.asarray(together["head"]["kernel"])
    assert not np.array_equal(kernels[0], kernels[1])
    assert shapes(jax.eval_shape(model.init, KEY, batch)[0]) == shapes(alone)


# What they compute.


def torch_vit(torch: Any, params: Any, image: np.ndarray, heads: int, patch: int, pool: str) -> Any:
    """A ViT written down once more, out of torch's own parts, from unrolled parameters."""
    F = torch.nn.functional

    def t(x: Any) -> Any:
        return torch.tensor(np.asarray(x), requires_grad=True)

    p = jax.tree.map(t, params)
    x = torch.tensor(image).permute(0, 3, 1, 2)
    width = p["embed"]["kernel"].shape[1]
    kernel = p["embed"]["kernel"].reshape(patch, patch, -1, width).permute(3, 2, 0, 1)
    x = F.conv2d(x, kernel, stride=patch).flatten(2).transpose(1, 2)
    if pool == "cls":
        x = torch.cat([p["embed"]["token"].expand(len(x), 1, -1), x], 1)
    x = x + p["embed"]["position"]
    for name in sorted(name for name in p if name.startswith("block_")):
        block = p[name]
        h = F.layer_norm(x, (width,), block["attn_norm"]["scale"], eps=1e-6)
        split = [h @ matrix for matrix in block["attn"]["qkv"]["kernel"]]
        q, k, v = (m.unflatten(-1, (heads, -1)).transpose(1, 2) for m in split)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + h @ block["attn"]["out"]["kernel"]
        h = F.layer_norm(x, (width,), block["mlp_norm"]["scale"], eps=1e-6)
        h = F.gelu(h @ block["mlp"]["up"]["kernel"], approximate="tanh")
        x = x + h @ block["mlp"]["down"]["kernel"]
    x = F.layer_norm(x, (width,), p["norm"]["scale"], eps=1e-6)
    x = x[:, 0] if pool == "cls" else x.mean(1)
    return p, x @ p["head"]["kernel"] + p["head"]["bias"]


@pytest.mark.parametrize("pool", ["gap", "cls"])
def test_vit_agrees_with_torch(pool: str, torch: Any):
    batch = images(3, 8, 4, 2)
    model = models.vit(width=16, depth=2, num_heads=4, mlp_dim=24, pool=pool, scan_layers=False)
    params, state = start(model, batch)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(KEY, leaf.shape), params)
    mirror, expected = torch_vit(torch, params, batch["image"], 4, patch=2, pool=pool)
    outputs = predict(model, params, state, batch)
    np.testing.assert_allclose(outputs, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    expected.square().sum().backward()
    gradient = jax.jit(
        jax.grad(lambda p: jnp.sum(model.apply(p, state, batch, key=None, train=False)[0] ** 2))
    )(params)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs.grad, rtol=1e-3, atol=1e-4),
        gradient,
        mirror,
    )


def numpy_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6) * scale


def numpy_vit_with_qk_norm(p: Any, image: np.ndarray, heads: int) -> np.ndarray:
    """One layer with patches of 2 by 2 pixels, one image and one head after the other."""
    rows = []
    for picture in image:
        squares = [picture[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2)]
        x = np.stack(squares) @ p["embed"]["kernel"] + p["embed"]["position"]
        block = p["block_0"]
        attention = block["attn"]
        h = numpy_norm(x, block["attn_norm"]["scale"])
        query, key, value = (
            np.split(h @ kernel, heads, axis=-1) for kernel in attention["qkv"]["kernel"]
        )
        mixed = []
        for q, k, v in zip(query, key, value, strict=True):
            q = numpy_norm(q, attention["q_norm"]["scale"])
            k = numpy_norm(k, attention["k_norm"]["scale"])
            weights = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(mixed, -1) @ attention["out"]["kernel"]
        h = numpy_norm(x, block["mlp_norm"]["scale"]) @ block["mlp"]["up"]["kernel"]
        gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + gelu @ block["mlp"]["down"]["kernel"]
        pooled = numpy_norm(x, p["norm"]["scale"]).mean(0)
        rows.append(pooled @ p["head"]["kernel"] + p["head"]["bias"])
    return np.stack(rows)


def test_qk_norm_agrees_with_numpy():
    batch = images(3, 4, 4, 1)
    model = models.vit(width=16, depth=1, num_heads=4, scan_layers=False, qk_norm=True)
    params, state = start(model, batch)
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.array(x) + noise.normal(size=x.shape), params)
    # Large queries, which only a norm makes harmless.
    params["block_0"]["attn"]["qkv"]["kernel"] *= 10.0
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    expected = numpy_vit_with_qk_norm(params, batch["image"].astype(np.float64), heads=4)
    np.testing.assert_allclose(predict(model, params, state, batch), expected, rtol=1e-4, atol=1e-4)


def test_qk_norm_adds_a_scale_for_queries_and_one_for_keys():
    batch = images()
    plain = shapes(start(models.vit(width=16, depth=2), batch)[0])
    normed = shapes(start(models.vit(width=16, depth=2, qk_norm=True), batch)[0])
    added = {"blocks/attn/q_norm/scale": (2, 4), "blocks/attn/k_norm/scale": (2, 4)}
    assert normed == plain | added


@short.parametrize(
    "make",
    [
        functools.partial(models.vit, width=16, depth=3, num_heads=2),
        functools.partial(models.mlp, width=16, depth=4, activation="tanh"),
    ],
    ids=["vit", "mlp"],
)
def test_scanned_and_unrolled_layers_are_the_same_function(make: Any):
    batch = images()
    scanned, unrolled = make(scan_layers=True), make(scan_layers=False)
    params, state = start(scanned, batch)
    blocks = params["blocks"]
    apart = {name: part for name, part in params.items() if name != "blocks"}
    for layer in range(len(jax.tree.leaves(blocks)[0])):
        apart[f"block_{layer}"] = jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
    assert shapes(apart) == shapes(start(unrolled, batch)[0])

    def total(model: models.Model, params: Any) -> jax.Array:
        return jnp.sum(jnp.square(model.apply(params, state, batch, key=None, train=True)[0]))

    value, gradient = jax.jit(jax.value_and_grad(functools.partial(total, scanned)))(params)
    other, parts = jax.jit(jax.value_and_grad(functools.partial(total, unrolled)))(apart)
    np.testing.assert_allclose(value, other, rtol=1e-5)
    layers = [part for name, part in sorted(parts.items()) if name.startswith("block_")]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, gradient["blocks"], stacked)
    jax.tree.map(close, gradient["embed"], parts["embed"])


def test_mlp_agrees_with_numpy():
    batch = images()
    model = models.mlp(width=16, depth=2, activation="tanh")
    params, state = start(model, batch)
    p = numpy_tree(params)
    x = np.tanh(batch["image"].reshape(4, -1) @ p["embed"]["kernel"] + p["embed"]["bias"])
    x = np.tanh(x @ p["blocks"]["linear"]["kernel"][0] + p["blocks"]["linear"]["bias"][0])
    expected = x @ p["head"]["kernel"] + p["head"]["bias"]
    np.testing.assert_allclose(predict(model, params, state, batch), expected, rtol=1e-5, atol=1e-6)


def test_convnet_agrees_with_torch(torch: Any):
    batch = images(4, 8, 8, 2)
    model = models.convnet((4, 6), 1, momentum=0.8)
    params, state = start(model, batch)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)

    class Twin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(2):
                kernel = np.asarray(params[f"block_{i}"]["conv"]["kernel"])
                conv = torch.nn.Conv2d(*kernel.shape[2:], 3, padding=1, bias=False)
                conv.weight.data = torch.tensor(kernel).permute(3, 2, 0, 1)
                norm = torch.nn.BatchNorm2d(kernel.shape[3], momentum=0.2)
                norm.weight.data += 0.1
                norm.bias.data += 0.1
                setattr(self, f"conv_{i}", conv)
                setattr(self, f"norm_{i}", norm)

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.norm_0(self.conv_0(x)))
            x = torch.relu(self.norm_1(self.conv_1(torch.max_pool2d(x, 2))))
            head = params["head"]
            kernel, bias = (torch.tensor(np.asarray(head[name])) for name in ("kernel", "bias"))
            return x.mean((2, 3)) @ kernel + bias

    twin = Twin()
    x = torch.tensor(batch["image"]).permute(0, 3, 1, 2)
    train = jax.jit(functools.partial(model.apply, key=None, train=True))
    outputs, state = train(params, state, batch)
    np.testing.assert_allclose(outputs, twin(x).detach(), rtol=1e-4, atol=1e-5)
    for i, count in enumerate((4 * 64, 4 * 16)):
        ours, theirs = state["batch_stats"][f"block_{i}"]["norm"], getattr(twin, f"norm_{i}")
        np.testing.assert_allclose(ours["mean"], theirs.running_mean, rtol=1e-5, atol=1e-6)
        # torch's running variance has count - 1 in the denominator; ours is the batch's own.
        unbiased = 0.8 + (ours["var"] - 0.8) * (count / (count - 1))
        np.testing.assert_allclose(unbiased, theirs.running_var, rtol=1e-5)
        theirs.running_var.data = torch.tensor(np.asarray(ours["var"]))
    outputs, same = jax.jit(functools.partial(model.apply, key=None, train=False))(
        params, state, batch
    )
    np.testing.assert_allclose(outputs, twin.eval()(x).detach(), rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, state)


# Precision and randomness.


@pytest.mark.long
@short.parametrize(
    ("model", "train"),
    [
        (models.vit(width=16, depth=2, pool="cls"), True),
        (models.vit(width=16, depth=1, scan_layers=False), True),
        (models.mlp(32, depth=3), True),
        (models.convnet((8, 16), 1), True),
        (models.convnet((8, 16), 1), False),
    ],
    ids=["vit", "vit-unrolled", "mlp", "convnet", "convnet-eval"],
)
def test_bfloat16_parameters_compute_in_bfloat16(model: models.Model, train: bool):
    batch = images(32)
    params, state = start(model, batch)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def total(params: Any) -> Any:
        outputs, after = model.apply(params, state, batch, key=KEY, train=train)
        return jnp.sum(jnp.square(outputs.astype(jnp.float32))), (outputs, after)

    compiled = jax.jit(jax.grad(total, has_aux=True))
    _, (wide, _) = compiled(params)
    gradient, (narrow, after) = compiled(half)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=0.05, atol=0.05)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jnp.bfloat16
        assert jnp.isfinite(leaf.astype(jnp.float32)).all()


def test_bfloat16_convolutions_are_finite_as_a_run_compiles_them():
    """They gave NaN on jax 0.12, where ReLU came after the cast and nobody took a gradient."""
    batch, model = images(32), models.convnet((32,), 2)
    params, state = start(model, batch)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    optimized = jax.jit(functools.partial(model.apply, key=None, train=False))
    (wide, _), (narrow, _) = optimized(params, state, batch), optimized(half, state, batch)
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=0.05)


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [True, False])
def test_dropout_is_active_in_training_and_depends_on_the_key(scan_layers: bool):
    batch = images()
    model = models.vit(width=8, depth=1, num_heads=1, dropout=0.5, scan_layers=scan_layers)
    params, state = start(model, batch)
    train = jax.jit(functools.partial(model.apply, train=True))

    def run(number: int) -> np.ndarray:
        return np.asarray(train(params, state, batch, key=jax.random.key(number))[0])

    calm, one, two = predict(model, params, state, batch), run(1), run(2)
    np.testing.assert_array_equal(one, run(1))
    assert abs(one - two).max() > 0.01 and abs(one - calm).max() > 0.01


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: models.vit(width=10, num_heads=4),
            ["num_heads=4", "width=10. Choose a num_heads such as 2 or 5."],
        ),
        (lambda: models.vit(depth=0), ["depth", "0"]),
        (lambda: models.vit(pool="max"), ["'gap'", "'cls'", "'max'"]),
        (lambda: models.vit(dropout=1.0), ["dropout=1.0"]),
        (lambda: start(models.vit(patch_size=3), images()), ["3 by 3", "8 by 8"]),
        (lambda: start(models.vit(inputs="pixels"), images()), ["'pixels'", "'image'", "inputs"]),
        (lambda: models.mlp(width=-1), ["width", "-1"]),
        (lambda: models.mlp(activation="rleu"), ["relu", "'rleu'"]),
        (lambda: models.convnet([]), ["widths"]),
        (lambda: models.convnet([8, 0]), ["widths[1]", "0"]),
        (lambda: models.convnet(momentum=1.0), ["momentum=1.0"]),
        (lambda: models.from_linen(nn.Dense), ["instance", "Dense"]),  # type: ignore[arg-type]
        (lambda: models.from_nnx(3), ["3"]),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_named(make: Any, words: list[str]):
    with pytest.raises(ValueError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


# Modules of others.


class Told(nn.Module):
    """Reads two inputs, has statistics and dropout, and is told by flax's older words."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: jax.Array, deterministic: bool, use_running_average: bool = True
    ) -> jax.Array:
        x = nn.Dense(8)(x.reshape(len(x), -1)) + y[:, None]
        x = nn.BatchNorm(use_running_average=use_running_average, momentum=0.5)(x)
        return nn.Dropout(0.5, deterministic=deterministic)(x)


class Untold(nn.Module):
    """Knows nothing of training; its kernel carries the names of its axes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        named = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(3, kernel_init=named)(x.reshape(len(x), -1))


def test_from_linen_passes_the_mode_and_keeps_the_state():
    batch = images(16) | {"shift": np.arange(16, dtype=np.float32)}
    model = models.from_linen(Told(), inputs=["image", "shift"])
    params, state = start(model, batch)
    assert shapes(params)["Dense_0/kernel"] == (64, 8)
    assert shapes(state) == {f"batch_stats/BatchNorm_0/{name}": (8,) for name in ("mean", "var")}
    train = jax.jit(functools.partial(model.apply, train=True))
    outputs, after = train(params, state, batch, key=KEY)
    assert 0.2 < np.mean(np.asarray(outputs) == 0) < 0.8  # dropped
    hidden = batch["image"].reshape(16, -1) @ np.asarray(params["Dense_0"]["kernel"])
    hidden += batch["shift"][:, None]
    after_mean = after["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(after_mean, 0.5 * hidden.mean(0), rtol=1e-4, atol=1e-6)
    calm = predict(model, params, after, batch)
    var = np.asarray(after["batch_stats"]["BatchNorm_0"]["var"])
    expected = (hidden - np.asarray(after_mean)) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(calm, expected, rtol=1e-3, atol=1e-4)


def test_from_linen_takes_a_module_without_a_training_argument():
    model = models.from_linen(Untold())
    params, state = start(model, images())
    assert state == {}
    assert isinstance(params["Dense_0"]["kernel"], jax.Array)  # its box is off
    outputs, after = jax.jit(functools.partial(model.apply, train=True))(
        params, state, images(), key=KEY
    )
    assert outputs.shape == (4, 3) and after == {}


class Nnx(nnx.Module):
    """A list of layers, statistics, dropout, and a count that its own code keeps."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(n, width, rngs=rngs) for n in (64, width)])
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.offset = np.float32(0.25)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += jnp.int32(1)
        x = x.reshape(len(x), -1)
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x)) + self.offset


def test_from_nnx_splits_parameters_and_state():
    batch = images(16)
    model = models.from_nnx(functools.partial(Nnx, width=6))
    params, state = start(model, batch)
    assert shapes(params) == {
        "layers/0/kernel": (64, 6),
        "layers/0/bias": (6,),
        "layers/1/kernel": (6, 6),
        "layers/1/bias": (6,),
        "norm/scale": (6,),
        "norm/bias": (6,),
    }
    assert shapes(state) == {"calls": (), "norm/mean": (6,), "norm/var": (6,)}
    assert type(params["layers"]) is dict and isinstance(params["norm"]["scale"], jax.Array)
    p = numpy_tree(params)
    hidden = batch["image"].reshape(16, -1)
    for layer in ("0", "1"):
        hidden = hidden @ p["layers"][layer]["kernel"] + p["layers"][layer]["bias"]
    calm = predict(model, params, state, batch)
    np.testing.assert_allclose(calm, hidden / np.sqrt(1 + 1e-5) + 0.25, rtol=1e-4, atol=1e-5)
    _, after = jax.jit(functools.partial(model.apply, train=True))(params, state, batch, key=KEY)
    assert after["calls"] == 1
    np.testing.assert_allclose(after["norm"]["mean"], 0.5 * hidden.mean(0), rtol=1e-4, atol=1e-6)


def test_from_nnx_draws_from_the_key_of_the_step_alone():
    batch = images(16)
    model = models.from_nnx(Nnx)
    params, state = start(model, batch)
    train = jax.jit(functools.partial(model.apply, train=True))
    one, after = train(params, state, batch, key=jax.random.key(1))
    again, _ = train(params, after, batch, key=jax.random.key(1))
    two, _ = train(params, state, batch, key=jax.random.key(2))
    np.testing.assert_array_equal(one, again)  # statistics moved, the draw did not
    assert not np.array_equal(one, two)
    assert 0.2 < np.mean(np.asarray(one) == 0.25) < 0.8
    other = start(model, batch, jax.random.key(5))[0]
    assert not np.array_equal(other["layers"]["0"]["kernel"], params["layers"]["0"]["kernel"])


def test_from_nnx_can_be_traced():
    batch = images(16)
    model = models.from_nnx(Nnx)
    params, state = start(model, batch)
    described = jax.eval_shape(model.init, KEY, batch)
    assert shapes(described[0]) == shapes(params) and shapes(described[1]) == shapes(state)

    def total(params: Any, state: Any, key: jax.Array) -> Any:
        outputs, state = model.apply(params, state, batch, key=key, train=True)
        return jnp.sum(jnp.square(outputs)), state

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        (value, state), gradient = jax.value_and_grad(total, has_aux=True)(params, state, key)
        return (jax.tree.map(lambda p, g: p - 0.001 * g, params, gradient), state), value

    (_, state), values = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, state), jax.random.split(KEY, 30)
    )
    assert state["calls"] == 30 and values[-5:].mean() < values[:5].mean()


class Bare(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 2, rngs=rngs)
        self.table = jnp.arange(2.0)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return self.linear(x.reshape(len(x), -1)) + (self.table if train else 0)


def test_from_nnx_refuses_a_bare_array():
    model = models.from_nnx(Bare)
    params, state = start(model, images())
    with pytest.raises(ValueError, match=r"Bare keeps a bare jax array as 'table'.*nnx.Variable"):
        model.apply(params, state, images(), key=None, train=False)


class Declared(Bare):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 2, rngs=rngs)
        self.table = nnx.data(100 + jnp.arange(2.0))


def test_from_nnx_passes_the_mode_and_keeps_declared_arrays():
    model = models.from_nnx(Declared)
    params, state = start(model, images())
    assert shapes(state) == {"table": (2,)}
    trained, after = model.apply(params, state, images(), key=KEY, train=True)
    calm, same = model.apply(params, state, images(), key=None, train=False)
    assert (trained - calm > 99).all()
    assert same is state and shapes(after) == {"table": (2,)}


def test_fixed_positions_are_sines_and_cosines_of_column_and_row():
    found = np.asarray(sincos2d(3, 5, 8))
    for row, column in itertools.product(range(3), range(5)):
        expected = [
            f(place / 10_000**power)
            for place in (column, row)
            for f in (math.sin, math.cos)
            for power in (0, 1)
        ]
        np.testing.assert_allclose(found[5 * row + column], expected, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("pool", ["gap", "cls"])
def test_a_vit_with_fixed_positions_has_no_parameter_for_them_and_sees_the_order(pool):
    pictures = jax.random.normal(jax.random.key(1), (2, 4, 8, 1))
    model = models.vit(width=16, depth=1, num_heads=2, pool=pool, positions="sincos2d")
    params, state = model.init(jax.random.key(0), {"image": pictures})
    assert set(params["embed"]) == {"kernel", "token"} - ({"token"} if pool == "gap" else set())

    def outputs(x):
        return np.asarray(model.apply(params, state, {"image": x}, key=None, train=False)[0])

    # The first two patches of each row are swapped.
    swapped = jnp.concatenate([pictures[:, :, 2:4], pictures[:, :, :2], pictures[:, :, 4:]], axis=2)
    assert np.abs(outputs(pictures) - outputs(swapped)).max() > 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [({"positions": "rope"}, "'rope'"), ({"positions": "sincos2d", "width": 6}, "multiple of 4")],
)
def test_positions_that_do_not_exist_or_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        models.vit(**{"num_heads": 1, **options})
