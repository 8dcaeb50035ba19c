"""What a config cannot say by itself: modules and arrays to call our functions with."""

import functools

import flax.linen as nn
import numpy as np
import optax
from flax import nnx

from trainer.engine.experiment import as_optimizer


class Linen(nn.Module):
    def __call__(self, x):
        return x


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def arrays():
    return {"image": np.zeros((4, 2), np.float32)}


def array(*_):
    return np.ones((2, 2), np.float32)


def hold(optimizer: functools.partial | optax.GradientTransformation):
    return as_optimizer(optimizer)
