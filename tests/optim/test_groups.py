"""Groups against optax run on each group alone, closed forms, and the mistakes a user makes."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import bound, paths
from optim.checks import EXAMPLES, FULL_BATCH, groups_needing
from optim.layer_decay import layer_scales


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "embed": {"kernel": (4, 6)},
        "blocks": {"mlp": {"kernel": (3, 6, 6), "bias": (3, 6)}},
        "head": {"kernel": (6, 2), "bias": (2,)},
    }
    flat, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, flat, strict=True)]
    return structure.unflatten(leaves)


def loss(params):
    """A coupled, non-quadratic function, so that groups see each other through the gradient."""
    total = sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(params))
    return jnp.log1p(total**2) + sum(
        jnp.mean(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params)
    )


def train(optimizer, params, steps, **extra):
    """Runs an optimizer under jit; returns the parameters and the state after every step."""
    state = jax.jit(optimizer.init)(params)
    history = []

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        return optimizer.update(grads, state, params, value=value, value_fn=loss, **extra)

    for _ in range(steps):
        params, state = step(params, state)
        history.append((params, state))
    return history


warm = optax.linear_schedule(0.0, 0.1, 5)
cool = optax.exponential_decay(0.05, 3, 0.5)
beta = optax.linear_schedule(0.5, 0.95, 8)


def three_groups(**options):
    return optim.optimizer(
        {
            "matrices": optim.group(".*/kernel", partial(optax.adamw, warm, weight_decay=0.1), 3),
            "frozen": optim.group("embed/.*", partial(optim.frozen)),
            "rest": optim.group(".*", partial(optax.sgd, learning_rate=cool, momentum=0.9)),
        },
        **options,
    )


@pytest.mark.long
def test_a_group_is_updated_as_by_its_optimizer_alone():
    # The reference knows nothing of groups: optax on each part of the gradients, by hand.
    params = make_params()
    history = train(three_groups(), params, 12)
    matrices = optax.adamw(warm, weight_decay=0.1)
    rest = optax.sgd(cool, momentum=0.9)
    parts = lambda p: (  # noqa: E731
        p["blocks"]["mlp"]["kernel"],
        [p["blocks"]["mlp"]["bias"], p["head"]["kernel"], p["head"]["bias"]],
    )
    reference: Any = params
    a, b = matrices.init(parts(params)[0]), rest.init(parts(params)[1])
    for mine, _ in history:
        grads = jax.grad(loss)(reference)
        u, a = matrices.update(parts(grads)[0], a, parts(reference)[0])
        v, b = rest.update(parts(grads)[1], b, parts(reference)[1])
        kernel = optax.apply_updates(parts(reference)[0], u)
        others: Any = optax.apply_updates(parts(reference)[1], v)
        bias, head, head_bias = others
        reference = {
            "embed": reference["embed"],
            "blocks": {"mlp": {"kernel": kernel, "bias": bias}},
            "head": {"kernel": head, "bias": head_bias},
        }
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), mine, reference)
    assert not np.array_equal(history[-1][0]["head"]["bias"], params["head"]["bias"])


@pytest.mark.parametrize("frozen", [optim.frozen(), partial(optim.frozen)])
def test_a_frozen_group_does_not_move_however_it_is_written(frozen):
    groups = {"f": optim.group("f", frozen), "r": optim.group("r", partial(optax.sgd, 1.0))}
    optimizer = optim.optimizer(groups, clip_norm=1.0)
    params = {"f": jnp.zeros((), jnp.int32), "r": jnp.zeros(())}
    grads = {"f": jnp.float32(1000.0), "r": jnp.float32(0.5)}
    after, _ = optimizer.update(grads, optimizer.init(params), params)
    assert float(after["r"]) == -0.5  # the norm is 0.5, and nothing is clipped


def test_frozen_parameters_have_no_state_and_do_not_count_in_the_norm():
    params = make_params()
    optimizer = three_groups(clip_norm=1e-3)
    (after, state), *_ = train(optimizer, params, 1)
    np.testing.assert_array_equal(after["embed"]["kernel"], params["embed"]["kernel"])
    assert "frozen" not in state.groups
    huge = jax.tree.map(jnp.ones_like, params) | {"embed": {"kernel": jnp.full((4, 6), 1e9)}}
    tame = jax.tree.map(jnp.ones_like, params)
    first = optimizer.init(params)
    one, _ = optimizer.update(huge, first, params)
    two, _ = optimizer.update(tame, first, params)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_clipping_is_global_over_groups():
    # Two groups of sgd: the update is -lr * g scaled by one scalar for both (closed form).
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    grads = {"a": jnp.full(3, 3.0), "b": jnp.full(4, -2.0)}
    norm = np.sqrt(3 * 9.0 + 4 * 4.0)
    optimizer = optim.optimizer(
        {
            "a": optim.group("a", partial(optax.sgd, 1.0)),
            "b": optim.group("b", partial(optax.sgd, 1.0)),
        },
        clip_norm=2.0,
    )
    after, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(after["a"], -3.0 * 2.0 / norm, rtol=1e-6)
    np.testing.assert_allclose(after["b"], 2.0 * 2.0 / norm, rtol=1e-6)
    small = jax.tree.map(lambda g: g / 100, grads)
    after, _ = optimizer.update(small, optimizer.init(params), params)
    np.testing.assert_allclose(after["a"], -0.03, rtol=1e-6)


def test_a_group_may_be_clipped_by_its_own_norm():
    # As docs/groups.md says; the other group is not scaled, and the bound may follow a schedule.
    clip = partial(optax.clip_by_global_norm, lambda step: 1.0 + step)
    clipped = partial(optax.chain, clip, partial(optax.sgd, 1.0))
    optimizer = optim.optimizer(
        {"a": optim.group("a", clipped), "b": optim.group("b", partial(optax.sgd, 1.0))}
    )
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([30.0, 40.0])}
    after, state = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(after["a"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(after["b"], [-30.0, -40.0])
    second, _ = optimizer.update(grads, state, after)
    np.testing.assert_allclose(second["a"] - after["a"], [-1.2, -1.6], rtol=1e-6)


def test_any_float_argument_takes_a_schedule():
    # b1 as a schedule, against Adam written out with b1 of that step (float64 NumPy).
    params = {"w": jnp.asarray([0.3, -2.0, 5.0])}
    optimizer = optim.optimizer(
        {"all": optim.group(".*", partial(optax.adam, learning_rate=0.1, b1=beta, eps=1e-8))}
    )
    state = optimizer.init(params)
    m = v = np.zeros(3)
    w = np.asarray(params["w"], np.float64)
    for t in range(10):
        g = np.cos(w) + 0.1 * t
        params, state = optimizer.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        b1 = float(beta(t))
        m, v = b1 * m + (1 - b1) * g, 0.999 * v + 0.001 * g**2
        w = w - 0.1 * (m / (1 - b1 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
        np.testing.assert_allclose(params["w"], w, rtol=2e-5, atol=1e-6)
        w = np.asarray(params["w"], np.float64)


def test_the_reported_learning_rate_is_the_applied_one():
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    optimizer = optim.optimizer(
        {
            "a": optim.group("a", partial(optax.sgd, warm)),
            "b": optim.group("b", partial(optax.sgd, cool)),
        }
    )
    state = optimizer.init(params)
    for step in range(7):
        told = optimizer.hyperparameters(optimizer.position(state))
        after, state = optimizer.update({"a": 1.0, "b": 1.0}, state, params)
        for name in ("a", "b"):
            applied = params[name] - after[name]
            np.testing.assert_allclose(told[name]["learning_rate"], applied, rtol=1e-6)
        np.testing.assert_allclose(params["a"] - after["a"], 0.02 * min(step, 5), rtol=1e-6)
        params = jax.tree.map(jnp.zeros_like, params)


def test_layer_decay_scales_the_learning_rate_of_every_layer():
    params = make_params()
    optimizer = optim.optimizer(
        {"all": optim.group(".*", partial(optax.sgd, 1.0))}, layer_decay=0.5
    )
    grads = jax.tree.map(jnp.ones_like, params)
    after, _ = optimizer.update(grads, optimizer.init(params), params)
    moved = jax.tree.map(lambda a, b: np.asarray(b - a), after, params)
    np.testing.assert_allclose(moved["embed"]["kernel"], 0.5**4, rtol=1e-5)
    for layer in range(3):
        np.testing.assert_allclose(
            moved["blocks"]["mlp"]["bias"][layer], 0.5 ** (3 - layer), rtol=1e-4
        )
    np.testing.assert_allclose(moved["head"]["bias"], 1.0, rtol=1e-5)


def beit_scale(name, depth, decay):
    """The factor of a parameter in BEiT's program (optim_factory.py), with its own names."""
    if name in ("cls_token", "mask_token", "pos_embed") or name.startswith("patch_embed"):
        layer = 0
    elif name.startswith("blocks"):
        layer = int(name.split(".")[1]) + 1
    else:
        layer = depth + 1
    return decay ** (depth + 1 - layer)


VIT = ("cls_token", "pos_embed", "patch_embed.proj.kernel", "norm.scale", "head.kernel")


@pytest.mark.parametrize("depth", [1, 12, 24])
@pytest.mark.parametrize("block", ["blocks.{}.attn.qkv.kernel", "blocks_{}.mlp.fc1.bias"])
def test_layer_decay_has_the_numbers_of_beit(depth, block):
    leaf = jnp.zeros((2, 2))
    names = [*VIT, *(block.format(i) for i in range(depth))]
    scales = layer_scales({name.replace(".", "/"): leaf for name in names}, 0.65)
    for name in names:
        wanted = beit_scale(name.replace("blocks_", "blocks."), depth, 0.65)
        assert scales.get(name.replace(".", "/"), 1.0) == pytest.approx(wanted)
    stacked = {"embed/kernel": leaf, "blocks/kernel": jnp.zeros((depth, 2, 2)), "head/bias": leaf}
    scales = layer_scales(stacked, 0.65)
    np.testing.assert_allclose(scales["embed/kernel"], 0.65 ** (depth + 1))
    np.testing.assert_allclose(
        scales["blocks/kernel"][:, 0, 0], 0.65 ** np.arange(depth, 0, -1), rtol=1e-5
    )
    assert "head/bias" not in scales


@pytest.mark.parametrize(
    ("below", "layer", "above"),
    [
        # big_vision and flax's ViT example; Hugging Face's flax GPT-2, BERT and ViT; T5X; ours.
        (
            ["embedding/kernel", "pos_embedding", "cls", "Transformer/posembed_input/pos_embed"],
            "Transformer/encoderblock_{}/MlpBlock_0/Dense_0/kernel",
            ["Transformer/encoder_norm/scale", "pre_logits/kernel", "head/kernel"],
        ),
        (
            ["transformer/wte/embedding", "transformer/wpe/embedding"],
            "transformer/h/{}/attn/c_attn/kernel",
            ["transformer/ln_f/scale", "lm_head/kernel"],
        ),
        (
            ["bert/embeddings/word_embeddings/embedding", "bert/embeddings/LayerNorm/scale"],
            "bert/encoder/layer/{}/attention/self/query/kernel",
            ["bert/pooler/dense/kernel", "classifier/kernel"],
        ),
        (
            ["token_embedder/embedding"],
            "decoder/layers_{}/self_attention/query/kernel",
            ["decoder/decoder_norm/scale", "decoder/logits_dense/kernel", "decoder/relpos_bias/x"],
        ),
        (["embed/x"], "block_{}/kernel", ["norm/scale", "head/kernel"]),
    ],
)
def test_layer_decay_recognizes_the_usual_names_of_layers(below, layer, above):
    names = [*below, *(layer.format(i) for i in range(12)), *above]
    scales = layer_scales({name: jnp.zeros((2, 2)) for name in names}, 0.75)
    for i in range(12):
        assert scales[layer.format(i)] == pytest.approx(0.75 ** (12 - i))
    assert all(scales[name] == pytest.approx(0.75**13) for name in below)
    assert not set(above) & set(scales)


def test_rules_say_which_layer_a_parameter_belongs_to():
    leaf = jnp.zeros((2, 2))
    named = {
        "stem/w": leaf,
        "encoder/layers_0/w": leaf,
        "encoder/layers_1/w": leaf,
        "decoder/layers_0/w": leaf,
        "trunk/w": jnp.zeros((3, 2)),
        "top/w": leaf,
    }
    rules = {
        "stem/.*": "embedding",
        r"encoder/layers_(\d+)/.*": 0,
        r"decoder/layers_(\d+)/.*": 2,
        "trunk/.*": "stacked",
        "top/.*": "head",
    }
    scales = layer_scales(named, 0.5, rules)
    np.testing.assert_allclose(scales["trunk/w"][:, 0], [0.125, 0.25, 0.5])
    del scales["trunk/w"]
    assert scales == {
        "stem/w": 0.5**4,
        "encoder/layers_0/w": 0.5**3,
        "encoder/layers_1/w": 0.5**2,
        "decoder/layers_0/w": 0.5,
    }


@pytest.mark.parametrize(
    ("named", "rules", "words"),
    [
        (["blocks_0/w", "adapter/w"], None, "The parameter adapter/w has no layer.*'adapter/w'"),
        (["blocks_0/w", "stage/norm/w"], None, "The parameter stage/norm/w has no layer"),
        (["embed/w", "head/w"], None, "no parameter belongs to a numbered layer"),
        (["encoder/layers_0/w", "decoder/layers_0/w"], None, "decoder/layers_ and encoder/layers_"),
        (["blocks_0/w"], {"a.*": "head"}, "'a.*' of layers matches no parameter.*blocks_0/w"),
        (["blocks_0/w"], {"(": "head"}, "not a regular expression"),
        (["blocks_0/w"], {".*": "top"}, "'stacked' or a number from 0, got 'top'"),
        (["blocks_0/w"], {".*": -1}, "'embedding', 'head', 'stacked' or a number from 0, got -1"),
        (["blocks_0/w"], {".*(w)": 0}, "must match the number of a layer.*'w'"),
    ],
)
def test_a_parameter_that_layer_decay_cannot_place_is_named(named, rules, words):
    params = dict.fromkeys(named, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=words):
        optimizer = optim.optimizer({"all": optim.group(".*", SGD)}, layer_decay=0.5, layers=rules)
        optimizer.update(params, optimizer.init(params), params)


def test_rules_of_layers_reach_the_optimizer():
    params = {"stem": jnp.ones(2), "block_0": {"w": jnp.ones(2)}, "odd": jnp.ones(2)}
    groups = {"f": optim.group("odd", optim.frozen()), "all": optim.group(".*", SGD)}
    optimizer = optim.optimizer(groups, layer_decay=0.5, layers={"stem": "embedding"})
    after, _ = optimizer.update(params, optimizer.init(params), params)  # odd does not move
    np.testing.assert_allclose(after["stem"], 1 - 0.1 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(after["block_0"]["w"], 1 - 0.1 * 0.5, rtol=1e-6)
    with pytest.raises(ValueError, match="layers is used by layer_decay only"):
        optim.optimizer(groups, layers={"stem": "embedding"})


SGD = partial(optax.sgd, 0.1)


@pytest.mark.parametrize(
    "recipe",
    [
        partial(optax.contrib.schedule_free_sgd, 0.1),
        partial(optax.lookahead, SGD, sync_period=2, slow_step_size=0.5),
        partial(optax.contrib.sam, SGD, SGD),
        partial(optax.contrib.mechanize, SGD),
        partial(optax.contrib.cocob),
        partial(optax.lbfgs, 0.1),
        partial(optax.chain, SGD, partial(optax.scale_by_backtracking_linesearch, 5)),
    ],
    ids=lambda recipe: recipe.func.__name__,
)
def test_layer_decay_refuses_optimizers_that_rely_on_the_size_of_their_own_step(recipe):
    # With every step scaled from outside, z, the slow parameters, SAM's start, ... are another's.
    optimizer = optim.optimizer({"all": optim.group(".*", recipe)}, layer_decay=0.5)
    with pytest.raises(optim.GroupError, match="depends on its unscaled steps") as caught:
        jax.eval_shape(optimizer.init, make_params())
    assert caught.value.group == "all"


def test_layer_decay_refuses_stacks_with_different_numbers_of_layers():
    for shape in ((1, 2), ()):
        params = {"blocks": {"w": jnp.ones((3, 2)), "shared": jnp.ones(shape)}}
        optimizer = optim.optimizer({"all": optim.group(".*", SGD)}, layer_decay=0.5)
        with pytest.raises(ValueError, match=r"blocks/shared .*differ|differ.*blocks/shared"):
            optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer_decay": 0.5}, "layer_decay"),
        ({"low_precision": "stochastic"}, "stochastic"),
        ({"clip_norm": 1.0}, "clip_norm"),
    ],
)
def test_parts_of_parameters_in_shard_map_are_refused(options, words):
    # The first layer of a part is not the first layer, and all parts would draw the same noise.
    optimizer = optim.optimizer({"all": optim.group(".*", SGD)}, **options)
    whole = {"blocks": {"w": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)}}
    spec = jax.sharding.PartitionSpec
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=axes)

    def step(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    for split, refused in ((spec("d"), True), (spec(), False)):
        run = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split)
        if refused:
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(run, whole)
        else:
            jax.eval_shape(run, whole)


@pytest.mark.long
def test_a_line_search_works_in_a_group():
    # optax's partition hands L-BFGS MaskedNodes and raises; here it is L-BFGS on its own part.
    params = make_params()
    optimizer = optim.optimizer(
        {
            "search": optim.group("head/.*", partial(optax.lbfgs)),
            "rest": optim.group(".*", partial(optax.sgd, 0.0)),
        }
    )
    history = train(optimizer, params, 8)
    alone = optax.lbfgs()
    of_head = lambda head: loss({**params, "head": head})  # noqa: E731
    head, state = params["head"], alone.init(params["head"])
    for mine, _ in history:
        value, grad = jax.value_and_grad(of_head)(head)
        updates, state = alone.update(grad, state, head, value=value, grad=grad, value_fn=of_head)
        head = optax.apply_updates(head, updates)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), mine["head"], head)
    assert loss(history[-1][0]) < loss(params)


def test_one_compilation_with_donation_and_in_scan(compilations):
    params = make_params()
    optimizer = three_groups(clip_norm=1.0)
    state = jax.jit(optimizer.init)(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def lawful_step(params, state):
        return optimizer.update(jax.grad(loss)(params), state, params)

    own = jax.tree.map(jnp.copy, params)
    with compilations() as names:
        for _ in range(5):
            own, state = lawful_step(own, state)
    assert names.count("jit(lawful_step)") == 1

    def body(carry, _):
        return optimizer.update(jax.grad(loss)(carry[0]), carry[1], carry[0]), None

    start = (params, jax.jit(optimizer.init)(params))
    (scanned, _), _ = jax.lax.scan(body, start, None, length=5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), scanned, own)


def test_skipped_steps_change_only_the_position():
    params = make_params()
    optimizer = three_groups(clip_norm=1.0)
    (params, state), *_ = train(optimizer, params, 1)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    after, new = optimizer.update(bad, state, params, skip=jnp.asarray(True))
    jax.tree.map(np.testing.assert_array_equal, after, params)
    jax.tree.map(np.testing.assert_array_equal, new.groups, state.groups)
    assert int(optimizer.position(new)) == int(optimizer.position(state)) + 1
    assert int(optimizer.skipped(new)) == 1


def test_the_step_and_the_skipped_updates_are_the_last_scalars_of_a_state():
    # Of whatever dtype and name the states of the groups are.
    last = bound.Unpacked(
        {"zz": {"zz": jnp.int32(1)}}, jnp.int32(4), jnp.int32(5), jnp.int32(2), jnp.int32(3)
    )
    scalars, _ = bound.pack(last)
    assert scalars["int32"].tolist() == [1, 4, 5, 2, 3]


def test_an_update_that_is_not_finite_is_skipped():
    rate = lambda t: jnp.where(t == 1, jnp.inf, 0.1)  # noqa: E731
    optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.adam, rate))})
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
    state = optimizer.init(params)
    for wanted in (0, 1, 1):
        before, kept = params, state
        params, state = optimizer.update(grads, state, params, skip=jnp.asarray(False))
        assert int(optimizer.skipped(state)) == wanted
        moved = bool((params["w"] != before["w"]).any())
        assert moved is (int(optimizer.skipped(state)) == int(optimizer.skipped(kept)))
    assert np.isfinite(params["w"]).all()


def test_bfloat16_parameters_get_float32_arithmetic():
    # bfloat16(0.999) is 1.0: Adam in bfloat16 divides by zero. In float32 the first step is -lr.
    params = {"w": jnp.zeros(4, jnp.bfloat16)}
    optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.adam, 0.25, b2=0.999))})
    state = optimizer.init(params)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
    after, _ = optimizer.update({"w": jnp.ones(4, jnp.bfloat16)}, state, params)
    assert after["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(after["w"].astype(jnp.float32), -0.25, rtol=1e-2)


def test_master_weights_follow_the_float32_run():
    # 1000 steps of 1e-4 from 1.0: bfloat16 cannot move (its resolution there is 2**-7).
    grads = {"w": jnp.ones(8, jnp.bfloat16)}
    ends = {}
    for how in ("nearest", "master", "stochastic"):
        optimizer = optim.optimizer(
            {"all": optim.group(".*", partial(optax.sgd, 1e-4))}, low_precision=how
        )
        params = {"w": jnp.ones(8, jnp.bfloat16)}
        start = (params, optimizer.init(params))

        def body(carry, _, optimizer=optimizer):
            return optimizer.update(grads, carry[1], carry[0]), None

        (params, _), _ = jax.lax.scan(body, start, None, length=1000)
        ends[how] = np.asarray(params["w"], np.float32)
    np.testing.assert_array_equal(ends["nearest"], 1.0)
    np.testing.assert_array_equal(ends["master"], np.float32(jnp.bfloat16(0.9)))
    assert abs(ends["stochastic"].mean() - 0.9) < 0.02
    assert len(set(ends["stochastic"])) > 1


def test_stochastic_rounding_is_right_on_average():
    # Between the neighbours 1.0 and 1.0078125 of bfloat16, at a quarter of the way.
    optimizer = optim.optimizer(
        {"all": optim.group(".*", partial(optax.sgd, 1.0))}, low_precision="stochastic"
    )
    params = {"w": jnp.ones(20_000, jnp.bfloat16)}
    grads = {"w": jnp.full(20_000, -0.0078125 / 4, jnp.float32)}
    after, _ = optimizer.update(grads, optimizer.init(params), params)
    up = np.asarray(after["w"], np.float32)
    assert set(up) == {1.0, 1.0078125}
    assert abs((up > 1).mean() - 0.25) < 0.015  # five standard deviations


def test_stochastic_rounding_of_float16_is_right_on_average():
    optimizer = optim.optimizer(
        {"all": optim.group(".*", partial(optax.sgd, 1.0))}, low_precision="stochastic"
    )
    # A value, and how far it goes towards its neighbour: normal, negative, subnormal, the largest.
    for start, gap in ((1.0, 2**-10), (-3.0, 2**-9), (2.0**-20, 2**-24), (65504.0, 0.0)):
        params = {"w": jnp.full(20_000, start, jnp.float16)}
        grads = {"w": jnp.full(20_000, -gap / 4, jnp.float32)}
        after, _ = optimizer.update(grads, optimizer.init(params), params)
        ends = np.asarray(after["w"], np.float64)
        assert set(ends) == {start, start + gap}
        assert abs((ends != start).mean() - (0.25 if gap else 0)) < 0.015


def test_stochastic_rounding_draws_from_the_key_of_the_run():
    optimizer = optim.optimizer({"all": optim.group(".*", SGD)}, low_precision="stochastic")
    params = {"w": jnp.ones(1000, jnp.bfloat16)}
    grads = {"w": jnp.full(1000, 0.01)}
    state = optimizer.init(params)
    ends = [
        np.asarray(optimizer.update(grads, state, params, key=key)[0]["w"], np.float32)
        for key in (jax.random.key(1), jax.random.key(1), jax.random.key(2))
    ]
    np.testing.assert_array_equal(ends[0], ends[1])
    assert (ends[0] != ends[2]).any()


def test_schedule_free_in_a_partition_evaluates_its_average():
    free = partial(optax.contrib.schedule_free, SGD, learning_rate=0.1)
    params = {"a": jnp.asarray([1.0, -2.0]), "b": jnp.ones(3), "c": jnp.ones(2)}
    labels = {"a": "one", "b": "rest", "c": "two"}
    recipe = partial(optax.partition, {"one": free, "rest": SGD, "two": free}, labels)
    ours = optim.optimizer({"all": optim.group(".*", recipe)})
    alone = optim.optimizer(
        {
            "rest": optim.group("b", SGD),
            "one": optim.group("a", free),
            "two": optim.group("c", free),
        }
    )
    ends = []
    for optimizer in (ours, alone):
        now, state = params, optimizer.init(params)
        for _ in range(4):
            now, state = optimizer.update(jax.tree.map(jnp.sin, now), state, now)
        ends.append(optimizer.eval_params(state, now))
        assert (ends[-1]["a"] != now["a"]).all() and (ends[-1]["b"] == now["b"]).all()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *ends)


def test_schedule_free_inside_a_wrapper_that_changes_the_tree_is_refused():
    free = partial(optax.contrib.schedule_free_sgd, 0.1)
    optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.flatten, free))})
    with pytest.raises(optim.GroupError, match="changes the tree of parameters"):
        optimizer.init(make_params())


def test_schedule_free_evaluates_its_average():
    params = {"a": {"w": jnp.asarray([1.0, -2.0])}, "b": jnp.ones(3)}
    recipe = partial(
        optax.contrib.schedule_free, partial(optax.sgd, learning_rate=0.1), learning_rate=0.1
    )
    optimizer = optim.optimizer(
        {"a": optim.group("a/.*", recipe), "b": optim.group("b", partial(optax.sgd, 0.1))}
    )
    reference = optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1)
    w, reference_state = params["a"], reference.init(params["a"])
    state = optimizer.init(params)
    for _ in range(5):
        grads = jax.tree.map(lambda x: x + 1, params)
        updates, reference_state = reference.update(
            jax.tree.map(lambda x: x + 1, w), reference_state, w
        )
        w = optax.apply_updates(w, updates)
        params, state = optimizer.update(grads, state, params)
    wanted = optax.contrib.schedule_free_eval_params(reference_state, w)
    mine = optimizer.eval_params(state, params)
    np.testing.assert_allclose(mine["a"]["w"], wanted["w"], rtol=1e-6)
    np.testing.assert_array_equal(mine["b"], params["b"])


def test_the_transformation_tx_computes_the_same_updates():
    params = make_params()
    optimizer = three_groups(clip_norm=1.0)
    state = optimizer.init(params)
    grads = jax.grad(loss)(params)
    updates, _ = optimizer.tx.update(grads, state, params)
    after, _ = optimizer.update(grads, state, params)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
        optax.apply_updates(params, updates),
        after,
    )


@pytest.mark.parametrize(
    ("groups", "name", "words"),
    [
        ({"a": "head/.*"}, None, ["blocks/mlp/bias", "'head/.*'", "'.*'"]),
        ({"a": "hed/kernel", "b": ".*"}, "a", ["'hed/kernel'", "head/kernel", "takes no"]),
        ({"a": "kernel", "b": ".*"}, "a", ["whole path", "embed/kernel"]),
        ({"a": ".*", "b": "head/.*"}, "b", ["earlier group", "'a'"]),
    ],
)
def test_groups_that_do_not_fit_the_parameters_are_refused(groups, name, words):
    optimizer = optim.optimizer(
        {key: optim.group(match, partial(optax.sgd, 0.1)) for key, match in groups.items()}
    )
    with pytest.raises(optim.GroupError) as caught:
        optimizer.label(make_params())
    assert caught.value.group == name
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("lost", [lambda u: {"a/w": u["a/w"]}, lambda u: {**u, "b/w": None}])
def test_an_optimizer_that_drops_an_update_is_named_with_the_parameter(lost):
    def lossy():
        return optax.stateless(lambda updates, params: lost(updates))

    opt = optim.optimizer({"all": optim.group(".*", partial(lossy))})
    params = {"a": {"w": jnp.ones(3)}, "b": {"w": jnp.ones(2)}}
    state = opt.init(params)
    with pytest.raises(optim.GroupError) as raised:
        opt.update(params, state, params)
    assert str(raised.value) == (
        "test_groups.lossy cannot update the group 'all'. It returned no update for the parameter"
        " b/w. Return one for each parameter, zeros for one that stays as it is."
    )


def test_mistakes_in_groups_are_whole_sentences():
    with pytest.raises(ValueError, match="not a regular expression"):
        optim.group("blocks/(", partial(optax.sgd, 0.1))
    with pytest.raises(ValueError, match=r"functools\.partial"):
        optim.group(".*", "adamw")
    with pytest.raises(ValueError, match="at least one group"):
        optim.optimizer({})
    groups = {"a": optim.group(".*", partial(optax.sgd, 0.1))}
    with pytest.raises(ValueError, match="clip_norm must be positive, got -1"):
        optim.optimizer(groups, clip_norm=-1.0)
    with pytest.raises(ValueError, match="clip_norm must be positive, got 0"):
        optim.optimizer(groups, clip_norm=0.0)
    with pytest.raises(ValueError, match="layer_decay must be a factor in"):
        optim.optimizer(groups, layer_decay=warm)
    private = {"p": optim.group(".*", partial(optax.contrib.dpsgd, 0.1, 1.0, 1.0, seed=0))}
    with pytest.raises(ValueError, match=r"in group 'p' optax\.contrib\.dpsgd clips the gradient"):
        optim.optimizer(private, clip_norm=1.0)
    with pytest.raises(ValueError, match="low_precision must be .* nearest, master, stochastic"):
        optim.optimizer(groups, low_precision="mster")
    whole = optim.optimizer({"a": optim.group(".*", partial(optax.sgd, 0.1))})
    with pytest.raises(optim.GroupError, match=r"int32.*frozen"):
        whole.init({"table": jnp.zeros(3, jnp.int32)})


GOOD = partial(optax.adam, learning_rate=0.1)


@pytest.mark.parametrize(
    ("recipe", "argument", "words"),
    [
        (partial(optax.sgd, -0.1), "learning_rate", "must not be negative, got -0.1"),
        (partial(optax.sgd, float("nan")), "learning_rate", "NaN"),
        (partial(optax.sgd, float("inf")), "learning_rate", "is infinite"),
        (partial(optax.contrib.muon, 0.1, adam_b2=1.0), "adam_b2", r"in \[0, 1\), .* got 1\."),
        (partial(optax.adam, 0.1, b1=1.0), "b1", r"b1 of optax.adam must be in \[0, 1\), .* got 1"),
        (partial(optax.sgd, 0.1, momentum=1.5), "momentum", r"in \[0, 1\), .* got 1\.5"),
        (partial(optax.contrib.prodigy, betas=(0.9, 1.0)), r"betas[1]", "optax.contrib.prodigy"),
        (
            partial(optax.contrib.mechanize, partial(optax.adam, 1.0, b2=2.0)),
            "base_optimizer.b2",
            "b2 of optax.adam must be .* got 2",
        ),
    ],
)
def test_an_invalid_argument_is_refused(recipe, argument, words):
    optimizer = optim.optimizer({"a": optim.group("head/.*", recipe), "b": optim.group(".*", GOOD)})
    with pytest.raises(optim.GroupError, match=words) as caught:
        jax.eval_shape(optimizer.init, make_params())
    assert (caught.value.group, caught.value.argument) == ("a", f"optimizer.{argument}")
    assert "\n" not in str(caught.value)


def test_unusual_but_valid_arguments_are_accepted():
    for recipe in (
        partial(optax.sm3, 0.1),  # its own b2 is 1
        partial(optax.polyak_sgd, f_min=-1.0),
        partial(optax.optimistic_adam_v2, 0.1),
        partial(optax.chain, GOOD, partial(optax.scale, step_size=-1.0)),
        partial(optax.contrib.muon, 0.1),
        partial(optax.sgd, jnp.float32(0.1)),
    ):
        jax.eval_shape(optim.optimizer({"a": optim.group(".*", recipe)}).init, {"w": jnp.ones(3)})


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (partial(optax.sgd), "optax.sgd needs learning_rate"),
        (partial(optax.sgd, None), "optax.sgd needs learning_rate"),
        (partial(optax.adam, learning_rat=0.1), "Did you mean 'learning_rate'"),
        (partial(optax.lookahead, GOOD, sync_period=2), "optax.lookahead needs slow_step_size"),
        (partial(optax.contrib.mechanize, partial(optax.lion)), "optax.lion needs learning_rate"),
    ],
)
def test_a_missing_or_unknown_argument_is_named(recipe, words):
    with pytest.raises(ValueError, match=words):
        optim.group(".*", recipe)


NESTED = partial(optim.optimizer, {"b": optim.group(".*", SGD)})


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (NESTED, "class Optimizer.*Groups cannot be nested"),
        (partial(optax.chain, NESTED), "class Optimizer"),
        (partial(optax.sgd, lambda t: None), "schedule of learning_rate .* raised ValueError"),
        (partial(optax.sgd, lambda t: jnp.ones(2)), r"returned an array of shape \(2,\)"),
        (partial(optax.sgd, lambda t: 0.1 if bool(t) else 0.2), "raised TracerBool"),
    ],
)
def test_a_value_that_is_not_an_optimizer_or_a_schedule_is_refused(recipe, words):
    optimizer = optim.optimizer({"a": optim.group(".*", recipe)})
    params = {"w": jnp.ones(3)}
    with pytest.raises(optim.GroupError, match=words) as caught:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    assert (caught.value.group, caught.value.argument) == ("a", "optimizer")


@pytest.mark.long
def test_a_schedule_receives_the_step_as_an_array():
    # A Python number has no `astype`, and no `dtype`.
    rate = lambda step: 0.1 * (step + 1).astype("float32")  # noqa: E731
    optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.sgd, rate))}, rate)
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 1e-3)}
    state = optimizer.init(params)
    assert float(optimizer.hyperparameters(3)["all"]["learning_rate"]) == pytest.approx(0.4)
    wrapped = optim.optimizer(
        {"all": optim.group(".*", partial(optim.cautious, partial(optax.sgd, rate)))}
    )
    for one in (optimizer, wrapped):
        state = one.init(params)
        after, state = one.update(grads, state, params)
        np.testing.assert_allclose(after["w"], 1 - 1e-4, rtol=1e-6)
        again, _ = one.update(grads, state, after)
        np.testing.assert_allclose(again["w"], 1 - 3e-4, rtol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "argument", "words"),
    [
        (partial(optax.sgd, lambda t: -0.1), "learning_rate", "negative, got -0.1. To move up"),
        (partial(optax.sgd, optax.linear_schedule(-0.1, 0.1, 9)), "learning_rate", "got -0.1"),
        (partial(optax.adam, 0.1, b1=optax.constant_schedule(1.0)), "b1", "average, got 1"),
        (
            partial(optax.lookahead, partial(optax.adam, lambda t: jnp.nan * t), 2, 0.5),
            "fast_optimizer.learning_rate",
            "NaN",
        ),
    ],
)
def test_a_schedule_that_starts_outside_its_range_is_refused(recipe, argument, words):
    optimizer = optim.optimizer({"a": optim.group("head/.*", recipe), "b": optim.group(".*", GOOD)})
    with pytest.raises(optim.GroupError, match="goes wrong at step 0: it .*" + words) as caught:
        optimizer.init(make_params())
    assert (caught.value.group, caught.value.argument) == ("a", f"optimizer.{argument}")


def test_a_schedule_of_clip_norm_that_starts_at_zero_is_refused():
    rest = {"all": optim.group(".*", GOOD)}
    optimizer = optim.optimizer(rest, clip_norm=optax.linear_schedule(0.0, 1.0, 9))
    with pytest.raises(
        optim.GroupError, match="schedule of clip_norm goes wrong .* got 0"
    ) as caught:
        optimizer.init(make_params())
    assert caught.value.argument == "clip_norm"


def test_an_argument_may_be_a_key_of_random_numbers():
    recipe = partial(optax.noisy_sgd, 0.1, key=jax.random.key(7))
    optimizer, bare = optim.optimizer({"all": optim.group(".*", recipe)}), recipe()
    params = {"w": jnp.ones(3)}
    after, _ = optimizer.update(params, optimizer.init(params), params)
    updates, _ = bare.update(params, bare.init(params), params)
    jax.tree.map(np.testing.assert_allclose, after, optax.apply_updates(params, updates))


def test_a_bare_optimizer_in_place_of_a_group_is_refused():
    with pytest.raises(ValueError, match=r"'a' must be made by optim\.group\(match, optimizer\)"):
        optim.optimizer({"a": optax.sgd(0.1)})  # pyright: ignore[reportArgumentType]


def test_parameters_of_the_wrong_kind_are_refused():
    params = {"a": jnp.ones(2, jnp.complex64), "b": jnp.arange(3)}
    groups = {"a": optim.group("a", partial(optax.lion, 0.1)), "b": optim.group("b", GOOD)}
    with pytest.raises(optim.GroupError, match="split_real_and_imaginary") as caught:
        optim.optimizer(groups).init(params)
    assert (caught.value.group, caught.value.argument) == ("a", "match")
    wrapped = partial(optax.contrib.split_real_and_imaginary, partial(optax.lion, 0.1))
    groups["a"] = optim.group("a", wrapped)
    with pytest.raises(optim.GroupError, match=r"b has dtype int32.*frozen") as caught:
        optim.optimizer(groups).init(params)
    assert caught.value.group == "b"
    groups["b"] = optim.group("b", partial(optim.frozen))
    optim.optimizer(groups).init(params)


@pytest.mark.long
def test_a_transformation_of_the_groups_leaves_frozen_leaves_of_any_dtype():
    params = {"w": jnp.ones(2), "mask": jnp.asarray([True, False])}
    groups = {"f": optim.group("mask", partial(optim.frozen)), "r": optim.group(".*", SGD)}
    tx = optim.optimizer(groups).tx
    updates: Any
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    assert updates["mask"].dtype == bool and not updates["mask"].any()


def test_a_single_array_as_parameters_and_a_python_float_as_value_are_accepted():
    optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.polyak_sgd))})
    params = jnp.ones(3)
    ends = [
        optimizer.update(params, optimizer.init(params), params, value=value)[0]
        for value in (0.5, np.float64(0.5), jnp.float32(0.5))
    ]
    for end in ends:
        np.testing.assert_allclose(end, 1 - 0.5 / 3, rtol=1e-6)


def test_inner_arguments_of_the_same_name_are_reported_with_their_path():
    recipe = partial(optim.cautious, partial(optax.adamw, warm, weight_decay=0.3))
    told = optim.optimizer({"a": optim.group(".*", recipe)}).hyperparameters(5)["a"]
    assert told["weight_decay"] == 0.0 and told["base_optimizer.weight_decay"] == 0.3
    assert told["learning_rate"] == pytest.approx(0.1)


def test_optimizers_that_need_full_batches_are_found():
    groups = {
        "a": optim.group(
            "a", partial(optax.chain, partial(optax.lbfgs), partial(optax.scale, 1.0))
        ),
        "b": optim.group("b", GOOD),
    }
    assert groups_needing(optim.optimizer(groups).groups, FULL_BATCH) == {"a": "optax.lbfgs"}


def adagrad_norm(learning_rate: float, first: Any = 0, sum_dtype: Any = None, back: bool = False):
    """AdaGrad-norm as a user writes it, whose sum of squares begins with an integer or narrow."""

    def init(params):
        return {"sum": jnp.array(first, sum_dtype)}

    def update(updates, state, params=None):
        total = state["sum"] + optax.tree.norm(updates, squared=True)
        total = total.astype(state["sum"].dtype) if back else total
        rate = -learning_rate / jnp.sqrt(total + 1e-8)
        return jax.tree.map(lambda g: rate * g, updates), {"sum": total}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        (partial(adagrad_norm, 0.5), ("int32", "float32")),
        (partial(adagrad_norm, 0.5, jnp.bfloat16(0)), ("bfloat16", "float32")),
        (partial(adagrad_norm, 0.5, np.float16(0)), ("float16", "float32")),
        (adagrad_norm(0.5), ("int32", "float32")),
        (partial(optax.chain, partial(adagrad_norm, 0.5, False)), ("bool", "float32")),
    ],
)
def test_a_state_that_would_be_truncated_is_refused(recipe, kinds):
    # Cast back to int32 after every step, the sum stays 0, and the parameters never arrive.
    optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
    params = {"w": jnp.ones(3)}
    with pytest.raises(optim.GroupError, match=r"state at .*\['sum'\]") as caught:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    assert all(kind in str(caught.value) for kind in kinds)
    assert (caught.value.group, caught.value.argument) == ("all", "optimizer")


def counted(learning_rate: float):
    """A user's optimizer whose whole state is one number."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -learning_rate * g, updates), state + 0.5

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)  # type: ignore[arg-type]


def test_a_state_of_one_array_that_would_be_truncated_is_named():
    optimizer = optim.optimizer({"all": optim.group(".*", partial(counted, 0.5))})
    params = {"w": jnp.ones(3)}
    with pytest.raises(optim.GroupError, match="Its state, which is a single array, is int32"):
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize(
    "recipe",
    [
        partial(adagrad_norm, 0.5, 0.0),
        partial(adagrad_norm, 0.5, jnp.bfloat16(0), back=True),
        partial(adagrad_norm, 0.5, sum_dtype="bfloat16"),
        partial(optax.chain, partial(adagrad_norm, 0.5, sum_dtype=jnp.bfloat16)),
        partial(optax.adam, 0.5, mu_dtype="bfloat16"),
    ],
)
def test_a_state_in_a_declared_dtype_keeps_it(recipe):
    optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
    params = {"w": jnp.ones(3)}
    before = jax.eval_shape(optimizer.init, params)
    after = jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p)[1], params)
    assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)


def test_state_of_float32_parameters_beside_float64_ones_stays_float32():
    # A schedule's value is float64 here, for the sake of the other parameters.
    with jax.enable_x64(True):
        optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.adam, warm, beta))})
        params = {"w": jnp.ones(3, jnp.float32), "v": jnp.ones(3, jnp.float64)}
        after = jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p)[1], params)
        assert {x.dtype.name for x in jax.tree.leaves(after.groups)} == {"float32", "float64"}


@pytest.mark.parametrize(
    ("recipe", "argument"),
    [
        (partial(optax.rprop, warm), "learning_rate"),
        (partial(optax.contrib.prodigy, 1.0, estim_lr0=beta), "estim_lr0"),
        (partial(optax.contrib.dadapt_adamw, 1.0, estim_lr0=beta), "estim_lr0"),
        (partial(optax.adagrad, warm, initial_accumulator_value=beta), "initial_accumulator_value"),
        (partial(optax.chain, partial(optax.rprop, warm), SGD), "args.0.learning_rate"),
        (partial(optim.cautious, partial(optax.rprop, warm)), "base_optimizer.learning_rate"),
    ],
)
def test_a_schedule_that_only_init_would_read_is_refused(recipe, argument):
    optimizer = optim.optimizer({"a": optim.group("head/.*", recipe), "b": optim.group(".*", GOOD)})
    with pytest.raises(optim.GroupError, match="of its value at step 0") as caught:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), make_params())
    assert (caught.value.group, caught.value.argument) == ("a", f"optimizer.{argument}")
    assert argument.split(".")[-1] in str(caught.value)


def test_schedules_that_updates_read_are_accepted():
    for recipe in (
        partial(optax.contrib.prodigy, warm, betas=(beta, 0.99)),
        partial(optax.lbfgs, linesearch=partial(optax.scale_by_backtracking_linesearch, 5, beta)),
        partial(optax.contrib.schedule_free_sgd, cool),
        partial(shown, warm),
    ):
        optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
        jax.eval_shape(
            lambda p, o=optimizer: o.update(p, o.init(p), p, value=0.1, value_fn=loss),
            make_params(),
        )


def shown(learning_rate: float):
    """Shows its argument in its state, as optax.contrib.schedule_free does with b1."""

    def init(params):
        return jnp.asarray(learning_rate)

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -learning_rate * g, updates), jnp.asarray(learning_rate)

    return optax.GradientTransformation(init, update)


def test_maximize_climbs_as_torch_does():
    # torch negates the gradient first, so that momentum is the same and weight decay still shrinks.
    params: Any = {"up": jnp.asarray([1.0, -2.0]), "down": jnp.asarray([1.0, -2.0])}
    recipe = partial(optax.adamw, 0.1, weight_decay=0.1)
    optimizer = optim.optimizer(
        {"up": optim.group("up", recipe, maximize=True), "down": optim.group("down", recipe)},
        clip_norm=1.0,
    )
    state = optimizer.init(params)
    alone, w = optax.adamw(0.1, weight_decay=0.1), params["up"]
    inner = alone.init(w)
    for t in range(4):
        g = jnp.cos(w + t)
        both = {"up": g, "down": jnp.zeros(2)}
        params, state = optimizer.update(both, state, params)
        scale = jnp.minimum(1.0, 1.0 / jnp.linalg.norm(g))
        updates, inner = alone.update(-scale * g, inner, w)
        w: Any = optax.apply_updates(w, updates)
        np.testing.assert_allclose(params["up"], w, rtol=1e-6)


def test_maximize_negates_the_values_and_gradients_that_a_line_search_evaluates():
    seen: dict[str, Any] = {}

    def update(updates, state, params=None, *, value, grad, value_fn, grad_fn, temperature):
        seen["numbers"] = (updates["w"], value, grad["w"], value_fn(params), temperature)
        seen["grad_fn"] = grad_fn(params, 0)["w"]
        return jax.tree.map(lambda g: -g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # type: ignore[arg-type]
    optimizer = optim.optimizer({"all": optim.group(".*", tx, maximize=True)})
    params = {"w": jnp.asarray(2.0)}
    given = {"value_fn": lambda p: p["w"] ** 2, "grad_fn": lambda p, i: {"w": 2 * p["w"]}}
    args = {"value": 4.0, "temperature": 7.0, **given}
    after, _ = optimizer.update({"w": jnp.asarray(4.0)}, optimizer.init(params), params, **args)
    assert seen["numbers"] == (-4.0, -4.0, -4.0, -4.0, 7.0) and seen["grad_fn"] == -4.0
    assert after["w"] == 6.0


def test_a_negative_learning_rate_names_maximize():
    optimizer = optim.optimizer({"a": optim.group(".*", partial(optax.sgd, -0.1))})
    with pytest.raises(optim.GroupError, match="must not be negative.*maximize"):
        optimizer.init(make_params())


@pytest.mark.parametrize(
    "recipe",
    [
        partial(optax.adafactor, 0.1, min_dim_size_to_factor=2),
        partial(optax.adafactor, 0.1, momentum=0.9, dtype_momentum="complex64"),
        partial(optax.optimistic_adam_v2, 0.1),
    ],
)
def test_complex_parameters_move_as_under_bare_optax(recipe):
    params: Any = {"w": jnp.asarray([[1 + 2j, 0.5 - 1j], [-1j, 2.0]]), "b": jnp.asarray([1j, 3.0])}
    optimizer, bare = optim.optimizer({"a": optim.group(".*", recipe)}), recipe()
    state, inner, wanted = optimizer.init(params), bare.init(params), params
    for _ in range(4):
        grads = jax.tree.map(lambda x: x - (1 - 1j), params)
        params, state = optimizer.update(grads, state, params)
        updates, inner = bare.update(grads, inner, wanted)
        wanted = optax.apply_updates(wanted, updates)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), params, wanted)


@pytest.mark.parametrize(
    "recipe",
    [
        partial(optax.adafactor, 0.1, momentum=0.9),  # kept in float32 where nothing else is said
        partial(optax.adam, 0.1, mu_dtype="bfloat16"),
        partial(optax.lion, 0.1),
    ],
)
def test_complex_parameters_whose_imaginary_parts_would_be_lost_are_refused(recipe):
    optimizer = optim.optimizer({"a": optim.group(".*", recipe)})
    with pytest.raises(optim.GroupError, match="split_real_and_imaginary"):
        optimizer.init({"w": jnp.asarray([1j])})


def rprop(learning_rate: float) -> optax.GradientTransformation:
    """A user's optimizer of a name that is also optax's, and that takes minibatches."""
    return optax.sgd(learning_rate)


def dpsgd(learning_rate: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate)


def test_optimizers_that_need_full_batches_or_examples_are_found_by_their_function():
    recipes = {
        "optax": partial(optax.rprop, 0.1),
        "inside": partial(optax.chain, partial(optax.scale_by_lbfgs), SGD),
        "theirs": partial(rprop, 0.1),
    }
    groups = {name: optim.group(name, recipe) for name, recipe in recipes.items()}
    assert set(groups_needing(groups, FULL_BATCH)) == {"optax", "inside"}
    private = partial(optax.contrib.dpsgd, 0.1, 1.0, 1.0, seed=0)
    groups = {"a": optim.group("a", private), "b": optim.group("b", partial(dpsgd, 0.1))}
    assert set(groups_needing(groups, EXAMPLES)) == {"a"}


def test_python_and_numpy_leaves_move_as_arrays():
    params: Any = {"a": 1.0, "b": np.float64(2.0), "c": np.ones(2), "d": jnp.ones(2)}
    optimizer = optim.optimizer({"all": optim.group(".*", partial(optax.adam, 0.1))})
    wanted: Any = jax.tree.map(jnp.float32, params)
    alone = optax.adam(0.1)
    state, inner = optimizer.init(params), alone.init(wanted)
    assert optimizer.label(params) == dict.fromkeys("abcd", "all")
    for _ in range(3):
        params, state = optimizer.update(params, state, params)
        updates, inner = alone.update(wanted, inner, wanted)
        wanted = optax.apply_updates(wanted, updates)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), params, wanted)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    with pytest.raises(optim.GroupError, match="parameter a has dtype int32"):
        optimizer.init({"a": 1})


def test_a_name_with_a_newline_is_matched_and_printed_on_one_line():
    params = {"a\nb": jnp.ones(3), "c\t": jnp.ones(2)}
    optimizer = optim.optimizer({"all": optim.group(r".*", SGD)})
    after, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(after["a\nb"], 0.9)
    with pytest.raises(optim.GroupError, match=r"parameter a\\nb of shape") as caught:
        optim.optimizer({"all": optim.group("d", SGD)}).init(params)
    assert "\n" not in str(caught.value)


def test_a_bare_array_is_matched_by_a_name():
    for pattern in (".*", "params"):
        optimizer = optim.optimizer({"all": optim.group(pattern, SGD)})
        params = jnp.ones(3)
        after, _ = optimizer.update(params, optimizer.init(params), params)
        np.testing.assert_allclose(after, 0.9)
    with pytest.raises(optim.GroupError, match=r"the parameter params of shape \(3,\)"):
        optim.optimizer({"all": optim.group("kernel", SGD)}).init(jnp.ones(3))
    with pytest.raises(optim.GroupError, match="The parameter params has dtype int32"):
        optim.optimizer({"all": optim.group(".*", SGD)}).init(jnp.arange(3))


def test_a_raw_state_of_nnx_is_matched_by_the_names_of_its_variables():
    nnx = pytest.importorskip("flax.nnx")
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    optimizer = optim.optimizer(
        {"kernels": optim.group(".*kernel", SGD), "rest": optim.group("bias", optim.frozen())}
    )
    after, _ = optimizer.update(state, optimizer.init(state), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    pure, moved = nnx.to_pure_dict(state), nnx.to_pure_dict(after)
    np.testing.assert_allclose(moved["kernel"], 0.9 * pure["kernel"], rtol=1e-6)
    # A node with more than its value keeps both names.
    pair = optax.ScaleByBacktrackingLinesearchState(jnp.ones(1), jnp.ones(2), None, None)  # type: ignore[arg-type]
    assert list(paths.flatten({"a": pair})) == ["a/learning_rate", "a/value"]


def test_an_optimizer_that_fails_names_a_parameter_without_elements():
    params = {"w": jnp.ones((2, 3)), "none": jnp.zeros((0, 3))}
    for recipe, words in (
        (partial(optax.contrib.muon, 0.1), "ZeroDivisionError"),
        (partial(optax.sm3, 0.1), "zero-size array"),
    ):
        optimizer = optim.optimizer({"all": optim.group(".*", recipe)})
        with pytest.raises(optim.GroupError, match=f"{words}.*The parameter none has no elements"):
            optimizer.update(params, optimizer.init(params), params)


def _tx_update(optimizer, params):
    return optimizer.tx.update(params, optimizer.tx.init(params), params)


@pytest.mark.parametrize(
    ("calls", "use"),
    [
        (1, lambda optimizer, params: optimizer.label(params)),
        (1, lambda optimizer, params: optimizer.trainable(params)),
        (1, lambda optimizer, params: optimizer.layer_scales(params)),
        (1, lambda optimizer, params: optimizer.init(params)),
        (2, lambda optimizer, params: optimizer.update(params, optimizer.init(params), params)),
        (2, lambda optimizer, params: optimizer.eval_params(optimizer.init(params), params)),
        (2, _tx_update),
    ],
    ids=["label", "trainable", "layer_scales", "init", "update", "eval_params", "tx"],
)
def test_each_call_compares_a_parameter_with_a_group_at_most_once(monkeypatch, calls, use):
    compared, takes = Counter(), optim.Group.takes

    def counted(group, path, leaf):
        compared[group.match.pattern, path] += 1
        return takes(group, path, leaf)

    monkeypatch.setattr(optim.Group, "takes", counted)
    optimizer = optim.optimizer(
        {"matrices": optim.group(".*kernel", SGD), "rest": optim.group(".*", SGD)},
        clip_norm=1.0,
        layer_decay=0.5,
    )
    use(optimizer, make_params(jnp.bfloat16))
    assert max(compared.values()) <= calls  # of `use`, init included


# ---- Widths


def test_width_scaling_divides_every_learning_rate_of_a_group():
    params, grads = {"w": jnp.arange(1.0, 4.0)}, {"w": jnp.asarray([0.3, -1.0, 2.0])}
    fall = lambda step: 0.1 * 0.5**step  # noqa: E731

    def moved(recipe, **options):
        optimizer = optim.optimizer({"all": optim.group(".*", recipe, **options)})
        state, at = optimizer.init(params), params
        for _ in range(3):
            at, state = optimizer.update(grads, state, at)
        return at["w"], optimizer.hyperparameters(1)["all"]["learning_rate"]

    for rate, divided in ((0.1, 0.025), (fall, lambda step: fall(step) / 4)):
        for factory in (partial(optax.adamw, weight_decay=0.1), optax.sgd, optim.mars):
            got, told = moved(partial(factory, rate), width_scaling=4)
            expected, right = moved(partial(factory, divided))
            np.testing.assert_array_equal(got, expected)
            assert told == right
    inside = partial(optax.chain, partial(optax.sgd, 0.1), partial(optax.scale, 1.0))
    got, _ = moved(inside, width_scaling=4.0)
    np.testing.assert_array_equal(got, moved(partial(optax.sgd, 0.025))[0])
    # A default.
    whole = optim.group(".*", partial(optax.contrib.schedule_free_sgd), width_scaling=4.0)
    assert optim.optimizer({"all": whole}).hyperparameters(0)["all"]["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("recipe", "scaling", "words"),
    [
        (partial(optax.sgd, 0.1), 0.0, "must be positive, such as width / base_width, got 0.0"),
        (partial(optax.sgd, 0.1), float("nan"), "must be positive.*got nan"),
        (optax.sgd(0.1), 4.0, "an optax transformation has none"),
        (partial(optax.contrib.cocob), 4.0, None),
        (partial(optax.scale, 0.1), 4.0, "optax.scale has none.*remove width_scaling"),
        (partial(optim.frozen), 4.0, "optim.frozen has none"),
    ],
)
def test_a_width_scaling_that_cannot_be_applied_is_refused(recipe, scaling, words):
    if words is None:
        assert optim.group(".*", recipe, width_scaling=scaling).width_scaling == scaling
        return
    with pytest.raises(ValueError, match=words):
        optim.group(".*", recipe, width_scaling=scaling)
