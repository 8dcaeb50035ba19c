"""Cross-entropy in float64 with its gradients by hand, and a language model of one kernel."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from tests.engine import test_loss_contract
from trainer import data, metrics
from trainer.engine.program import Program
from trainer.logits import ChunkedLogits

BATCH, POSITIONS, WIDTH, VOCABULARY = 12, 5, 6, 11


class Known(NamedTuple):
    """Losses [batch, positions], and the gradients of their weighted sum."""

    losses: np.ndarray
    features: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray


def known(
    features: Any,
    kernel: Any,
    labels: Any,
    weights: Any,
    bias: Any = 0.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    soft_cap_form: str = "tanh",
    z_loss: float = 0.0,
    smoothing: float = 0.0,
) -> Known:
    """Computes the losses and the gradients of their sum with these weights, in float64."""
    features, kernel, weights = (np.asarray(x, np.float64) for x in (features, kernel, weights))
    logits: Any = scale * (features @ kernel) + bias
    slope: Any = 1.0
    if soft_cap is not None and soft_cap_form == "algebraic":
        length = np.hypot(logits, soft_cap)
        logits, slope = soft_cap * logits / length, (soft_cap / length) ** 3
    elif soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
        slope = 1 - (logits / soft_cap) ** 2
    size = kernel.shape[1]
    target = (1 - smoothing) * np.eye(size)[labels] + smoothing / size
    denominator: Any = logsumexp(logits, axis=-1, keepdims=True)
    values = -(target * (logits - denominator)).sum(-1) + z_loss * denominator[..., 0] ** 2
    probabilities: Any = softmax(logits, axis=-1)
    by_logits = probabilities * (1 + 2 * z_loss * denominator) - target
    by_bias = weights[..., None] * by_logits * slope
    by_products = scale * by_bias
    by_kernel = np.einsum("bpw,bpv->wv", features, by_products)
    return Known(values, by_products @ kernel.T, by_kernel, by_bias.sum((0, 1)))


def texts(examples: int, seed: int) -> dict[str, np.ndarray]:
    """Returns sequences of various lengths, the first third of length 1."""
    random = np.random.default_rng(seed)
    lengths = random.integers(POSITIONS + 1, size=examples)
    lengths[: examples // 3] = 1
    mask = (np.arange(POSITIONS) < lengths[:, None]).astype(np.float32)
    label = random.integers(VOCABULARY, size=mask.shape)
    return {
        "x": random.normal(size=(*mask.shape, WIDTH)).astype(np.float32),
        "label": np.where(mask > 0, label, -100).astype(np.int32),
        "bytes": random.integers(6, size=mask.shape).astype(np.int32),
        "mask": mask,
    }


TRAIN, TEST = texts(BATCH, 0), texts(BATCH - 1, 1)
KERNEL = np.random.default_rng(2).normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
SOFT_CAP, Z_LOSS = 3.0, 0.01


def model(chunk: int | None = 7, **changes: Any) -> Any:
    """Returns a model whose features are the field "x"."""
    options = {"soft_cap": SOFT_CAP, "z_loss": Z_LOSS, "chunk": chunk} | changes

    def init(key: Any, batch: Any) -> Any:
        return {"kernel": KERNEL}, {}

    def apply(params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
        own: Any = options | ({} if train else {"z_loss": 0.0})
        return ChunkedLogits(features=batch["x"], kernel=params["kernel"], **own), state

    return SimpleNamespace(init=init, apply=apply)


def program(**changes: Any) -> Program:
    """Returns a program of the whole of `TRAIN` as one batch."""
    options = {
        "model": model(),
        "data": data.ArrayDataset(TRAIN, TEST, batch_size=None, eval_batch_size=4),
        "metrics": {
            "accuracy": metrics.accuracy(),
            "perplexity": metrics.perplexity(),
            "bits_per_byte": metrics.bits_per_byte(),
        },
    }
    return test_loss_contract.program(**(options | changes))
