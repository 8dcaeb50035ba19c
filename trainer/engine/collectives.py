"""Reads from a compiled program what the devices of a mesh send each other.

The program is that of XLA's SPMD partitioner, in the text of `jax.stages.Compiled.as_text`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
"""The names of the collectives."""

_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
_CONSTANT = re.compile(r"%?([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
_BOUND = re.compile(r"ROOT .* compare\([^)]*?%?([\w.-]+)\), direction=LT")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z\d]*)\[([\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
    r"\{([^}]*)\}"
)


class Collective(NamedTuple):
    """A collective of a compiled program."""

    kind: str  # one of `KINDS`
    size: int  # bytes of its result on a device
    # how often a call executes it, with both branches of a condition; at least once where the
    # compiler does not know how often a loop runs
    times: int
    # the devices that exchange arrays, [groups, devices], by their index in the mesh; of a
    # collective-permute the pairs of a sender and a receiver; None if not known
    groups: Sequence[Sequence[int]] | None


class Traffic(NamedTuple):
    """The collectives of one kind over the same axes."""

    kind: str  # one of `KINDS`
    axes: str  # such as "data, fsdp"; "?" if the axes could not be told
    count: int  # how many a call of the program executes
    size: int  # bytes of their results on a device, summed over all executed


def find_collectives(text: str) -> list[Collective]:
    """Finds the collectives in a program's `jax.stages.Compiled.as_text`."""
    return [
        Collective(found[2], _bytes(_results(*found.groups())), times, _groups(line))
        for line, times in executed_lines(text)
        if (found := _COLLECTIVE.search(line)) and times
    ]


def executed_lines(text: str) -> Iterator[tuple[str, int]]:
    """Yields each instruction of a compiled program, and how often a call executes it."""
    # A loop of unknown length counts once, and of a condition both branches.
    calls: dict[str, list[tuple[str, int]]] = {}  # computation -> those that call it
    lengths = _lengths(text)
    for name, line in _computations(text):
        inner = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            inner += re.findall(r"[\w.-]+", branches)
        condition = _CONDITION.search(line)
        trips = lengths.get(condition[1], 1) if condition else 1
        trips = int(found[1]) if (found := _TRIPS.search(line)) else trips
        for each in inner:
            calls.setdefault(each, []).append((name, trips))

    @cache
    def times(name: str) -> int:
        return sum(trips * times(caller) for caller, trips in calls.get(name, ())) if name else 1

    return ((line, times(name)) for name, line in _computations(text))


def _lengths(text: str) -> dict[str, int]:
    """Returns how often loops run, by their condition, that compare a number with a constant."""
    # A TPU's compiler writes no known_trip_count. jax counts from 0 in `scan` and `fori_loop`.
    constants: dict[tuple[str, str], int] = {}
    found = {}
    for name, line in _computations(text):
        if constant := _CONSTANT.search(line):
            constants[name, constant[1]] = int(constant[2])
        elif (bound := _BOUND.search(line)) and (name, bound[1]) in constants:
            found[name] = constants[name, bound[1]]
    return found


def axes_of_devices(collective: Collective, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which devices of a group differ; None if groups are unknown."""
    if collective.groups is None:
        return None
    shape = tuple(mesh.values())
    differ = np.zeros(len(shape), bool)
    for group in collective.groups:
        positions = np.stack(np.unravel_index(np.asarray(group), shape))  # [axes, devices]
        differ |= (positions != positions[:, :1]).any(axis=1)
    return tuple(name for name, each in zip(mesh, differ, strict=True) if each)


def find_traffic(text: str, mesh: Mapping[str, int]) -> list[Traffic]:
    """Sums a compiled program's collectives by kind and axes, those of most bytes first."""
    # Collectives of one device with itself are left out.
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for each in find_collectives(text):
        if (axes := axes_of_devices(each, mesh)) == ():
            continue
        key = each.kind, "?" if axes is None else ", ".join(axes)
        counts[key] += each.times
        sizes[key] += each.times * each.size
    return [Traffic(*key, counts[key], size) for key, size in sizes.most_common()]


def _computations(text: str) -> Iterator[tuple[str, str]]:
    """Yields each line with the name of its computation; "" is that where a program begins."""
    name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = "" if header[1] else header[2]
        elif line.startswith("  "):
            yield name, line


def _results(result: str, kind: str, started: str | None) -> str:
    """Returns what a collective computes, without the operands that one which is started shows."""
    if not started or kind == "all-reduce":
        return result
    depth, parts = 0, [""]  # of a tuple (operands, results, ...)
    for sign in result[1:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts[1]


def _bytes(result: str) -> int:
    """Returns the bytes of a result such as "(f32[8,4]{1,0}, bf16[])"."""
    total = 0
    for dtype, shape in _ARRAY.findall(result):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        total += math.prod(_numbers(shape)) * bits // 8
    return total


def _groups(line: str) -> Sequence[Sequence[int]] | None:
    if (found := _PAIRS.search(line)) or (found := _LISTED.search(line)):
        return [_numbers(each) for each in re.findall(r"[\d,]+\d|\d", found[1].replace("},{", " "))]
    if found := _IOTA.search(line):
        return _permuted(found[2], found[3]).reshape(_numbers(found[1])).tolist()
    if found := _MESH.search(line):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        shape = [int(size) for size in sizes.values()]
        devices = np.arange(math.prod(shape)) if not found[2] else _permuted(found[2], found[3])
        within = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", found[4])]
        others = [i for i in range(len(shape)) if i not in within]
        grid = devices.reshape(shape).transpose(*others, *within)
        return grid.reshape(-1, math.prod(shape[i] for i in within)).tolist()
    return None


def _permuted(shape: str, order: str | None) -> np.ndarray:
    """Returns the devices of XLA's notation [shape]T(order), flat."""
    sizes = _numbers(shape)
    axes = _numbers(order) if order else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).ravel()


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]
