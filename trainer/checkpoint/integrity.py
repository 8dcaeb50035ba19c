"""The manifest of a checkpoint: names, shapes, dtypes and checksums of its leaves.

This module depends on numpy and jax, not on the storage. The manifest is a JSON object, sealed with
the SHA-256 of its own text. Every leaf has a CRC-32 of its *global* logical bytes (C order, little
endian), so that a checkpoint can be verified on any number of devices.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optim.paths import flatten

MANIFEST = "manifest.json"
# How a step is stored: by orbax, with a list of its files; or with its leaves in one file.
ORBAX, ONE_FILE = 1, 2

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
    # ValueError is raised for dtype object too. `name` is the path of the leaf, for the error.
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
    if manifest.get("format") not in (ORBAX, ONE_FILE):
        raise ValueError(
            f"it has format {manifest.get('format')}, and {ORBAX} and {ONE_FILE} can be read"
        )
    return manifest


def specs(manifest: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the Spec of every leaf that a manifest lists, by path."""
    return {
        name: Spec(tuple(entry["shape"]), entry["dtype"])
        for name, entry in manifest["leaves"].items()
    }


def verify(manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a line for every damaged leaf among arrays that were read, given by path."""
    # Each is a whole array as it was stored, and a typed key is its key data. Leaves that are not
    # given are not checked.
    problems = []
    for name, array in arrays.items():
        entry = manifest["leaves"][name]
        stored = Spec(tuple(entry["stored_shape"]), entry["stored_dtype"])
        if Spec(array.shape, str(array.dtype)) != stored:
            problems.append(f"{name}: {Spec(array.shape, str(array.dtype))} was read, not {stored}")
            continue
        for index, crc in entry["crc32"]:  # an empty index stands for the whole leaf
            piece = array[tuple(slice(*bounds) for bounds in index)] if index else array
            if checksum(piece) != crc:
                problems.append(f"{name}: its data do not have the checksum they were saved with")
                break
    return problems


def as_saved(entry: Mapping[str, Any], array: np.ndarray) -> np.ndarray:
    """Returns an array that was read, uncopied, in the dtype it had before it was stored."""
    # `entry` is the leaf's, in the manifest. A typed key stays its key data.
    if entry["dtype"] == entry["stored_dtype"] or entry["dtype"].startswith("key<"):
        return array
    return array.view(dtype(entry["dtype"]))
