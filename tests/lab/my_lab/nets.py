"""Two models, one in each of flax's two ways."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class Spiralnet(nn.Module):
    """A linen perceptron with batch statistics and dropout; told apart by `train`."""

    width: int = 32
    depth: int = 2
    classes: int = 3
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(self.depth):
            x = nn.Dense(self.width)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(self.dropout, deterministic=not train)(jax.nn.relu(x))
        return nn.Dense(self.classes)(x)


class Ringnet(nnx.Module):
    """The same in nnx, with a list of layers."""

    def __init__(self, width: int = 32, depth: int = 2, classes: int = 3, *, rngs: nnx.Rngs):
        sizes = [2, *[width] * depth]
        pairs = zip(sizes, sizes[1:], strict=False)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(self.dropout(self.norm(x)))
