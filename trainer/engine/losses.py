"""Calls the loss of an experiment, checks what it returns, and averages it over a batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from trainer.engine.contracts import Batch, ComponentError, calling, describe


class Losses(NamedTuple):
    """What a loss returned for a batch.

    Attributes:
        values: floating-point losses [batch] or [batch, positions].
        aux: name -> real scalar; empty if the loss returned none.
    """

    values: Any
    aux: dict[str, Any]

    def counted(self, batch: Batch) -> Any:
        """Returns the losses in float32, with 0 where the mask of the batch is 0."""
        values = self.values.astype(jnp.float32)
        if "mask" not in batch:
            return values
        mask = batch["mask"]
        if mask.ndim < values.ndim:
            mask = mask[:, None]
        # Not a product: the loss of a masked label such as -100 may be NaN.
        return jnp.where(mask > 0, values, 0.0)

    def mean(self, batch: Batch, share: Any = None) -> Any:
        """Returns the mean of the losses, weighted by the mask of the batch if it has one.

        Args:
            batch: the batch.
            share: the mean of the mask of the whole batch, of which `batch` is a microbatch; None
                if it is the whole batch. The average of such means over microbatches of equal size
                is the weighted mean over the whole batch.
        """
        # Over all losses, those that do not count included; the division corrects it.
        total = jnp.mean(self.counted(batch))
        if "mask" not in batch:
            return total
        share = mask_mean(batch) if share is None else share
        # 0 for a batch in which nothing counts, and not NaN.
        return total / jnp.maximum(share, jnp.finfo(jnp.float32).tiny)


def mask_mean(batch: Batch) -> Any:
    """Returns the mean of the mask of a batch, float32; 1 if it has no mask."""
    return jnp.mean(batch["mask"].astype(jnp.float32)) if "mask" in batch else jnp.float32(1)


def compute_losses(loss: Any, outputs: Any, batch: Batch) -> Losses:
    """Computes the losses of the examples of a batch, or of their positions.

    Args:
        loss: the experiment's loss.
        outputs: the model's outputs for the batch.
        batch: field name -> array.

    Returns:
        The losses, and the named scalars that came with them.

    Raises:
        ComponentError: the loss raises; it returns something else; or the mask of the batch does
            not fit the shape of the losses.
    """
    aux: Any = {}
    with calling("loss"):
        values: Any = loss(outputs, batch)
    if isinstance(values, tuple) and len(values) == 2:
        values, aux = values
    size = next(iter(batch.values())).shape[0]
    shape = tuple(getattr(values, "shape", ()))
    fits = len(shape) in (1, 2) and shape[:1] == (size,) and 0 not in shape
    if not fits or not jnp.issubdtype(jnp.result_type(values), jnp.floating):
        raise ComponentError(
            "loss",
            f"A loss must return floats of shape [batch] or [batch, positions], ({size},) or "
            f"({size}, positions) here, or a pair (losses, aux) of them and a dict of named "
            f"scalars, but this one returned {describe(values)}. Do not average over the examples: "
            "the step does. See Loss in trainer/protocols.py.",
        )
    mask = batch.get("mask")
    if mask is not None and mask.shape not in (shape, shape[:1]):
        raise ComponentError(
            "data",
            f"The batch has a 'mask' of {describe(mask)}, and the loss returned "
            f"{describe(values)}. The mask must have the shape of the losses, or one number for "
            "each example.",
        )
    return Losses(values, _checked_aux(aux))


def _checked_aux(aux: Any) -> dict[str, Any]:
    if not isinstance(aux, Mapping) or not all(isinstance(name, str) for name in aux):
        names = f" with the keys {', '.join(map(repr, aux))}" if isinstance(aux, Mapping) else ""
        raise ComponentError(
            "loss",
            f"A loss that returns a pair returns (losses, aux), where aux is a dict from names to "
            f"scalars, but the second value of this one is {describe(aux)}{names}.",
        )
    scalars = {}
    for name, x in aux.items():
        # A Python number has no dtype and no shape.
        value = jnp.asarray(x) if isinstance(x, bool | int | float) else x
        dtype = getattr(value, "dtype", None)
        real = dtype is not None and (
            jnp.issubdtype(dtype, jnp.floating)
            or jnp.issubdtype(dtype, jnp.integer)
            or dtype == jnp.bool_
        )
        if not real or getattr(value, "shape", None) != ():
            raise ComponentError(
                "loss",
                f"The loss returned the aux value {name!r} as {describe(x)}. It must be a scalar, "
                "a real number of shape (): average it over the batch. Metrics take values of "
                "single examples.",
            )
        if name == "loss":
            raise ComponentError(
                "loss",
                "The loss returned an aux value called 'loss', which is the name of the loss "
                "itself in the metrics. Use another name.",
            )
        scalars[name] = value.astype(jnp.float32)
    return scalars
