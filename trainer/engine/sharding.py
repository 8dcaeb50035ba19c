"""Arranges devices in a mesh, and shards the state and the batches over it."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optim.paths import flatten, path_name


def make_mesh(axes: Mapping[str, int] | None) -> Mesh:
    """Arranges the first devices in a mesh, as many as the axes need.

    `axes` are axis name -> number of devices, such as {"data": 2, "fsdp": 4}. Every axis splits the
    batch; the axis "fsdp" also splits the parameters. None is one axis "data" with all devices.
    Raises ValueError if an axis is unknown or has no devices, or if there are too few devices.
    """
    devices = jax.devices()
    axes = {"data": len(devices)} if axes is None else dict(axes)
    unknown = sorted(set(axes) - {"data", "fsdp"})
    if unknown:
        raise ValueError(
            f"The mesh has an axis {unknown[0]!r}. The possible axes are 'data', which splits the "
            f"batch, and 'fsdp', which splits the parameters as well."
        )
    if any(size < 1 for size in axes.values()):
        raise ValueError(f"The mesh {axes} has an axis without devices; give each at least 1.")
    size = math.prod(axes.values())
    if size > len(devices):
        raise ValueError(
            f"The mesh {axes} needs {size} devices, but there are {len(devices)} "
            f"{devices[0].platform} devices. Make it smaller, or leave it out to use all of them."
        )
    grid = np.asarray(devices[:size]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def is_simulated(mesh: Mesh) -> bool:
    """Returns whether several devices of a mesh share a CPU.

    They deadlock on few cores if many collectives are in flight, so that the host must not be far
    ahead.
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: the first axis is split over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """Returns a tree of shardings that split each parameter over the mesh axis "fsdp".

    A parameter is split along its longest axis that the devices divide evenly. It is replicated if
    there is no such axis, or no mesh axis "fsdp".
    """
    shards = mesh.shape.get("fsdp", 1)

    def sharding_of(x: Any) -> NamedSharding:
        # An axis of length 0 divides evenly, too, but has nothing to split.
        fitting = [i for i, n in enumerate(x.shape) if n % shards == 0 and n >= shards]
        if shards == 1 or not fitting:
            return replicated(mesh)
        longest = max(fitting, key=lambda i: x.shape[i])
        names = [None] * len(x.shape)
        return NamedSharding(mesh, PartitionSpec(*names[:longest], "fsdp", *names[longest + 1 :]))

    return jax.tree.map(sharding_of, params)


def state_shardings(mesh: Mesh, state: Any, params: Any) -> Any:
    """Returns a tree of shardings that split a state as the parameters that its leaves belong to.

    A leaf belongs to the parameter whose path is the end of the leaf's path, the longest such, and
    whose shape is the end of its shape: `opt_state/groups/rest/1/mu/head/kernel` is split as
    `head/kernel` is. Further axes before those of the parameter are not split: they count the
    trials of a stacked state, or the past steps that L-BFGS keeps. Leaves that belong to no
    parameter are replicated.
    """
    shapes = flatten(params)
    by_path = flatten(param_shardings(mesh, params))

    def place(path: Any, x: Any) -> NamedSharding:
        names = path_name(path).split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        for tail in tails:
            if tail not in shapes:
                continue
            # The number of axes before those of the parameter.
            more = len(x.shape) - len(shapes[tail].shape)
            if more >= 0 and x.shape[more:] == shapes[tail].shape:
                return NamedSharding(mesh, PartitionSpec(*[None] * more, *by_path[tail].spec))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def make_read_only(batch: Mapping[str, np.ndarray]) -> None:
    """Makes the arrays of a batch read-only, and the arrays that they are views of.

    Devices run behind the host and may read a batch from the host's memory late. A data set that
    reused its buffers would then train on another batch than it yielded; writing to a read-only
    array raises instead.
    """
    for array in batch.values():
        # The flag of a view does not protect the array that it shows.
        while isinstance(array, np.ndarray):
            if array.flags.writeable:  # asking takes a quarter of the time of setting
                array.flags.writeable = False
            array = array.base


def to_devices(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Sends this process's shard of a batch to its devices, and returns the global batch.

    On a mesh of one device, the batch is returned unchanged.
    """
    if mesh.size == 1:
        return dict(batch)  # the compiled step transfers it in half the time of jax.device_put
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    # jax.device_put would need the whole batch in every process.
    return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}
