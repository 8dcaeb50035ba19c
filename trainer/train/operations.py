"""Finds the operations of a step that took the most time, in what jax's profiler wrote."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

# Their time is that of the operations inside of them, which are listed by themselves.
_CONTAINERS = {"while", "conditional"}
_INSTRUCTION = re.compile(
    r'\s*(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((?:.*op_name="([^"]*)")?'
)
# Parts of a name that say how jax called a function, and not which.
_CALLS = re.compile(
    r"while|body|cond|closed_call|core_call|eval_jaxpr|checkpoint|remat\d?|rematted_computation|scan"
    r"|branch_\d+_fun|custom_(jvp|vjp)_call(_jaxpr)?|shard_map|vmap\(\)|.*<lambda>.*"
    r"|\w+\.\w+"  # a module and its method, before the module by itself
)


class Operation(NamedTuple):
    """An operation of a step.

    Attributes:
        name: the part of the model or optimizer, and jax's name of the operation, such as "forward
            blocks/mlp/up/dot_general".
        share: of the time of all operations.
        seconds: the sum over all of its calls and over all threads or devices.
    """

    name: str
    share: float
    seconds: float


def costliest(folder: Path, hlo: str, count: int = 10) -> list[Operation]:
    """Returns the operations that took the most time, the costliest first.

    Operations that the compiler merged count under the name of the last of them.

    Args:
        folder: into which jax's profiler wrote; its newest profile is read.
        hlo: the text of the compiled program.
        count: the most operations to return.
    """
    names = dict(_instructions(hlo))
    module = re.match(r"HloModule ([\w.\-]+)", hlo)
    file = max(folder.glob("plugins/profile/*/*.xplane.pb"))
    planes = list(ProfileData.from_file(str(file)).planes)
    found = [plane for plane in planes if plane.name.startswith("/device:")]
    lines = [line for plane in found or planes for line in _lines(plane)]
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for instruction, own in _own_seconds(line, module[1] if module else ""):
            kind, name = names.get(instruction, ("", ""))
            if kind not in _CONTAINERS:
                seconds[name or re.sub(r"[.\d]+$", "", instruction)] += own
    total = sum(seconds.values()) or 1.0
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    return [Operation(name, own / total, own) for name, own in ranked]


def _instructions(hlo: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the name of each instruction, with its kind and the readable name."""
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            yield found[1], (found[2], readable(found[3] or ""))


def readable(op_name: str) -> str:
    """Shortens the name that jax gives to an operation.

    Args:
        op_name: the scopes and the operation, separated by slashes.

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


def _lines(plane: Any) -> list[Any]:
    """Returns the lines of a plane that have operations, each once."""
    lines = list(plane.lines)
    # A TPU has other lines beside it, with the same time by module and by step.
    return [line for line in lines if line.name == "XLA Ops"] or [
        line for line in lines if not line.name.startswith(("XLA ", "Steps", "Framework", "Source"))
    ]


def _own_seconds(line: Any, module: str) -> Iterator[tuple[str, float]]:
    """Yields the instructions of a line, with the time of each without those inside of it."""
    events = sorted(_events(line, module), key=lambda each: (each[0], -each[1]))
    open_: list[list[Any]] = []  # end, instruction, own time
    for start, duration, instruction in events:
        while open_ and open_[-1][0] <= start:
            _, name, own = open_.pop()
            yield name, own * 1e-9
        if open_:
            open_[-1][2] -= duration
        open_.append([start + duration, instruction, duration])
    for _, name, own in open_:
        yield name, own * 1e-9


def _events(line: Any, module: str) -> Iterable[tuple[float, float, str]]:
    for event in line.events:
        stats = dict(event.stats)
        instruction = stats.get("hlo_op")
        if instruction is None and line.name == "XLA Ops":
            instruction = event.name.lstrip("%").split(" ")[0]
        elif instruction is None and line.name.startswith("Stream"):  # a kernel in a graph
            instruction = event.name
        if instruction is not None and stats.get("hlo_module", module) == module:
            yield event.start_ns, event.duration_ns, str(instruction)
