"""All that `explain` finds out about a config; another process can read it from a file.

What each device of a mesh holds of the state and a batch is counted from shapes and shardings.
"""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optim.dtypes import widen
from optim.paths import flatten
from trainer.config import Config
from trainer.engine import memory as memories
from trainer.engine.collectives import Traffic, find_traffic
from trainer.engine.plan import Plan, make_plan
from trainer.engine.program import Program
from trainer.messages import UserError, plural
from trainer.writers.json_files import as_dataclass

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
    for owner, path, x in memories.state_leaves(state):
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


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step that was compiled from shapes, and not run."""

    steps: int  # how many a call of the program computes
    platform: str  # of the compiler, such as "cpu"
    seconds: float  # of compiling
    memory: memories.StepMemory | None  # on each device; None if the compiler does not report it
    traffic: Sequence[Traffic]  # by kind and by axes of the mesh
    refused: bool = False  # by the compiler, because the step needs more memory than a device has


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a config means, on which devices."""

    plan: Plan
    holdings: Holdings
    memory: memories.Memory  # what the holdings must fit into
    elsewhere: int | None  # the number of devices, if not here; None for those of this machine
    compiled: Compiled | None = None  # None if it was not asked for

    @property
    def needed(self) -> int:
        """The bytes that a device needs: for the compiled step, or else for `holdings`."""
        if self.compiled is not None and self.compiled.memory is not None:
            return self.compiled.memory.total
        return sum(self.holdings.totals.values())

    @property
    def fits(self) -> bool | None:
        """Whether `needed` fits into the memory; None if its size is not known."""
        if self.compiled is not None and self.compiled.refused:
            return False
        if self.memory.limit is None:
            return None
        return self.memory.devices * self.needed <= self.memory.limit


class Elsewhere(NamedTuple):
    """The devices of a run that are not here."""

    count: int
    name: str  # of each, such as "simulated device"
    memory: memories.Memory  # of each
    devices: Sequence[Any] | None = None  # of a target; None if jax simulates them


def explain(program: Program, config: Config, elsewhere: Elsewhere | None = None) -> Explanation:
    """Explains a program, which is neither compiled nor run; raises as `make_plan`."""
    # With `elsewhere` None, for the devices of this machine.
    if elsewhere is None:
        memory = memories.memory_of(list(program.mesh.local_devices))
        return Explanation(make_plan(program, config), find_holdings(program), memory, None)
    plan = make_plan(program, config, elsewhere.memory)
    plan = dataclasses.replace(plan, devices=plural(program.mesh.size, elsewhere.name))
    return Explanation(plan, find_holdings(program), elsewhere.memory, elsewhere.count)


def with_compiled(explanation: Explanation, program: Program) -> Explanation:
    """Compiles the step of an explained program from shapes, without computing parameters."""
    rule, mesh = program.block_rule, program.mesh
    began = time.perf_counter()
    refused, text = False, ""
    try:
        program.compile(program.abstract_state())
        memory = memories.compiled_memory(program.compiled)
        text = program.compiled.as_text() if mesh.size > 1 else ""
    except jax.errors.JaxRuntimeError as error:
        if explanation.elsewhere is None:
            raise
        if not (refused := "RESOURCE_EXHAUSTED" in str(error)):
            said = str(error).splitlines()[0][:300]
            raise UserError(f"The compiler for {explanation.plan.devices} fails: {said}") from error
        memory = memories.memory_asked_for(str(error), sum(explanation.holdings.totals.values()))
    compiled = Compiled(
        steps=rule.steps if rule.form == "device_loop" else 1,
        platform=mesh.devices.flat[0].platform,
        seconds=time.perf_counter() - began,
        memory=memory,
        traffic=find_traffic(text, mesh.shape) if text else (),
        refused=refused,
    )
    return dataclasses.replace(explanation, compiled=compiled)


def to_json(explanation: Explanation) -> str:
    """Returns an explanation as text, from which `from_json` makes it again."""
    return json.dumps(dataclasses.asdict(explanation), default=np.ndarray.tolist)


def from_json(text: str) -> Explanation:
    """Returns the explanation of a text of `to_json`."""
    found = as_dataclass(json.loads(text), Explanation)
    schedules = {
        name: (np.asarray(steps), np.asarray(rates))
        for name, (steps, rates) in found.plan.schedules.items()
    }
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, schedules=schedules))
