"""Profiles some steps of a run, for --profile, and names the operations that took the most time."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from trainer.engine.block import Computed
from trainer.engine.contracts import Batch
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import UserError

_WARM_UP = 10  # steps of this start that are left out if only a number of steps is asked for

Advance = Callable[[State, Sequence[Batch]], Computed]


class Profile:
    """Writes a profile of jax for the blocks that contain some steps, and prints a table."""

    # It waits for the steps before the profile; what is computed does not change. `steps` is the
    # first step, counted from 1, or None for the one after the warm-up; and the number of steps.

    def __init__(self, steps: tuple[int | None, int], log: Callable[[str], None]):
        self._first, self._count = steps
        self._log = log
        self._folder: Path
        self._running = False
        self._begun = 0  # the first step in the profile
        self._profiled = 0  # how many steps it has; after a rollback, repeated ones count twice

    def choose_steps(self, before: int, end: int) -> None:
        """Chooses the steps of the profile; raises UserError if the run will not make them."""
        # The run has made `before` steps, and ends with the step `end`.
        first = before + _WARM_UP + 1 if self._first is None else self._first
        last = first + self._count - 1
        if not before < first <= last <= end:
            asked = f"--profile asks for the steps {first:,} to {last:,}"
            if self._first is None:
                asked += f", {self._count:,} after the first {_WARM_UP}"
            if before >= end:
                raise UserError(f"{asked}, but the run has made its {end:,} steps. Leave it out.")
            raise UserError(
                f"{asked}, but the run makes the steps {before + 1:,} to {end:,}. Name some of "
                f"these, as in --profile={before + 1}-{min(end, before + 10)}."
            )
        self._first = first

    def profiled(
        self, program: Program, step: int, folder: Path, report_activity: Callable[[str], None]
    ) -> Advance:
        """Returns `Program.advance` with a profile of the chosen steps, written to a new folder."""
        # `step` steps are finished before the first block. `report_activity`, as `Watchdog.other`,
        # is told what takes long here.
        done = step
        self._folder = folder
        assert self._first is not None, "choose() comes first"
        first, last = self._first, self._first + self._count - 1

        def advance(state: State, batches: Sequence[Batch]) -> Computed:
            nonlocal done
            before, done = done, done + len(batches)
            if not self._running and before < first <= done:
                jax.block_until_ready(state)  # so that earlier steps are not in the profile
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # it would slow the host down, and fill the file
                jax.profiler.start_trace(str(folder), profiler_options=options)
                self._running, self._begun, self._profiled = True, before + 1, 0
            computed = program.advance(state, batches)
            if self._running:
                self._begun = min(self._begun, before + 1)
                self._profiled += len(batches)
            if self._running and done >= last:
                jax.block_until_ready(computed)
                report_activity(f"the profile of the steps to {done}")
                self._running = False
                jax.profiler.stop_trace()
                self._log(
                    f"The steps {self._begun:,} to {done:,} are profiled in {folder}. The "
                    "costliest operations, by their share of the time of all:"
                )
                for operation in costliest(folder, program.compiled.as_text() or ""):
                    time = 1e3 * operation.seconds / self._profiled
                    self._log(f"{operation.share:7.1%} {time:10.3f} ms a step  {operation.name}")
            return computed

        return advance

    def close(self) -> None:
        """Ends a profile whose last step was not reached."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log(
                f"The run ended before the profile in {self._folder}, which has the steps until "
                "then."
            )


# Left out: their time is that of the operations inside of them, which are listed themselves.
_CONTAINERS = {"while", "conditional"}
_INSTRUCTION = re.compile(
    r'\s*(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((?:.*op_name="([^"]*)")?'
)
# Parts of a name that tell how jax called a function, and not which function.
_CALLS = re.compile(
    r"while|body|cond|closed_call|core_call|eval_jaxpr|checkpoint|remat\d?|rematted_computation|scan"
    r"|branch_\d+_fun|custom_(jvp|vjp)_call(_jaxpr)?|shard_map|vmap\(\)|.*<lambda>.*"
    r"|\w+\.\w+"  # a module and its method, before the module by itself
)


class Operation(NamedTuple):
    """An operation of a step."""

    # part of the model or optimizer and jax's name, such as "forward blocks/mlp/up/dot_general"
    name: str
    share: float  # of the time of all operations
    seconds: float  # the sum over all of its calls and over all threads or devices


def costliest(folder: Path, hlo: str, count: int = 10) -> list[Operation]:
    """Returns at most `count` operations that took the most time, the costliest first."""
    # The newest profile in the folder of jax's profiler is read; `hlo` is the text of the compiled
    # program. Operations that the compiler merged count under the name of the last of them.
    matches = filter(None, map(_INSTRUCTION.match, hlo.splitlines()))
    names = {found[1]: (found[2], readable(found[3] or "")) for found in matches}
    module = re.match(r"HloModule ([\w.\-]+)", hlo)
    file = max(folder.glob("plugins/profile/*/*.xplane.pb"))
    planes = list(ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    seconds: defaultdict[str, float] = defaultdict(float)
    for plane in devices or planes:
        lines = list(plane.lines)
        # A TPU has further lines, which show the same time by module and by step.
        others = ("XLA ", "Steps", "Framework", "Source")
        of_operations = [line for line in lines if line.name == "XLA Ops"]
        for line in of_operations or [x for x in lines if not x.name.startswith(others)]:
            for instruction, own in _own_seconds(line, module[1] if module else ""):
                kind, name = names.get(instruction, ("", ""))
                if kind not in _CONTAINERS:
                    seconds[name or re.sub(r"[.\d]+$", "", instruction)] += own
    total = sum(seconds.values()) or 1.0
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    return [Operation(name, own / total, own) for name, own in ranked]


def readable(op_name: str) -> str:
    """Shortens jax's name of an operation, which has its scopes before it, joined by slashes.

    Example:
        >>> readable("jit(step)/transpose(jvp(Vit))/while/body/blocks/mlp/up/dot_general")
        'backward blocks/mlp/up/dot_general'
    """
    parts = op_name.split("/")
    way = ""
    if "rematted_computation" in parts:
        way = "recomputed "
    elif any(part.startswith("transpose(") for part in parts):
        way = "backward "
    elif any(part.startswith("jvp(") for part in parts):
        way = "forward "
    named: list[str] = []
    for part in parts[parts[0].startswith("jit(") :]:
        if _CALLS.fullmatch(part) or part.startswith(("jvp(", "transpose(")):
            continue
        part = re.sub(r"^jit\((.*)\)$", r"\1", part)
        if part not in named[-1:]:
            named.append(part)
    return way + "/".join(named) if named else ""


def _own_seconds(line: Any, module: str) -> Iterator[tuple[str, float]]:
    """Yields the instructions of a line, with the time of each without those inside of it."""
    events: list[tuple[float, float, str]] = []  # start, duration, instruction
    for event in line.events:
        stats = dict(event.stats)
        if (instruction := stats.get("hlo_op")) is None and line.name == "XLA Ops":
            instruction = event.name.lstrip("%").split(" ")[0]
        elif instruction is None and line.name.startswith("Stream"):  # a kernel in a graph
            instruction = event.name
        if instruction is not None and stats.get("hlo_module", module) == module:
            events.append((event.start_ns, event.duration_ns, str(instruction)))
    open_: list[list[Any]] = []  # end, instruction, own time
    for start, duration, instruction in sorted(events, key=lambda each: (each[0], -each[1])):
        while open_ and open_[-1][0] <= start:
            _, name, own = open_.pop()
            yield name, own * 1e-9
        if open_:
            open_[-1][2] -= duration
        open_.append([start + duration, instruction, duration])
    for _, name, own in open_:
        yield name, own * 1e-9
