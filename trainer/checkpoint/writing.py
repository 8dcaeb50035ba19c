"""Writes the files of a checkpoint that one process has as a whole, in the layout of orbax.

Orbax takes 30 ms of Python for 21 small leaves, and delays the steps meanwhile. Here tensorstore
writes the leaves, as it does for orbax, but together in one transaction. Orbax can read them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from trainer.checkpoint import integrity
from trainer.checkpoint.file_list import STEP_METADATA, SizeAndCrc, size_and_crc
from trainer.checkpoint.host_copy import HostLeaf, arrays_to_write, manifest_entries

_BATCH = 1 << 25  # bytes written in one transaction; a larger leaf is written alone
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def write_step(
    directory: Path, manifest: Mapping[str, Any], leaves: Mapping[str, HostLeaf]
) -> dict[str, SizeAndCrc]:
    """Writes the arrays of a step, its manifest and what orbax reads about it.

    The folder must be empty, `manifest` is without its leaves, and each leaf is a whole host array.
    Returns the sizes and CRC-32 of the files with arrays, by path relative to the folder; these
    files are synced. Raises OSError if the disk cannot be written, or ValueError if tensorstore
    cannot write: its text has the number of the system's error.
    """
    state, sealed = directory / "state", directory / "integrity" / integrity.MANIFEST
    for folder in (state, sealed.parent):
        folder.mkdir(mode=0o700)
    arrays = {name: np.asarray(array) for name, array in arrays_to_write(leaves).items()}
    checked, known = {}, {}
    for batch in _batches(arrays):
        # Checksum, write and drop a part before the next one, while it is in a cache.
        checked |= manifest_entries({name: leaves[name] for name in batch if name in leaves})
        _write_arrays(state, batch)
        for path in (state / "d").iterdir():
            name = path.relative_to(directory).as_posix()
            if name not in known:
                known[name] = size_and_crc(path)
                _drop_from_memory(path)
    checked |= manifest_entries(
        {name: leaf for name, leaf in leaves.items() if name not in checked}
    )
    sealed.write_text(integrity.seal({**manifest, "leaves": checked}))
    (state / "_METADATA").write_text(json.dumps(_tree_metadata(arrays)))
    (directory / STEP_METADATA).write_text(json.dumps(_step_metadata()))
    return known


def _batches(arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Divides arrays into parts of at most 32 MiB, or of one array."""
    batch: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if batch and sum(x.nbytes for x in batch.values()) + array.nbytes > _BATCH:
            yield batch
            batch = {}
        batch[name] = array
    yield batch


def _write_arrays(state: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Adds arrays to the database of a step, each as a zarr array of one chunk."""
    # Not synced here: the files are synced when they are dropped, and again before the commit.
    context = ts.Context({"file_io_sync": False})
    transaction = ts.Transaction()
    try:
        opened = {
            name: ts.open(
                {
                    "driver": "zarr",
                    "kvstore": {
                        "driver": "ocdbt",
                        "base": state.as_uri() + "/",
                        "path": name + "/",
                    },
                    # Parameters hardly compress, and zstd would take the cores from the steps.
                    "metadata": {"chunks": list(array.shape), "compressor": None},
                    "dtype": ts.dtype(array.dtype).name,
                    "schema": {"domain": {"shape": list(array.shape)}},
                    "store_data_equal_to_fill_value": True,
                },
                create=True,
                open=False,
                context=context,
                transaction=transaction,
            )
            for name, array in arrays.items()
        }
        # Not copied: the arrays stay valid, and are not written into.
        writes = [
            opened[name].result().write(array, can_reference_source_data_indefinitely=True)
            for name, array in arrays.items()
        ]
        for write in writes:  # a write whose future is dropped before it is done writes nothing
            write.copy.result()
        transaction.commit_async().result()
    except BaseException:
        transaction.abort()
        raise


def _drop_from_memory(path: Path) -> None:
    """Writes a file through to the disk, and frees the memory in which the system caches it.

    The files of a large checkpoint would otherwise evict the data that the steps read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _tree_metadata(names: Iterable[str]) -> dict[str, Any]:
    """Returns what orbax reads about the arrays of a step: a dict with one level."""
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    return {
        "tree_metadata": {
            str((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],  # 2: the key of a dict
                "value_metadata": value,
            }
            for name in names
        },
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _step_metadata() -> dict[str, Any]:
    """Returns what orbax's manager reads about a step."""
    return {
        "item_handlers": {"state": _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": time.time_ns(),
        "commit_timestamp_nsecs": None,
        "custom_metadata": {},
    }
