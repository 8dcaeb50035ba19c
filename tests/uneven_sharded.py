"""Prints evaluations of batches that do not divide, on one and on eight devices, as JSON."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from flax import struct

from tests import token_cases
from tests.engine.test_loss_contract import CLASSES, KERNEL, POSITIONS, TEST, TRAIN
from tests.engine.test_loss_contract import program as program_of
from trainer import data


class Uneven(data.ArrayDataset):
    """Evaluates batches of these sizes, without padding."""

    def __init__(self, train: Any, test: Any, sizes: list[int]):
        super().__init__(train, test, batch_size=None)
        self.test, self.sizes = test, sizes

    def evaluate(self, split: str = "test") -> Any:
        ends = np.cumsum(self.sizes)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield {name: x[start:end] for name, x in self.test.items()}


class Model:
    """Returns outputs of many shapes, one of which has as many rows as a padded batch."""

    def init(self, key: Any, batch: Any) -> Any:
        return {"kernel": jnp.asarray(KERNEL)}, {}

    def apply(self, params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
        logits = batch["x"] @ params["kernel"]
        pooled = logits.mean(1)
        outputs = {
            "logits": logits,
            "flat": logits.reshape(-1, CLASSES),
            "pairs": pooled @ pooled.T,
            "table": jnp.arange(24.0).reshape(8, 3),
            "scale": jnp.float32(2.0),
        }
        return outputs, state


def compare(outputs: Any, batch: Any) -> Any:
    """Compares each example with all others of its batch; the mean of all is an aux value."""
    size = len(batch["x"])
    shapes = {name: x.shape for name, x in outputs.items()}
    assert shapes == {
        "logits": (size, POSITIONS, CLASSES),
        "flat": (size * POSITIONS, CLASSES),
        "pairs": (size, size),
        "table": (8, 3),
        "scale": (),
    }
    flat = outputs["flat"].reshape(outputs["logits"].shape)
    losses = jax.nn.logsumexp(outputs["pairs"], axis=1)[:, None] + (flat**3).sum(2)
    return losses * outputs["scale"] + outputs["table"].sum(), {"mean": outputs["pairs"].mean()}


@struct.dataclass
class Unmasked(clu_metrics.Metric):
    """Counts examples without a look at the mask, and adds up their outputs."""

    count: Any
    total: Any

    @classmethod
    def empty(cls) -> Any:
        return cls(count=jnp.int32(0), total=jnp.float32(0))

    @classmethod
    def from_model_output(cls, *, outputs: Any, batch: Any, **_: Any) -> Any:
        return cls(count=jnp.int32(len(batch["x"])), total=outputs["logits"].sum())

    def merge(self, other: Any) -> Any:
        return Unmasked(count=self.count + other.count, total=self.total + other.total)

    def compute(self) -> Any:
        return self.count + 0.001 * self.total


def evaluate(devices: int, sizes: list[int]) -> dict[str, float]:
    program = program_of(
        mesh={"data": devices},
        model=Model(),
        data=Uneven(TRAIN, TEST, sizes),
        loss=compare,
        metrics={"unmasked": Unmasked},
    )
    program.evaluation.check(program.abstract_state())
    return program.evaluation.run_splits(program.init())


def tokens(devices: int) -> dict[str, float]:
    program = token_cases.program(
        mesh={"data": devices}, data=Uneven(token_cases.TRAIN, token_cases.TEST, [8, 3])
    )
    return program.evaluation.run_splits(program.init())


if __name__ == "__main__":
    for each in ([8, 8, 7], [23], [3, 5, 15], [22, 1]):
        print(json.dumps([evaluate(devices, each) for devices in (1, 8)]))
    print(json.dumps([tokens(devices) for devices in (1, 4)]))
