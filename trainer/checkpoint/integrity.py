"""The manifest of a checkpoint: names, shapes, dtypes and checksums of its leaves.

This module depends on numpy and jax, not on the storage. The manifest is a JSON object, sealed with
the SHA-256 of its own text. Every leaf has a CRC-32 of its *global* logical bytes (C order, little
endian), so that a checkpoint can be verified on any number of devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from optim.paths import flatten

FORMAT = 1
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # a retry cannot help
MANIFEST = "manifest.json"
FILES = "integrity/files.json"
ARRAYS = "state/manifest.ocdbt"  # the index of the arrays
COMMITTED = "commit_success.txt"
_LATER = ("_CHECKPOINT_METADATA", COMMITTED)  # must exist with any content, so they are not listed

Index = list[list[int]]  # [[start, stop], ...], a shard's position in its leaf


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be used or does not exist."""


class CorruptCheckpoint(CheckpointError):
    """Raised if the files of a checkpoint are not as they were saved.

    A disk that cannot be read at the moment raises OSError instead.

    Attributes:
      problems: one line for each damaged leaf or file.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)


class Spec(NamedTuple):
    """The global shape of a leaf, and its dtype by name."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf (array or ShapeDtypeStruct) is a typed PRNG key."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def spec(name: str, leaf: Any) -> Spec:
    """Returns the Spec of an array or ShapeDtypeStruct; raises ValueError for anything else."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ValueError(
            f"The leaf {name!r} of the state is a Python {type(leaf).__name__}. "
            "Only arrays can be saved: make it one with jnp.asarray(value, dtype)."
        )
    dtype = str(leaf.dtype)
    if not is_key(leaf) and np.dtype(leaf.dtype).hasobject:
        raise ValueError(f"The leaf {name!r} of the state has dtype object, which is never saved.")
    return Spec(tuple(int(n) for n in leaf.shape), dtype)


def dtype(name: str) -> np.dtype:
    """Returns the numpy dtype of a name in a manifest, such as "bfloat16"; raises ValueError."""
    try:
        return jax.numpy.dtype(name)
    except TypeError as e:
        raise ValueError(f"{name!r} is not a dtype") from e


def checksum(array: np.ndarray) -> str:
    """Returns the CRC-32, as eight hex digits, of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{zlib.crc32(flat):08x}"  # type: ignore[arg-type]


def digests(tree: Any) -> dict[str, str]:
    """Returns dtype, shape and SHA-256 of the bytes of every leaf of a pytree, by path.

    Used to compare two states bit for bit: -0.0 and 0.0 differ, NaNs with the same bits are equal.
    """
    result = {}
    for name, leaf in flatten(tree, verbatim=True).items():
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        host = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
        digest = hashlib.sha256(host).hexdigest()  # type: ignore[arg-type]
        result[name] = f"{spec(name, leaf)}:{digest}"
    return result


def seal(manifest: Mapping[str, Any]) -> str:
    """Returns the JSON text of a manifest together with the SHA-256 of its canonical form."""
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return json.dumps(
        {"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": manifest}, indent=1
    )


def unseal(text: str) -> dict[str, Any]:
    """Returns the manifest in a sealed text; raises ValueError if the text was changed."""
    outer = json.loads(text)
    if not isinstance(outer, dict) or not isinstance(outer.get("manifest"), dict):
        raise ValueError("it is not a manifest")
    manifest = outer["manifest"]
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(body.encode()).hexdigest() != outer.get("sha256"):
        raise ValueError("it does not have the hash that it states")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"it has format {manifest.get('format')}, and {FORMAT} can be read")
    return manifest


def specs(manifest: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the Spec of every leaf that a manifest lists."""
    return {
        name: Spec(tuple(entry["shape"]), entry["dtype"])
        for name, entry in manifest["leaves"].items()
    }


def verify(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Compares arrays that were read with a manifest, and returns a line for every damaged leaf.

    Args:
      manifest: of the checkpoint.
      arrays: path -> whole array, for some or all of the leaves; a typed key as its key data.
    """
    problems = []
    for name, array in arrays.items():
        entry = manifest["leaves"][name]
        stored = Spec(tuple(entry["stored_shape"]), entry["stored_dtype"])
        if Spec(array.shape, str(array.dtype)) != stored:
            problems.append(f"{name}: {Spec(array.shape, str(array.dtype))} was read, not {stored}")
            continue
        for index, crc in entry["crc32"]:
            piece = array[tuple(slice(*bounds) for bounds in index)] if index else array
            if checksum(piece) != crc:
                problems.append(f"{name}: its data do not have the checksum they were saved with")
                break
    return problems


def file_list(directory: Path) -> dict[str, list[Any]]:
    """Returns size and CRC-32 of every file of a step, by its relative path; raises OSError."""
    listing = {}
    for folder, _, names in os.walk(directory, onerror=_raise):  # rglob() ignores errors
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(directory).as_posix()
            if name not in (FILES, *_LATER) and path.is_file():
                listing[name] = _size_and_crc(path)
    return listing


def _raise(error: OSError) -> None:
    raise error


def file_problems(directory: Path, listing: Mapping[str, Sequence[Any]]) -> list[str]:
    """Compares the files of a step with a listing, and returns a line for every bad file."""
    present = file_list(directory)  # names of the listing are compared, and never opened
    problems = [f"the file {name} is missing" for name in _LATER if not (directory / name).exists()]
    for name, (size, crc) in listing.items():
        if name not in present:
            problems.append(f"the file {name} is missing")
        elif present[name][0] != size:
            problems.append(f"the file {name} has {present[name][0]} bytes instead of {size}")
        elif present[name][1] != crc:
            problems.append(f"the file {name} was changed: its checksum differs")
    return problems


def _size_and_crc(path: Path) -> list[Any]:
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, f"{crc:08x}"]


def as_saved(entry: Mapping[str, Any], array: np.ndarray) -> np.ndarray:
    """Returns an array in the dtype it had before it was stored; a typed key as its key data."""
    if entry["dtype"] == entry["stored_dtype"] or entry["dtype"].startswith("key<"):
        return array
    return array.view(dtype(entry["dtype"]))


class HostLeaf(NamedTuple):
    """A leaf that is being saved: its spec, and the shards of it that this process has."""

    spec: Spec
    data: Any  # np.ndarray if this process has the whole leaf, else the jax.Array
    pieces: list[tuple[Index, np.ndarray]]  # [([], whole array)], or one entry for each shard


def to_host(tree: Any) -> dict[str, HostLeaf]:
    """Fetches every leaf of a state and returns it by path.

    The arrays stay valid when the state is donated afterwards. On a CPU they may be views, and jax
    does not reuse a buffer while a view of it exists; on other devices they are copies.
    """
    leaves = flatten(tree, verbatim=True)
    known = {name: spec(name, leaf) for name, leaf in leaves.items()}
    arrays = {
        name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in leaves.items()
    }
    for array in arrays.values():  # start all transfers before waiting for the first
        if isinstance(array, jax.Array) and array.is_fully_addressable:
            array.copy_to_host_async()
    return {name: _host_leaf(known[name], array) for name, array in arrays.items()}


def _host_leaf(known: Spec, array: Any) -> HostLeaf:
    whole = not isinstance(array, jax.Array) or (
        array.is_fully_addressable or array.is_fully_replicated
    )
    if whole:
        data = np.asarray(array)
        if not isinstance(array, jax.Array):
            data = data.copy()  # its owner may write into it; a jax.Array is immutable
        if data.dtype.isbuiltin != 1 and data.dtype.name != "bfloat16":
            data = np.ascontiguousarray(data).view(np.uint8)  # orbax cannot store all of them
        return HostLeaf(known, data, [([], data)])
    pieces = [
        (_bounds(shard.index, array.shape), np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    return HostLeaf(known, array, pieces)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Index:
    return [list(part.indices(n)[:2]) for part, n in zip(index, shape, strict=True)]


def entries(leaves: Mapping[str, HostLeaf]) -> dict[str, Any]:
    """Computes the checksums and returns the manifest's entry of every leaf."""
    return {
        name: {
            "shape": list(leaf.spec.shape),
            "dtype": leaf.spec.dtype,
            "stored_shape": list(leaf.data.shape),
            "stored_dtype": str(leaf.data.dtype),
            "crc32": [[index, checksum(piece)] for index, piece in leaf.pieces],
        }
        for name, leaf in leaves.items()
    }


def system_error(error: BaseException) -> OSError | None:
    """Returns the OSError that caused an error, or None if there is none."""
    if isinstance(error, OSError):
        return error
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # as tensorstore writes it
        return OSError(int(found[1]), os.strerror(int(found[1])))
    return None


def reason(error: BaseException) -> str:
    """Returns the message of an error, shortened to one line of 200 characters."""
    system = system_error(error)
    if system is not None and system.errno:
        return os.strerror(system.errno)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 200 else lines[0][:197] + "..."
