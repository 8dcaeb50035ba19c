"""Compares the size of a run's state and batch with the memory of its devices."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from optim.paths import flatten

# The limits of cgroups v2 and v1; v1 without a limit has a number larger than any memory.
_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def too_large(state: Any, batch: Any, devices: Sequence[Any]) -> str | None:
    """Returns an error message if a state and a batch do not fit into memory, else None.

    It is None as well if the size of the memory is not known. Other memory that a step needs, for
    gradients and activations, is not counted. `state` and `batch` consist of `jax.ShapeDtypeStruct`
    with shardings; `devices` are those of this process.
    """
    limit, sharing, owner = _room(devices)
    size = sharing * _bytes(state)
    needed = size + sharing * _bytes(batch)
    if limit is None or needed <= limit:
        return None
    sizes = {path: sharing * _bytes(x) for path, x in flatten(state.params).items()}
    largest = [
        f"{path} ({_words(sizes[path])})" for path in sorted(sizes, key=lambda p: -sizes[p])[:3]
    ]
    return (
        f"The parameters and the state of the optimizer take {_words(size)}, a batch takes "
        f"{_words(needed - size)}, and {owner} has {_words(limit)} of memory. The largest "
        f"parameters are {', '.join(largest)}. Make the model or the batch smaller, or split them "
        f"over more devices with mesh."
    )


@dataclass(frozen=True)
class StepMemory:
    """The bytes that a compiled step takes on each device, as XLA reports them.

    Attributes:
        arguments: the state and the batches before the step.
        results: what the step returns and does not write into the memory of its arguments.
        temporary: everything in between: gradients, activations and copies.
        code: the program itself.
    """

    arguments: int
    results: int
    temporary: int
    code: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.arguments + self.results + self.temporary + self.code

    def describe(self, devices: Sequence[Any]) -> str:
        """Returns a line with the bytes, and the memory that one of this process's devices has."""
        limit, sharing, owner = _room(devices)
        parts = {"state and batch": self.arguments, "temporary": self.temporary}
        parts |= {"results": self.results, "code": self.code}
        text = ", ".join(f"{name} {_words(size)}" for name, size in parts.items())
        where = "of a device"
        if devices[0].platform == "cpu":
            several = f"for each of {len(devices)} devices " if len(devices) > 1 else ""
            where = f"{several}on this CPU"
        text = f"memory {where}: {_words(self.total)} ({text})"
        if limit is None:
            return text
        if sharing * self.total <= limit:
            return f"{text}; {owner} has {_words(limit)}"
        return (
            f"{text}; {owner} has only {_words(limit)}. The temporary memory is smaller with "
            "--set microbatches=N, which splits a batch into N parts, with a smaller batch, or "
            "with more devices."
        )


def compiled_memory(compiled: Any) -> StepMemory | None:
    """Returns the memory of a `jax.stages.Compiled`; None if the compiler does not report it."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return StepMemory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )


def host_memory() -> int | None:
    """Returns the bytes of memory that this process may use; None if it cannot be found out."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        pass
    for file in _GROUPS:
        try:
            found.append(int(file.read_text()))  # a container's limit; "max" means unlimited
        except (OSError, ValueError):
            pass
    # os.sysconf returns -1 for what it does not know.
    return min((size for size in found if size > 0), default=None)


def device_memory(device: Any) -> int | None:
    """Returns the bytes of memory of a device; None if the device does not report them."""
    return stats_of(device).get("bytes_limit")


def stats_of(device: Any) -> dict[str, int]:
    """Returns the `memory_stats` of a device of this process; {} if it does not report them."""
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}


def _room(devices: Sequence[Any]) -> tuple[int | None, int, str]:
    """Returns the bytes of a memory, the number of devices that share it, and whose it is."""
    if devices[0].platform == "cpu":  # simulated devices share the memory of one machine
        return host_memory(), len(devices), "this machine"
    return device_memory(devices[0]), 1, f"a device ({devices[0].device_kind})"


def _bytes(tree: Any) -> int:
    """Returns the bytes of a device's shards of the arrays in a tree."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _words(size: int) -> str:
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:,} bytes"
