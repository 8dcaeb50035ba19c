"""What the benchmarks of whole models compute: a model, a batch and their count of operations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_gpt
from benchmarks.jax_gpt import Shape
from optim.paths import flatten
from trainer import models


class Workload(NamedTuple):
    """A model with its batch, for all sides.

    Args:
        model: our model.
        batch: field name -> array of a batch; the inputs, then the labels.
        loss: `loss(params, batch)`, the mean loss by hand.
        module: returns the module of PyTorch with the parameters of our model.
        bfloat16: whether the products, and Muon's, are in bfloat16, and all else in float32; `loss`
            agrees with it.
        unit: what is counted, such as "tokens".
        units: how many a batch has.
        flops: operations of a step, as MFU counts them.
    """

    model: models.Model
    batch: dict[str, np.ndarray]
    loss: Callable[[Any, Any], jax.Array]
    module: Callable[[Any], Any]
    bfloat16: bool
    unit: str
    units: int
    flops: float


def make_gpt_workload(
    shape: Shape, bfloat16: bool = False, attention: str = "auto", by_hand: str = "auto"
) -> Workload:
    """Returns a GPT and a batch of random tokens.

    Args:
        shape: the sizes.
        bfloat16: as in `Workload`.
        attention: of our side, as in `models.gpt`.
        by_hand: that of the loss by hand, as in `jax_gpt.attention`.
    """
    sizes = (shape.vocab_size, shape.width, shape.depth, shape.num_heads)
    model, batch = models.gpt(*sizes, max_length=shape.length, attention=attention), shape.batch()
    dtype = jnp.bfloat16 if bfloat16 else jnp.float32

    def module(params: Any) -> Any:
        from benchmarks import torch_gpt

        return torch_gpt.load(torch_gpt.Gpt(*sizes), torch_gpt.to_torch(params))

    attended = 6 * shape.depth * shape.width * shape.length
    return Workload(
        model,
        batch,
        lambda params, batch: jax_gpt.mean_loss(params, batch, shape, dtype, by_hand),
        module,
        bfloat16,
        "tokens",
        shape.tokens,
        shape.tokens * (6.0 * sum(kernel_sizes(model, batch).values()) + attended),
    )


def kernel_sizes(model: models.Model, batch: dict[str, np.ndarray]) -> dict[str, int]:
    """Returns the number of parameters of each kernel of a model, by its path."""
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    return {path: x.size for path, x in flatten(params).items() if path.endswith("kernel")}
