"""A model of yours: a flax module as anybody writes it. Lockstep need not be imported."""

import flax.linen as nn
import jax


class Net(nn.Module):
    """A small convolutional network with batch statistics and dropout.

    `train` is True in training and False in evaluation; Lockstep passes it, keeps the batch
    statistics between steps, and gives dropout its random numbers.
    """

    width: int = 16
    dropout: float = 0.1
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for level in range(2):  # x is [batch, height, width, channels]
            x = nn.Conv(self.width * 2**level, (3, 3), strides=(2, 2), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(self.classes)(x)  # [batch, classes]
