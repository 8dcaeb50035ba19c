"""models.gpt against a GPT written in PyTorch: logits, loss, gradients and a step of training."""

import importlib.util
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.gpt_sides import make_program, torch_optimizers
from benchmarks.jax_gpt import CLIP
from trainer import losses, models

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: `make torch` adds it.", allow_module_level=True)

from benchmarks import torch_gpt
from benchmarks.torch_gpt import torch

pytestmark = pytest.mark.torch

BASE = {"vocab_size": 29, "width": 32, "depth": 2, "num_heads": 4}
SETTINGS = {
    "squared ReLU, untied": {},
    "GELU, tied, no qk-norm": {"activation": "gelu", "tied": True, "qk_norm": False},
    "SwiGLU, grouped heads": {"activation": "swiglu", "num_kv_heads": 2, "mlp_dim": 48},
    "soft-cap, z-loss": {"soft_cap": 3.0, "z_loss": 0.1, "rope_base": 500.0},
    "one head of keys": {"num_kv_heads": 1, "tied": True, "soft_cap": 2.0},
}


def text(packed: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    found = draw.integers(0, 29, (3, 131)).astype(np.int32)
    batch = {"tokens": found[:, :-1].copy(), "label": found[:, 1:].copy()}
    if packed:
        starts = draw.integers(0, 8, (3, 130)) == 0
        batch["documents"] = starts.cumsum(axis=1).astype(np.int32)
    return batch


def start(setting: dict[str, Any]) -> tuple[Any, Any]:
    """Returns models.gpt and parameters that are large enough for every part to matter."""
    model = models.gpt(**BASE, **setting, max_length=130)
    params, _ = model.init(jax.random.key(0), text(False))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    add = lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape)  # noqa: E731
    return model, jax.tree.map(add, params)


def in_module(setting: dict[str, Any], params: Any) -> Any:
    return torch_gpt.load(torch_gpt.Gpt(**BASE, **setting), torch_gpt.to_torch(params))


def in_torch(batch: dict[str, np.ndarray]) -> list[Any]:
    return [
        torch.from_numpy(batch[name]) for name in ("tokens", "label", "documents") if name in batch
    ]


def close(found: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_loss_and_gradients_agree_with_torch(name, packed):
    model, params = start(SETTINGS[name])
    other = in_module(SETTINGS[name], params)
    batch = text(packed)
    tokens, labels, *numbers = in_torch(batch)
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
    arrays = torch_gpt.to_torch(gradient)
    for key, parameter in other.named_parameters():
        assert np.abs(arrays[key]).max() > 1e-6, key
        close(arrays[key], parameter.grad)


@pytest.mark.parametrize("name", ["squared ReLU, untied", "SwiGLU, grouped heads"])
def test_a_step_of_adamw_gives_the_parameters_of_torch(name):
    model, params = start(SETTINGS[name])
    batch = text(packed=True)
    program = make_program(model, batch, "adamw")
    state = program.init()
    state = state._replace(params=jax.tree.map(lambda x: x.copy(), params))
    state, metrics = program.step(state, program.feed.to_devices(batch))

    other = in_module(SETTINGS[name], params)
    (optimizer,) = torch_optimizers(other, "adamw")
    other.loss(*in_torch(text(packed=True))).backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), CLIP)
    assert norm > CLIP  # so that the test sees the clipping
    close(metrics["grad_norm"], norm)
    optimizer.step()
    first, found = torch_gpt.to_torch(params), torch_gpt.to_torch(state.params)
    for key, parameter in other.named_parameters():
        expected = parameter.detach().numpy()
        assert np.abs(expected - first[key]).max() > 1e-3, key
        # A first step of Adam is a sign, which rounding decides where a gradient is nearly 0.
        far = np.abs(found[key] - expected) > 1e-5
        assert far.mean() < 0.001, key
