"""Arranges devices in a mesh, and sends batches to them.

An evaluation batch that does not divide over the devices is padded. The model computes the padded
batch, but the loss and the metrics get the outputs of its own examples only. They are thus equal to
those of the batch on one device, even if they ignore the mask or compare the examples of a batch
with each other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optim.division import Axes, split_as
from trainer.constraints import computed_by
from trainer.data.dtypes import narrow_dtype
from trainer.engine.contracts import Batch
from trainer.messages import UserError, plural

AXES = ("data", "fsdp", "tensor")
"""The axes that a mesh may have."""

BATCH_AXES = ("data", "fsdp")
"""The axes that split a batch."""


def keep_to_cpu(count: int, option: str) -> None:
    """Has jax use the CPU only, as so many devices; raises UserError, naming an option."""
    if jax.config.values.get("jax_num_cpu_devices") == count:
        return  # an earlier call has set both options
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UserError(
            f"{option} needs a process of its own, and in this one jax already uses the devices of"
            " this machine: start python -m trainer explain."
        ) from error
    jax.config.update("jax_platforms", "cpu")


def make_mesh(axes: Mapping[str, int] | None, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges the first devices in a mesh, as many as the axes need; raises ValueError."""
    # `axes` is axis name -> number of devices, such as {"data": -1, "fsdp": 4}, where -1, once, is
    # as many as there are for the others. "data" and "fsdp" split the batch, "fsdp" and "tensor"
    # the parameters. None is one axis "data" with all devices. `devices` may be those of a target,
    # for which programs are only compiled; None is `jax.devices()`.
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes({"data": -1} if axes is None else axes, len(devices), devices[0].platform)
    grid = np.asarray(devices[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes))


def axis_sizes(axes: Mapping[str, int], devices: int, platform: str) -> dict[str, int]:
    """Returns the sizes of a mesh's axes, with a number in the place of -1; raises ValueError.

    Example:
        >>> axis_sizes({"data": -1, "tensor": 2}, 8, "gpu")
        {'data': 4, 'tensor': 2}
    """
    if unknown := sorted(set(axes) - set(AXES)):
        raise ValueError(
            f"The mesh has an axis {unknown[0]!r}. The possible axes are 'data', which splits the "
            f"batch, 'tensor', which splits the parameters, and 'fsdp', which splits both."
        )
    open_axes = [name for name, size in axes.items() if size == -1]
    if not axes or len(open_axes) > 1 or any(size < 1 and size != -1 for size in axes.values()):
        raise ValueError(
            f"The mesh is {dict(axes)}. Give each axis the number of its devices, at least 1, and "
            f"at most one axis -1 for all that the others leave."
        )
    fixed = math.prod(size for size in axes.values() if size != -1)
    there = f"there {'is' if devices == 1 else 'are'} {plural(devices, f'{platform} device')}"
    elsewhere = "explain --devices=N plans it for N devices."
    if not open_axes and fixed > devices:
        raise ValueError(
            f"The mesh {dict(axes)} needs {fixed} devices, but {there}. Make it smaller, or leave "
            f"it out to use all of them; {elsewhere}"
        )
    if open_axes and devices % fixed:
        raise ValueError(
            f"In the mesh {dict(axes)}, {open_axes[0]!r} has as many devices as the other axes "
            f"leave, but {there}, which their product {fixed} does not divide. Choose sizes whose "
            f"product divides {devices}; {elsewhere}"
        )
    return {name: devices // fixed if size == -1 else size for name, size in axes.items()}


def is_simulated(mesh: Mesh) -> bool:
    """Returns whether several devices of a mesh share a CPU."""
    # They deadlock on few cores if many collectives are in flight: the host must not be far ahead.
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


@contextmanager
def ambient(
    mesh: Mesh, split: Mapping[str, Sequence[Axes]] | None = None, divided: bool = True
) -> Iterator[None]:
    """Makes the devices of a mesh known to what is traced meanwhile."""
    # On several devices, models then constrain their activations (`trainer/constraints.py`), and
    # optimizers of matrices divide their work (`optim/division.py`), unless `divided` is false.
    # `split`, where an optimizer is traced, is path name -> the mesh axes that split each dimension
    # of a parameter, from `ShardingRules.axes_of`.
    with computed_by(mesh.devices.flat[0]):
        if mesh.size == 1 or not divided:
            yield
            return
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), split_as(split or {}):
            yield


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


# Batches.


class DataShard(NamedTuple):
    """Which part of every batch the devices of a process hold."""

    rank: int  # the index of the part, from 0; processes of one rank hold the same examples
    size: int  # into how many parts the processes divide a batch


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: "data" and "fsdp" split its first axis."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that split a batch, in its order."""
    return tuple(name for name in mesh.axis_names if name in BATCH_AXES)


def batch_parts(mesh: Mesh | AbstractMesh) -> int:
    """Returns into how many parts the devices of a mesh split a batch."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def data_shard(mesh: Mesh) -> DataShard:
    """Returns which part of a batch this process's devices hold; raises ValueError."""
    # It raises in every process, also for the devices of another one.
    count = batch_parts(mesh)
    # The devices of a target may be those of several processes, of which this is none.
    owners = {device.process_index for device in mesh.devices.flat}
    by_process: dict[int, set[int]] = {i: set() for i in {*range(jax.process_count()), *owners}}
    for device, (rows,) in batch_sharding(mesh).devices_indices_map((count,)).items():
        by_process[device.process_index].add(rows.start or 0)
    size = len(by_process[0])
    for process, parts in by_process.items():
        first = min(parts, default=0)
        if not size or parts != set(range(first, first + size)) or first % size:
            raise ValueError(
                f"The mesh {dict(mesh.shape)} splits a batch into {count} parts, of which the "
                f"devices of process {process} hold {sorted(parts) or 'none'}; those of process 0 "
                f"hold {sorted(by_process[0]) or 'none'}. Every process must hold equally many, "
                f"one after the other: order the axes as 'data', 'fsdp', 'tensor', and use all "
                f"devices."
            )
    return DataShard(min(by_process[jax.process_index()]) // size, count // size)


def make_read_only(batch: Mapping[str, np.ndarray]) -> None:
    """Makes the arrays of a batch read-only, and the arrays that they are views of."""
    # Devices run behind the host and may read a batch from the host's memory late. A data set that
    # reused its buffers would train on another batch than it yielded; writing raises instead.
    for array in batch.values():
        # The flag of a view does not protect the array that it shows.
        while isinstance(array, np.ndarray):
            if array.flags.writeable:  # asking takes a quarter of the time of setting
                array.flags.writeable = False
            array = array.base


def to_devices(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Sends this process's shard of a batch to its devices, and returns the global batch."""
    if mesh.size == 1:
        return dict(batch)  # the compiled step transfers it in half the time of jax.device_put
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    # jax.device_put would need the whole batch in every process.
    return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}


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
