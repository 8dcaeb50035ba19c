"""Checks the training batches of a data set, and sends them to the devices."""

import copy
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.data.dtypes import narrow_dtype
from trainer.engine import mesh as meshes
from trainer.engine.contracts import Batch, check_batch, check_values, endless
from trainer.engine.datasets import check_shard
from trainer.engine.experiment import Experiment

_ALIGNMENT = 64  # bytes


class Feed:
    """The training batches of an experiment, for the devices of a mesh."""

    def __init__(self, experiment: Experiment, mesh: Mesh):
        self._experiment, self._mesh = experiment, mesh
        self._shard = meshes.data_shard(mesh)
        check_shard(experiment.data, self._shard)
        self._element_spec = dict(experiment.data.element_spec)  # some compute it at each access
        self._values_checked, self._readers = False, 1
        self._copies: list[Iterator[Batch]] = []
        self._stacked: tuple[list[Batch], dict[str, np.ndarray]] = [], {}
        size, microbatches = experiment.data.batch_size, experiment.microbatches
        if size // microbatches % (parts := meshes.batch_parts(mesh)):
            along = "" if parts == mesh.size else f" along {' and '.join(meshes.batch_axes(mesh))}"
            raise ValueError(
                f"A batch of {size} examples in {microbatches} microbatches does not divide over "
                f"{parts} devices{along}. Choose another batch_size, or a smaller mesh."
            )

    def abstract_batch(self, steps: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns a batch's shapes, with shardings and the dtypes that jax gives it."""
        # For `steps` batches that are stacked, shapes are [steps, batch, ...], without shardings.
        spread = meshes.batch_sharding(self._mesh) if steps is None else None
        stacked = () if steps is None else (steps,)
        return {
            name: jax.ShapeDtypeStruct((*stacked, *x.shape), narrow_dtype(x.dtype), sharding=spread)
            for name, x in self._element_spec.items()
        }

    def of(self, experiment: Experiment) -> "Feed":
        """Returns the feed of an experiment that differs in the seed of the data only."""
        feed = copy.copy(self)
        feed._experiment = experiment
        return feed

    def shared(self, readers: int) -> "Feed":
        """Returns a feed for several readers that advance side by side."""
        # Each of them calls `batches` once, for the same index; a batch is made and stacked once.
        feed = copy.copy(self)
        feed._copies = []
        feed._readers = readers
        return feed

    def batches(self, batch_index: int) -> Iterator[Batch]:
        """Yields this process's shards of the training batches, from an index on, without end."""
        if self._readers == 1:
            return self._read(batch_index)
        if not self._copies:
            self._copies = list(itertools.tee(_Shared(self._read(batch_index)), self._readers))
        return self._copies.pop()

    def batch(self, batch_index: int) -> Batch:
        """Returns this process's shard of a batch; raises ComponentError if the data end."""
        return next(self._read(batch_index))

    def _read(self, batch_index: int) -> Iterator[Batch]:
        return endless(self._experiment.batches(batch_index, self._shard))

    def to_devices(self, batch: Batch) -> dict[str, Any]:
        """Sends this process's shard of a batch to the devices; returns the global batch."""
        # The arrays become read-only.
        self._check(batch)
        return meshes.to_devices(self._mesh, batch)

    def stack(self, batches: Sequence[Batch], steps: int) -> dict[str, np.ndarray]:
        """Stacks at most `steps` batches, on one device, to arrays [steps, batch, ...]."""
        # The arrays become read-only; what lies behind them in the result is undefined.
        before, stacked = self._stacked
        if len(before) == len(batches) and all(map(operator.is_, before, batches)):
            return stacked  # another reader stacked them
        for batch in batches:
            self._check(batch)
        stacked = stack(batches, steps)
        if self._readers > 1:
            self._stacked = list(batches), stacked
        return stacked

    def _check(self, batch: Batch) -> None:
        check_batch(batch, self._element_spec, self._shard.size)
        if not self._values_checked:
            check_values(batch, "train()")
            self._values_checked = True
        meshes.make_read_only(batch)


class _Shared(Iterator[Batch]):
    """The batches of several readers; an error that ends them is raised for each reader."""

    def __init__(self, batches: Iterator[Batch]):
        self._batches = batches
        self._error: Exception | None = None

    def __next__(self) -> Batch:
        if self._error is None:
            try:
                return next(self._batches)
            except Exception as error:
                self._error = error
        raise self._error


def stack(batches: Sequence[Batch], places: int) -> dict[str, np.ndarray]:
    """Stacks batches to arrays [places, batch, ...]; what lies behind them is undefined."""
    # In jax's type: it would convert what is undefined too, and warn if that overflows.
    arrays = {
        name: _empty((places, *x.shape), narrow_dtype(x.dtype)) for name, x in batches[0].items()
    }
    for name, array in arrays.items():
        np.stack([batch[name] for batch in batches], out=array[: len(batches)])
    return arrays


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array whose address lets XLA read it in place."""
    # XLA copies arrays at other addresses, which took 1 ms for 2 MB.
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
