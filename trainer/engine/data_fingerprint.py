"""The fingerprint of a data set, by which a run that is resumed notices that its data changed."""

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from trainer.data.absent import DeclaredData
from trainer.engine import contracts
from trainer.engine.contracts import Batch, ComponentError, calling
from trainer.engine.data_shards import WHOLE, eval_batches, takes_shard, train_batches
from trainer.engine.splits import split_sizes

_SEED = 0
_FAR = 100  # not farther: a data set may have to make all batches before this one


def digest_batch(batch: Mapping[str, ArrayLike]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes of a batch, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def data_fingerprint(data: Any) -> str:
    """Returns the attribute `fingerprint` of a data set, or else a hash of some batches."""
    # The hash, "batches " and 16 hex digits, covers `element_spec`, `num_examples`, the first
    # training batch, one far behind it in the first epoch, and the first batch of every split that
    # is evaluated: hashing all batches would take as long as an epoch. The batches are whole, and
    # the hash does not depend on the process; of a data set that takes no part of a batch, each
    # process hashes its own shards.
    if not _has_own(data):
        return f"batches {_hash_batches(data)[:16]}"
    with calling("data"):
        own = data.fingerprint
    if not isinstance(own, str) or not own:
        kind = "a method" if callable(own) else repr(own)
        raise ComponentError(
            "data",
            f"The attribute fingerprint of the data set is {kind}. It must be a text that changes "
            "when the data change, such as a sha256. Leave it out, and batches are hashed instead.",
        )
    return own


def read_batch(data: Any, index: int) -> Batch:
    """Returns the training batch of an index, whole, with the seed 0; raises ComponentError."""
    # Of a data set that takes no part of a batch, it is this process's shard.
    with calling("data"):
        batch = next(contracts.endless(train_batches(data, index, _SEED, WHOLE)))
    shards = 1 if takes_shard(data.train) else jax.process_count()
    contracts.check_batch(batch, data.element_spec, shards)
    contracts.check_values(batch, "train()")
    return batch


def describe_fingerprint(data: Any) -> str:
    """Returns the plan's line about the fingerprint, reading no data; "" if they are not here."""
    if isinstance(data, DeclaredData):
        return ""
    if _has_own(data):
        return "fingerprint of the data: that of the data set"
    batches = f"batches 0 and {far}" if (far := _far(data)) else "batch 0"
    return (
        f"fingerprint of the data: a hash of training {batches} and of the first batch of "
        f"{' and '.join(split_sizes(data))}; the data set has none"
    )


def _has_own(data: Any) -> bool:
    # Without computing a property, which may read all data.
    if inspect.getattr_static(data, "fingerprint", None) is not None:
        return True
    return getattr(data, "fingerprint", None) is not None  # found by a __getattr__


def _far(data: Any) -> int:
    if not data.num_examples:  # not known
        return _FAR
    return int(max(0, min(_FAR, data.num_examples // data.batch_size - 1)))


def _hash_batches(data: Any) -> str:
    first = digest_batch(read_batch(data, 0))
    if digest_batch(read_batch(data, 0)) != first:
        raise ComponentError(
            "data",
            f"train(0, {_SEED}) of the data set yielded two different batches. A batch must be a "
            "pure function of the seed and its index, or a run cannot be resumed: draw from "
            "np.random.default_rng([seed, index]), and begin at batch_index. A data set that "
            "cannot do so needs an attribute fingerprint, a text that stands for its data.",
        )
    with calling("data"):
        spec = {name: (x.shape, np.dtype(x.dtype).str) for name, x in data.element_spec.items()}
    parts = [str(sorted(spec.items())), str(data.num_examples), first]
    parts.append(digest_batch(read_batch(data, _far(data))))
    for split in split_sizes(data):
        with calling("data"):
            batch = next(eval_batches(data, split, WHOLE), None)
        parts.append(f"{split} {digest_batch(contracts.check_eval_batch(batch))}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
