"""Shards the parameters and the state of a run over a mesh."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optim.paths import flatten, path_name
from trainer.engine.mesh import replicated


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
