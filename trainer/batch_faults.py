"""Tells whether the batch itself is why a loss is not finite: its numbers or its labels."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.given import example_losses
from trainer.program import Program
from trainer.step import apply_model

Batch = Mapping[str, Any]


def find_fault(program: Program, batch: Batch) -> str | None:
    """Looks for a field of a batch that makes the loss not finite, whatever the parameters are.

    That is a field of floats some of which are not finite; or one of integers without which the
    loss of outputs of nothing but zeros would be finite: labels that are no classes.

    Args:
        program: the experiment, whose model and loss are asked.
        batch: of training, on the host.

    Returns:
        A sentence without its full stop that names the field; None where no field is at fault.
    """
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    for name, x in arrays.items():
        if (fault := _not_finite(x)) is not None:
            return f"The field {name!r} of its batch holds {fault}"
    try:
        return _labels(program, arrays)
    except Exception:  # the user's loss, given what it may not expect: the run's own error matters
        return None


def _not_finite(x: np.ndarray) -> str | None:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    found = [(int(np.isnan(wide).sum()), "NaN"), (int(np.isinf(wide).sum()), "infinite")]
    told = " and ".join(f"{count} {what}" for count, what in found if count)
    return f"{told} of {x.size} values" if told else None


def _labels(program: Program, batch: dict[str, np.ndarray]) -> str | None:
    experiment, state = program.experiment, program.abstract_state()

    def apply(params: Any, model_state: Any, batch: Any) -> Any:
        return apply_model(experiment, params, model_state, batch, key=None, train=False)[0]

    outputs = jax.eval_shape(apply, state.params, state.model_state, batch)
    if not hasattr(outputs, "shape") or not outputs.shape:
        return None
    zeros, classes = np.zeros(outputs.shape, outputs.dtype), outputs.shape[-1]

    def finite(batch: dict[str, np.ndarray]) -> bool:
        given = {name: jnp.asarray(x) for name, x in batch.items()}
        return bool(jnp.isfinite(example_losses(experiment.loss, jnp.asarray(zeros), given)).all())

    if finite(batch):
        return None
    for name, x in batch.items():
        outside = (x < 0) | (x >= classes) if x.dtype.kind in "iu" else np.zeros(1, bool)
        if outside.any() and finite(batch | {name: np.clip(x, 0, classes - 1)}):
            return (
                f"The field {name!r} of its batch holds {x.min()} to {x.max()}, and the model's "
                f"outputs have {classes} classes, 0 to {classes - 1}: {int(outside.sum())} of "
                f"{x.size} labels are outside"
            )
    return None
