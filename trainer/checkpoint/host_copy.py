"""Fetches the leaves of a state from the devices, as host arrays that stay valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optim.paths import flatten
from trainer.checkpoint.integrity import Spec, checksum, is_key, spec

Index = list[list[int]]  # [[start, stop], ...], a shard's position in its leaf


class HostLeaf(NamedTuple):
    """A leaf that is being saved."""

    spec: Spec
    # the whole leaf; the jax.Array itself if this process does not have all of its shards
    data: np.ndarray | jax.Array
    # what this process computes checksums of: [([], whole array)], or (position, data) of each
    # shard that this process saves
    pieces: list[tuple[Index, np.ndarray]]


def to_host(tree: Any) -> dict[str, HostLeaf]:
    """Fetches every leaf, by path; raises ValueError for one of dtype object or no array."""
    # The arrays stay valid when the state is donated afterwards. On a CPU they may be views, and
    # jax does not reuse a buffer while a view of it exists; on other devices they are copies.
    leaves = flatten(tree, verbatim=True)
    known = {name: spec(name, leaf) for name, leaf in leaves.items()}
    arrays = {
        name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in leaves.items()
    }
    for array in arrays.values():  # start all transfers before waiting for the first
        if isinstance(array, jax.Array) and array.is_fully_addressable:
            array.copy_to_host_async()
    return {name: _host_leaf(known[name], array) for name, array in arrays.items()}


def _host_leaf(known: Spec, array: np.ndarray | jax.Array) -> HostLeaf:
    if not isinstance(array, jax.Array):
        return _whole(known, np.array(array))  # copied, because its owner may write into it
    if array.is_fully_addressable or array.is_fully_replicated:
        return _whole(known, np.asarray(array))
    pieces = [
        (_bounds(shard.index, array.shape), np.asarray(shard.data))
        for shard in array.addressable_shards
        # Save one of the copies that a shard has on several devices.
        if shard.replica_id == 0
    ]
    return HostLeaf(known, array, pieces)


def _whole(known: Spec, data: np.ndarray) -> HostLeaf:
    if data.dtype.isbuiltin != 1 and data.dtype.name != "bfloat16":
        # Orbax cannot store all dtypes of ml_dtypes, such as float8_e4m3fn.
        data = np.ascontiguousarray(data).view(np.uint8)
    return HostLeaf(known, data, [([], data)])


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Index:
    return [list(part.indices(n)[:2]) for part, n in zip(index, shape, strict=True)]


def manifest_entries(leaves: Mapping[str, HostLeaf]) -> dict[str, dict[str, Any]]:
    """Computes the checksums of leaves, and returns their entries of the manifest, by path."""
    # The "crc32" of an entry is a list of [position, checksum], one for each piece of the leaf.
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


def arrays_to_write(leaves: Mapping[str, HostLeaf]) -> dict[str, np.ndarray | jax.Array]:
    """Returns the arrays that are written for leaves, by path: always at least one."""
    # Empty leaves are left out, because orbax cannot store them.
    stored = {name: leaf.data for name, leaf in leaves.items() if 0 not in leaf.data.shape}
    return stored or {"nothing": np.zeros(1, np.uint8)}  # orbax refuses an item without leaves
