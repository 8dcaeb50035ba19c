"""Policies of rematerialization for layers by their names, by what their backward passes keep."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def loss_of(kind: str, **arguments: Any) -> Any:
    model = model_of(kind, **arguments)

    def loss(params: Any) -> jax.Array:
        outputs = model.apply(params, {}, BATCHES[kind], key=None, train=True)[0]
        return jnp.square(outputs.whole() if kind == "gpt" else outputs).mean()

    return loss


def start(kind: str, **arguments: Any) -> Any:
    return model_of(kind, **arguments).init(jax.random.key(0), BATCHES[kind])[0]


def kept(kind: str, **arguments: Any) -> int:
    """Counts the bytes that a forward pass keeps for the backward pass, from shapes."""
    params = jax.eval_shape(functools.partial(start, kind, **arguments))
    loss = loss_of(kind, **arguments)
    residuals = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))


@pytest.mark.parametrize("kind", BATCHES)
def test_layers_with_policies_of_their_own_have_the_same_gradients(kind: str):
    params = start(kind, scan_layers=False)
    plain, mixed = (
        jax.jit(jax.grad(loss_of(kind, scan_layers=False, remat=remat)))(params)
        for remat in ("none", MIXED)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, mixed, plain)


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


def test_a_vit_with_stacked_layers_has_a_policy_too():
    found = [kept("vit", remat=remat) for remat in ("full", "products", "none")]
    assert found[0] < found[1] < found[2]
    assert kept("vit") == found[1]
    assert kept("vit", scan_layers=False) == kept("vit", scan_layers=False, remat="none")


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    ("remat", "scan_layers", "message"),
    [
        (MIXED, True, "Set scan_layers=False, or remat to one of products, full, none."),
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
