"""Compares the size of a run's state and batch with the memory of its devices."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from optim.paths import flatten

# The limits of cgroups v2 and v1; v1 without a limit has a number larger than any memory.
_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Memory:
    """The memory that what a device holds must fit into."""

    limit: int | None  # bytes; None if they are not known
    devices: int  # the number of devices that share it
    owner: str  # such as "this machine"
    described: str  # the memory that a compiled step's line is about: "of a device"


def memory_of(devices: Sequence[Any]) -> Memory:
    """Returns the memory of devices of this process."""
    count = len(devices)
    if devices[0].platform == "cpu":  # simulated devices share the memory of one machine
        several = f"for each of {count} devices " if count > 1 else ""
        return Memory(host_memory(), count, "this machine", f"{several}on this CPU")
    owner = f"a device ({devices[0].device_kind})"
    return Memory(device_memory(devices[0]), 1, owner, "of a device")


def planned_memory(limit: int | None) -> Memory:
    """Returns the memory of simulated devices: `limit` bytes each, None if not known."""
    return Memory(limit, 1, "a device", "of a device, as a CPU's compiler plans it")


def too_large(state: Any, batch: Any, memory: Memory) -> str | None:
    """Returns an error message if a state and a batch do not fit into memory, else None."""
    # Other memory that a step needs, for gradients and activations, is not counted.
    size = memory.devices * bytes_of(state)
    needed = size + memory.devices * bytes_of(batch)
    if memory.limit is None or needed <= memory.limit:
        return None
    # A parameter and what the state has of it, such as its averages.
    sizes: Counter[str] = Counter()
    for path, _, x in state_leaves(state):
        sizes[path or ""] += memory.devices * bytes_of(x)
    del sizes[""]
    largest = [f"{path} ({in_words(size)})" for path, size in sizes.most_common(3)]
    # Devices that are simulated share the memory of one machine.
    where = " on a device" if memory.owner.startswith("a device") else ""
    has = f"{memory.owner} has {in_words(memory.limit)} of memory"
    return (
        f"The parameters and the state of the optimizer take {in_words(size)}{where}, a "
        f"batch takes {in_words(needed - size)}, and {has}. The largest parameters, each with its "
        f"state, are {', '.join(largest)}. Make the model or the batch smaller, or split them over "
        f"more devices with mesh."
    )


def state_leaves(state: Any) -> Iterator[tuple[str | None, str, Any]]:
    """Yields the leaves of a `State` as (path of the parameter, own path, leaf)."""
    # The parameter is the one whose path, the longest such, is the end of the own path, or None.
    params = flatten(state.params)
    for path, x in flatten(state).items():
        names = path.split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        yield next((tail for tail in tails if tail in params), None), path, x


@dataclass(frozen=True)
class StepMemory:
    """The bytes that a compiled step takes on each device, as XLA reports them."""

    arguments: int  # the state and the batches before the step
    results: int  # what the step returns and does not write into its arguments' memory
    temporary: int  # gradients, activations and copies
    code: int  # the program itself

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.arguments + self.results + self.temporary + self.code

    def describe(self, memory: Memory) -> str:
        """Returns a line with the bytes, and the memory that a device has."""
        parts = {"state and batch": self.arguments, "temporary": self.temporary}
        parts |= {"results": self.results, "code": self.code}
        text = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items())
        text = f"memory {memory.described}: {in_words(self.total)} ({text})"
        if memory.limit is None:
            return text
        if memory.devices * self.total <= memory.limit:
            return f"{text}; {memory.owner} has {in_words(memory.limit)}"
        return (
            f"{text}; {memory.owner} has only {in_words(memory.limit)}. The temporary memory is "
            "smaller with --set microbatches=N, which splits a batch into N parts, with a smaller "
            "batch, or with more devices."
        )


def compiled_memory(compiled: Any) -> StepMemory | None:
    """Returns the memory of a `jax.stages.Compiled`; None if the compiler does not report it."""
    if (found := compiled.memory_analysis()) is None:
        return None
    arguments = found.argument_size_in_bytes
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    temporary = found.temp_size_in_bytes
    (device, *_) = jax.tree.leaves(compiled.input_shardings)[0].device_set
    if device.platform == "tpu":
        # Both are at least what is needed: the size of temporary memory counts arrays that are not
        # in use at the same time (XLA accepted a step with 18.6 GB of it for a TPU of 16.9 GB), and
        # the peak those on the chip, of some MB. On CPUs, the peak has no temporary memory.
        temporary = min(temporary, found.peak_memory_in_bytes - arguments - results)
    return StepMemory(arguments, results, temporary, code=found.generated_code_size_in_bytes)


def memory_asked_for(error: str, held: int) -> StepMemory | None:
    """Reads what a step needs that a TPU's compiler refuses; None if the error does not say it."""
    # `held` are the bytes of state and batch. "G" is 2**30 bytes.
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds|Used ([\d.]+)([KMGT]) of", error)
    if found is None:
        return None
    size, unit = (each for each in found.groups() if each is not None)
    return StepMemory(held, 0, int(float(size) * 1024 ** (1 + "KMGT".index(unit))) - held, 0)


def host_memory() -> int | None:
    """Returns the bytes of memory that this process may use; None if it cannot be found out."""
    found = []
    with suppress(ValueError, OSError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in _GROUPS:
        with suppress(ValueError, OSError):
            found.append(int(file.read_text()))  # a container's limit; "max" means unlimited
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


def bytes_of(tree: Any) -> int:
    """Returns the bytes that a device holds of the arrays in a tree."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def in_words(size: int) -> str:
    """Returns bytes with a decimal unit, such as "1.34 GB"."""
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:,} bytes"
