"""models.gpt against NumPy, torch, closed forms and itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optim.paths import flatten
from tests import short
from trainer import models
from trainer.engine.flops import count_flops
from trainer.models import attention
from trainer.models.gpt import Embed
from trainer.models.layers import Mlp, RmsNorm, normal

pytestmark = pytest.mark.usefixtures("strict_promotion")

KEY = jax.random.key(0)
small = functools.partial(models.gpt, vocab_size=31, width=16, depth=2, num_heads=4, max_length=24)

# Which parts a variant of the model has.
VARIANTS: dict[str, dict[str, Any]] = {
    "squared relu": {},
    "gelu, no qk-norm": {"activation": "gelu", "qk_norm": False},
    "swiglu, grouped, tied": {"activation": "swiglu", "num_kv_heads": 2, "tied": True},
    "one head of keys, soft cap": {"num_kv_heads": 1, "soft_cap": 2.0, "mlp_dim": 24},
    "biases, half of the pairs": {
        "bias": True,
        "rope": "half",
        "num_kv_heads": 2,
        "attention_scale": 0.8,
        "soft_cap": 2.0,
        "soft_cap_form": "algebraic",
        "norm_epsilon": 0.3,
        "embed_norm": True,
        "activation": "swiglu",
        "base_depth": 1,
    },
    "biases, of a tied head none": {"bias": True, "qk_norm": "unscaled", "tied": True},
}


def text(batch: int = 3, length: int = 12, documents: bool = False, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    found = {"tokens": random.integers(0, 31, (batch, length)).astype(np.int32)}
    if documents:
        found["documents"] = np.sort(random.integers(0, 3, (batch, length)), axis=1)
    return found


def start(model: models.Model, batch: Any = None, noise: float = 0.0) -> Any:
    params = jax.jit(model.init)(KEY, text() if batch is None else batch)[0]
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + jnp.asarray(noise * random.standard_normal(x.shape), x.dtype), params
    )


def predict(model: models.Model, params: Any, batch: Any, **more: Any) -> Any:
    def logits(params: Any, batch: Any) -> jax.Array:
        return model.apply(params, {}, batch, **{"key": None, "train": False} | more)[0].whole()

    return np.asarray(jax.jit(logits)(params, batch))


def apart(params: Any) -> Any:
    """Returns the parameters of a scan as those of layers that are apart."""
    blocks = params["blocks"]
    rest = {name: part for name, part in params.items() if name != "blocks"}
    depth = len(jax.tree.leaves(blocks)[0])
    return rest | {f"block_{i}": jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(depth)}


# Parameters.


@pytest.mark.long
def test_the_paths_and_shapes_of_the_parameters():
    def shapes(**arguments: Any) -> dict[str, Any]:
        return {path: x.shape for path, x in flatten(start(small(**arguments))).items()}

    common = {
        "embed/embedding": (31, 16),
        "blocks/attn/out/kernel": (2, 16, 16),
        "blocks/mlp/up/kernel": (2, 16, 64),
        "blocks/mlp/down/kernel": (2, 64, 16),
        "blocks/attn_norm/scale": (2, 16),
        "blocks/mlp_norm/scale": (2, 16),
        "norm/scale": (16,),
    }
    equal = {"blocks/attn/qkv/kernel": (2, 3, 16, 16)}
    head = {"head/kernel": (16, 31)}
    norms = {"blocks/attn/q_norm/scale": (2, 4), "blocks/attn/k_norm/scale": (2, 4)}
    grouped = {"blocks/attn/q/kernel": (2, 16, 16), "blocks/attn/kv/kernel": (2, 2, 16, 8)}
    gate = {"blocks/mlp/gate/kernel": (2, 16, 64)}
    assert shapes() == common | equal | head | norms
    assert shapes(qk_norm=False) == common | equal | head
    assert shapes(num_kv_heads=2, tied=True) == common | grouped | norms
    assert shapes(activation="swiglu") == common | equal | head | norms | gate
    apart = shapes(scan_layers=False)
    assert apart["block_1/attn/qkv/kernel"] == (3, 16, 16) and len(apart) == 3 + 2 * 8


def test_gpt2_124m_has_the_number_of_parameters_of_its_closed_form():
    model = models.gpt(50304, 768, 12, 12, activation="gelu", qk_norm=False, tied=True)
    params = jax.eval_shape(model.init, KEY, {"tokens": jnp.ones((1, 8), jnp.int32)})[0]
    kernels, scales = 12 * 12 * 768**2, (2 * 12 + 1) * 768
    assert sum(x.size for x in jax.tree.leaves(params)) == 50304 * 768 + kernels + scales


@pytest.mark.long
def test_initial_values():
    model = functools.partial(models.gpt, width=64, depth=8)
    found = flatten(start(model(), text()))
    deviations = {path: float(np.std(x)) for path, x in found.items() if "scale" not in path}
    assert deviations == {
        "embed/embedding": pytest.approx(0.02, rel=0.02),
        "head/kernel": pytest.approx(1 / 8, rel=0.02),
        "blocks/attn/qkv/kernel": pytest.approx(1 / 8, rel=0.02),
        "blocks/mlp/up/kernel": pytest.approx(1 / 8, rel=0.02),
        "blocks/attn/out/kernel": pytest.approx(1 / 8 / 4, rel=0.02),  # sqrt(2 * 8) = 4
        "blocks/mlp/down/kernel": pytest.approx(1 / 16 / 4, rel=0.02),
    }
    shallow = flatten(start(model(base_depth=2), text()))
    assert np.std(shallow["blocks/attn/out/kernel"]) == pytest.approx(1 / 8 / 2, rel=0.02)
    zeros = flatten(start(model(zero_init=True), text()))
    assert not np.any(zeros["blocks/attn/out/kernel"])
    assert not np.any(zeros["blocks/mlp/down/kernel"])
    assert not np.any(zeros["head/kernel"]) and np.any(zeros["embed/embedding"])
    assert np.all(zeros["blocks/attn_norm/scale"] == 1)
    program = str(jax.make_jaxpr(model().init)(KEY, text()))
    assert program.count("random_bits") == 1 and "dot_general" not in program


@pytest.mark.long
def test_the_initial_values_of_modded_nanogpt():
    arguments = {"init_scale": 0.33**0.5, "embed_init": 1.0, "zero_init": True, "bias": True}
    model = models.gpt(width=128, depth=4, **arguments, embed_dtype="bfloat16")
    found = flatten(start(model))
    deviations = {path: float(np.std(x.astype(jnp.float32))) for path, x in found.items()}
    assert deviations["embed/embedding"] == pytest.approx(1, rel=0.02)
    for name in ("attn/qkv", "mlp/up"):
        assert deviations[f"blocks/{name}/kernel"] == pytest.approx((0.33 / 128) ** 0.5, rel=0.02)
    zeros = {path for path in found if path.endswith("bias")} | {"head/kernel"}
    zeros |= {"blocks/attn/out/kernel", "blocks/mlp/down/kernel"}
    assert len(zeros) == 8 and not any(np.any(found[path]) for path in zeros)
    dtypes = {path: str(x.dtype) for path, x in found.items()}
    assert dtypes.pop("embed/embedding") == "bfloat16" and set(dtypes.values()) == {"float32"}
    # Without zero_init the factor is that of all kernels; what they start with stays the same.
    half, whole = (flatten(start(small(init_scale=factor))) for factor in (0.5, 1.0))
    for path, x in whole.items():
        factor = 0.5 if path.endswith("kernel") else 1
        np.testing.assert_allclose(half[path], factor * x, rtol=1e-6)


# What it computes.


def numpy_norm(x: np.ndarray, scale: Any, epsilon: float = 1e-6) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def numpy_rotate(x: np.ndarray, position: int, base: float, rope: str = "full") -> np.ndarray:
    """Multiplies pairs of a vector, as complex numbers, by exp(i * angle)."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    if rope == "half":
        turned = (1 / base) ** np.linspace(0, 1, half // 2)
        pairs = pairs * np.exp(-1j * position * np.append(turned, np.zeros(half // 2)))
    else:
        pairs = pairs * np.exp(1j * position * base ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])


def linear(x: np.ndarray, layer: Any) -> Any:
    """Multiplies by one kernel, or by each of several, and adds the biases, if there are any."""
    if layer["kernel"].ndim == 2:
        return x @ layer["kernel"] + layer.get("bias", 0)
    biases = layer.get("bias", np.zeros(len(layer["kernel"])))
    return [x @ kernel + bias for kernel, bias in zip(layer["kernel"], biases, strict=True)]


def numpy_gpt(
    p: Any, batch: Any, heads: int, arguments: Any, largest: dict[str, Any] | None = None
) -> np.ndarray:
    """One sequence, one token and one head after the other."""
    # `largest` gets layer -> the largest product of a query and a key of each head.
    rows, kv_heads = [], arguments.get("num_kv_heads", heads)
    kind, rope = arguments.get("activation", "relu2"), arguments.get("rope", "full")
    norm = functools.partial(numpy_norm, epsilon=arguments.get("norm_epsilon", 1e-6))
    depth = sum(name.startswith("block_") for name in p)
    share = arguments.get("base_depth", depth) / depth  # CompleteP, table 1, with alpha = 1
    for index, tokens in enumerate(batch["tokens"]):
        documents = batch["documents"][index] if "documents" in batch else np.zeros(len(tokens))
        x = p["embed"]["embedding"][tokens]
        if "norm" in p["embed"]:
            x = norm(x, p["embed"]["norm"]["scale"])
        for name in sorted(name for name in p if name.startswith("block_")):
            attn, mlp = p[name]["attn"], p[name]["mlp"]
            h = norm(x, p[name]["attn_norm"]["scale"])
            if "qkv" in attn:
                q, k, v = linear(h, attn["qkv"])
            else:
                q, (k, v) = linear(h, attn["q"]), linear(h, attn["kv"])
            q, k, v = (
                m.reshape(len(tokens), n, -1) for m, n in ((q, heads), (k, kv_heads), (v, kv_heads))
            )
            if arguments.get("qk_norm", True):
                q = norm(q, attn["q_norm"]["scale"] if "q_norm" in attn else 1)
                k = norm(k, attn["k_norm"]["scale"] if "k_norm" in attn else 1)
            mixed = np.zeros_like(q)
            for t in range(len(tokens)):
                seen = [s for s in range(t + 1) if documents[s] == documents[t]]
                for head in range(heads):
                    group = head // (heads // kv_heads)
                    query = numpy_rotate(q[t, head], t, 10000.0, rope)
                    keys = np.stack([numpy_rotate(k[s, group], s, 10000.0, rope) for s in seen])
                    scale = arguments.get("attention_scale", 1 / np.sqrt(len(query)))
                    scores = keys @ query * scale
                    if largest is not None:
                        of_layer = largest.setdefault(name, np.full(heads, -np.inf))
                        of_layer[head] = max(of_layer[head], scores.max())
                    weights = np.exp(scores)
                    mixed[t, head] = weights / weights.sum() @ v[seen, group]
            x = x + share * linear(mixed.reshape(len(tokens), -1), attn["out"])
            h = norm(x, p[name]["mlp_norm"]["scale"])
            up = linear(h, mlp["up"])
            if kind == "swiglu":
                gate = linear(h, mlp["gate"])
                up = up * gate / (1 + np.exp(-gate))
            elif kind == "gelu":
                up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            else:
                up = np.maximum(up, 0) ** 2
            x = x + share * linear(up, mlp["down"])
        head = p["head"] if "head" in p else {"kernel": p["embed"]["embedding"].T}
        logits, cap = linear(norm(x, p["norm"]["scale"]), head), arguments.get("soft_cap")
        if arguments.get("soft_cap_form") == "algebraic":
            logits = cap * logits / np.sqrt(logits**2 + cap**2)
        elif cap:
            logits = cap * np.tanh(logits / cap)
        rows.append(logits)
    return np.stack(rows)


@short.parametrize("documents", [False, True], ids=["whole", "documents"])
@short.parametrize("name", VARIANTS, lambda name: "rope" in VARIANTS[name])
def test_the_logits_are_those_of_numpy(name: str, documents: bool):
    arguments, batch = VARIANTS[name], text(documents=documents)
    params = start(small(**arguments), noise=0.2)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), apart(params))
    expected = numpy_gpt(wide, batch, 4, arguments)
    assert expected.std() > 0.5
    for implementation in ("plain", "xla"):
        found = predict(small(**arguments, attention=implementation), params, batch)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_agrees_with_torch(kv_heads: int, torch: Any):
    random = np.random.default_rng(0)
    query, key, value = (
        random.standard_normal((2, 9, heads, 8)).astype(np.float32)
        for heads in (4, kv_heads, kv_heads)
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(x).transpose(1, 2) for x in (query, key, value)),
        is_causal=True,
        enable_gqa=True,
    ).transpose(1, 2)
    for implementation in ("plain", "xla"):
        found = attention.attend(
            *map(jnp.asarray, (query, key, value)), None, 8**-0.5, implementation
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_blocks_of_queries_are_attention_as_a_whole():
    query = jax.random.normal(KEY, (2, 300, 4, 8))
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 300, 2, 8))
    documents = jnp.repeat(jnp.arange(3), 100)
    mask = jnp.broadcast_to(documents[:, None] == documents, (2, 1, 300, 300))

    def run(implementation: str, mask: Any) -> Any:
        def total(*arrays: jax.Array) -> Any:
            mixed = attention.attend(*arrays, mask, 0.5, implementation)
            return jnp.sum(jnp.sin(mixed)), mixed

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(query, key, value)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, run("plain", None), run("xla", None))
    jax.tree.map(close, run("plain", mask), run("xla", mask))


def test_norm_and_swiglu_agree_with_torch(torch: Any):
    random = np.random.default_rng(0)
    x, scale = random.standard_normal((5, 8)), random.standard_normal(8)
    up, gate, down = (random.standard_normal(s) for s in ((8, 12), (8, 12), (12, 8)))
    x, scale, up, gate, down = (y.astype(np.float32) for y in (x, scale, up, gate, down))
    t, functions = torch.tensor, torch.nn.functional
    found = RmsNorm().apply({"params": {"scale": jnp.asarray(scale)}}, x)
    wanted = functions.rms_norm(t(x), (8,), t(scale), eps=1e-6)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    kernels = {"up": up, "gate": gate, "down": down}
    params = {name: {"kernel": jnp.asarray(kernel)} for name, kernel in kernels.items()}
    found = Mlp(12, "swiglu").apply({"params": params}, x)
    wanted = (functions.silu(t(x) @ t(gate)) * (t(x) @ t(up))) @ t(down)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_products_of_rotated_vectors_depend_on_their_distance():
    query, key = jax.random.normal(KEY, (2, 1, 1, 1, 8))

    def product(at: int, other: int) -> Any:
        angles = attention.rotary_angles(jnp.array([at, other]), 8, 100.0)
        return jnp.vdot(attention.rotate(query, angles[:1]), attention.rotate(key, angles[1:]))

    np.testing.assert_allclose(product(3, 1), product(53, 51), rtol=1e-4)
    assert abs(product(3, 1) - product(3, 2)) > 0.01
    np.testing.assert_allclose(product(7, 7), jnp.vdot(query, key), rtol=1e-5)


def test_a_later_token_does_not_change_what_comes_before():
    model, batch = small(), text()
    params = start(model, noise=0.2)
    before = predict(model, params, batch)
    changed = batch["tokens"].copy()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    after = predict(model, params, {"tokens": changed})
    np.testing.assert_array_equal(after[:, :7], before[:, :7])
    assert (np.abs(after[:, 7:] - before[:, 7:]).max(axis=-1) > 1e-4).all()


@short.parametrize("implementation", ["plain", "xla"])
def test_a_document_is_computed_as_if_it_were_alone(implementation: str):
    model, tokens = small(attention=implementation), text()["tokens"]
    params = start(model, noise=0.2)
    documents = np.repeat(np.array([[0] * 5 + [1] * 4 + [2] * 3], np.int32), 3, axis=0)
    together = predict(model, params, {"tokens": tokens, "documents": documents})
    for number in range(3):
        within = documents[0] == number
        alone = predict(model, params, {"tokens": tokens[:, within]})
        np.testing.assert_allclose(together[:, within], alone, rtol=1e-4, atol=1e-5)
    assert not np.allclose(together, predict(model, params, {"tokens": tokens}), atol=1e-2)


def test_a_token_outside_of_the_vocabulary_is_not_finite():
    model, batch = small(), text()
    batch["tokens"][1, 3] = 31
    found = predict(model, start(model), batch)
    assert np.isfinite(found[[0, 2]]).all() and np.isnan(found[1, 3:]).all()


def total(model: models.Model, batch: Any, params: Any, key: Any = None) -> jax.Array:
    """A loss: the mean negative logarithm of each token's probability after the one before it."""
    logits = model.apply(params, {}, batch, key=key, train=True)[0].whole()
    chosen = jnp.asarray(batch["tokens"])[:, 1:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), chosen, -1).mean()


@short.parametrize("name", VARIANTS)
def test_every_parameter_has_a_gradient(name: str):
    model, batch = small(**VARIANTS[name]), text(16, 24)
    batch["tokens"][:2, :16] = np.arange(32).reshape(2, 16) % 31  # every token
    params = start(model, noise=0.2)
    for path, x in flatten(
        jax.jit(jax.grad(functools.partial(total, model, batch)))(params)
    ).items():
        assert np.mean(np.asarray(x) != 0) > 0.9, path


@pytest.mark.long
def test_stacked_and_separate_layers_and_remat_policies_are_the_same_function():
    batch = text(documents=True)
    params = start(small(), noise=0.2)
    value = jax.value_and_grad(functools.partial(total, small(), batch))
    wanted, gradient = jax.jit(value)(params)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    for remat in ("none", "full"):
        other = jax.value_and_grad(functools.partial(total, small(remat=remat), batch))
        found, slope = jax.jit(other)(params)
        close(found, wanted)
        jax.tree.map(close, slope, gradient)
    for remat in ("none", "full"):
        model = small(remat=remat, scan_layers=False)
        other = jax.value_and_grad(functools.partial(total, model, batch))
        found, slope = jax.jit(other)(apart(params))
        close(found, wanted)
        jax.tree.map(close, slope, apart(gradient))


@pytest.mark.long
def test_remat_policies_recompute_what_they_say():
    def products(**arguments: Any) -> int:
        model, batch = small(**arguments), text()
        program = jax.make_jaxpr(jax.grad(functools.partial(total, model, batch)))(start(model))
        return count_flops(program)

    none, some, full = (products(remat=name) for name in ("none", "products", "full"))
    # What "products" saves is all that has a product: attention computes its scores again anyway.
    assert none == some < full
    assert products(remat="full", scan_layers=False) == full
    assert products(remat="none", scan_layers=False) == none


def test_the_operations_of_a_step_are_6_for_each_parameter_and_token():
    model, batch = models.gpt(31, 64, 3, activation="swiglu", remat="none"), text(4, 16)
    params = start(model)
    program = jax.make_jaxpr(jax.grad(functools.partial(total, model, batch)))(params)
    kernels = sum(x.size for path, x in flatten(params).items() if path.endswith("kernel"))
    # Layers, width and tokens: two products forward; backward four, and the scores once more.
    attended = 14 * 3 * 64 * 16
    assert count_flops(program) == 4 * 16 * (6 * kernels + attended)


@pytest.mark.long
def test_bfloat16_parameters_compute_in_bfloat16():
    variant = VARIANTS["swiglu, grouped, tied"]
    model, batch = small(**variant, soft_cap=15.0), text(documents=True)
    params = start(model)

    def value(params: Any) -> Any:
        outputs = model.apply(params, {}, batch, key=None, train=True)[0]
        return jnp.square(outputs.whole()).mean(), outputs

    run = jax.jit(jax.grad(value, has_aux=True))
    gradient, outputs = run(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert outputs.features.dtype == outputs.kernel.dtype == jnp.bfloat16
    wide = run(params)[1].features
    np.testing.assert_allclose(outputs.features.astype(jnp.float32), wide, rtol=0.05, atol=0.05)
    for path, x in flatten(gradient).items():
        assert x.dtype == jnp.bfloat16 and jnp.isfinite(x.astype(jnp.float32)).all(), path


def test_softmax_and_norms_are_float32_in_bfloat16():
    program = str(
        jax.make_jaxpr(functools.partial(small().apply, key=None, train=False))(
            jax.tree.map(lambda x: x.astype(jnp.bfloat16), start(small())), {}, text()
        )
    )
    for name in ("exp ", "rsqrt ", "cos ", "reduce_max"):
        lines = [line for line in program.splitlines() if f"= {name}" in line]
        assert lines and all("bf16[" not in line.split("=")[0] for line in lines), name


@pytest.mark.long
def test_dropout_and_z_loss_are_of_training_alone():
    model, batch = small(dropout=0.5, z_loss=0.01), text()
    params = start(model)
    train = jax.jit(lambda key: model.apply(params, {}, batch, key=key, train=True)[0])
    first, second = train(jax.random.key(1)), train(jax.random.key(2))
    assert first.z_loss == 0.01
    assert not np.allclose(first.features, second.features)
    outputs, state = model.apply(params, {}, batch, key=None, train=False)
    assert outputs.z_loss == 0.0 and state == {}
    same = predict(small(), params, batch)
    np.testing.assert_array_equal(predict(model, params, batch), same)
    assert model.mode and model.mode(True) == {"train": True}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_gradient_of_a_frequent_token_is_added_in_float32(precision: str):
    # 4,096 equal gradients: a sum in bfloat16 would stop where one is less than half of a unit.
    model = small(embed_dtype="bfloat16", max_length=256, depth=1)
    batch = {"tokens": np.zeros((16, 256), np.int32)}
    params = start(model, batch)
    others = jax.tree.map(lambda x: x.astype(precision), params)
    params = {**others, "embed": params["embed"]}
    assert params["embed"]["embedding"].dtype == jnp.bfloat16

    def embedded(params: Any) -> Any:
        _, seen = model.module.apply(
            {"params": params},
            batch["tokens"],
            capture_intermediates=lambda module, _: module.name == "embed",
        )
        return seen["intermediates"]["embed"]["__call__"][0][0]

    assert jax.eval_shape(embedded, params).dtype == precision
    gradient = jax.jit(jax.grad(lambda p: embedded(p).astype(jnp.float32).sum()))(params)
    found = gradient["embed"]["embedding"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0].astype(np.float32), 4096)
    np.testing.assert_array_equal(found[1:].astype(np.float32), 0)


@pytest.mark.long
def test_an_embedding_in_bfloat16_changes_its_rounding_only():
    model, other = small(embed_dtype="bfloat16", bias=True), small(bias=True)
    params = start(model, noise=0.2)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    assert params["embed"]["embedding"].dtype == jnp.bfloat16
    wanted = predict(other, wide, text())
    np.testing.assert_array_equal(predict(model, params, text()), wanted)
    cache = model.language.empty_cache(params, 3, 12)
    assert jax.tree.leaves(cache["layers"])[0].dtype == jnp.float32
    logits, _ = jax.jit(model.language.decode)(params, {}, text()["tokens"], cache)
    np.testing.assert_allclose(logits, wanted, rtol=1e-3, atol=1e-4)


def test_the_epsilon_of_a_norm_may_be_that_of_torch(torch: Any):
    x = np.full((2, 8), 3e-4, np.float32)
    for dtype in ("float32", "bfloat16"):
        wanted = torch.nn.functional.rms_norm(torch.tensor(x).to(getattr(torch, dtype)), (8,))
        found: Any = RmsNorm(None, use_scale=False).apply({}, jnp.asarray(x, dtype))
        assert found.dtype == dtype
        tolerance = 1e-6 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(
            found.astype(jnp.float32), wanted.float().numpy(), rtol=tolerance
        )
        usual: Any = RmsNorm(use_scale=False).apply({}, jnp.asarray(x, dtype))
        assert np.abs(np.asarray(found - usual, np.float32)).max() > 0.3


# Continuing a text.


@short.parametrize("scan_layers", [True, False], ids=["stacked", "separate"])
@short.parametrize("name", VARIANTS, lambda name: "rope" in VARIANTS[name])
def test_decoding_with_a_cache_agrees_with_the_whole_sequence(name: str, scan_layers: bool):
    model, batch = small(**VARIANTS[name], scan_layers=scan_layers), text()
    params = start(model, noise=0.2)
    language, wanted = model.language, predict(model, params, batch)
    assert language is not None and (language.vocab_size, language.max_length) == (31, 24)
    decode = jax.jit(language.decode)
    cache = language.empty_cache(params, 3, 15)
    kv_heads = VARIANTS[name].get("num_kv_heads", 4)
    assert jax.tree.leaves(cache["layers"])[0].shape[-4:] == (3, 15, kv_heads, 4)
    found, start_at = [], 0
    for count in (5, 1, 3, 1, 1, 1):  # the prompt at once, and then mostly one by one
        tokens = batch["tokens"][:, start_at : start_at + count]
        logits, cache = decode(params, {}, tokens, cache)
        found.append(logits)
        start_at += count
    assert found[0].dtype == jnp.float32 and cache["position"] == 12
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted, rtol=1e-3, atol=1e-4)


def test_one_program_decodes_every_token(compilations: Any):
    model = small()
    params, decode = start(model), jax.jit(model.language.decode)
    cache = model.language.empty_cache(params, 1, 24)
    _, cache = decode(params, {}, np.ones((1, 4), np.int32), cache)
    _, cache = decode(params, {}, np.ones((1, 1), np.int32), cache)
    with compilations() as names:
        for _ in range(5):
            _, cache = decode(params, {}, np.ones((1, 1), np.int32), cache)
    assert not [name for name in names if "decode" in name]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert (
        jax.tree.leaves(model.language.empty_cache(half, 1, 4)["layers"])[0].dtype == jnp.bfloat16
    )


# What it refuses.


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float32", "xla"), ("bfloat16", "cudnn"), ("float16", "cudnn")]
)
def test_the_attention_of_cudnn_is_asked_for_in_its_dtypes_only(monkeypatch, dtype, wanted):
    """The first parameters of every model are drawn in float32, which cuDNN refuses."""
    asked = []

    def noting(query: Any, *operands: Any, implementation: str, **more: Any) -> Any:
        asked.append(implementation)
        return query

    model = small(attention="cudnn")
    batch = {"tokens": np.zeros((1, 8), np.int32)}
    params, _ = model.init(jax.random.key(0), batch)  # refused before: "Q must be fp16/bf16"
    monkeypatch.setattr(jax.nn, "dot_product_attention", noting)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    jax.eval_shape(lambda p: model.apply(p, {}, batch, key=None, train=True), params)
    assert set(asked) == {wanted}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"num_heads": 3},
            "num_heads=3 does not divide width=16. Choose a num_heads such as 2 or 4.",
        ),
        ({"num_kv_heads": 3}, "divide num_heads=4. Choose a num_kv_heads such as 2 or 4."),
        ({"num_heads": 16}, "16 / 16 = 1 is odd. Choose a num_heads such as 8."),
        ({"width": 15, "num_heads": 3}, "15 / 3 = 5 is odd. Choose an even width."),
        (
            {"activation": "swigl"},
            "activation='swigl', which does not exist. Did you mean 'swiglu'?",
        ),
        (
            {"remat": "all"},
            "'all' for remat, which does not exist. There is: full, none, products.",
        ),
        ({"attention": "cudn"}, "Did you mean 'cudnn'?"),
        ({"depth": 0}, "depth to be at least 1"),
        ({"vocab_size": 0}, "vocab_size to be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads to be at least 1"),
        ({"dropout": 1.0}, "0 <= dropout < 1"),
        ({"soft_cap": 0.0}, "a positive soft_cap"),
        ({"z_loss": -1.0}, "z_loss >= 0"),
        ({"rope_base": 1.0}, "rope_base > 1"),
        ({"base_width": 0}, "base_width to be at least 1"),
        ({"base_width": 8, "base_head_dim": -4}, "base_head_dim to be at least 1"),
        ({"loss_chunk": 0}, "loss_chunk to be at least 1"),
        ({"qk_norm": "unscald"}, "qk_norm='unscald', which does not exist. Did you mean 'unscal"),
        ({"rope": "quarter"}, "rope='quarter', which does not exist. There is: full, half."),
        ({"rope": "half", "width": 24}, "24 / 4 = 6 is not a multiple of 4. Choose a width such"),
        ({"soft_cap": 1.0, "soft_cap_form": "root"}, "There is: algebraic, tanh."),
        ({"soft_cap_form": "algebraic"}, "but no soft_cap whose form it could be. Give"),
        ({"embed_dtype": "bf16"}, "embed_dtype='bf16', which does not exist."),
        ({"embed_dtype": "bfloat16", "tied": True}, "embed_dtype='bfloat16' and tied=True"),
        ({"attention_scale": 0.1, "base_width": 8}, "attention_scale=0.1 and base_width=8"),
        ({"attention_scale": 0.0}, "a positive attention_scale, or None"),
        ({"norm_epsilon": -1.0}, "norm_epsilon >= 0, or None"),
        ({"init_scale": -1.0}, "init_scale >= 0"),
        ({"embed_init": float("inf")}, "embed_init >= 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], said: str):
    with pytest.raises(ValueError) as error:
        small(**arguments)
    assert said in str(error.value)


def test_wrong_batches_are_refused():
    model = small()
    params = start(model)

    def said(batch: Any) -> str:
        with pytest.raises(ValueError) as error:
            model.apply(params, {}, batch, key=None, train=False)
        return str(error.value)

    none = "None of these is tokens: take a data set of text, such as data.text or data.tokens."
    image = np.zeros((3, 8, 8, 1), np.float32)
    told = said({"image": image})
    assert "from inputs='tokens', but the batch has image float32[3, 8, 8, 1]. " + none in told
    assert said({"tokens": image, "words": text()["tokens"]}).endswith(
        "argument `inputs` to words."
    )
    with pytest.raises(ValueError, match=none):
        small(inputs="image").init(jax.random.key(0), {"image": image})
    assert "sequences of 25 tokens, but its max_length is 24" in said(text(length=25))
    assert "float32[3, 12]" in said({"tokens": text()["tokens"].astype(np.float32)})
    assert "int32[12]" in said({"tokens": text()["tokens"][0]})
    with pytest.raises(ValueError, match="remember 25 tokens, but a sequence has 1 to 24"):
        model.language.empty_cache(params, 1, 25)
    cache = model.language.empty_cache(params, 3, 6)
    with pytest.raises(ValueError, match="got 12 tokens at once, but its cache has room for 6"):
        model.language.decode(params, {}, text()["tokens"], cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_gradient_of_a_frequent_token_is_the_sum_over_all_its_places(dtype):
    # In bfloat16, 256 + 1 is 256: a sum of ones that is rounded after each would end there.
    tokens = jnp.ones((4, 512), "int32").at[:, :4].set(2)
    embed, table = Embed(5, 4, normal(1.0), None), jnp.ones((5, 4), dtype)

    def total(table: jax.Array) -> jax.Array:
        return embed.apply({"params": {"embedding": table}}, tokens, None)[0].sum(dtype="float32")

    found = jax.jit(jax.grad(total))(table)
    assert found.dtype == dtype
    assert np.asarray(found[:, 0], "float32").tolist() == [0, 2032, 16, 0, 0]
