"""Policies of rematerialization for layers by their names, by what their backward passes keep."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import short
from trainer import models

MIXED = {"block_[01]": "full", ".*": "none"}
BATCHES = {
    "gpt": {"tokens": np.arange(64, dtype=np.int32).reshape(2, 32) % 31},
    "vit": {"image": np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 8, 8, 1)},
}


def model_of(kind: str, **arguments: Any) -> models.Model:
    if kind == "gpt":
        return models.gpt(31, 16, 4, 2, max_length=32, **arguments)
    return models.vit(width=16, depth=4, num_heads=2, **arguments)


def outputs_of(kind: str, **arguments: Any) -> Any:
    model = model_of(kind, **arguments)
    key = jax.random.key(3) if "dropout" in arguments else None

    def outputs(params: Any) -> jax.Array:
        found = model.apply(params, {}, BATCHES[kind], key=key, train=True)[0]
        return found.whole() if kind == "gpt" else found

    return outputs


def loss_of(kind: str, **arguments: Any) -> Any:
    outputs = outputs_of(kind, **arguments)
    return lambda params: jnp.square(outputs(params)).mean()


def start(kind: str, **arguments: Any) -> Any:
    return model_of(kind, **arguments).init(jax.random.key(0), BATCHES[kind])[0]


def kept(kind: str, **arguments: Any) -> int:
    """Counts the bytes that a forward pass keeps for the backward pass, from shapes."""
    params = jax.eval_shape(functools.partial(start, kind, **arguments))
    loss = loss_of(kind, **arguments)
    residuals = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))


@pytest.mark.long
@pytest.mark.parametrize("kind", BATCHES)
def test_layers_with_policies_of_their_own_have_the_same_gradients(kind: str):
    params = start(kind, scan_layers=False)
    plain, mixed = (
        jax.jit(jax.grad(loss_of(kind, scan_layers=False, remat=remat)))(params)
        for remat in ("none", MIXED)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, mixed, plain)


@pytest.mark.long
@pytest.mark.parametrize("kind", BATCHES)
def test_each_layer_keeps_what_its_policy_says(kind: str):
    of = functools.partial(kept, kind, scan_layers=False)
    full, none = of(remat="full"), of(remat="none")
    assert full < of(remat="products") < none
    # Two of four equal layers; what layers share, such as the angles of rotations, is kept once.
    assert 2 * of(remat=MIXED) == pytest.approx(full + none, rel=0.005)
    one = of(remat={"block_3": "none", ".*": "full"})
    assert 4 * one == pytest.approx(3 * full + none, rel=0.005)
    # The first pattern that matches a layer holds.
    assert of(remat={"block_[0-2]": "none", "block_[0-3]": "full"}) == of(
        remat={"block_3": "full", ".*": "none"}
    )


SEGMENTS = {"block_0": "full", "block_[12]": "none", ".*": "products"}


@pytest.mark.long
@pytest.mark.parametrize("kind", BATCHES)
def test_segments_of_a_stack_have_the_outputs_and_the_dropout_of_one_scan(kind: str):
    one, three = ({"remat": remat, "dropout": 0.3} for remat in ("none", SEGMENTS))
    params = start(kind, **one)
    jax.tree.map(np.testing.assert_array_equal, start(kind, **three), params)
    found = [jax.jit(outputs_of(kind, **each))(params) for each in (one, three)]
    # A loop over one layer may round in another way: 1.8e-7 for a ViT with dropout.
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    other = jax.jit(outputs_of(kind, remat="none"))(params)
    assert not np.allclose(found[0], other)  # the dropout is there
    gradients = [jax.jit(jax.grad(loss_of(kind, **each)))(params) for each in (three, one)]
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients[1]))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6 * largest)
    jax.tree.map(close, *gradients)


@pytest.mark.long
@pytest.mark.parametrize("kind", BATCHES)
def test_segments_of_a_stack_have_the_gradients_of_layers_apart(kind: str):
    params = dict(start(kind))
    found = dict(jax.jit(jax.grad(loss_of(kind, remat=SEGMENTS)))(params))
    stacked, gradients = params.pop("blocks"), found.pop("blocks")
    for index in range(4):
        params[f"block_{index}"] = jax.tree.map(lambda x, i=index: x[i], stacked)
        found[f"block_{index}"] = jax.tree.map(lambda x, i=index: x[i], gradients)
    apart = jax.jit(jax.grad(loss_of(kind, scan_layers=False)))(params)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, apart)


@pytest.mark.long
def test_a_gpt_of_segments_decodes_with_the_cache_of_one_scan():
    tokens, params = BATCHES["gpt"]["tokens"][:, :8], start("gpt")
    found = []
    for remat in ("none", SEGMENTS):
        language: Any = model_of("gpt", remat=remat).language
        cache = language.empty_cache(params, 2, 12)
        decode = jax.jit(language.decode)
        _, cache = decode(params, {}, tokens[:, :5], cache)
        found.append(decode(params, {}, tokens[:, 5:], cache))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[1][1]["layers"]["blocks"]["attn"]["key"].shape[:3] == (4, 2, 12)


@pytest.mark.long
@pytest.mark.parametrize("kind", BATCHES)
def test_attention_weights_of_segments_are_those_of_one_scan(kind: str):
    params = start(kind)
    seen = []
    for remat in ("none", SEGMENTS):
        capture: Any = model_of(kind, remat=remat).capture
        seen.append(capture(params, {}, BATCHES[kind])[1])
    assert jax.tree.structure(seen[0]) == jax.tree.structure(seen[1])
    jax.tree.map(np.testing.assert_array_equal, *seen)


def lowered(kind: str, remat: Any) -> Any:
    params = jax.eval_shape(functools.partial(start, kind))
    return jax.jit(jax.grad(loss_of(kind, remat=remat))).lower(params)


@pytest.mark.long
@short.parametrize("kind", BATCHES)
def test_a_stack_has_a_program_for_each_segment(kind: str):
    params = jax.eval_shape(functools.partial(start, kind))
    loops = {
        count: str(jax.make_jaxpr(outputs_of(kind, remat=remat))(params)).count(" scan[")
        for count, remat in ((1, "full"), (2, MIXED), (3, SEGMENTS))
    }
    assert [loops[count] - loops[1] for count in loops] == [0, 1, 2]
    same = lowered(kind, {"block_[01]": "full", ".*": "full"})
    assert same.as_text() == lowered(kind, "full").as_text()


@short.parametrize("kind", BATCHES)
def test_each_segment_of_a_stack_keeps_what_its_policy_says(kind: str):
    full, none, mixed = (kept(kind, remat=remat) for remat in ("full", "none", MIXED))
    # A backward pass also keeps the parts of the stacked parameters that a segment reads.
    sizes = jax.eval_shape(functools.partial(start, kind))["blocks"]
    parts = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sizes))
    assert full < mixed < none
    assert 2 * mixed == pytest.approx(full + none, abs=2 * parts)


@pytest.mark.long
def test_the_compiled_gradient_of_segments_needs_memory_between_those_of_their_policies():
    def temporary(remat: Any) -> int:
        model = models.gpt(31, 32, 4, 2, max_length=128, loss_chunk=32, remat=remat)
        batch = {"tokens": np.zeros((8, 128), np.int32)}
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch)[0])

        def loss(params: Any) -> jax.Array:
            found: Any = model.apply(params, {}, batch, key=None, train=True)[0]
            return jnp.square(found.whole()).mean()

        found = jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    full, mixed, none = map(temporary, ("full", MIXED, "none"))
    assert full + (none - full) * 0.25 < mixed < full + (none - full) * 0.75


@pytest.mark.long
def test_a_vit_with_stacked_layers_has_a_policy_too():
    found = [kept("vit", remat=remat) for remat in ("full", "products", "none")]
    assert found[0] < found[1] < found[2]
    assert kept("vit") == found[1]
    assert kept("vit", scan_layers=False) == kept("vit", scan_layers=False, remat="none")


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    ("remat", "scan_layers", "message"),
    [
        ({"blocks": "full", ".*": "none"}, True, "the layers are block_0, block_1, block_2, block"),
        ({"block_4": "full", ".*": "none"}, False, "no layer. A pattern matches a whole name; the"),
        ({"block": "full", ".*": "none"}, False, "the layers are block_0, block_1, block_2, block"),
        ({".*": "none", "block_1": "full"}, False, "'block_1', but earlier patterns match all"),
        ({"block_[0-2]": "full"}, False, "has no policy for block_3. Add a last pattern '.*'"),
        ({".*": "ful"}, False, "Did you mean 'full'?"),
        ("ful", True, "Did you mean 'full'?"),
        ({"(": "full"}, False, "unterminated subpattern"),
    ],
)
def test_wrong_policies_are_refused(kind: str, remat: Any, scan_layers: bool, message: str):
    with pytest.raises(ValueError, match=f"^models.{kind} got ") as error:
        model_of(kind, remat=remat, scan_layers=scan_layers)
    assert message in str(error.value)
