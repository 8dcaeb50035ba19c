"""Which axes are a matrix: against the authors' programs, optax, and the same layers in 2-D."""

import warnings
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
from optim.declarations import OptimizerWarning, declarations
from optim.layouts import PRESETS, layouts, rules
from optim.muon import muon
from optim.scion import scion
from optim.shampoo import shampoo
from optim.soap import soap
from tests import runs, short
from tests.programs import keller_jordan, spectral_conv, to_flax
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.engine.plan import find_matrices

MHDPA = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)
FACTORIES = {
    "muon": muon,
    "scion": scion,
    "spectral_conv": partial(scion, norm="spectral_conv", constrained=False),
    "sign": partial(scion, norm="sign"),
    "col_norm": partial(scion, norm="col_norm"),
    "row_norm": partial(scion, norm="row_norm"),
    "soap": partial(soap, precondition_frequency=2),
    "shampoo": partial(shampoo, every=2),
}


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def run(tx, grads, start) -> list[Any]:
    """Trains on a list of gradients; returns the updates of every step."""
    params = jax.tree.map(jnp.asarray, start)
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
        params: Any = optax.apply_updates(params, updates)
        seen.append(jax.tree.map(np.asarray, updates))
    return seen


def attention(width=16) -> dict[str, Any]:
    """The kernels of flax's attention, drawn at random, as flax names and shapes them."""
    x = jnp.ones((1, 2, width))
    shapes = jax.eval_shape(MHDPA.init, jax.random.key(0), x)["params"]
    assert set(shapes) == {"query", "key", "value", "out"}
    kernels = {k: draw(v["kernel"].shape, i) for i, (k, v) in enumerate(shapes.items())}
    return {k: {"kernel": x.astype(np.float32)} for k, x in kernels.items()}


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """The same kernels as matrices [in, out], by hand."""
    return {
        name: {"kernel": one["kernel"].reshape((-1, 16) if name == "out" else (16, -1))}
        for name, one in tree.items()
    }


def scaled(tree, factor):
    return jax.tree.map(lambda x: np.sin(factor * x), tree)


# ---- The same layer, however its kernels are stored


@short.parametrize("name", [name for name in FACTORIES if name != "spectral_conv"])
def test_attention_kernels_move_like_kernels_of_two_axes(name):
    start = attention()
    assert start["query"]["kernel"].shape == (16, 4, 4)
    assert start["out"]["kernel"].shape == (4, 4, 16)
    grads = [scaled(start, factor) for factor in (1, 2, 3)]
    got = run(FACTORIES[name](0.1, matrices="attention"), grads, start)
    expected = run(FACTORIES[name](0.1), [flat(g) for g in grads], flat(start))
    for ours, theirs in zip(got, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, flat(ours), theirs)


@short.parametrize("name", FACTORIES)
def test_a_layout_is_a_batch_of_matrices(name):
    # Axes in any order: 'batch' between the rows, and columns before rows.
    start = {"w": draw((6, 3, 4, 2))}
    grads = [scaled(start, factor) for factor in (1, 2, 3)]
    spec = "out a heads b -> heads (a b) out"

    def by_hand(tree):
        return {f"w{i}": np.moveaxis(tree["w"][:, :, i], 0, -1).reshape(6, 6) for i in range(4)}

    got = run(FACTORIES[name](0.1, matrices=spec), grads, start)
    other = {"matrices": "in out -> in out"} if name == "spectral_conv" else {}
    expected = run(FACTORIES[name](0.1, **other), [by_hand(g) for g in grads], by_hand(start))
    window = 3**-0.5 if name == "spectral_conv" else 1.0
    for ours, theirs in zip(got, expected, strict=True):
        for path, x in by_hand(ours).items():
            np.testing.assert_allclose(x, window * theirs[path], rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:.*kernel of a convolution")  # all of them take it for one
@short.parametrize("name", FACTORIES)
def test_parameters_without_elements_do_not_change_the_others(name):
    start = {"w": draw((1, 2, 6, 4))}
    shapes = [(0, 3, 4, 2), (2, 0, 4, 2), (2, 2, 0, 3), (2, 2, 3, 0)]
    none = {f"none{i}": np.zeros(shape) for i, shape in enumerate(shapes)}
    grads = [scaled(start, factor) for factor in (1, 2, 3)]
    tx = FACTORIES[name](0.1)
    got = run(tx, [{**g, **none} for g in grads], {**start, **none})
    for ours, theirs in zip(got, run(tx, grads, start), strict=True):
        np.testing.assert_array_equal(ours["w"], theirs["w"])
        assert {path: ours[path].shape for path in none} == {p: x.shape for p, x in none.items()}


def test_stacked_layers_and_heads_are_batch():
    query = {"query": {"kernel": attention()["query"]["kernel"]}}
    stack: Any = jax.tree.map(lambda x: np.stack([x, 2 * x + 1]), query)
    [got] = run(muon(0.1, matrices="attention_query"), [scaled(stack, 1)], stack)
    second = jax.tree.map(lambda x: x[1], stack)
    [alone] = run(muon(0.1, matrices="attention_query"), [scaled(second, 1)], second)
    np.testing.assert_allclose(
        got["query"]["kernel"][1], alone["query"]["kernel"], rtol=0, atol=1e-6
    )
    [heads] = run(muon(0.1, matrices="attention_query_per_head"), [scaled(query, 1)], query)
    head = jax.tree.map(lambda x: x[:, 2], query)
    [one] = run(muon(0.1), [scaled(head, 1)], head)
    np.testing.assert_allclose(
        heads["query"]["kernel"][:, 2], one["query"]["kernel"], rtol=0, atol=1e-6
    )


# ---- The authors' programs, in float64


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (4, 8, 3, 3), (30, 4, 3, 3), (6, 9), (9, 6)])
def test_muon_on_convolutions_agrees_with_keller_jordans(shape):
    grads = draw((6, *shape))
    with jax.enable_x64(True):
        got = run(
            muon(0.02, matrices="conv" if len(shape) == 4 else None),
            [{"conv": to_flax(g)} for g in grads],
            {"conv": to_flax(draw(shape, 1))},
        )
    for ours, theirs in zip(got, keller_jordan(grads), strict=True):
        np.testing.assert_allclose(ours["conv"], to_flax(theirs), rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (40, 4, 3, 3), (4, 8, 5)])
def test_spectral_conv_agrees_with_the_scion_authors_code(shape):
    grads = draw((6, *shape))
    with jax.enable_x64(True):
        tx = scion(
            0.02,
            3.0,
            norm="spectral_conv",
            constrained=False,
            matrices="conv1d" if len(shape) == 3 else None,
        )
        got = run(tx, [{"w": to_flax(g)} for g in grads], {"w": to_flax(draw(shape, 1))})
    for ours, theirs in zip(got, spectral_conv(grads), strict=True):
        np.testing.assert_allclose(ours["w"], to_flax(theirs), rtol=0, atol=1e-7)


@short.parametrize(
    ("preset", "shape", "reduction", "output"),
    [
        ("conv", (3, 3, 4, 8), (0, 1, 2), 3),
        ("attention_query", (6, 2, 4), 0, (1, 2)),
        ("attention_value_per_head", (6, 2, 4), 0, 2),
        ("attention_out", (2, 4, 6), (0, 1), 2),
        ("attention_out_per_head", (2, 4, 6), 1, 2),
        ("qkv", (5, 3, 4, 4), 2, 3),
        ("qkv_joint", (5, 3, 4, 4), 2, (1, 3)),
        ("embedding", (7, 4), 0, 1),
        ("dense", (5, 7, 4), 1, 2),
    ],
)
def test_presets_agree_with_optaxs_dimension_numbers(preset, shape, reduction, output):
    # Without Nesterov: optax corrects the momentum's bias, which orthogonalization does not see.
    grads, start = [{"w": g} for g in draw((3, *shape))], {"w": draw(shape, 1)}
    numbers = optax.contrib.MuonDimensionNumbers(reduction, output)
    with jax.enable_x64(True):
        got = run(muon(0.02, nesterov=False, matrices=preset), grads, start)
        theirs = optax.contrib.muon(
            0.02, nesterov=False, eps=1e-15, muon_weight_dimension_numbers={"w": numbers}
        )
        expected = run(theirs, grads, start)
    for ours, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours["w"], other["w"], rtol=1e-6, atol=1e-9)


# ---- The language


def test_every_preset_fits_flax():
    def nnx_layers(rngs):
        return {
            "conv1d": nnx.Conv(16, 8, (5,), rngs=rngs),
            "conv3d": nnx.Conv(4, 8, (2, 3, 5), rngs=rngs),
            "dense": nnx.Linear(16, 8, rngs=rngs),
            "embedding": nnx.Embed(30, 8, rngs=rngs),
            "attention": nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False),
        }

    made: Any = nnx.eval_shape(lambda: nnx_layers(nnx.Rngs(0)))
    linen = jax.eval_shape(nn.Conv(8, (3, 3)).init, jax.random.key(0), jnp.ones((1, 6, 6, 16)))
    inits = {
        "conv": linen["params"]["kernel"],
        **{name: made[name].kernel for name in ("conv1d", "conv3d", "dense")},
        "embedding": made["embedding"].embedding,
        "attention_query": made["attention"].query.kernel,
        "attention_out": made["attention"].out.kernel,
    }
    inits = {name: jax.tree.leaves(x)[0] for name, x in inits.items()}
    sizes = {
        name: next(iter(layouts({"w": x}, rules(name), "muon").values())).matrices
        for name, x in inits.items()
    }
    assert sizes == {
        "conv": (1, 9 * 16, 8),
        "conv1d": (1, 5 * 16, 8),
        "conv3d": (1, 30 * 4, 8),
        "dense": (1, 16, 8),
        "embedding": (1, 30, 8),
        "attention_query": (1, 16, 16),
        "attention_out": (1, 16, 16),
    }
    assert all(rules(name) for name in PRESETS)


def test_a_mapping_uses_the_first_matching_pattern():
    shapes = {"a/conv/kernel": (3, 3, 4, 8), "b/kernel": (2, 4, 8), "b/query/kernel": (6, 2, 4)}
    tree = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    spec = {".*conv/kernel": "conv", "b/query/.*": "... in h d -> ... in (h d)", ".*": "dense"}
    found = layouts(tree, rules(spec), "optim.muon")
    assert [at.matrices for at in found.values()] == [(1, 36, 8), (2, 4, 8), (1, 6, 8)]
    del spec[".*"]
    assert [at.matrices for at in layouts(tree, rules(spec), "optim.muon").values()] == [
        (1, 36, 8),
        (2, 4, 8),
        (1, 6, 8),
    ]


@pytest.mark.parametrize(
    "spec, words",
    [
        ("attentoin", "Did you mean 'attention'"),
        ("in out", "'in out'. It must be one of dense"),
        ("in out -> in", "rows .inputs. and the columns"),
        ("in out -> (in out)", "left side names the last axes"),
        ("in out -> in out heads", "each once"),
        ("in in -> in in", "each once"),
        ("in heads out -> in (heads out", "'in heads out -> in .heads out'"),
        ({"(": "dense"}, r"pattern '\(' is not a regular expression"),
        ({".*": {"a": "dense"}}, "has {'a': 'dense'}"),
        (3, "has 3"),
    ],
)
def test_an_invalid_spec_is_refused(spec, words):
    for factory in (muon, scion, soap, shampoo):
        with pytest.raises(ValueError, match=words):
            factory(0.1, matrices=spec)


@pytest.mark.long
def test_a_spec_that_does_not_fit_the_parameters_is_refused():
    with pytest.raises(ValueError, match=r"'a' has the axes 'height width in out', .* \(3, 4\)"):
        muon(0.1, matrices="conv").init({"a": jnp.ones((3, 4))})
    with pytest.raises(ValueError, match="'convs/.*' matches none .* nearest are conv/kernel"):
        muon(0.1, matrices={"convs/.*": "conv"}).init({"conv": {"kernel": jnp.ones((3, 4))}})
    with pytest.raises(ValueError, match="takes too long"):
        muon(0.1, matrices={"(([a-z]*)*)*X": "conv"}).init({"a" * 40: jnp.ones((3, 4))})
    # Stacked kernels of Dense layers named `out` are not taken for attention's.
    with pytest.raises(ValueError, match="query.* matches none"):
        muon(0.1, matrices="attention").init({"out": {"kernel": jnp.ones((3, 4, 4))}})
    with pytest.raises(ValueError, match="bias_rms.* remove matrices"):
        scion(0.1, norm="bias_rms", matrices="dense")


# ---- What is plainly not the layer's matrix


def doubts(tree, **kwargs) -> list[str]:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, jnp.float32), tree, is_leaf=_is_shape)
    return [text for one in declarations(muon(0.1, **kwargs).init, shapes) for text in one.doubts]


def _is_shape(x):
    return isinstance(x, tuple)


def test_attention_kernels_with_the_default_spec_get_a_warning():
    variables = jax.eval_shape(
        nn.MultiHeadDotProductAttention(num_heads=4).init, jax.random.key(0), jnp.ones((1, 2, 64))
    )["params"]
    for leading in ((), (12,)):  # scanned layers stack them
        kernels = {k: {"kernel": (*leading, *v["kernel"].shape)} for k, v in variables.items()}
        [text] = doubts({"attn": kernels})
        counts = "768 matrices" if leading else "64 matrices"
        assert "attn/key/kernel" in text and f"(and 3 like it): {counts} of 4x16." in text
        assert "'attention' for one matrix a kernel" in text and "'dense'" in text
        assert not doubts({"attn": kernels}, matrices="attention")
        assert not doubts({"attn": kernels}, matrices="dense")
    # Without the plan of a run it is a warning of Python's.
    with pytest.warns(OptimizerWarning, match="16 matrices of 4x4.*attention_per_head"):
        muon(0.1).init(attention())


def test_likely_mistakes_in_specs_get_a_warning():
    [text] = doubts({"block_0": {"conv": {"kernel": (3, 3, 16, 32)}}})
    assert "9 matrices of 16x32" in text and "{'block_0/conv/kernel': 'conv'}" in text
    assert "convolution" in doubts({"stem": {"kernel": (7, 7, 3, 64)}})[0]
    assert "is not a matrix" in doubts({"blocks": {"norm": {"scale": (4, 64)}}})[0]
    assert "batch axis is larger than the matrices" in doubts({"proj": {"kernel": (64, 4, 16)}})[0]


def test_stacked_layers_get_no_warning():
    ours = {"attn": {"qkv": {"kernel": (3, 3, 64, 64)}, "out": {"kernel": (3, 64, 64)}}}
    dense = {name: {"kernel": (12, 64, 64)} for name in ("query", "key", "value", "out")}
    ones = {"conv": {"kernel": (1, 1, 64, 64)}}
    experts = {"experts": {"kernel": (12, 8, 64, 256)}}
    for tree in (ours, {"attn": dense}, ones, experts):
        assert not doubts(tree)


def test_scions_momentum_may_be_one():
    # The authors' default: no mean at all.
    group = optim.group(".*", partial(scion, 0.1, momentum=1.0))
    tx = optim.optimizer({"all": group})
    params = {"w": jnp.eye(3)}
    moved, state = tx.update(params, tx.init(params), params)
    again, _ = tx.update(moved, state, moved)
    alone, _ = tx.update(moved, tx.init(params), moved)
    np.testing.assert_array_equal(again["w"], alone["w"])


def test_scions_momentum_in_other_optimizers_gets_a_warning():
    with pytest.warns(OptimizerWarning, match="For a decay of 0.9, set momentum=0.1"):
        scion(0.1, momentum=0.9).init(jnp.ones((3, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scion(0.1, momentum=0.5).init(jnp.ones((3, 3)))


# ---- The plan, and the config


def test_the_plan_sums_the_matrices_of_each_group():
    stack = {"kernel": jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)}
    wide = {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    tree = {"a": stack, "b": stack, "c": stack, "d": wide, "head": wide, "x": wide}
    group = optim.group
    tx = optim.optimizer(
        {
            # Found inside other optimizers, and named by none.
            "hidden": group("[a-d]/.*", partial(optim.cautious, partial(muon, 0.1))),
            "head": group("head/.*", partial(scion, 0.1, norm="sign")),
            "rest": group(".*", partial(optax.adam, 0.1)),
        }
    )
    found = find_matrices(tx, tree)
    assert found.lines == [
        "In group 'hidden', optim.muon works on 48 matrices of 64x64, 1 of 64x256 (inputs by"
        " outputs).",
        "In group 'head', optim.scion with norm='sign' works on 1 matrix of 64x256 (inputs by"
        " outputs).",
        "* Not named by `matrices`: the last two axes are the matrix, and all axes before them are"
        " batch axes.",
    ]
    assert found.cells["a/kernel"] == "16 of 64x64 *" and found.cells["d/kernel"] == "1 of 64x256"
    assert "x/kernel" not in found.cells
    assert found.warnings == []


GIN = """
experiment:
  model     = @models.convnet()
  data      = @data.digits()
  loss      = @losses.softmax_cross_entropy()
  optimizer = @optim.optimizer()
  steps     = 2
models.convnet.widths = (4, 8)
models.convnet.blocks_per_width = 1
data.digits.batch_size = 8
optim.optimizer.groups = {'convs': @convs/optim.group(), 'rest': @rest/optim.group()}
convs/optim.group.match = '.*/conv/kernel'
convs/optim.group.optimizer = @optim.muon()
optim.muon.learning_rate = 0.02
rest/optim.group.match = '.*'
rest/optim.group.optimizer = @optax.adam()
optax.adam.learning_rate = 1e-3
"""

YAML = """
include: base.gin.yaml
optimizer.groups.convs.optimizer.matrices: {".*/conv/kernel": conv}
"""


def test_explain_warns_until_the_config_specifies_the_matrices(tmp_path, capsys):
    (tmp_path / "a.gin").write_text(GIN)
    (tmp_path / "b.gin").write_text(
        GIN + "optim.muon.matrices = {'.*/conv/kernel': 'height width in out -> (height width in)"
        " out'}\n"
    )
    told = runs.printed(capsys, "explain", f"--gin_file={tmp_path / 'a.gin'}")
    assert told.count("warning: ") == 1 and "block_0/conv/kernel [3x3x1x4] (and 1 like it)" in told
    assert "matrices={'block_0/conv/kernel': 'conv'}" in told
    assert "9 of 1x4" in told and "9 of 4x8" in told
    told = runs.printed(capsys, "explain", f"--gin_file={tmp_path / 'b.gin'}")
    assert "warning" not in told
    assert "optim.muon works on 1 matrix of 9x4, 1 of 36x8 (inputs by outputs)" in told
    # The resolved config is YAML, and loads again.
    assert main(["config", f"--gin_file={tmp_path / 'b.gin'}"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert runs.printed(capsys, "explain", f"--config={tmp_path / 'c.yaml'}") == told


def test_a_wrong_spec_in_a_config_is_reported_with_file_and_line(tmp_path, capsys):
    for line, words in [
        ("optim.muon.matrices = 'convs'", "Did you mean 'conv'"),
        ("optim.muon.matrices = {'conv/.*': 'conv'}", "matches none of its parameters"),
        ("optim.muon.scale = 'spectral'", "was renamed to 'original'"),
        ("optim.muon.coefficients = 'jordan'", "Did you mean 'ns_coefficients'"),
    ]:
        (tmp_path / "a.gin").write_text(GIN + line + "\n")
        said = runs.refused(capsys, "explain", f"--gin_file={tmp_path / 'a.gin'}")
        assert words in said and "a.gin:" in said and said.count("\n") <= 3, said


def test_a_convolution_whose_layout_is_not_named_is_an_error_of_the_plan():
    """The bias has the axes of the outputs, so that the others are summed over: flax's nn.Conv."""
    kernel, bias = jnp.ones((5, 1, 24)), jnp.ones(24)
    params = {"Conv_0": {"kernel": kernel, "bias": bias}}

    def planned(**options: Any) -> list[str]:
        recipe = partial(optim.muon, 0.02, **options)
        groups = {
            "convs": optim.group(".*kernel", recipe),
            "rest": optim.group(".*", optax.sgd(1.0)),
        }
        return find_matrices(optim.optimizer(groups), params).lines

    with pytest.raises(
        ConfigError, match=r"5 matrices of 1x24.*matrices={'Conv_0/kernel': 'conv1d'}"
    ):
        planned()
    assert "1 matrix of 5x24" in planned(matrices="conv1d")[0]
    assert (
        "5 of 1x24" in planned(matrices="dense")[0] or "5 matrices" in planned(matrices="dense")[0]
    )
