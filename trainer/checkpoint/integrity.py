"""What a checkpoint promises about its content: names, shapes, dtypes and checksums of leaves.

Knows numpy and jax, not the storage. The manifest is a plain JSON object, sealed with the SHA-256
of its own text; every leaf has a CRC-32 of its *global* logical bytes (C order, little endian), so
that a checkpoint can be checked on any number of devices.
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

FORMAT = 1
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # what no retry would alter
MANIFEST = "manifest.json"
FILES = "integrity/files.json"
ARRAYS = "state/manifest.ocdbt"  # the index of the arrays
COMMITTED = "commit_success.txt"
_LATER = ("_CHECKPOINT_METADATA", COMMITTED)  # not listed: these must exist, and may hold anything

Index = list[list[int]]  # [[start, stop], ...] of a piece in its leaf


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or is not there."""


class Damaged(CheckpointError):
    """A checkpoint whose files do not hold what was saved; `problems` has a line a bad leaf.

    Never said of a disk that cannot be read just now: that stays the OSError that it is.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)


class Spec(NamedTuple):
    """What a leaf is, without its values: a global shape and a dtype by name."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by path, as in "params/blocks/attn/qkv/kernel".

    Raises ValueError when two leaves would have the same path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(
                f"Two leaves of the state have the path {name!r}. "
                "Rename one of them: a key of a state must not contain '/'."
            )
        leaves[name] = leaf
    return leaves


def is_key(leaf: Any) -> bool:
    """Tells whether a leaf (array or ShapeDtypeStruct) is a typed PRNG key."""
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
    """Returns the numpy dtype of a name in a manifest, as "bfloat16"; raises ValueError."""
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

    For comparing two states leaf by leaf, bit for bit; -0.0 and 0.0 differ, equal NaNs are equal.
    """
    result = {}
    for name, leaf in named_leaves(tree).items():
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
    """Returns the manifest in a sealed text; raises ValueError when it was altered."""
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
    """Checks arrays that were read against a manifest, and returns a line for every bad leaf.

    arrays: a subset of the leaves, each whole, a typed key as its key data.
    """
    problems = []
    for name, array in arrays.items():
        entry = manifest["leaves"][name]
        stored = Spec(tuple(entry["stored_shape"]), entry["stored_dtype"])
        if Spec(array.shape, str(array.dtype)) != stored:
            problems.append(f"{name}: {Spec(array.shape, str(array.dtype))} was read, not {stored}")
            continue
        for index, crc in entry["crc32"]:
            part = array[tuple(slice(*bounds) for bounds in index)] if index else array
            if checksum(part) != crc:
                problems.append(f"{name}: its data do not have the checksum they were saved with")
                break
    return problems


def file_list(directory: Path) -> dict[str, list[Any]]:
    """Returns size and CRC-32 of every file of a step, by its path in there; raises OSError."""
    listing = {}
    for folder, _, names in os.walk(directory, onerror=_raise):  # rglob() would pass errors over
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(directory).as_posix()
            if name not in (FILES, *_LATER) and path.is_file():
                listing[name] = _size_and_crc(path)
    return listing


def _raise(error: OSError) -> None:
    raise error


def file_problems(directory: Path, listing: Mapping[str, Sequence[Any]]) -> list[str]:
    """Compares the files of a step with a listing, and returns a line for every bad one."""
    present = file_list(directory)  # no name of the listing is ever opened
    problems = [f"the file {name} is missing" for name in _LATER if not (directory / name).exists()]
    for name, (size, crc) in listing.items():
        if name not in present:
            problems.append(f"the file {name} is missing")
        elif present[name][0] != size:
            problems.append(f"the file {name} has {present[name][0]} bytes instead of {size}")
        elif present[name][1] != crc:
            problems.append(f"the file {name} is not what was saved: its checksum differs")
    return problems


def _size_and_crc(path: Path) -> list[Any]:
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, f"{crc:08x}"]


def as_saved(entry: Mapping[str, Any], array: np.ndarray) -> np.ndarray:
    """Returns an array as it was before it was stored, a typed key still as its key data."""
    if entry["dtype"] == entry["stored_dtype"] or entry["dtype"].startswith("key<"):
        return array
    return array.view(dtype(entry["dtype"]))


class HostLeaf(NamedTuple):
    """A leaf on its way to disk: what it is, and the pieces of it that this process holds."""

    spec: Spec
    data: Any  # np.ndarray when the whole leaf is here, else the jax.Array
    pieces: list[tuple[Index, np.ndarray]]  # [([], whole)] or one entry a shard


def to_host(tree: Any) -> dict[str, HostLeaf]:
    """Fetches every leaf of a state and returns it by path.

    The arrays stay valid when the state is donated afterwards: jax does not reuse a buffer while a
    view of it lives (on the CPU), and elsewhere they are copies.
    """
    leaves = named_leaves(tree)
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
            data = data.copy()  # its owner may write into it; into a jax.Array nobody can
        if data.dtype.isbuiltin != 1 and data.dtype.name != "bfloat16":
            data = np.ascontiguousarray(data).view(np.uint8)  # float8, int4: not all are storable
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
    """Returns what the operating system said, where that is behind an error."""
    if isinstance(error, OSError):
        return error
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # tensorstore says it so
        return OSError(int(found[1]), os.strerror(int(found[1])))
    return None


def reason(error: BaseException) -> str:
    """Returns what an error says, short enough to be read."""
    system = system_error(error)
    if system is not None and system.errno:
        return os.strerror(system.errno)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 200 else lines[0][:197] + "..."
