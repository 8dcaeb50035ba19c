"""Inspects checkpoints without a program: ls, check, diff, and parameters for a warm start.

The functions take a workdir, a checkpoints/ directory or its damaged/ directory, and change nothing
on disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optim.paths import flatten
from optim.patterns import fullmatch
from trainer.checkpoint import integrity
from trainer.checkpoint.integrity import CheckpointError, CorruptCheckpoint
from trainer.checkpoint.reading import mismatches, read_arrays, read_manifest, step_directories


class Info(NamedTuple):
    """One line of `checkpoint ls`."""

    step: int
    metric: float | None  # as it was saved; NaN stays NaN
    leaves: int
    nbytes: int  # of the arrays, not of the files
    saved: float  # seconds since the epoch, from the file system
    problem: str | None  # why its manifest cannot be read; only check() reads the arrays


def ls(directory: str | os.PathLike[str]) -> list[Info]:
    """Lists the checkpoints of a run, oldest first, from their manifests alone."""
    return [_info(step, path) for step, path in _steps(directory).items()]


def _info(step: int, path: Path) -> Info:
    saved = path.stat().st_mtime
    try:
        manifest = read_manifest(path)
    except CorruptCheckpoint as e:
        return Info(step, None, 0, 0, saved, str(e))
    metric = manifest["metric"]
    nbytes = sum(
        int(np.prod(entry["stored_shape"])) * integrity.dtype(entry["stored_dtype"]).itemsize
        for entry in manifest["leaves"].values()
    )
    value = None if metric is None else float(metric)
    return Info(step, value, len(manifest["leaves"]), nbytes, saved, None)


def check(directory: str | os.PathLike[str], step: int | None = None) -> dict[int, list[str]]:
    """Reads every leaf of one checkpoint, or of all, and returns the problems of each by step."""
    return {number: _problems(path) for number, path in _steps(directory, step).items()}


def _problems(path: Path) -> list[str]:
    try:
        read_arrays(path, read_manifest(path))
    except CorruptCheckpoint as e:
        return e.problems or [str(e)]
    return []


def diff(
    directory: str | os.PathLike[str],
    step_a: int,
    step_b: int,
    other: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Compares two checkpoints bit for bit, and returns a line for every leaf that differs.

    Args:
      directory: of the first checkpoint.
      step_a: of the first checkpoint.
      step_b: of the second checkpoint.
      other: directory of the second checkpoint; None for the same one.
    """
    a = _steps(directory, step_a)[step_a]
    b = _steps(other if other is not None else directory, step_b)[step_b]
    manifests = read_manifest(a), read_manifest(b)
    specs = [integrity.specs(manifest) for manifest in manifests]
    values = read_arrays(a, manifests[0]), read_arrays(b, manifests[1])
    lines = []
    for name in dict.fromkeys([*specs[0], *specs[1]]):
        one, two = (spec.get(name) for spec in specs)
        if one is None or two is None or one != two:
            lines.append(f"{name}: {one or 'absent'} | {two or 'absent'}")
        elif line := _difference(values[0][name], values[1][name]):
            lines.append(f"{name}: {line}")
    return lines


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    if a.tobytes() == b.tobytes():
        return ""
    width = a.dtype.itemsize
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, width) for x in (a, b)]
    count = int((raw[0] != raw[1]).any(axis=1).sum())
    text = f"{count} of {a.size} values differ"
    if a.dtype == np.bool_ or np.issubdtype(a.dtype, np.unsignedinteger):
        return text
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return f"{text}, by at most {np.nanmax(gap, initial=0.0):.3g}"


def misfits(directory: str | os.PathLike[str], step: int, abstract_state: Any) -> list[str]:
    """Returns a line for every leaf whose path, shape or dtype differs from those of a state.

    Only the manifest is read; if it is damaged, there are no lines. Raises CheckpointError if there
    is no such step.
    """
    try:
        manifest = read_manifest(_steps(directory, step)[step])
    except CorruptCheckpoint:
        return []
    return mismatches(manifest, flatten(abstract_state, verbatim=True))


def load_params(
    workdir: str | os.PathLike[str], step: int | None = None, prefix: str = "params"
) -> dict[str, Any]:
    """Reads the parameters of another run's checkpoint, and verifies their checksums.

    Args:
      workdir: the other run's workdir, or its checkpoints/ directory.
      step: of the checkpoint; None for the newest intact one.
      prefix: path of the subtree of the state to read.

    Returns: nested dicts of numpy arrays. Raises CheckpointError.
    """
    problems = []
    for number, path in sorted(_steps(workdir, step).items(), reverse=True):
        try:
            arrays = read_arrays(path, read_manifest(path), prefix + "/")
        except CorruptCheckpoint as e:
            problems.append(f"step {number}: {e}")
            continue
        if not arrays:
            raise CheckpointError(f"The checkpoint {path} has no leaf under {prefix!r}.")
        return nested({name[len(prefix) + 1 :]: array for name, array in arrays.items()})
    raise CheckpointError(
        f"No checkpoint in {workdir} can be used for a warm start: {'; '.join(problems)}."
    )


def rename(params: Mapping[str, Any], rules: Mapping[str, str | None]) -> dict[str, Any]:
    r"""Renames the paths of nested parameters by regular expressions.

    Args:
      params: nested dicts of arrays.
      rules: pattern -> replacement, as in {r'encoder/(.*)': r'backbone/\1', 'head/.*': None}. A
        pattern must match a whole path. The first matching rule applies; None drops the parameter.
        A parameter that no rule matches keeps its path.

    Returns: nested dicts. Raises ValueError if a rule applies to no parameter, a pattern is invalid
    or takes too long, or two parameters would get the same path.

    Example:
      >>> rename({"encoder": {"bias": 1}, "head": 2}, {"encoder/(.*)": r"net/\1", "head": None})
      {'net': {'bias': 1}}
    """
    compiled = [(_pattern(pattern), replacement) for pattern, replacement in rules.items()]
    unused = set(rules)
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    paths = _flat(params)
    for path, value in paths.items():
        target: str | None = path
        for pattern, replacement in compiled:
            match = fullmatch(pattern, path)
            if match:
                unused.discard(pattern.pattern)
                target = None if replacement is None else _expand(match, replacement)
                break
        if target is None:
            continue
        clash = next((t for t in result if _nest_clash(t, target)), None)
        if clash is not None:
            raise ValueError(
                f"Renaming would put {path!r} at {target!r}, where {origin[clash]!r} is already."
            )
        result[target], origin[target] = value, path
    if unused:
        raise ValueError(
            f"The renaming rule {sorted(unused)[0]!r} decides no parameter; "
            f"there are {', '.join(list(paths)[:6])}{', ...' if len(paths) > 6 else ''}. "
            "A pattern must match a whole path, and the first that matches decides."
        )
    return nested(result)


def _pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ValueError(f"The renaming rule {pattern!r} is not a regular expression: {e}.") from e


def _expand(match: re.Match[str], replacement: str) -> str:
    try:
        target = match.expand(replacement)
    except (re.error, IndexError) as e:
        raise ValueError(
            f"The replacement {replacement!r} of the renaming rule {match.re.pattern!r} "
            f"cannot be used: {e}."
        ) from e
    if not target or "" in target.split("/"):
        raise ValueError(
            f"The renaming rule {match.re.pattern!r} turns {match.string!r} into {target!r}, "
            "which is not a path."
        )
    return target


def _nest_clash(a: str, b: str) -> bool:
    return a == b or a.startswith(b + "/") or b.startswith(a + "/")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves |= _flat(value, path + "/") if isinstance(value, Mapping) else {path: value}
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Builds a nested dict from leaves by path name, "a/b/c"."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _steps(directory: str | os.PathLike[str], step: int | None = None) -> dict[int, Path]:
    root = Path(directory)
    home = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    found = step_directories(home)
    if step is None and found:
        return found
    if step in found:
        return {step: found[step]}
    there = f"there are {list(found)}" if found else "there is none at all"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError(f"There is {wanted} in {home}; {there}.")
