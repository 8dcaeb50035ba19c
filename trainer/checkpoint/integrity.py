"""The leaves that a checkpoint saves, its manifest with their checksums, and a list of its files.

Steps of several processes have a list of their files with sizes and checksums, too, so that
tensorstore never parses a damaged index. The manifest is a JSON object, sealed with the SHA-256 of
its own text. Every leaf has a CRC-32 of its *global* logical bytes (C order, little endian), or,
if several processes saved it, a checksum of each of its chunks.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from optim.paths import flatten
from trainer.writers.files import raise_error

MANIFEST = "manifest.json"
# How a step is stored: by orbax, with a list of its files, as until 0.3.0; with its leaves in one
# file; or by several processes, with a checksum of every chunk (`storage`).
ORBAX, ONE_FILE, SHARDS = 1, 2, 3

_PART = 1 << 18  # bytes


class Spec(NamedTuple):
    """The global shape of a leaf, and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str  # such as "bfloat16" or "key<fry>"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def is_key(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    """Returns whether a leaf is a typed PRNG key."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def spec(name: str, leaf: Any) -> Spec:
    """Returns the Spec of an array or ShapeDtypeStruct; ValueError for any other leaf."""
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
    """Returns the numpy dtype of a name such as "bfloat16"; ValueError if there is none."""
    try:
        return jax.numpy.dtype(name)
    except TypeError as e:
        raise ValueError(f"{name!r} is not a dtype") from e


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array in C order, as uint8; a view if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def checksum(array: np.ndarray) -> str:
    """Returns the CRC-32, as eight hex digits, of an array's bytes in C order."""
    # Orbax alone noticed none of 25 flipped bytes of array data, and restored wrong values. A
    # CRC-32 of every leaf takes a fifth of the time of an np.save of the state.
    flat = as_bytes(array)
    # Copy part by part into a buffer that stays in the processor's cache: that and the sum of the
    # buffer take less time than zlib takes to read main memory.
    part, crc = np.empty(min(flat.size, _PART), np.uint8), 0
    for start in range(0, flat.size, _PART):
        now = part[: flat.size - start]
        now[:] = flat[start : start + _PART]
        crc = zlib.crc32(now, crc)  # type: ignore[arg-type]
    return f"{crc:08x}"


def digests(tree: Any) -> dict[str, str]:
    """Returns path -> a hash of each leaf, such as "float32[64,10]:9f86d0...", of its bits."""
    result = {}
    for name, leaf in flatten(tree, verbatim=True).items():
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        digest = hashlib.sha256(as_bytes(np.asarray(data))).hexdigest()  # type: ignore[arg-type]
        result[name] = f"{spec(name, leaf)}:{digest}"
    return result


class HostLeaf(NamedTuple):
    """A leaf that is being saved whole, by the one process of a run."""

    spec: Spec
    data: np.ndarray  # with the dtype in which it is written


def to_host(tree: Any) -> dict[str, HostLeaf]:
    """Fetches every leaf, by path; raises ValueError for one of dtype object or no array."""
    # The arrays stay valid when the state is donated afterwards. On a CPU they may be views, and
    # jax does not reuse a buffer while a view of it exists; on other devices they are copies.
    leaves = flatten(tree, verbatim=True)
    known = {name: spec(name, leaf) for name, leaf in leaves.items()}
    arrays = {name: jax.random.key_data(x) if is_key(x) else x for name, x in leaves.items()}
    for array in arrays.values():  # start all transfers before waiting for the first
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    # An array of NumPy is copied, because its owner may write into it.
    return {
        name: HostLeaf(
            known[name], storable(np.asarray(x) if isinstance(x, jax.Array) else np.array(x))
        )
        for name, x in arrays.items()
    }


def storable(data: np.ndarray) -> np.ndarray:
    """Returns an array, or its bytes if it has a dtype that not all formats have."""
    if data.dtype.isbuiltin != 1 and data.dtype.name != "bfloat16":
        return np.ascontiguousarray(data).view(np.uint8)  # such as float8_e4m3fn
    return data


def manifest_entries(leaves: Mapping[str, HostLeaf]) -> dict[str, dict[str, Any]]:
    """Computes the checksums of leaves, and returns their entries of the manifest, by path."""
    # The "crc32" of an entry is a list of [position, checksum]: of several pieces of a leaf in the
    # steps of several processes that orbax wrote, of the whole leaf, whose position is [], here.
    return {
        name: {
            **entry(leaf.spec, Spec(leaf.data.shape, str(leaf.data.dtype))),
            "crc32": [[[], checksum(leaf.data)]],
        }
        for name, leaf in leaves.items()
    }


def entry(known: Spec, stored: Spec) -> dict[str, Any]:
    """Returns the entry of a leaf in the manifest, without its checksums."""
    return {
        **{"shape": list(known.shape), "dtype": known.dtype},
        **{"stored_shape": list(stored.shape), "stored_dtype": stored.dtype},
    }


def seal(manifest: Mapping[str, Any]) -> str:
    """Returns the JSON text of a manifest together with the SHA-256 of its canonical form."""
    # On one line: json indents in Python code, slowly enough to delay the steps.
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}", "manifest": {body}}}\n'


def unseal(text: str) -> dict[str, Any]:
    """Returns the manifest in a text of `seal`; ValueError if it was changed or is unreadable."""
    outer = json.loads(text)
    if not isinstance(outer, dict) or not isinstance(outer.get("manifest"), dict):
        raise ValueError("it is not a manifest")
    manifest = outer["manifest"]
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(body.encode()).hexdigest() != outer.get("sha256"):
        raise ValueError("it does not have the hash that it states")
    if manifest.get("format") not in (ORBAX, ONE_FILE, SHARDS):
        raise ValueError(
            f"it has format {manifest.get('format')}, and {ORBAX} to {SHARDS} can be read"
        )
    return manifest


def specs(manifest: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the Spec of every leaf that a manifest lists, by path."""
    return {
        name: Spec(tuple(known["shape"]), known["dtype"])
        for name, known in manifest["leaves"].items()
    }


def verify(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a line for every damaged leaf among arrays that were read, given by path."""
    # Each is a whole array as it was stored, and a typed key is its key data. Leaves that are not
    # given are not checked.
    problems = []
    for name, array in arrays.items():
        known = manifest["leaves"][name]
        stored = Spec(tuple(known["stored_shape"]), known["stored_dtype"])
        if Spec(array.shape, str(array.dtype)) != stored:
            problems.append(f"{name}: {Spec(array.shape, str(array.dtype))} was read, not {stored}")
            continue
        # An empty index stands for the whole leaf. The chunks of shards were compared when read.
        for index, crc in known.get("crc32", ()):
            piece = array[tuple(slice(*bounds) for bounds in index)] if index else array
            if checksum(piece) != crc:
                problems.append(f"{name}: its data do not have the checksum they were saved with")
                break
    return problems


FILES = "integrity/files.json"
_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")  # orbax's: any content, so not listed

SizeAndCrc = tuple[int, str]  # bytes, and CRC-32 as eight hex digits; a list when read from JSON


def file_list(directory: Path, most: float = math.inf) -> dict[str, SizeAndCrc]:
    """Returns the size and CRC-32 of every file of a step, by path relative to its folder."""
    # Files of more than `most` bytes are not read, and have an empty CRC-32.
    listing = {}
    for folder, _, names in os.walk(directory, onerror=raise_error):  # rglob() ignores errors
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(directory).as_posix()
            if name not in (FILES, MANIFEST, *_LATER) and path.is_file():
                size = path.stat().st_size
                listing[name] = size_and_crc(path) if size <= most else (size, "")
    return listing


def missing_marks(directory: Path) -> list[str]:
    """Returns a line for each mark of orbax that is missing."""
    return [f"the file {name} is missing" for name in _LATER if not (directory / name).is_file()]


def file_problems(
    present: Mapping[str, SizeAndCrc], listing: Mapping[str, SizeAndCrc]
) -> list[str]:
    """Returns a line for each listed file that is missing or differs from what was saved."""
    # A damaged listing may name any path: its names are compared, and never opened.
    problems = []
    for name, (size, crc) in listing.items():
        if name not in present:
            problems.append(f"the file {name} is missing")
        elif present[name][0] != size:
            problems.append(f"the file {name} has {present[name][0]} bytes instead of {size}")
        elif present[name][1] != crc:
            problems.append(f"the file {name} was changed: its checksum differs")
    return problems


def size_and_crc(path: Path) -> SizeAndCrc:
    """Reads a file, and returns its size in bytes and its CRC-32."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 18):  # small enough for a cache of the processor
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, f"{crc:08x}"
