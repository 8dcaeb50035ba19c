"""What a model observes in its forward pass, and the parts that read it."""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import parts
from optim.parts.base import Part
from optim.paths import flatten
from tests import runs, short
from tests.models import test_gpt
from tests.models.test_gpt import apart, numpy_gpt, small, start, text
from tests.models.test_gpt import linear as numpy_linear
from trainer import losses, models
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program

HEADS, HEAD_DIM, LARGEST = 4, 4, 2.0
VARIANTS: dict[str, dict[str, Any]] = {
    "heads": {},
    "grouped": {"num_kv_heads": 2},
    "one head of keys, biases": {"bias": True, "num_kv_heads": 1},
    "layers apart, biases": {"scan_layers": False, "bias": True},
    "two policies": {"remat": {"block_0": "full", ".*": "none"}},
}


class Tokens:
    """One batch of tokens, again and again."""

    def __init__(self, batch: Any):
        self.batch = {**batch, "label": batch["tokens"]}
        self.batch_size = self.num_examples = len(batch["tokens"])
        kinds = {name: (x.shape, x.dtype) for name, x in self.batch.items()}
        self.element_spec = {name: jax.ShapeDtypeStruct(*kind) for name, kind in kinds.items()}

    def train(self, batch_index: int, seed: int) -> Any:
        while True:
            yield self.batch

    def evaluate(self) -> Any:
        yield {**self.batch, "mask": np.ones(self.batch_size, np.float32)}


def step_once(model: Any, batch: Any, params: Any, groups: dict[str, Any], **more: Any) -> Any:
    """The state after a step from parameters."""
    made = Experiment(
        model=model,
        data=Tokens(batch),
        loss=losses.softmax_cross_entropy(labels="label"),
        optimizer=optim.optimizer(groups),
        **dict.fromkeys(("steps", "log_every", "eval_every", "save_every"), 3),
        **more,
    )
    program = Program(made)
    state = program.init()._replace(params=jax.tree.map(jnp.copy, params))
    return program.step(state, program.feed.to_devices(made.data.batch))[0]


def stepped(model: Any, batch: Any, params: Any, *after: partial, **more: Any) -> dict[str, Any]:
    """The parameters after a step along the gradients, with parts after it for attention."""
    groups = {
        "attention": optim.group("block.*/attn/.*", chain(partial(parts.decay, 0.1), *after)),
        "rest": optim.group(".*", chain()),
    }
    state = step_once(model, batch, params, groups, **more)
    return {path: np.asarray(x) for path, x in flatten(state.params).items()}


def chain(*after: partial) -> partial:
    return partial(optim.chain, 0.05, [partial(optax.identity)], after)


def factor_of(path: str, queries: Any, keys: Any) -> Any:
    """What multiplies a parameter; `queries` and `keys` are the factors of columns, by layer."""
    _, kind, leaf = path.rsplit("/", 2) if path.count("/") > 1 else ("", "", "")
    layer = path.partition("/")[0]
    rows = {"qkv": [queries, keys, np.ones_like(keys)], "kv": [keys, np.ones_like(keys)]}
    if kind not in ("q", *rows):
        return 1
    found = queries if kind == "q" else np.stack(rows[kind], axis=1)  # [layers, matrices, columns]
    found = found[..., None, :] if leaf == "kernel" else found
    return found if layer == "blocks" else found[int(layer.removeprefix("block_"))]


@short.parametrize("more", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
@short.parametrize("documents", [False, True], ids=["one", "documents"])
@short.parametrize("name", sorted(VARIANTS, key=lambda name: "num_kv_heads" not in VARIANTS[name]))
def test_qk_clip_is_its_formula_with_the_logits_of_numpy(name, documents, more):
    """W <- sqrt(min(1, largest / logit)) W after the update, for queries and keys of each head."""
    arguments = VARIANTS[name] | {"qk_norm": False}
    model, batch = small(**arguments), text(batch=4, documents=documents)
    params = start(model, batch, noise=0.3)
    wide = params if "block_0" in params else apart(params)
    logits: dict[str, Any] = {}
    numpy_gpt(
        jax.tree.map(lambda x: np.asarray(x, np.float64), wide), batch, HEADS, arguments, logits
    )
    group = HEADS // arguments.get("num_kv_heads", HEADS)
    largest = np.stack([logits[layer].reshape(-1, group).max(axis=1) for layer in sorted(logits)])
    factors = np.sqrt(np.minimum(1, LARGEST / largest))  # [layers, heads of keys]
    assert (factors < 0.9).any() and np.ptp(factors) > 0.05
    queries, keys = (np.repeat(factors, n * HEAD_DIM, axis=1) for n in (group, 1))
    found = stepped(model, batch, params, partial(parts.qk_clip, LARGEST), **more)
    for path, without in stepped(model, batch, params, **more).items():
        wanted = without * factor_of(path, queries, keys)
        np.testing.assert_allclose(found[path], wanted, rtol=2e-4, atol=1e-6, err_msg=path)


class Seen(NamedTuple):
    """The state of a part that keeps what it read."""

    inputs: dict[str, Any]


def stepped_with_inputs(model: Any, batch: Any, params: Any, **more: Any) -> dict[str, Any]:
    """What a part of the optimizer of all kernels has read of their inputs in a step."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return updates, Seen(extra["observations"]["kernel_inputs"])

    def init(_: Any) -> Seen:
        _, _, seen = model.apply(
            params, {}, batch, key=None, train=False, observe=("kernel_inputs",)
        )
        return Seen(jax.tree.map(jnp.zeros_like, seen["kernel_inputs"]))

    reader = partial(Part, init, update, name="reader", reads=["kernel_inputs"])
    groups = {"all": optim.group(".*", partial(optim.chain, 0.05, [reader], []))}
    state = step_once(model, batch, params, groups, **more)
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, Seen))
    return next(x.inputs for x in found if isinstance(x, Seen))


@short.parametrize("more", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
@short.parametrize("name", sorted(VARIANTS, key=lambda name: "num_kv_heads" not in VARIANTS[name]))
def test_inputs_of_kernels_are_those_of_numpy(name, more, monkeypatch):
    """The mean of x x^T over the inputs of each kernel, in scanned layers and in layers apart."""
    model, batch = small(**VARIANTS[name]), text(batch=4)
    params = start(model, batch, noise=0.3)
    wide = jax.tree.map(
        lambda x: np.asarray(x, np.float64), params if "block_0" in params else apart(params)
    )
    inputs: dict[int, list[Any]] = {}

    def linear(x: Any, layer: Any) -> Any:
        inputs.setdefault(id(layer), []).append(x)
        return numpy_linear(x, layer)

    monkeypatch.setattr(test_gpt, "linear", linear)
    numpy_gpt(wide, batch, HEADS, VARIANTS[name])
    found = stepped_with_inputs(model, batch, params, **more)
    assert len(found) == (8 if "block_0" in params else 4) + ("num_kv_heads" in VARIANTS[name])
    for path, seen in found.items():
        first, *rest, _ = path.split("/")
        stacked = [f"block_{i}" for i in range(2)] if first == "blocks" else [first]
        for block, one in zip(stacked, seen if first == "blocks" else [seen], strict=True):
            layer = wide[block]
            for key in rest:
                layer = layer[key]
            x = np.concatenate(inputs[id(layer)])
            wanted = np.broadcast_to(x.T @ x / len(x), one.shape)
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5, err_msg=path)


class Twice(nn.Module):
    """A module of a user, whose second layer is called twice."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        again = nn.Dense(6, name="again")
        return again(again(nn.Dense(6, name="first")(x)))


def test_inputs_of_the_layers_of_a_user_are_observed():
    model = models.from_linen(Twice(), inputs="x")
    batch = {"x": np.random.default_rng(0).standard_normal((5, 3, 6)).astype(np.float32)}
    params, _ = model.init(jax.random.key(0), batch)
    outputs, _, seen = model.apply(
        params, {}, batch, key=None, train=True, observe=("kernel_inputs",)
    )
    plain, _ = model.apply(params, {}, batch, key=None, train=True)
    np.testing.assert_array_equal(outputs, plain)
    x = batch["x"].reshape(-1, 6)
    once = x @ params["first"]["kernel"]
    twice = once @ params["again"]["kernel"]
    found = seen["kernel_inputs"]
    assert sorted(found) == ["again/kernel", "first/kernel"]
    np.testing.assert_allclose(found["first/kernel"], x.T @ x / 15, rtol=1e-5, atol=1e-5)
    wanted = (once.T @ once + twice.T @ twice) / 15
    np.testing.assert_allclose(found["again/kernel"], wanted, rtol=1e-4, atol=1e-5)


def test_what_is_not_clipped_keeps_its_bits():
    model, batch = small(qk_norm=False), text(batch=4)
    params = start(model, batch)
    found = stepped(model, batch, params, partial(parts.qk_clip, 1e4))
    for path, x in stepped(model, batch, params).items():
        np.testing.assert_array_equal(found[path], x)


def test_nothing_is_observed_unless_a_part_reads_it():
    model, batch = small(qk_norm=False), text(batch=4)
    asked: list[Any] = []

    def apply(*given: Any, **more: Any) -> Any:
        asked.append(more.get("observe"))
        return model.apply(*given, **more)

    noting, params = model._replace(apply=apply), start(model, batch)
    stepped(noting, batch, params)
    assert set(asked) == {None}
    stepped(noting, batch, params, partial(parts.qk_clip))
    assert ("attention_logits",) in asked


CONFIG = """
model: !models.gpt {width: 16, depth: 2, num_heads: 2, qk_norm: false}
data: !data.text {length: 16, batch_size: 4, eval_tokens: 256}
loss: !losses.softmax_cross_entropy
steps: 4
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group
      match: block.*/kernel
      optimizer: !optim.chain
        learning_rate: 0.02
        before: [!parts.momentum , !parts.polar ]
        after: [!parts.qk_clip {largest: 0.5}]
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 0.01}}
"""


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (["model.qk_norm=true"], "reads 'attention_logits' of the model's forward pass, but its"),
        (
            [
                "model=!models.mlp",
                "data=!data.digits",
                "optimizer.groups.matrices.match=blocks.*kernel",
            ],
            "but the model does not say that it observes it. Choose another optimizer",
        ),
        (["optimizer.groups.matrices.match=block.*mlp/.*/kernel"], "of which the group has none"),
    ],
)
def test_a_model_or_a_group_without_logits_is_refused(edits, said, tmp_path, capsys):
    (tmp_path / "clip.yaml").write_text(CONFIG)
    words = [f"--config={tmp_path / 'clip.yaml'}", *(f"--set={edit}" for edit in edits)]
    error = runs.refused(capsys, "explain", *words)
    assert said in error and "qk_clip" in error and "Traceback" not in error


@short.parametrize("read_by", ["the run", "the other"])
def test_a_shadow_has_the_observations_that_either_reads(read_by, tmp_path, capsys):
    plain = CONFIG.replace("        after: [!parts.qk_clip {largest: 0.5}]\n", "")
    own, other = (CONFIG, plain) if read_by == "the run" else (plain, CONFIG)
    for name, config in (("own", own), ("other", other)):
        (tmp_path / f"{name}.yaml").write_text(config)
    words = [f"--config={tmp_path / 'own.yaml'}", f"--shadow={tmp_path / 'other.yaml'}"]
    assert "matrices" in runs.printed(capsys, "shadow", *words, "--steps=4")


def test_maximize_does_not_turn_observations_around():
    recipe = partial(optim.chain, 0.1, [partial(optax.identity)], [partial(parts.qk_clip)])
    optimizer = optim.optimizer({"all": optim.group(".*", recipe, maximize=True)})
    params, grads = {"kernel": jnp.ones(2)}, {"kernel": jnp.array([1.0, 0.0])}
    seen = {"attention_logits": {"kernel": jnp.array([50.0, 400.0])}}
    after, _ = optimizer.update(grads, optimizer.init(params), params, observations=seen)
    np.testing.assert_allclose(after["kernel"], [1.1, 0.5])
