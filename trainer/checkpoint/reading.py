"""Reads checkpoints, and verifies their checksums; start with `read_state`.

The processes of one run agree on what they read by exchanging a few integers.
"""

import importlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from optim.paths import flatten
from trainer.checkpoint import errors, integrity, leaf_file
from trainer.checkpoint.folder import Folder
from trainer.writers.files import read_regular

if TYPE_CHECKING:
    from trainer.checkpoint.bucket import Bucket, Place


def storage() -> ModuleType:
    """Imports tensorstore when it is first needed, so that it does not delay the first step."""
    return importlib.import_module("trainer.checkpoint.storage")


def home_of(checkpoints: str | os.PathLike[str]) -> "Folder | Bucket":
    """Returns where the steps of a run are, by the path of checkpoints/ in its folder."""
    # It is a folder with the steps, or a file with the URL of the place where they are. Only names
    # that a run has chosen are followed: the folder may be somebody else's, and steps are removed.
    path = Path(checkpoints).absolute()
    try:
        url = read_regular(path).decode().strip() if path.is_file() else ""
    except (OSError, ValueError):
        url = ""
    ours = re.fullmatch(r"(file:///|gs://|s3://).+-[0-9a-f]{8}", url)
    return home_at(url) if ours else Folder(path)


def home_at(url: str) -> "Folder | Bucket":
    """Returns the place of a URL, in which the steps of a run are."""
    if url.startswith("file:///"):
        return Folder(Path(url.removeprefix("file://")))
    return importlib.import_module("trainer.checkpoint.bucket").Bucket(url)


def read_arrays(
    step_directory: "Path | Place", manifest: Mapping[str, Any], prefix: str = ""
) -> dict[str, np.ndarray]:
    """Reads the leaves whose paths start with `prefix` into host memory; verifies checksums."""
    # A typed key is read as its key data. Raises CorruptCheckpoint if a file or a leaf is damaged,
    # and OSError if the disk cannot be read.
    every = manifest["leaves"]
    wanted = [name for name in every if name.startswith(prefix)]
    _check_files(step_directory, manifest)
    arrays = _as_stored(step_directory, manifest, wanted)
    _raise_if_damaged(integrity.verify(manifest, arrays))
    for name, array in arrays.items():
        kind = every[name]["dtype"]
        if kind != every[name]["stored_dtype"] and not kind.startswith("key<"):
            arrays[name] = array.view(integrity.dtype(kind))
    return arrays


def mismatches(manifest: Mapping[str, Any], leaves: Mapping[str, Any]) -> list[str]:
    """Returns a line for every leaf that is missing, superfluous, or of another shape or dtype."""
    saved = integrity.specs(manifest)
    wanted = {name: integrity.spec(name, leaf) for name, leaf in leaves.items()}
    return [
        f"{name}: the checkpoint has {saved.get(name, 'no such leaf')}, "
        f"the program expects {wanted.get(name, 'no such leaf')}"
        for name in dict.fromkeys([*wanted, *saved])
        if saved.get(name) != wanted.get(name)
    ]


def read_state(step_directory: "Path | Place", abstract_state: Any) -> Any:
    """Reads a step, in every process, into the structure and shardings of a state."""
    # Every leaf is committed; one whose abstract leaf has no sharding is on the first device.
    # Raises CorruptCheckpoint in all processes if one of them finds the step damaged;
    # CheckpointError in all if one of them cannot read the disk; and UnlikeCheckpoint.
    targets = flatten(abstract_state, verbatim=True)
    problem, leaves = None, {}
    try:
        manifest = read_manifest(step_directory)
        if wrong := mismatches(manifest, targets):
            more = [f"... and {len(wrong) - 4} more leaves"] if len(wrong) > 5 else []
            shown = wrong[: 4 if more else 5] + more
            raise errors.UnlikeCheckpoint(
                f"The checkpoint {step_directory} does not fit this program:\n  "
                + "\n  ".join(shown)
            )
        leaves = dict(_placed(step_directory, manifest, targets))
    except (errors.CorruptCheckpoint, OSError) as e:
        problem = e
    # Two votes, because only damage may set the checkpoint aside, not a disk that fails for now.
    if not all_agree(not isinstance(problem, OSError)):
        why = errors.one_line(problem) if problem else "another process cannot read it"
        raise errors.CheckpointError(
            f"The checkpoint {step_directory} cannot be read now: {why}. Nothing was "
            "changed; start the same command again when it can be read."
        ) from problem
    if not all_agree(problem is None):
        raise problem or errors.CorruptCheckpoint("another process found it damaged")
    ordered = [leaves[name] for name in targets]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), ordered)


def _placed(
    step_directory: "Path | Place", manifest: Mapping[str, Any], targets: Mapping[str, Any]
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the leaves of a step on the devices of their targets."""
    entries = manifest["leaves"]
    if manifest["format"] != integrity.SHARDS:
        arrays = read_arrays(step_directory, manifest)
        for name, target in targets.items():
            # Popped, so that host memory is freed as leaves reach the devices.
            yield name, place_on_devices(arrays.pop(name), target)
        return
    # Each process reads the parts that its devices hold, once for all of them.
    _check_files(step_directory, manifest)
    holders: dict[str, dict[Any, list[Any]]] = {}  # of a leaf that is divided, by place
    regions: dict[str, Collection[Any]] = {}
    for name, target in targets.items():
        regions[name] = [storage().everywhere(entries[name]["stored_shape"])]
        if getattr(target, "sharding", None) is not None and not integrity.is_key(target):
            regions[name] = here = holders[name] = {}
            indices = target.sharding.addressable_devices_indices_map(target.shape)
            for device, index in indices.items():
                here.setdefault(storage().region_of(index, target.shape), []).append(device)
    for name, arrays in storage().read_regions(step_directory / "state", manifest, regions):
        target = targets[name]
        if not integrity.is_key(target):
            arrays = [array.view(integrity.dtype(entries[name]["dtype"])) for array in arrays]
        if name not in holders:
            yield name, place_on_devices(arrays[0], target)
            continue
        shards = [
            jax.device_put(array, device, may_alias=False)  # see place_on_devices
            for array, devices in zip(arrays, holders[name].values(), strict=True)
            for device in devices
        ]
        whole = jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)
        yield name, whole


def check_saved_files(step_directory: "Path | Place") -> None:
    """Raises CorruptCheckpoint if a file or leaf of a step is not as it was saved, and OSError."""
    manifest, problems = read_manifest(step_directory), []
    _check_files(step_directory, manifest)
    # One leaf after another: the memory of all of them may be missing.
    for name in manifest["leaves"]:
        try:
            problems += integrity.verify(manifest, _as_stored(step_directory, manifest, [name]))
        except errors.CorruptCheckpoint as e:
            problems.append(str(e))
    _raise_if_damaged(list(dict.fromkeys(problems)))


def _check_files(step_directory: "Path | Place", manifest: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint if the files of several processes are not those that were saved."""
    # Before tensorstore parses one. The file of one process is checked with its leaves.
    problems = []
    if manifest["format"] == integrity.ORBAX and isinstance(step_directory, Path):
        problems = integrity.missing_marks(step_directory)
        listing = _sealed(step_directory, integrity.FILES)["files"]
        problems += integrity.file_problems(integrity.file_list(step_directory), listing)
    elif manifest["format"] == integrity.SHARDS:
        problems = storage().wrong_files(step_directory, manifest)
    _raise_if_damaged(problems)


def _as_stored(
    step_directory: "Path | Place", manifest: Mapping[str, Any], wanted: Collection[str]
) -> dict[str, np.ndarray]:
    """Reads leaves whole, without a check of the files and of the checksums in the manifest."""
    if manifest["format"] == integrity.ONE_FILE and isinstance(step_directory, Path):
        return dict(leaf_file.read_leaves(step_directory, manifest, wanted))
    shapes = {name: manifest["leaves"][name]["stored_shape"] for name in wanted}
    regions = {name: [storage().everywhere(shape)] for name, shape in shapes.items()}
    read = storage().read_regions(step_directory / "state", manifest, regions)
    return {name: array for name, (array,) in read}


def _raise_if_damaged(problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise errors.CorruptCheckpoint(problems[0] + more, problems)


def place_on_devices(array: np.ndarray, target: Any) -> jax.Array:
    """Puts a whole host array, or the key data of a typed key, on the target's devices."""
    # Without a sharding, it is put on the first device. The result is committed.
    if (sharding := getattr(target, "sharding", None)) is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    whole: Any = array
    if integrity.is_key(target):
        impl = []  # jax tells the implementation of a key only while it is traced
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), target)
        whole = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=impl[0])
    if sharding.is_fully_addressable:
        # A copy: the first step takes the state as donated buffers, and on a CPU jax does not
        # donate a buffer that a numpy array shares.
        return jax.device_put(whole, sharding, may_alias=False)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def read_manifest(step_directory: "Path | Place") -> dict[str, Any]:
    """Reads the manifest of a step; CorruptCheckpoint if it is missing or was changed."""
    # It has the checksums that all processes of the run wrote.
    if not isinstance(step_directory, Path) or not (step_directory / "integrity").is_dir():
        manifest = _sealed(step_directory, integrity.MANIFEST)
        if not isinstance(step_directory, Path) and manifest["format"] != integrity.SHARDS:
            raise errors.CorruptCheckpoint("its manifest is not that of a step in a bucket")
        return manifest
    # Orbax wrote it. The manifest of process 0 lists all leaves. Those of the other processes add
    # the checksums of the shards that process 0 does not have.
    name = f"integrity/{integrity.MANIFEST}"
    manifest = _sealed(step_directory, name)
    for process in range(1, manifest["processes"]):
        part = _sealed(step_directory, f"{name}.{process}")
        for leaf, entry in part["leaves"].items():
            manifest["leaves"][leaf]["crc32"] += entry["crc32"]
    return manifest


def _sealed(step_directory: "Path | Place", name: str) -> dict[str, Any]:
    path = step_directory / name
    try:
        content = read_regular(path) if isinstance(path, Path) else path.read()
        return integrity.unseal(content.decode())
    except OSError as e:
        if not errors.means_absent(e):
            raise
        raise errors.CorruptCheckpoint(f"the file {name} is missing") from e
    except (ValueError, RecursionError) as e:
        raise errors.CorruptCheckpoint(
            f"the file {name} cannot be used: {errors.one_line(e)}"
        ) from e


def all_gather_ints(values: Sequence[int]) -> np.ndarray:
    """Collects integers of every process as an int32 array [processes, values]."""
    # All processes must call it, in the same order and with equally many values, each within int32:
    # it waits for the last of them.
    if jax.process_count() == 1:
        return np.asarray(values, np.int32)[None]
    from jax.experimental import multihost_utils

    # int32, because jax truncates int64 unless jax_enable_x64 is set.
    gathered = multihost_utils.process_allgather(np.asarray(values, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)


def all_agree(ok: bool) -> bool:
    """Returns whether `ok` is true in every process of the run."""
    # All processes must call it, including one that failed: the others wait for it.
    return bool(all_gather_ints([ok]).all())
