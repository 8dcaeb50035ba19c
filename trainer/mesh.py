"""Lays the devices out, and says how the state and the batches are spread over them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optim.paths import flatten, path_name


def make_mesh(axes: Mapping[str, int] | None) -> Mesh:
    """Lays the devices out.

    Args:
        axes: axis name -> number of devices, such as {"data": 2, "fsdp": 4}. Every axis splits the
            batch; the axis "fsdp" also splits the parameters. None puts every device on one axis
            "data".

    Returns:
        A mesh over the first devices, as many as the axes need.

    Raises:
        ValueError: an unknown axis, or more devices asked for than there are.
    """
    devices = jax.devices()
    axes = {"data": len(devices)} if axes is None else dict(axes)
    unknown = sorted(set(axes) - {"data", "fsdp"})
    if unknown:
        raise ValueError(
            f"The mesh has an axis {unknown[0]!r}; the axes there are 'data', which splits the "
            f"batch, and 'fsdp', which splits the parameters as well."
        )
    if any(size < 1 for size in axes.values()):
        raise ValueError(f"The mesh {axes} has an axis without devices; give each at least 1.")
    size = math.prod(axes.values())
    if size > len(devices):
        raise ValueError(
            f"The mesh {axes} needs {size} devices; of {devices[0].platform} devices there are "
            f"{len(devices)}. Make the mesh smaller, or leave it out to use every device."
        )
    grid = np.asarray(devices[:size]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Splits the first axis of every array of a batch over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """Splits each parameter over the axis "fsdp", along its longest axis that divides evenly.

    Args:
        mesh: what `make_mesh` made.
        params: a pytree of anything with a shape.

    Returns:
        A tree like `params` of shardings; replicated without an axis "fsdp", and where nothing
        divides.
    """
    parts = mesh.shape.get("fsdp", 1)

    def spread(x: Any) -> NamedSharding:
        fitting = [i for i, n in enumerate(x.shape) if n % parts == 0 and n >= parts]
        if parts == 1 or not fitting:
            return replicated(mesh)
        longest = max(fitting, key=lambda i: x.shape[i])
        names = [None] * len(x.shape)
        return NamedSharding(mesh, PartitionSpec(*names[:longest], "fsdp", *names[longest + 1 :]))

    return jax.tree.map(spread, params)


def state_shardings(mesh: Mesh, state: Any, params: Any) -> Any:
    """Spreads a state: what is shaped like a parameter goes where the parameter goes.

    A leaf belongs to the parameter whose path name is the longest that ends its own, and whose
    shape it
    has: `opt_state/groups/rest/1/mu/head/kernel` is spread like `head/kernel`.

    Args:
        mesh: what `make_mesh` made.
        state: a pytree of anything with a shape, such as the whole `State`.
        params: the parameters' shapes.

    Returns:
        A tree like `state` of shardings; what belongs to no parameter is replicated.
    """
    shapes = flatten(params)
    spread = flatten(param_shardings(mesh, params))

    def place(path: Any, x: Any) -> NamedSharding:
        parts = path_name(path).split("/")
        tails = ("/".join(parts[i:]) for i in range(len(parts)))
        for tail in tails:
            if tail in shapes and shapes[tail].shape == x.shape:
                return spread[tail]
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def hold(batch: Mapping[str, np.ndarray]) -> None:
    """Makes a batch read-only, with the arrays that it is a view of.

    Steps run behind the host and read a batch where it is: a data set that fills the same array
    again would train on another batch than it gave. Now it raises.
    """
    for array in batch.values():
        while isinstance(array, np.ndarray):
            array.flags.writeable = False
            array = array.base


def put_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Sends this process's part of a batch to its devices.

    Args:
        mesh: what `make_mesh` made.
        batch: name -> array; the first axis is this process's share of the batch.

    Returns:
        The global batch, spread over all devices; as it is where there is one device.
    """
    if mesh.size == 1:
        return dict(batch)  # the compiled step sends it, in half the time of a device_put
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}
