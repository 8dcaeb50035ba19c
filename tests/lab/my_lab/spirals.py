"""A data set that shares nothing with ours but the methods and attributes that are asked for."""

import hashlib
from collections.abc import Iterator

import jax
import numpy as np


class Spirals:
    """Points on three noisy spiral arms; every batch is drawn anew from its seed and step."""

    num_examples = 3000
    num_eval_examples = 500

    def __init__(self, batch_size: int = 100, noise: float = 0.05):
        if not 0 < batch_size <= self.num_examples:
            raise ValueError(f"Spirals have 1 to {self.num_examples} points a batch.")
        self.batch_size = batch_size
        self.noise = noise
        self.element_spec = {
            "point": jax.ShapeDtypeStruct((batch_size, 2), np.float32),
            "arm": jax.ShapeDtypeStruct((batch_size,), np.int32),
        }

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._draw(0, 1, 1000)["point"].tobytes()).hexdigest()

    def train(self, batch_index: int = 0, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield self._draw(seed, batch_index + 1, self.batch_size)
            batch_index += 1

    def evaluate(self) -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, self.num_eval_examples, self.batch_size):
            batch = self._draw(2**63, start, self.batch_size)
            left = self.num_eval_examples - start
            batch["mask"] = (np.arange(self.batch_size) < left).astype(np.float32)
            yield batch

    def _draw(self, seed: int, number: int, count: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([seed, number])
        arm = random.integers(3, size=count).astype(np.int32)
        radius = random.uniform(0.1, 1.0, count)
        angle = 4.0 * radius + arm * (2 * np.pi / 3)
        point = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        point += self.noise * random.standard_normal((count, 2))
        return {"point": point.astype(np.float32), "arm": arm}
