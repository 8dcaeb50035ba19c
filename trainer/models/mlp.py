"""A multilayer perceptron."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax

from trainer.messages import check_positive
from trainer.models.layers import Linear, run_stack
from trainer.models.linen_model import from_our_linen
from trainer.models.model import Model

_ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jax.nn.tanh, "silu": jax.nn.silu}


class Layer(nn.Module):
    """Applies a linear layer and the activation."""

    width: int
    activation: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, inputs] to [batch, width]."""
        return self.activation(Linear(self.width, name="linear")(x))


class Mlp(nn.Module):
    """Applies an input layer to flattened inputs, equal hidden layers and an output layer."""

    width: int
    depth: int
    num_outputs: int
    activation: str
    scan_layers: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, ...] to [batch, num_outputs]."""
        act = _ACTIVATIONS[self.activation]
        x = act(Linear(self.width, name="embed")(x.reshape(x.shape[0], -1)))
        if self.depth > 1:
            layer = functools.partial(Layer, self.width, act)
            # The input layer is the first of `depth` hidden ones; its kernel has another shape.
            x = run_stack(layer, lambda layer, x: layer(x), x, self.depth - 1, self.scan_layers)
        return Linear(self.num_outputs, name="head")(x)


def mlp(
    width: int = 64,
    depth: int = 2,
    num_classes: int = 10,
    activation: str = "relu",
    scan_layers: bool = True,
    inputs: str = "image",
) -> Model:
    """Returns a multilayer perceptron with `depth` hidden layers of equal width.

    The parameters are `embed/kernel` [inputs, width], `blocks/linear/kernel` [depth - 1, width,
    width], `head/kernel` [width, num_classes], and a `bias` for each kernel. The model computes in
    the dtype of its parameters.

    Args:
        width: number of units in a hidden layer.
        depth: number of hidden layers; the first is `embed`, the others are `blocks`.
        num_classes: number of classes; the outputs are logits [batch, num_classes]. For regression,
            the number of values to predict.
        activation: "relu", "gelu", "tanh" or "silu".
        scan_layers: True stacks the equal layers and scans over them; False keeps them apart, as
            `block_0/linear/kernel`, `block_1/linear/kernel`, ... Both compute the same function.
        inputs: key of the inputs in the batch, [batch, ...]; all axes except the first are
            flattened.

    Raises:
        ValueError: a size is not positive, or the activation is unknown.

    Example:
        >>> import jax
        >>> from trainer import models
        >>> model = models.mlp(width=8, depth=3, num_classes=2, inputs="x")
        >>> params, _ = model.init(jax.random.key(0), {"x": jax.numpy.ones((16, 4))})
        >>> params["embed"]["kernel"].shape, params["blocks"]["linear"]["kernel"].shape
        ((4, 8), (2, 8, 8))
    """
    check_positive("models.mlp", width=width, depth=depth, num_classes=num_classes)
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"models.mlp has the activations {', '.join(_ACTIVATIONS)}, but got {activation!r}."
        )
    return from_our_linen(Mlp(width, depth, num_classes, activation, scan_layers), inputs)
