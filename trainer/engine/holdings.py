"""Counts what each device of a mesh holds of the state and a batch, from shapes and shardings."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from optim.dtypes import widen
from optim.paths import flatten
from trainer.engine.memory import state_leaves
from trainer.engine.program import Program

ROLES = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "ema": "average of the parameters",
    "model_state": "model state",
}
"""Field of `step.State` -> what it holds; the other fields have a few bytes."""

GRADIENTS, BATCH, OTHER = "gradients", "one batch", "counters and inputs"


class Held(NamedTuple):
    """What a device holds of an array."""

    path: str
    shape: tuple[int, ...]  # of the whole array
    dtype: str
    # for each dimension, the names of the mesh's axes that split it
    axes: tuple[tuple[str, ...], ...]
    shard: tuple[int, ...]  # the shape of a device's part
    size: int  # the bytes of that part

    @property
    def split(self) -> str:
        """The axes in the grammar of a config's sharding, such as "- data+fsdp"; "-" for none."""
        return " ".join("+".join(names) or "-" for names in self.axes) if any(self.axes) else "-"


class HeldParameter(NamedTuple):
    """What a device holds of a parameter and of all that belongs to it."""

    held: Held
    gradient: int  # bytes; 0 if it is frozen
    state: int  # bytes of the optimizer's state and of the averages of the parameter


class Holdings(NamedTuple):
    """What each device of a mesh holds."""

    mesh: Mapping[str, int]  # axis -> number of devices
    parameters: Sequence[HeldParameter]  # in the order of the plan
    # the leaves of the state that have another shape than the parameter that they belong to, are
    # split in another way, or belong to none; without vectors that no axis splits
    apart: Sequence[Held]
    batch: Sequence[Held]  # the fields of a training batch
    # what it is -> bytes of a device, in the order in which they are shown
    totals: Mapping[str, int]
    gradient_dtypes: str  # such as "float32"

    @property
    def mesh_text(self) -> str:
        """The mesh in words: "data 4 x fsdp 8"."""
        return " x ".join(f"{name} {size}" for name, size in self.mesh.items())


def find_holdings(program: Program) -> Holdings:
    """Finds what each device of a program's mesh holds; nothing is computed or compiled."""
    # Gradients are counted as their parameters are split. With several microbatches they are summed
    # in at least float32, and otherwise have the dtype of their parameter.
    state, batch = program.abstract_state(), program.feed.abstract_batch()
    params = {path: held(path, x) for path, x in flatten(state.params).items()}
    totals = Counter(dict.fromkeys((*ROLES.values(), GRADIENTS, BATCH, OTHER), 0))
    of_parameter: Counter[str | None] = Counter()
    apart = []
    for owner, path, x in state_leaves(state):
        leaf, field = held(path, x), path.split("/")[0]
        totals[ROLES.get(field, OTHER)] += leaf.size
        if field == "params":
            continue
        of_parameter[owner] += leaf.size
        vector = len(leaf.shape) < 2 and not any(leaf.axes)
        if field in ROLES and not vector and not _follows(leaf, params.get(owner or "")):
            apart.append(leaf)
    gradients = dict(program.experiment.optimizer.trainable(state.params))
    if program.experiment.microbatches > 1:
        gradients = jax.eval_shape(widen, gradients)
    sizes = {p: math.prod(params[p].shard) * x.dtype.itemsize for p, x in gradients.items()}
    totals[GRADIENTS] = sum(sizes.values())
    fields = [held(name, x) for name, x in batch.items()]
    totals[BATCH] = sum(each.size for each in fields)
    return Holdings(
        mesh=dict(program.mesh.shape),
        parameters=[
            HeldParameter(one, sizes.get(path, 0), of_parameter[path])
            for path, one in params.items()
        ],
        apart=apart,
        batch=fields,
        totals={name: size for name, size in totals.items() if size},
        gradient_dtypes=", ".join(sorted({x.dtype.name for x in gradients.values()})),
    )


def held(path: str, x: Any) -> Held:
    """Returns what a device holds of a `jax.ShapeDtypeStruct` with a sharding."""
    spec = (*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec)))
    axes = tuple((each,) if isinstance(each, str) else tuple(each or ()) for each in spec)
    shard = x.sharding.shard_shape(x.shape)
    size = math.prod(shard) * x.dtype.itemsize
    return Held(path, tuple(x.shape), x.dtype.name, axes, shard, size)


def _follows(leaf: Held, owner: Held | None) -> bool:
    """Returns whether a leaf is split as a parameter, with more dimensions before its own."""
    if owner is None:
        return False
    more = len(leaf.shape) - len(owner.shape)
    return leaf.shape[more:] == owner.shape and leaf.axes == ((),) * more + owner.axes
