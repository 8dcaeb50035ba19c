"""Reads checkpoints, and verifies their checksums."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from optim.paths import flatten
from trainer.checkpoint import integrity
from trainer.checkpoint.agreement import all_agree
from trainer.checkpoint.integrity import CheckpointError, CorruptCheckpoint

DAMAGED, REMOVED = "damaged", "removed"  # folders beside the steps
TEMPORARY = ".orbax-checkpoint-tmp"


def storage() -> Any:
    """Imports orbax when it is first needed, so that it does not delay the first step."""
    return importlib.import_module("trainer.checkpoint.storage")


def read_arrays(
    step_directory: Path, manifest: Mapping[str, Any], prefix: str = ""
) -> dict[str, np.ndarray]:
    """Reads leaves whole into host memory and checks them; raises CorruptCheckpoint or OSError.

    The checksums of the files are verified first, so that orbax never parses a damaged file.

    Args:
      step_directory: the step's folder.
      manifest: of the step.
      prefix: reads only the leaves whose paths start with it.
    """
    _check_files(step_directory)
    every = manifest["leaves"]
    wanted = [name for name in every if name.startswith(prefix)]
    empty = [name for name in wanted if 0 in every[name]["stored_shape"]]  # not stored
    arrays = {}
    if len(wanted) > len(empty):
        stored = [name for name in every if 0 not in every[name]["stored_shape"]]
        arrays = storage().load(step_directory, stored, set(wanted) - set(empty))
    for name in empty:
        entry = every[name]
        arrays[name] = np.zeros(entry["stored_shape"], integrity.dtype(entry["stored_dtype"]))
    arrays = {name: np.asarray(arrays[name]) for name in wanted}
    _refuse(integrity.verify(manifest, arrays))
    return {name: integrity.as_saved(every[name], array) for name, array in arrays.items()}


def mismatches(manifest: Mapping[str, Any], leaves: Mapping[str, Any]) -> list[str]:
    """Returns a line for every leaf that is missing, superfluous, or of another shape or dtype.

    Args:
      manifest: of a checkpoint.
      leaves: path -> array or ShapeDtypeStruct, as the program expects them.
    """
    saved = integrity.specs(manifest)
    wanted = {name: integrity.spec(name, leaf) for name, leaf in leaves.items()}
    return [
        f"{name}: the checkpoint holds {saved.get(name, 'no such leaf')}, "
        f"the program wants {wanted.get(name, 'no such leaf')}"
        for name in dict.fromkeys([*wanted, *saved])
        if saved.get(name) != wanted.get(name)
    ]


def read_for(step_directory: Path, targets: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads a step whose leaves must have the paths, shapes and dtypes of the targets.

    Raises CheckpointError, which names the leaves that differ; CorruptCheckpoint; OSError.
    """
    manifest = read_manifest(step_directory)
    wrong = mismatches(manifest, targets)
    if wrong:
        more = [f"... and {len(wrong) - 4} more leaves"] if len(wrong) > 5 else []
        shown = wrong[: 4 if more else 5] + more
        raise CheckpointError(
            f"The checkpoint {step_directory} does not fit this program:\n  " + "\n  ".join(shown)
        )
    return read_arrays(step_directory, manifest)


def read_in_all_processes(
    step_directory: Path, targets: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Reads a step as read_for() does, in every process of the run.

    Raises the same exception in all of them: CorruptCheckpoint if one finds the step damaged,
    CheckpointError if one cannot read it now.
    """
    problem, arrays = None, {}
    try:
        arrays = read_for(step_directory, targets)
    except (CorruptCheckpoint, OSError) as e:
        problem = e
    if not all_agree(not isinstance(problem, OSError)):
        why = integrity.reason(problem) if problem else "another process cannot read it"
        raise CheckpointError(
            f"The checkpoint {step_directory} cannot be read now: {why}. Nothing was "
            "changed; start the same command again when it can be read."
        ) from problem
    if not all_agree(problem is None):
        raise problem or CorruptCheckpoint("another process found it damaged")
    return arrays


def read_state(step_directory: Path, abstract_state: Any) -> Any:
    """Reads a step, in every process of the run, into the structure and shardings of a state.

    Args:
      step_directory: the step's folder.
      abstract_state: pytree of jax.ShapeDtypeStruct with `sharding` (None: first device).

    Returns: the state, every leaf committed. Raises what `read_in_all_processes` raises.
    """
    targets = flatten(abstract_state, verbatim=True)
    arrays = read_in_all_processes(step_directory, targets)
    leaves = [place(arrays.pop(name), target) for name, target in targets.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def _check_files(step_directory: Path) -> None:
    listing = _sealed(step_directory / integrity.FILES)["files"]
    _refuse(integrity.file_problems(step_directory, listing))


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise CorruptCheckpoint(problems[0] + more, problems)


def _key_impl(target: Any) -> Any:
    """Returns the PRNG implementation of an abstract key, which only a traced value has."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), target)
    return found[0]


def place(array: np.ndarray, target: Any) -> jax.Array:
    """Puts a whole host array on the devices, committed to the target's sharding."""
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if integrity.is_key(target):
        keys = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=_key_impl(target))
        if sharding.is_fully_addressable:
            return jax.device_put(keys, sharding)
        return jax.make_array_from_callback(keys.shape, sharding, lambda index: keys[index])
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def step_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the committed steps in a checkpoints/ directory, oldest first, as absolute paths."""
    root = Path(directory)
    try:
        root = root.absolute()  # orbax does not accept relative paths
        if not root.is_dir():
            return {}
        names = [path for path in root.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", path.name)]
        return dict(sorted((int(path.name), path) for path in names if path.is_dir()))
    except OSError as e:
        raise CheckpointError(f"{root} cannot be listed: {integrity.reason(e)}.") from e


def holds_results(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoints/ directory has more than the files of an interrupted save."""
    root = Path(directory)
    if not root.is_dir():
        return root.exists()
    return any(TEMPORARY not in path.name and path.name != REMOVED for path in root.iterdir())


def check_not_lost(directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if every checkpoint was set aside as damaged.

    A run must not start anew in such a folder, because it would erase the metrics.

    Args:
      directory: a checkpoints/ directory, which may not exist yet.
    """
    home = Path(directory) / DAMAGED
    if not step_directories(directory) and home.is_dir() and any(home.iterdir()):
        raise CheckpointError(
            f"Every checkpoint of this run was damaged and moved to {home}. Starting anew "
            "would erase its metrics: remove that folder to do so, choose another --workdir, or "
            f"move a repaired checkpoint back to {directory}."
        )


def read_manifest(step_directory: Path) -> dict[str, Any]:
    """Reads and checks the manifest of a step; raises CorruptCheckpoint or OSError."""
    path = step_directory / "integrity" / integrity.MANIFEST
    manifest = _sealed(path)
    for process in range(1, manifest["processes"]):
        part = _sealed(path.with_name(f"{integrity.MANIFEST}.{process}"))
        for name, entry in part["leaves"].items():
            manifest["leaves"][name]["crc32"] += entry["crc32"]
    return manifest


def _sealed(path: Path) -> dict[str, Any]:
    try:
        return integrity.unseal(path.read_text())
    except integrity.ABSENT as e:
        raise CorruptCheckpoint(f"the file integrity/{path.name} is missing") from e
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpoint(
            f"the file integrity/{path.name} cannot be used: {integrity.reason(e)}"
        ) from e


def read_metric(path: Path) -> float:
    """Returns the metric that a step was saved with; NaN if it has none or is damaged."""
    try:
        metric = read_manifest(path)["metric"]
    except CorruptCheckpoint:
        return math.nan
    return math.nan if metric is None else float(metric)
