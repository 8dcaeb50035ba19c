"""A linear model of 64 points with a squared error: a quadratic, whose path numpy can compute."""

import flax.linen as nn
import numpy as np

from trainer import data, models

__all__ = ["model", "points"]


def model(bias: bool = False):
    return models.from_linen(nn.Dense(1, use_bias=bias), inputs="x")


def points(batch_size: int | None = None):
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 4)).astype(np.float32) * np.float32([1, 2, 3, 4])
    y = (x @ np.float32([1, -1, 1, -1]))[:, None]
    both = {"x": x, "target": y}
    return data.ArrayDataset(both, both, batch_size=batch_size)
