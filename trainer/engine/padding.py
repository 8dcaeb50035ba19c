"""Pads an evaluation batch that does not divide over the devices, and removes the padding again.

The model computes the padded batch, but the loss and the metrics get the outputs of its own
examples only. They are thus equal to those of the batch on one device, even if they ignore the mask
or compare the examples of a batch with each other.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.data.dtypes import narrow_dtype
from trainer.engine.contracts import Batch
from trainer.engine.mesh import batch_parts, data_shard


def pad(mesh: Mesh, batch: Batch) -> Batch:
    """Appends copies of the first example to this process's shard until it divides over devices."""
    if not (missing := -size_of(batch) % (batch_parts(mesh) // data_shard(mesh).size)):
        return batch
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    return {
        name: np.concatenate([x, np.repeat(x[:1], missing, axis=0)]) for name, x in arrays.items()
    }


def padded_shapes(mesh: Mesh, shapes: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a padded batch, from those of the batch of all processes."""
    return resized(shapes, size_of(shapes) + -size_of(shapes) % batch_parts(mesh))


def size_of(batch: Batch) -> int:
    """Returns the number of examples of a batch of arrays or shapes."""
    return next(iter(batch.values())).shape[0]


def resized(batch: Batch, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch with another number of examples, and the dtypes of jax."""
    return {
        name: jax.ShapeDtypeStruct((size, *x.shape[1:]), narrow_dtype(x.dtype))
        for name, x in batch.items()
    }


def without_padding(padded: Any, shapes: Any, shards: int) -> Any:
    """Removes the padding from a batch, or from what a model computed of it."""
    # `padded` has arrays of all processes, and `shapes` those of its leaves without padding. An
    # axis that is shorter there counts examples, or equally many rows of each example. `shards` is
    # the number of shards that the processes padded.

    def cut(x: Any, wanted: Any) -> Any:
        for axis, size in enumerate(wanted.shape):
            before, after = x.shape[:axis], x.shape[axis + 1 :]
            if x.shape[axis] != size:  # each process has padded its shard
                rows = x.reshape(*before, shards, x.shape[axis] // shards, *after)
                rows = jax.lax.slice_in_dim(rows, 0, size // shards, axis=axis + 1)
                x = rows.reshape(*before, size, *after)
        return x

    return jax.tree.map(cut, padded, shapes)
