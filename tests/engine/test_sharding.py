"""Rules say which axes of the mesh split which dimensions of parameters and state."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import optim
from optim import parts
from optim.paths import flatten
from tests import runs, short
from trainer import config, models
from trainer.engine import memory
from trainer.engine.contracts import ComponentError
from trainer.engine.plan import make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import load_located
from trainer.engine.sharding import ShardingRules, state_shardings
from trainer.engine.step import State

TWO = AbstractMesh((2, 4), ("data", "fsdp"))
THREE = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
TENSOR = AbstractMesh((4,), ("tensor",))


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shapes(model, **batch):
    return jax.eval_shape(model.init, jax.random.key(0), batch)[0]


GPT = models.gpt(
    width=32,
    depth=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=96,
    vocab_size=258,
    activation="swiglu",
    bias=True,
)
GPT_SHAPES = shapes(GPT, tokens=leaf(2, 8).update(dtype=jnp.int32))
VIT = models.vit(width=32, depth=2, num_heads=4)
VIT_SHAPES = shapes(VIT, image=leaf(2, 8, 8, 1))


def specs(rules, params):
    """Returns path -> the spec as the plan shows it."""
    found = flatten(state_shardings(rules, params, params))
    return {
        path: ", ".join("+".join(x) if isinstance(x, tuple) else x or "-" for x in one.spec)
        for path, one in found.items()
    }


# By hand. Of [2, 3, 32, 32], 4 divides 32 only, and the first of the longest dimensions is taken.
GPT_SPECS = {  # path: (data 2 x fsdp 4, data 2 x fsdp 2 x tensor 2)
    "embed/embedding": ("-, fsdp", "tensor, fsdp"),
    "norm/scale": ("fsdp", "fsdp"),
    "head/kernel": ("fsdp, -", "fsdp, tensor"),
    "head/bias": ("", "tensor"),  # 258 = 2 * 129
    "blocks/attn/q/kernel": ("-, fsdp, -", "-, fsdp, tensor"),
    "blocks/attn/q/bias": ("-, fsdp", "fsdp, tensor"),
    "blocks/attn/kv/kernel": ("-, -, fsdp, -", "-, -, fsdp, tensor"),
    "blocks/attn/kv/bias": ("-, -, fsdp", "fsdp, -, tensor"),
    "blocks/attn/out/kernel": ("-, fsdp, -", "-, tensor, fsdp"),
    "blocks/attn/out/bias": ("-, fsdp", "-, fsdp"),
    "blocks/attn/q_norm/scale": ("-, fsdp", "-, fsdp"),
    "blocks/attn/k_norm/scale": ("-, fsdp", "-, fsdp"),
    "blocks/attn_norm/scale": ("-, fsdp", "-, fsdp"),
    "blocks/mlp/up/kernel": ("-, -, fsdp", "-, fsdp, tensor"),
    "blocks/mlp/gate/kernel": ("-, -, fsdp", "-, fsdp, tensor"),
    "blocks/mlp/down/kernel": ("-, fsdp, -", "-, tensor, fsdp"),
    "blocks/mlp/up/bias": ("-, fsdp", "fsdp, tensor"),
    "blocks/mlp/gate/bias": ("-, fsdp", "fsdp, tensor"),
    "blocks/mlp/down/bias": ("-, fsdp", "-, fsdp"),
    "blocks/mlp_norm/scale": ("-, fsdp", "-, fsdp"),
}
VIT_SPECS = {
    "embed/kernel": ("-, fsdp", "-, fsdp"),
    "embed/position": ("-, fsdp", "-, fsdp"),
    "norm/scale": ("fsdp", "fsdp"),
    "head/kernel": ("fsdp, -", "fsdp, tensor"),
    "head/bias": ("", "tensor"),
    "blocks/attn/qkv/kernel": ("-, -, fsdp, -", "-, -, fsdp, tensor"),
    "blocks/attn/out/kernel": ("-, fsdp, -", "-, tensor, fsdp"),
    "blocks/attn_norm/scale": ("-, fsdp", "-, fsdp"),
    "blocks/mlp/up/kernel": ("-, -, fsdp", "-, fsdp, tensor"),
    "blocks/mlp/down/kernel": ("-, fsdp, -", "-, tensor, fsdp"),
    "blocks/mlp_norm/scale": ("-, fsdp", "-, fsdp"),
}


@pytest.mark.parametrize(
    ("model", "params", "known"),
    [(GPT, GPT_SHAPES, GPT_SPECS), (VIT, VIT_SHAPES, VIT_SPECS)],
    ids=["gpt", "vit"],
)
def test_attention_and_perceptron_are_split_by_columns_and_rows_and_then_over_fsdp(
    model, params, known
):
    for index, mesh in enumerate((TWO, THREE)):
        found = specs(ShardingRules(mesh, None, model), params)
        assert found == {path: both[index] for path, both in known.items()}


def test_layers_apart_and_a_tied_embedding_have_the_same_defaults():
    model = models.gpt(width=8, depth=1, num_heads=2, vocab_size=6, scan_layers=False, tied=True)
    found = specs(
        ShardingRules(THREE, None, model), shapes(model, tokens=leaf(2, 8).update(dtype=jnp.int32))
    )
    assert found["block_0/attn/qkv/kernel"] == "-, fsdp, tensor"
    assert found["block_0/mlp/down/kernel"] == "tensor, fsdp"
    assert found["embed/embedding"] == "tensor, fsdp" and "head/kernel" not in found


PARAMS = {"a": {"kernel": leaf(3, 8, 4), "bias": leaf(4)}, "b": {"kernel": leaf(8, 8)}, "c": leaf()}


def test_the_first_rule_that_matches_decides_and_nothing_is_added_to_it():
    given = {"a/kernel": "tensor -", "(a|b)/kernel": "data+fsdp -", "a/.*": "-"}
    assert specs(ShardingRules(THREE, given), PARAMS) == {
        "a/kernel": "-, tensor, -",
        "a/bias": "",
        "b/kernel": "data+fsdp, -",
        "c": "",
    }
    # Other parameters have the defaults.
    found = specs(ShardingRules(THREE, {"a/kernel": "- tensor"}), PARAMS)
    assert found == {"a/kernel": "-, -, tensor", "a/bias": "fsdp", "b/kernel": "fsdp, -", "c": ""}


def test_an_axis_that_the_mesh_lacks_or_whose_size_is_1_splits_nothing():
    given = {".*/kernel": "fsdp tensor", ".*": "-"}
    for sizes in ((8,), (8, 1), (8, 1, 1)):
        mesh = AbstractMesh(sizes, ("data", "tensor", "fsdp")[: len(sizes)])
        assert set(specs(ShardingRules(mesh, given), PARAMS).values()) == {""}
    found = specs(ShardingRules(TENSOR, given), PARAMS)
    assert found["a/kernel"] == "-, -, tensor" and found["b/kernel"] == "-, tensor"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a/kernl": "fsdp"}, "matches no parameter. The nearest parameters are a/kernel"),
        ({"kernel": "fsdp"}, "are a/kernel, b/kernel. A pattern matches a whole path: add .*"),
        ({".*": "-", "b/kernel": "fsdp"}, "by an earlier rule, as b/kernel by '.*'. Put it before"),
        ({"b/kernel": "fsdp tensr"}, "no axis 'tensr'. Did you mean 'tensor'? A rule has one word"),
        ({"b/kernel": "fsdp None"}, "There is: data, fsdp, tensor. A rule has one word"),
        ({"a/bias": "- fsdp"}, "It has 2 words, but a/bias [4] has 1 dimension."),
        ({"c": "fsdp"}, "It has 1 words, but c [] has 0 dimensions."),
        ({"b/kernel": "fsdp fsdp"}, "It names the axis 'fsdp' twice"),
        ({"b/kernel": "data+fsdp fsdp"}, "It names the axis 'fsdp' twice"),
        ({"b/kernel": ""}, "It names no axes."),
        ({"(b/kernel": "fsdp"}, "not a regular expression: missing ), unterminated"),
        ({"a/kernel": "tensor - -"}, "The dimension of 3 of a/kernel [3, 8, 4] does not divide"),
        ({"a/kernel": "tensor - -"}, "over tensor 2. 2 or 4 would; or write '-' in its place."),
        ({"a/bias": "data+fsdp+tensor"}, "over data 2 and fsdp 2 and tensor 2. 8 would; or write"),
    ],
)
def test_a_rule_that_does_not_fit_is_named_with_what_would_fit(given, words):
    with pytest.raises(ComponentError, match=re.escape(words)) as caught:
        ShardingRules(THREE, given).axes_of(PARAMS)
    wrong = list(given)[-1]
    assert caught.value.component == f"sharding.{wrong}"
    assert f"The rule {wrong!r}: {given[wrong]!r} of sharding" in str(caught.value)


def test_heads_that_tensor_does_not_divide_are_refused_where_the_defaults_split_them():
    with pytest.raises(ComponentError, match="num_kv_heads is 2, and the mesh has tensor 4") as one:
        ShardingRules(TENSOR, None, GPT).axes_of(GPT_SHAPES)
    assert one.value.component == "model.num_kv_heads"
    assert "such as 4, a tensor of 1 or 2, or write a rule for these parameters" in str(one.value)
    advice = re.search(r"such as \{'(.*)': '-'\}", str(one.value))
    assert advice is not None
    found = specs(ShardingRules(TENSOR, {advice[1]: "-"}, GPT), GPT_SHAPES)
    assert found["blocks/attn/kv/kernel"] == "" and found["blocks/attn/q/kernel"].endswith("tensor")
    eight = AbstractMesh((8,), ("tensor",))
    with pytest.raises(ComponentError, match="num_heads is 4, and the mesh has tensor 8"):
        ShardingRules(eight, None, VIT).axes_of(VIT_SHAPES)


def test_what_no_axis_divides_stays_whole_and_is_listed():
    rules = ShardingRules(TENSOR, None, models.gpt(num_heads=4, vocab_size=257))
    params = shapes(models.gpt(vocab_size=257), tokens=leaf(2, 8).update(dtype=jnp.int32))
    assert specs(rules, params)["embed/embedding"] == ""
    assert rules.left_whole(params) == [
        "sharding: embed/embedding, head/kernel: tensor 4 does not divide the dimension of 257, "
        "which stays whole; 256 or 260 would be split"
    ]
    assert ShardingRules(TWO).left_whole({"odd": leaf(3, 5), "b": leaf(8)}) == [
        "sharding: fsdp 4 divides no free dimension of odd [3, 5]: the devices along it all keep "
        "the same of them, unless a rule of `sharding` splits them"
    ]
    (line,) = ShardingRules(TENSOR).left_whole(PARAMS)
    assert line.startswith("sharding: tensor 4 splits no parameter, and the devices along it")
    assert ShardingRules(TENSOR, {"b/kernel": "tensor -"}).left_whole(PARAMS) == []


# The state.

KERNELS = {
    "blocks": {"qkv": {"kernel": leaf(2, 3, 8, 8)}, "up": {"kernel": leaf(2, 8, 16)}},
    "head": {"kernel": leaf(8, 6)},
}
# Of a kernel [rows, columns] over "fsdp, tensor", the rows of the left factors are over fsdp, and
# those of the right ones over tensor, whose columns are free for fsdp.
LEFT, RIGHT = ("fsdp", None), ("tensor", "fsdp")
FACTORS = {
    "blocks/qkv/kernel": ((None, None, *LEFT), (None, None, *RIGHT)),
    "blocks/up/kernel": ((None, *LEFT), (None, *RIGHT)),
    "head/kernel": (LEFT, RIGHT),
}
GIVEN = {".*/kernel": "fsdp tensor"}


@pytest.mark.parametrize(
    ("tx", "fields"),
    [
        (optim.soap(), "left right left_basis right_basis"),
        (parts.soap(b1=0.9), "left right left_basis right_basis"),
        (parts.kl_soap(), "left right left_basis right_basis left_values right_values"),
        (parts.kl_shampoo(), "left right left_basis right_basis left_values right_values"),
        (optim.shampoo(0.1), "left right left_root right_root"),
        (parts.shampoo(), "left right left_root right_root"),
        (parts.psgd(), "left right"),
        (parts.psgd(geometry="Q0.5EQ1.5"), "left right"),
    ],
)
def test_factors_are_split_by_the_dimension_that_they_belong_to(tx, fields):
    state = jax.eval_shape(tx.init, KERNELS)
    found = flatten(state_shardings(ShardingRules(THREE, GIVEN), state, KERNELS))
    checked = 0
    for name, one in found.items():
        field = next((part for part in name.split("/") if part in fields.split()), None)
        if field is None:
            continue
        path = name.partition(f"{field}/")[2]
        wanted = FACTORS[path][field.startswith("right")]
        if field.endswith("values"):
            # The one dimension of the right values belongs to tensor: fsdp has the layers at most.
            wanted = wanted[:-1]
            if field.startswith("right") and path != "head/kernel":
                wanted = ("fsdp", *wanted[1:])
        assert tuple(one.spec) == wanted, name
        checked += 1
    assert checked == 3 * len(fields.split())


def test_moments_and_copies_are_split_as_their_parameters():
    state = jax.eval_shape(optim.soap().init, KERNELS)
    found = flatten(state_shardings(ShardingRules(THREE, GIVEN), state, KERNELS))
    moments = {n: x for n, x in found.items() if "/mean/" in n or "/variance/" in n}
    assert len(moments) == 6
    for name, one in moments.items():
        assert tuple(one.spec)[-2:] == ("fsdp", "tensor"), name


def test_factors_of_merged_dimensions_and_of_one_side_are_split_as_far_as_they_can_be():
    params = {
        "conv": {"kernel": leaf(3, 3, 8, 16)},
        "qkv": {"kernel": leaf(2, 3, 8, 4)},
        "long": {"kernel": leaf(8, 64)},
    }
    specs = {"conv/.*": "conv", "qkv/.*": "qkv_joint"}
    tx = optim.soap(matrices=specs, max_precond_dim=72)
    state = jax.eval_shape(tx.init, params)
    both = state, state_shardings(ShardingRules(THREE, GIVEN), state, params)
    found = {name: tuple(one.spec) for name, one in flatten(both[1]).items()}
    sizes = {name: x.shape for name, x in flatten(both[0]).items()}

    def of(field, path):
        name = next(each for each in found if each.endswith(f"/{field}/{path}"))
        return sizes[name], found[name]

    assert of("left", "conv/kernel") == ((72, 72), ("fsdp", None))  # 3 * 3 * 8, the last over fsdp
    assert of("right", "conv/kernel") == ((16, 16), ("tensor", "fsdp"))
    assert of("left", "qkv/kernel") == ((2, 8, 8), (None, "fsdp", None))
    # 3 * 4, which do not follow each other: only fsdp, along the longest that it divides.
    assert of("right", "qkv/kernel") == ((2, 12, 12), (None, "fsdp", None))
    one = parts.soap(sides="shorter")
    state = jax.eval_shape(one.init, {"long": params["long"]})
    rules = ShardingRules(THREE, {".*": "- tensor"})
    found = flatten(state_shardings(rules, state, {"long": params["long"]}))
    assert [n for n in found if "right" in n] == []
    # A rule without fsdp leaves the factors whole over fsdp, too.
    assert {tuple(x.spec) for n, x in found.items() if "left" in n} == {()}


def test_what_fits_into_memory_counts_the_shards_of_factors():
    state = jax.eval_shape(optim.soap().init, KERNELS)
    placed = state_shardings(ShardingRules(THREE, GIVEN), state, KERNELS)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )
    # By hand, numbers of 4 bytes: mean and variance over 4; two left factors over 2, two right
    # ones over 4; and the count.
    kernels = 2 * 3 * 64 + 2 * 128 + 48
    left = 2 * 3 * 64 + 2 * 64 + 64
    right = 2 * 3 * 64 + 2 * 256 + 36
    wanted = 4 * (2 * kernels // 4 + 2 * left // 2 + 2 * right // 4 + 1)

    state = State((), {}, {}, abstract, {}, {}, {})  # type: ignore[arg-type]
    assert memory.too_large(state, {}, memory.planned_memory(wanted)) is None
    told = memory.too_large(state, {}, memory.planned_memory(wanted - 1))
    assert told is not None and f"take {wanted:,} bytes" in told


# Configs.

GIN = """include 'configs/muon_vit.gin'
experiment.mesh = {'data': 1}
experiment.sharding = {
    'blocks/attn/(q|qkv)/kernel': 'fsdp tensor',
    '.*/(up|down)/kernel': '- data+fsdp',
}
"""
YAML = """include: configs/muon_vit.yaml
mesh: {data: 1}
sharding:
  blocks/attn/(q|qkv)/kernel: fsdp tensor
  .*/(up|down)/kernel: '- data+fsdp'
"""


@pytest.mark.parametrize(("name", "text"), [("mine.gin", GIN), ("mine.yaml", YAML)])
def test_gin_yaml_and_set_spell_rules_whose_keys_are_patterns(tmp_path, name, text):
    (tmp_path / name).write_text(text.replace("configs/", f"{runs.ROOT}/configs/"))
    read = config.load([tmp_path / name])
    given = {"blocks/attn/(q|qkv)/kernel": "fsdp tensor", ".*/(up|down)/kernel": "- data+fsdp"}
    assert read.root.kwargs["sharding"] == given
    (tmp_path / "again.yaml").write_text(config.dump(read.root))
    assert config.load([tmp_path / "again.yaml"]).root.kwargs["sharding"] == given
    edited = config.override(read, ["sharding..*/(up|down)/kernel='- fsdp'"])
    assert edited.root.kwargs["sharding"] == given | {".*/(up|down)/kernel": "- fsdp"}
    edited = config.override(
        read, ["sharding.head/kernel='- tensor'", "sharding.blocks/attn/(q|qkv)/kernel=tensor -"]
    )
    program = load_located(edited)
    found = program.experiment.sharding
    assert found == {**given, "blocks/attn/(q|qkv)/kernel": "tensor -", "head/kernel": "- tensor"}
    text = render_plan(make_plan(program, edited))
    assert "sharding: " not in text  # one device: nothing is split, and nothing is left whole


def test_a_setting_of_a_pattern_with_dots_is_told_to_set_the_whole_mapping(tmp_path):
    for text, place in (
        (YAML, "sharding={blocks/.*/kernel: ...}"),
        ("", "{blocks/.*/kernel: ...}"),
    ):
        own = text.partition("mesh")[0] or "include: configs/muon_vit.yaml\n"
        own += text[text.find("sharding") :] if text else ""
        (tmp_path / "mine.yaml").write_text(own.replace("configs/", f"{runs.ROOT}/configs/"))
        with pytest.raises(config.ConfigError, match=re.escape(place)):
            read = config.load([tmp_path / "mine.yaml"])
            config.override(read, ["sharding.blocks/.*/kernel=fsdp tensor"])


def test_a_rule_for_a_model_that_another_file_replaced_is_named_with_its_line(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(YAML.replace("configs/", f"{runs.ROOT}/configs/"))
    other = tmp_path / "other.yaml"
    other.write_text(
        f"include: {base}\n"
        "model: !models.convnet {}\n"
        "optimizer: !optax.sgd {learning_rate: 0.1}\n"
    )
    read = config.load([other])
    with pytest.raises(config.ConfigError) as caught:
        make_plan(load_located(read), read)
    said = str(caught.value)
    assert said.startswith(f"{base}:4: The rule 'blocks/attn/(q|qkv)/kernel': 'fsdp tensor'")
    assert "It matches no parameter. The nearest parameters are block_" in said


def test_a_mistake_in_a_rule_or_a_mesh_has_the_place_of_its_value(tmp_path):
    (tmp_path / "mine.yaml").write_text(YAML.replace("configs/", f"{runs.ROOT}/configs/"))
    read = config.load([tmp_path / "mine.yaml"])
    for setting, words in (
        ("sharding.head/kernel=tensr", "There is no axis 'tensr'."),
        ("mesh={data: -1, tensor: 3}", "which their product 3 does not divide. Choose sizes"),
    ):
        with pytest.raises(config.ConfigError) as caught:
            load_located(config.override(read, [setting]))
        assert str(caught.value).startswith(f"--set {setting}: ") and words in str(caught.value)


# Explicit axes, where the sharding of an array is a part of its type.

OPTIMIZERS = {
    "adamw": partial(optax.adamw, 1e-3),
    "muon": partial(optim.muon, 0.02),
    "soap": partial(optim.soap, 3e-3),
    "shampoo": partial(optim.shampoo, 0.1),
}
OWN_RULES = {"blocks/mlp/up/kernel": "fsdp+tensor -", "blocks/mlp/down/kernel": "- fsdp"}


def explicit(*names):
    return AbstractMesh((2,) * len(names), names, axis_types=(AxisType.Explicit,) * len(names))


def typed(shapes, shardings):
    """Returns shapes whose types have these shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def types(tree):
    """Returns path -> what the type of a leaf says of its shape, dtype and sharding."""
    found = {}
    for path, x in flatten(tree).items():
        axes = () if x.sharding is None else tuple(x.sharding.spec)
        found[path] = (x.shape, x.dtype, *axes, *[None] * (x.ndim - len(axes)))
    return found


MODELS = {"gpt": (GPT, GPT_SHAPES), "vit": (VIT, VIT_SHAPES)}


def on_explicit_axes(model, name, given, names):
    """Yields (init, update, parameters, state, the mesh), typed by rules: in groups, and bare."""
    (made, shapes), mesh, factory = MODELS[model], explicit(*names), OPTIMIZERS[name]
    rules = ShardingRules(mesh, given, made)
    params = typed(shapes, state_shardings(rules, shapes, shapes))
    kernels = {n: x for n, x in flatten(params).items() if re.fullmatch("block.*/kernel", n)}
    groups = {
        "own": optim.group("block.*/kernel", factory),
        "rest": optim.group(".*", OPTIMIZERS["adamw"]),
    }
    for tx, own in ((optim.optimizer(groups, clip_norm=1.0), params), (factory(), kernels)):
        state = jax.eval_shape(tx.init, own)
        yield tx, own, typed(state, state_shardings(rules, state, params)), mesh


MESHES = pytest.mark.parametrize(
    "names", [("fsdp", "tensor"), ("data", "fsdp", "tensor")], ids=["2 axes", "3 axes"]
)
GIVEN_RULES = short.parametrize("given", [None, OWN_RULES], ids=["defaults", "rules"])


@MESHES
@GIVEN_RULES
@pytest.mark.parametrize("name", OPTIMIZERS)
@short.parametrize("model", MODELS)
def test_an_update_on_explicit_axes_keeps_the_shardings_that_rules_give(model, name, given, names):
    for tx, params, state, mesh in on_explicit_axes(model, name, given, names):
        with jax.sharding.use_abstract_mesh(mesh):
            new = jax.eval_shape(tx.update, params, state, params)
        before = types((params, state))
        assert types(new) == before
        # Everything but the counts is split, the factors too.
        assert {path for path, (_, _, *axes) in before.items() if not any(axes)} == {
            path for path, (shape, *_) in before.items() if not shape or "int32" in path
        }


@MESHES
@GIVEN_RULES
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_the_rules_of_moments_are_those_that_jax_derives_from_the_parameters(
    model, name, given, names
):
    _, (tx, params, state, mesh) = on_explicit_axes(model, name, given, names)
    with jax.sharding.use_abstract_mesh(mesh):
        assert types(jax.eval_shape(tx.init, params)) == types(state)
