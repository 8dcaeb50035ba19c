"""Finds out whether a batch itself makes the loss not finite, by its values or its labels."""

import jax
import jax.numpy as jnp
import numpy as np

from trainer.data.dtypes import changed_values, narrow_dtype
from trainer.engine.contracts import Batch
from trainer.engine.metric_sums import compute_losses, with_ignored
from trainer.engine.program import Program
from trainer.engine.step import output_shapes


def find_fault(program: Program, batch: Batch) -> str | None:
    """Finds a field of a batch that makes the loss not finite for any parameters; None if none."""
    # It has NaN, infinite values, values that do not fit into jax's dtype, or labels outside of the
    # classes. The last is tested on outputs that are all zero: their loss becomes finite when the
    # field is clipped to the classes. Returns a sentence without its full stop.
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    for name, x in arrays.items():
        if (fault := _not_finite(x) or _changed(x)) is not None:
            return f"The field {name!r} of its batch holds {fault}"
    try:
        return _labels(program, arrays)
    except Exception:  # the user's loss may refuse such outputs; the run's own error matters
        return None


def _not_finite(x: np.ndarray) -> str | None:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    found = [(int(np.isnan(wide).sum()), "NaN"), (int(np.isinf(wide).sum()), "infinite")]
    text = " and ".join(f"{count} {kind}" for count, kind in found if count)
    return f"{text} of {x.size} values" if text else None


def _changed(x: np.ndarray) -> str | None:
    lost = changed_values(x)
    if not lost.size:
        return None
    return (
        f"{lost.size} of {x.size} values that do not fit into {narrow_dtype(x.dtype)}, such as "
        f"{lost[0].item()}"
    )


def _labels(program: Program, batch: dict[str, np.ndarray]) -> str | None:
    experiment, state = program.experiment, program.abstract_state()

    # Outputs of zeros need only shapes, so the model is not run.
    outputs = output_shapes(experiment, state, batch)
    if not hasattr(outputs, "shape") or not outputs.shape:
        return None
    # [batch, classes], or [batch, positions, classes] for a sequence.
    classes = outputs.shape[-1]
    # In a ChunkedLogits, features and kernel become zeros, and so do the logits.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)

    def finite(batch: dict[str, np.ndarray]) -> bool:
        fields = {name: jnp.asarray(x) for name, x in batch.items()}
        given = with_ignored(experiment.loss, fields)
        losses = compute_losses(experiment.loss, zeros, given)
        return bool(jnp.isfinite(losses.counted(given)).all())

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
