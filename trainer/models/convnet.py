"""A small convolutional network whose batch statistics are model state."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from trainer.messages import check_positive
from trainer.models.layers import BatchNorm, Linear, convolution
from trainer.models.linen_model import from_our_linen
from trainer.models.model import Model


class Conv(nn.Module):
    """Convolves 3 by 3 with zero padding and `kernel` [3, 3, channels, features]."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, height, width, channels] to [batch, height, width, features]."""
        kernel = self.param("kernel", convolution, (3, 3, x.shape[-1], self.features))
        layout = ("NHWC", "HWIO", "NHWC")
        x = x.astype(kernel.dtype)
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


class Block(nn.Module):
    """Applies a convolution, batch normalization and ReLU."""

    features: int
    momentum: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [batch, height, width, channels] to [batch, height, width, features]."""
        x = Conv(self.features, name="conv")(x)
        # ReLU before the cast: XLA's CPU compiler of jax 0.12 fuses a bfloat16 ReLU between two
        # convolutions and a mean into a kernel that gives NaN.
        return jax.nn.relu(BatchNorm(self.momentum, name="norm")(x, train)).astype(x.dtype)


class ConvNet(nn.Module):
    """Applies blocks with max pooling in between, averages over the pixels, and classifies."""

    widths: tuple[int, ...]
    blocks_per_width: int
    num_classes: int
    momentum: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps images [batch, height, width, channels] to logits [batch, num_classes]."""
        index = 0
        for level, width in enumerate(self.widths):
            # Pooling would make a side of 1 empty.
            if level and min(x.shape[1:3]) > 1:
                x = nn.max_pool(x, (2, 2), (2, 2))
            for _ in range(self.blocks_per_width):
                x = Block(width, self.momentum, name=f"block_{index}")(x, train)
                index += 1
        x = x.mean(axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
        return Linear(self.num_classes, name="head")(x)


def convnet(
    widths: Sequence[int] = (32, 64),
    blocks_per_width: int = 2,
    num_classes: int = 10,
    momentum: float = 0.9,
    inputs: str = "image",
) -> Model:
    """Returns a small convolutional network with batch normalization.

    The parameters are `block_<i>/conv/kernel` [3, 3, channels, features], `block_<i>/norm/scale`,
    `block_<i>/norm/bias`, `head/kernel` and `head/bias`; the model state has the running `mean`
    and `var` of every norm, float32, which evaluation uses.

    Ioffe and Szegedy, "Batch Normalization" (arXiv:1502.03167).

    Args:
        widths: number of features at each resolution; max pooling between them halves height and
            width.
        blocks_per_width: number of convolutions at each resolution.
        num_classes: number of classes; the outputs are logits [batch, num_classes].
        momentum: decay of the running statistics per training step, in [0, 1).
        inputs: key of the images in the batch, [batch, height, width, channels].

    Raises:
        ValueError: a size is not positive, there are no widths, or momentum is outside [0, 1).

    Example:
        >>> import jax
        >>> from trainer import models
        >>> model = models.convnet(widths=(4,), blocks_per_width=1)
        >>> batch = {"image": jax.numpy.ones((4, 8, 8, 1))}
        >>> params, model_state = model.init(jax.random.key(0), batch)
        >>> params["block_0"]["conv"]["kernel"].shape
        (3, 3, 1, 4)
        >>> sorted(model_state["batch_stats"]["block_0"]["norm"])
        ['mean', 'var']
    """
    if not widths:
        raise ValueError("models.convnet needs at least one number in widths, but got none.")
    sizes = {f"widths[{index}]": width for index, width in enumerate(widths)}
    check_positive(
        "models.convnet", **sizes, blocks_per_width=blocks_per_width, num_classes=num_classes
    )
    if not 0 <= momentum < 1:
        raise ValueError(f"models.convnet needs 0 <= momentum < 1, but got momentum={momentum}.")
    return from_our_linen(ConvNet(tuple(widths), blocks_per_width, num_classes, momentum), inputs)
