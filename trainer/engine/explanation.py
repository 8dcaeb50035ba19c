"""All that `explain` finds out about a config; another process can read it from a file."""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.config import Config
from trainer.engine.collectives import Traffic, find_traffic
from trainer.engine.holdings import Holdings, find_holdings
from trainer.engine.memory import Memory, StepMemory, compiled_memory, memory_asked_for, memory_of
from trainer.engine.plan import Plan, make_plan
from trainer.engine.program import Program
from trainer.messages import UserError, plural
from trainer.writers.json_files import as_dataclass


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step that was compiled from shapes, and not run."""

    steps: int  # how many a call of the program computes
    platform: str  # of the compiler, such as "cpu"
    seconds: float  # of compiling
    memory: StepMemory | None  # on each device; None if the compiler does not report it
    traffic: Sequence[Traffic]  # by kind and by axes of the mesh
    refused: bool = False  # by the compiler, because the step needs more memory than a device has


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a config means, on which devices."""

    plan: Plan
    holdings: Holdings
    memory: Memory  # what the holdings must fit into
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
    memory: Memory  # of each
    devices: Sequence[Any] | None = None  # of a target; None if jax simulates them


def explain(program: Program, config: Config, elsewhere: Elsewhere | None = None) -> Explanation:
    """Explains a program, which is neither compiled nor run; raises as `make_plan`."""
    # With `elsewhere` None, for the devices of this machine.
    if elsewhere is None:
        plan, memory = make_plan(program, config), memory_of(list(program.mesh.local_devices))
        return Explanation(plan, find_holdings(program), memory, None)
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
        memory = compiled_memory(program.compiled)
        text = program.compiled.as_text() if mesh.size > 1 else ""
    except jax.errors.JaxRuntimeError as error:
        if explanation.elsewhere is None:
            raise
        if not (refused := "RESOURCE_EXHAUSTED" in str(error)):
            said = str(error).splitlines()[0][:300]
            raise UserError(f"The compiler for {explanation.plan.devices} fails: {said}") from error
        memory = memory_asked_for(str(error), sum(explanation.holdings.totals.values()))
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
