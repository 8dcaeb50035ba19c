"""models.gpt against a GPT written in PyTorch: logits, loss, gradients and a step of training."""

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.gpt_sides import make_program, torch_optimizers
from benchmarks.jax_gpt import CLIP, Shape
from trainer import losses, models

SHAPE = Shape(vocab_size=29, width=32, depth=2, num_heads=4, length=130, batch_size=3)
SETTINGS = {
    "squared ReLU, untied": {},
    "GELU, tied, no qk-norm": {"activation": "gelu", "tied": True, "qk_norm": False},
    "SwiGLU, grouped heads": {"activation": "swiglu", "num_kv_heads": 2, "mlp_dim": 48},
    "soft-cap, z-loss": {"soft_cap": 3.0, "z_loss": 0.1, "rope_base": 500.0},
    "one head of keys": {"num_kv_heads": 1, "tied": True, "soft_cap": 2.0},
}


def both(name: str, packed: bool) -> tuple[Any, Any, Any, dict[str, np.ndarray]]:
    """Returns models.gpt, parameters, the module of PyTorch that has them, too, and a batch."""
    from benchmarks import torch_gpt  # an extra of the project

    setting, batch = SETTINGS[name], SHAPE.batch()
    sizes: Any = SHAPE[:4]
    if packed:
        starts = np.random.default_rng(1).integers(0, 8, batch["tokens"].shape) == 0
        batch["documents"] = starts.cumsum(axis=1).astype(np.int32)
    model = models.gpt(*sizes, **setting, max_length=SHAPE.length)
    params, _ = model.init(jax.random.key(0), batch)
    # Large enough for every part to matter.
    keys = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)
    module = torch_gpt.load(torch_gpt.Gpt(*sizes, **setting), torch_gpt.to_torch(params))
    return model, params, module, batch


def close(found: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_loss_and_gradients_agree_with_torch(torch, name, packed):
    from benchmarks.torch_gpt import to_torch

    model, params, other, batch = both(name, packed)
    tokens, labels, *numbers = map(torch.tensor, batch.values())
    value = other.loss(tokens, labels, *numbers)
    value.backward()
    cross_entropy: Any = losses.softmax_cross_entropy()

    def total(params: Any) -> Any:
        outputs, _ = model.apply(params, {}, batch, key=None, train=True)
        found = cross_entropy(outputs, batch)
        # With a z-loss the loss has it in a part of its own, too.
        return (found[0] if isinstance(found, tuple) else found).mean(), outputs.whole()

    (mine, logits), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    close(logits, other(tokens, *numbers).detach())
    close(mine, value.detach())
    arrays = to_torch(gradient)
    for key, parameter in other.named_parameters():
        assert np.abs(arrays[key]).max() > 1e-6, key
        close(arrays[key], parameter.grad)


@pytest.mark.parametrize("name", ["squared ReLU, untied", "SwiGLU, grouped heads"])
def test_a_step_of_adamw_gives_the_parameters_of_torch(torch, name):
    from benchmarks.torch_gpt import to_torch

    model, params, other, batch = both(name, packed=True)
    program = make_program(model, batch, "adamw")
    state = program.init()
    state = state._replace(params=jax.tree.map(lambda x: x.copy(), params))
    state, metrics = program.step(state, program.feed.to_devices(batch))

    (optimizer,) = torch_optimizers(other, "adamw")
    other.loss(*map(torch.tensor, batch.values())).backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), CLIP)
    assert norm > CLIP  # so that the test sees the clipping
    close(metrics["grad_norm"], norm)
    optimizer.step()
    first, found = to_torch(params), to_torch(state.params)
    for key, parameter in other.named_parameters():
        expected = parameter.detach().numpy()
        assert np.abs(expected - first[key]).max() > 1e-3, key
        # A first step of Adam is a sign, which rounding decides where a gradient is nearly 0.
        far = np.abs(found[key] - expected) > 1e-5
        assert far.mean() < 0.001, key
