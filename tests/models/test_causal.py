"""Attention in blocks, against one softmax over the whole sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import short
from trainer.models import causal

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
        outputs(causal.causal_attention),
        outputs(whole),
    )


@pytest.mark.long
def test_large_scores_do_not_overflow():
    query, key, value = arrays(130)
    found = causal.causal_attention(100 * query, 100 * key, value, None, 1.0)
    np.testing.assert_allclose(found, whole(100 * query, 100 * key, value, None, 1.0), atol=1e-4)


def test_the_backward_pass_of_a_layer_with_remat_does_not_repeat_the_forward_pass():
    inputs = arrays(256)

    def exponentials(policy: Any) -> int:
        def layer(query: Any, key: Any, value: Any) -> Any:
            return jnp.square(causal.causal_attention(query, key, value, None, 1.0)).sum()

        kept = jax.checkpoint(layer, policy=policy)
        return str(jax.make_jaxpr(jax.jit(jax.grad(kept)))(*inputs)).count("= exp ")

    # Two blocks: both passes have the exponentials of each.
    assert exponentials(jax.checkpoint_policies.save_only_these_names(causal.SAVED)) == 4
    assert exponentials(jax.checkpoint_policies.nothing_saveable) == 6


@pytest.mark.long
def test_several_models_at_once_compute_what_each_does_alone():
    inputs = arrays(130)
    stacked = [jnp.stack([x, 2 * x]) for x in inputs]
    run = lambda q, k, v: causal.causal_attention(q, k, v, None, 0.5)  # noqa: E731
    found = jax.vmap(run)(*stacked)
    for i in range(2):
        np.testing.assert_allclose(found[i], run(*[x[i] for x in stacked]), rtol=1e-5, atol=1e-5)
