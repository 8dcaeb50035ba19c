"""Attention in blocks, against one softmax over the whole sequence."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import short
from trainer.constraints import computed_by
from trainer.models import attention
from trainer.models.attention import attend

LENGTHS = [1, 127, 128, 300]


def arrays(length: int) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(2, length, 2, 4)) * 2, jnp.float32) for _ in range(3)]


def documents(length: int) -> jax.Array:
    numbers = np.sort(np.random.default_rng(1).integers(0, 5, (2, length)))
    return jnp.asarray(numbers[:, None, :, None] == numbers[:, None, None, :])


def whole(query: Any, key: Any, value: Any, mask: Any, scale: float) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(seen if mask is None else seen & mask, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


@pytest.mark.parametrize("length", LENGTHS)
@short.parametrize("packed", [False, True])
def test_blocks_compute_what_one_softmax_does_and_so_do_their_gradients(length, packed):
    mask = documents(length) if packed else None
    inputs = arrays(length)
    weights = jnp.cos(jnp.arange(inputs[0].size).reshape(inputs[0].shape))

    def outputs(attention: Any) -> Any:
        def total(*inputs: jax.Array) -> Any:
            found = attention(*inputs, mask, 0.7)
            return (found * weights).sum(), found

        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        outputs(attention.causal_attention),
        outputs(whole),
    )


@pytest.mark.long
def test_large_scores_do_not_overflow():
    query, key, value = arrays(130)
    found = attention.causal_attention(100 * query, 100 * key, value, None, 1.0)
    np.testing.assert_allclose(found, whole(100 * query, 100 * key, value, None, 1.0), atol=1e-4)


def test_the_backward_pass_of_a_layer_with_remat_does_not_repeat_the_forward_pass():
    inputs = arrays(256)

    def exponentials(policy: Any) -> int:
        def layer(query: Any, key: Any, value: Any) -> Any:
            return jnp.square(attention.causal_attention(query, key, value, None, 1.0)).sum()

        kept = jax.checkpoint(layer, policy=policy)
        return str(jax.make_jaxpr(jax.jit(jax.grad(kept)))(*inputs)).count("= exp ")

    # Two blocks: both passes have the exponentials of each.
    assert exponentials(jax.checkpoint_policies.save_only_these_names(attention.SAVED)) == 4
    assert exponentials(jax.checkpoint_policies.nothing_saveable) == 6


@pytest.mark.long
def test_several_models_at_once_compute_what_each_does_alone():
    inputs = arrays(130)
    stacked = [jnp.stack([x, 2 * x]) for x in inputs]
    run = lambda q, k, v: attention.causal_attention(q, k, v, None, 0.5)  # noqa: E731
    found = jax.vmap(run)(*stacked)
    for i in range(2):
        np.testing.assert_allclose(found[i], run(*[x[i] for x in stacked]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "tokens", "chosen"),
    [
        (("cpu", "cpu"), 8192, "plain"),
        (("tpu", "TPU v5 lite"), 8192, "plain"),
        (("gpu", "AMD Instinct MI300X"), 1024, "xla"),
    ],
)
def test_what_attention_takes_by_itself(kind, tokens, chosen):
    x = jax.ShapeDtypeStruct((1, tokens, 1, 64), jnp.bfloat16)
    device = SimpleNamespace(platform=kind[0], device_kind=kind[1])

    def traced(how: str) -> str:
        attended = lambda q, k, v: attend(q, k, v, None, 0.125, how)  # noqa: E731
        return str(jax.make_jaxpr(attended)(x, x, x))

    with computed_by(device):
        assert traced("auto") == traced(chosen)
    assert traced("plain") != traced("xla")


@short.parametrize(("tokens", "blocks"), [(300, 2), (200, 1), (1000, 4), (1024, 4), (8200, 8)])
def test_a_tpu_has_few_blocks_which_compute_the_same(tokens, blocks):
    with computed_by(SimpleNamespace(platform="tpu")):
        found = attention._blocks(tokens)
        assert len(found) == blocks
        rows = [row for queries, _ in found for row in range(*queries.indices(tokens))]
        assert rows == list(range(tokens))
    if tokens < 2000:
        inputs = arrays(tokens)
        with computed_by(SimpleNamespace(platform="tpu")):
            found = value_and_gradients(attention.causal_attention, inputs)
        for one, other in zip(found, value_and_gradients(whole, inputs), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4)


def value_and_gradients(function: Any, inputs: list[jax.Array]) -> list[Any]:
    def summed(*inputs: Any) -> Any:
        return jnp.sin(function(*inputs, None, 0.7)).sum()

    value, gradients = jax.value_and_grad(summed, (0, 1, 2))(*inputs)
    return [value, *gradients]
