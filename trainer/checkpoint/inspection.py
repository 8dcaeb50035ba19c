"""Inspects checkpoints without a program: ls, check, diff, distances, parameters for a warm start.

The functions take a workdir, a checkpoints/ directory or its damaged/ directory, and change nothing
on disk. They raise CheckpointError if there is no such checkpoint, CorruptCheckpoint if what they
read of it is damaged, and OSError if the disk cannot be read.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from optim.paths import flatten
from trainer.checkpoint import integrity
from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint
from trainer.checkpoint.reading import (
    check_saved_files,
    home_of,
    mismatches,
    read_arrays,
    read_manifest,
)

StrPath = str | os.PathLike[str]


class Info(NamedTuple):
    """One line of `checkpoint ls`."""

    step: int
    metric: float | None  # as it was saved; NaN stays NaN
    leaves: int
    nbytes: int  # of the arrays, not of the files
    saved: float  # seconds since the epoch; NaN if it is not known
    problem: str | None  # why its manifest cannot be read; only check_leaves() reads the arrays


def ls(directory: StrPath) -> list[Info]:
    """Lists the checkpoints of a run, oldest first, from their manifests, damaged ones too."""
    listed = []
    for step, path in _steps(directory).items():
        saved = path.stat().st_mtime if isinstance(path, Path) else math.nan
        try:
            manifest = read_manifest(path)
        except CorruptCheckpoint as e:
            listed.append(Info(step, None, 0, 0, saved, str(e)))
            continue
        metric = None if manifest["metric"] is None else float(manifest["metric"])
        nbytes = sum(
            int(np.prod(entry["stored_shape"])) * integrity.dtype(entry["stored_dtype"]).itemsize
            for entry in manifest["leaves"].values()
        )
        saved = manifest.get("saved", saved)
        listed.append(Info(step, metric, len(manifest["leaves"]), nbytes, saved, None))
    return listed


def check_leaves(directory: StrPath, step: int | None = None) -> dict[int, list[str]]:
    """Verifies every leaf of a checkpoint, None for all: step -> a line for each problem."""
    found: dict[int, list[str]] = {}
    for number, path in _steps(directory, step).items():
        found[number] = []
        try:
            check_saved_files(path)
        except CorruptCheckpoint as e:
            found[number] = e.problems or [str(e)]
    return found


def diff_checkpoints(
    directory: StrPath, step_a: int, step_b: int, other: StrPath | None = None
) -> list[str]:
    """Compares two checkpoints bit for bit; a line for every leaf that differs."""
    # `other` is the directory of the second one; None for that of the first.
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
    # [values, bytes of a value]: compared as bits, so that NaNs are equal and -0.0 and 0.0 are not.
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, width) for x in (a, b)]
    count = int((raw[0] != raw[1]).any(axis=1).sum())
    text = f"{count} of {a.size} values differ"
    # Unsigned integers are mostly the data of PRNG keys, whose distance means nothing.
    if a.dtype == np.bool_ or np.issubdtype(a.dtype, np.unsignedinteger):
        return text
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return f"{text}, by at most {np.nanmax(gap, initial=0.0):.3g}"


def distances(directory: StrPath, step: int, other: StrPath) -> dict[str, float]:
    """Measures how far the states of two checkpoints of a step are apart, for each field."""
    # That is the Euclidean norm of the difference of all floats of a field, such as "params",
    # divided by the larger of their norms; fields without a difference of bits are left out. It is
    # infinite if other values than floats differ, values are not finite, or leaves are missing.
    one, two = load_leaves(directory, step), load_leaves(other, step)
    unequal = dict[str, list[np.ndarray]]()  # field -> three squared norms of each leaf
    for name in dict.fromkeys([*one, *two]):
        unequal.setdefault(name.partition("/")[0], []).append(_norms(one.get(name), two.get(name)))
    found = {}
    for name, norms in unequal.items():
        a, b, gap = np.sum(norms, axis=0)
        if gap != 0:
            found[name] = math.sqrt(gap / max(a, b, gap)) if math.isfinite(gap) else math.inf
    return found


def _norms(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray:
    """Returns the squared norms of two arrays and of their difference; 0 for equal bits."""
    # The last is infinite as `distances` says. It is at least the smallest float if bits differ.
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return np.array([0.0, 0.0, math.inf])
    equal = a.tobytes() == b.tobytes()
    if not jax.numpy.issubdtype(a.dtype, jax.numpy.floating):
        return np.array([0.0, 0.0, 0.0 if equal else math.inf])
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        sums = np.array([np.sum(x * x), np.sum(y * y), np.sum((x - y) ** 2)])
    if equal:
        sums[2] = 0.0
    elif not np.isfinite(sums).all():
        sums = np.array([0.0, 0.0, math.inf])
    else:
        sums[2] = max(sums[2], np.finfo(np.float64).tiny)
    return sums


def misfits(directory: StrPath, step: int, abstract_state: Any) -> list[str]:
    """Returns a line for every leaf whose path, shape or dtype is not that of an abstract state."""
    try:
        manifest = read_manifest(_steps(directory, step)[step])
    except (CorruptCheckpoint, OSError):  # which a restore tells
        return []
    return mismatches(manifest, flatten(abstract_state, verbatim=True))


def load_params(
    workdir: StrPath, step: int | None = None, prefix: str = "params"
) -> dict[str, Any]:
    """Reads a subtree of a state as nested dicts, and verifies it; None is the newest step."""
    number, path = max(_steps(workdir, step).items())
    tree = load_parts(workdir, number, [prefix])[prefix]
    if not tree:
        raise CheckpointError(f"The checkpoint {path} has no leaf under {prefix!r}.")
    return tree


def load_parts(directory: StrPath, step: int, parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads fields of a state, such as "params" and "ema", as nested dicts, and verifies them."""
    from flax import traverse_util  # takes long to import, and other commands do without

    path, found = _steps(directory, step)[step], {}
    manifest = read_manifest(path)
    for part in parts:
        arrays = read_arrays(path, manifest, f"{part}/")
        leaves = {name.removeprefix(f"{part}/"): x for name, x in arrays.items()}
        found[part] = traverse_util.unflatten_dict(leaves, sep="/")
    return found


def leaves_digest(directory: StrPath, step: int) -> str:
    """Returns the SHA-256 of the path, shape, dtype and checksum of each leaf of a checkpoint."""
    leaves = read_manifest(_steps(directory, step)[step])["leaves"]
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_leaves(directory: StrPath, step: int) -> dict[str, np.ndarray]:
    """Reads every leaf of a checkpoint by its path, a typed key as its data, and verifies them."""
    path = _steps(directory, step)[step]
    return read_arrays(path, read_manifest(path))


def leaf_names(directory: StrPath, step: int) -> list[str]:
    """Returns the paths of the leaves of a checkpoint, such as "params/head/kernel"."""
    return list(read_manifest(_steps(directory, step)[step])["leaves"])


def _steps(directory: StrPath, step: int | None = None) -> dict[int, Any]:
    root = Path(directory)
    home = home_of(root / "checkpoints" if (root / "checkpoints").exists() else root)
    found: dict[int, Any] = home.steps()
    if step is None and found:
        return found
    if step is not None and step in found:
        return {step: found[step]}
    if not found and any((each / "plan.json").exists() for each in root.absolute().parents):
        raise CheckpointError(
            f"There is no checkpoint in {home}: a sweep keeps those of its trials only if its file "
            "has `checkpoints: final` or `best`. The config in the folder trains the same "
            "parameters again, in a workdir of its own."
        )
    if not found:
        raise CheckpointError(
            f"There is no checkpoint in {home}: the run has not saved yet, or its checkpoints were "
            "removed. A run saves every `save_every` steps of its config and when it is stopped. "
            "Let it compute on, start it again, or name the folder of another run."
        )
    listed = ", ".join(map(str, found))
    raise CheckpointError(f"There is no checkpoint of step {step} in {home}; there are {listed}.")
