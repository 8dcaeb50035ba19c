"""The step of a run of one process: its leaves in one file, and a manifest beside it.

The file has the safetensors format, which other programs read: the length of a header as eight
bytes, the header (JSON: name -> dtype, shape, position), and the leaves one after another. No byte
lies between them, so the checksums of the header and of all leaves are those of the whole file.
"""

import glob
import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.checkpoint import integrity
from trainer.checkpoint.errors import CorruptCheckpoint, means_absent, one_line
from trainer.checkpoint.integrity import HostLeaf, manifest_entries
from trainer.writers.files import open_regular, replace_file

LEAVES = "state.safetensors"

_PART = 1 << 25  # bytes, after which the file is written through to the disk
_ALIGNMENT = 8
# The dtypes of the format and their names in it. In a step, a leaf of another dtype is a row of
# bytes for other programs.
DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL"},
}


def write_step(directory: Path, manifest: Mapping[str, Any], leaves: Mapping[str, HostLeaf]) -> str:
    """Writes the leaves of a step, and returns the text of its manifest; syncs nothing."""
    # The folder must exist, `manifest` is without its leaves, and each leaf is a whole host array.

    # Larger items first: every leaf then begins at a multiple of the size of its items.
    names = sorted(leaves, key=lambda name: -leaves[name].data.dtype.itemsize)
    header, starts = _header({name: leaves[name].data for name in names})
    entries, unsynced = {}, 0
    with open(directory / LEAVES, "wb") as file:
        file.write(header)
        for name in names:
            # Checksum and write a leaf before the next one, while it is in a cache.
            entries |= manifest_entries({name: leaves[name]})
            content = integrity.as_bytes(np.asarray(leaves[name].data))
            for at in range(0, content.size, _PART):
                unsynced += file.write(content[at : at + _PART])  # type: ignore[arg-type]
                if unsynced >= _PART:
                    # Write it to the disk, and free the memory that caches it: the file of a large
                    # checkpoint would otherwise evict the data that the steps read.
                    file.flush()
                    os.fsync(file.fileno())
                    if hasattr(os, "posix_fadvise"):  # not on macOS
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    unsynced = 0
            entries[name]["start"] = starts[name]
    whole = {
        **manifest,
        "format": integrity.ONE_FILE,
        "header": [len(header), f"{zlib.crc32(header):08x}"],
        "leaves": entries,
    }
    return integrity.seal(whole)


def _header(arrays: Mapping[str, np.ndarray | Any]) -> tuple[bytes, dict[str, int]]:
    """Returns the bytes before the leaves, and where each leaf starts in the file, by name."""
    described, ends = {}, [0]
    for name, array in arrays.items():
        known = DTYPES.get(array.dtype.name)
        described[name] = {
            "dtype": known or "U8",
            "shape": list(array.shape) if known else [array.nbytes],
            "data_offsets": [ends[-1], ends[-1] + array.nbytes],
        }
        ends.append(ends[-1] + array.nbytes)
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + at for name, at in zip(arrays, ends, strict=False)}


def read_leaves(
    directory: Path, manifest: Mapping[str, Any], wanted: Collection[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields leaves of a step as they were stored; their checksums are not compared."""
    # Raises CorruptCheckpoint if the file is missing, has another size or another header, and
    # OSError if the disk cannot be read.
    try:
        with open_regular(directory / LEAVES) as file:
            _check_layout(file, manifest)
            for name in wanted:
                yield name, _read_leaf(file, manifest["leaves"][name])
    except OSError as e:
        if not means_absent(e):
            raise
        raise CorruptCheckpoint(f"the file {LEAVES} is missing") from e
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, CorruptCheckpoint):
            raise
        raise CorruptCheckpoint(f"its manifest does not fit {LEAVES}: {one_line(e)}") from e


def _check_layout(file: BinaryIO, manifest: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint unless the file has the size and the header of its save."""
    # A leaf cannot be larger than the file after this, whatever its entry says.
    length, crc = manifest["header"]
    size = length
    for entry in manifest["leaves"].values():
        shape = entry["stored_shape"]
        if min(shape, default=0) < 0:
            raise ValueError(f"a leaf has the shape {shape}")
        size += math.prod(shape) * integrity.dtype(entry["stored_dtype"]).itemsize
    if (found := os.fstat(file.fileno()).st_size) != size:
        raise CorruptCheckpoint(f"the file {LEAVES} has {found} bytes instead of {size}")
    if f"{zlib.crc32(file.read(length)):08x}" != crc:
        raise CorruptCheckpoint(
            f"the file {LEAVES} was changed: the checksum of its header differs"
        )


def _read_leaf(file: BinaryIO, entry: Mapping[str, Any]) -> np.ndarray:
    array = np.empty(entry["stored_shape"], integrity.dtype(entry["stored_dtype"]))
    if entry["start"] < 0:
        raise ValueError(f"a leaf starts at {entry['start']}")
    file.seek(entry["start"])
    content = integrity.as_bytes(array)
    read = file.readinto(content)  # type: ignore[attr-defined]
    if read != content.size:
        raise CorruptCheckpoint(f"the file {LEAVES} ends within a leaf")
    return array


def export(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], most: float
) -> list[Path]:
    """Writes or replaces a safetensors file, and returns its path; ValueError for its dtypes."""
    # More than `most` bytes are divided among several files, as the Hugging Face hub has them, and
    # the path of their index is returned, too, which is written last. A file is written whole or
    # not at all.
    import safetensors.numpy

    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, x in arrays.items():
        if x.dtype.name not in DTYPES:
            raise ValueError(
                f"{name} has the dtype {x.dtype.name}, which a safetensors file cannot have. It "
                f"can have {', '.join(DTYPES)}."
            )
        if size + x.nbytes > most and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = np.ascontiguousarray(x).reshape(x.shape)
        size += x.nbytes
    of = len(parts)
    paths = [path]
    if of > 1:
        numbers = range(1, of + 1)
        paths = [path.with_name(f"{path.stem}-{i:05}-of-{of:05}{path.suffix}") for i in numbers]
    for file, part in zip(paths, parts, strict=True):
        replace_file(file, safetensors.numpy.save(part, dict(metadata)))
    if of > 1:
        files = {name: file.name for file, part in zip(paths, parts, strict=True) for name in part}
        total = sum(x.nbytes for x in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        paths.append(path.with_name(f"{path.name}.index.json"))
        replace_file(paths[-1], (json.dumps(index, indent=2) + "\n").encode())
    return paths


def exported_before(path: Path) -> list[Path]:
    """Returns the files that an export to a path may have written."""
    parts = path.parent.glob(f"{glob.escape(path.stem)}-*-of-*{path.suffix}")
    files = [path, path.with_name(f"{path.name}.index.json"), *sorted(parts)]
    return [file for file in files if file.exists()]
