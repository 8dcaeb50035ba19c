"""Reads a data set: a process's part of each batch, the splits, and the fingerprint.

The part is that of `mesh.data_shard`: processes whose devices differ only along "tensor" hold the
same examples. A data set whose `train` and `evaluate` take the keywords `rank` and `size` yields
any part. One whose methods do not is asked for no part, and yields that of its process.

By the fingerprint a run that is resumed notices that its data changed.
"""

import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike

from trainer.data.absent import DeclaredData
from trainer.engine import contracts
from trainer.engine.contracts import Batch, calling, data_error
from trainer.engine.mesh import DataShard
from trainer.messages import plural
from trainer.writers.lines import PREFIXES

WHOLE = DataShard(rank=0, size=1)
"""The part of a batch that is all of it."""

_KEYWORDS = frozenset(("rank", "size"))


def takes_shard(method: Callable[..., Any]) -> bool:
    """Returns whether a method of a data set, `train` or `evaluate`, takes `rank` and `size`."""
    # By name only: what takes **keywords may pass them on to a method that takes no part.
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return _KEYWORDS <= {x.name for x in _parameters(method).values() if x.kind in by_name}


def check_shard(data: Any, shard: DataShard) -> None:
    """Raises ComponentError if a data set cannot yield the part that a process holds."""
    # A data set whose methods take no part yields that of its process: it fits a mesh that gives
    # process 0 the first of as many parts as there are processes, and so on.
    of_process = DataShard(jax.process_index(), jax.process_count())
    methods = {"train()": data.train, "evaluate()": data.evaluate}
    lacking = [name for name, method in methods.items() if not takes_shard(method)]
    if shard == of_process or not lacking:
        return
    raise data_error(
        f"On this mesh, process {of_process.rank} of {of_process.size} needs part {shard.rank} of "
        f"{shard.size} of each batch (counted from 0): processes that differ only along 'tensor' "
        f"need the same examples. But {' and '.join(lacking)} of the data set cannot be asked for "
        f"a part.\nAdd the keywords rank and size, as in train(self, batch_index, seed, rank=0, "
        f"size=1) and evaluate(self, split, rank=0, size=1), and yield part rank of size equal "
        f"parts of each batch.\nOr choose a mesh whose axis 'tensor' comes last and stays within a "
        f"process, which has {plural(jax.local_device_count(), 'device')}.",
    )


def train_batches(data: Any, index: int, seed: int, shard: DataShard | None) -> Iterator[Batch]:
    """Yields a part of each training batch, from an index on."""
    # With the `shard` None, or a `train` that takes no part, it is that of its process.
    return iter(data.train(index, seed, **_keywords(data.train, shard)))


def eval_batches(data: Any, split: str, shard: DataShard) -> Iterator[Batch]:
    """Yields a part of each batch of a split, once."""
    # If `evaluate` takes no part, it is that of its process. `evaluate` gets no split if it takes
    # none, as in a class that overrides that of `ArrayDataset`, or if the data set has no attribute
    # `splits`.
    keywords = _keywords(data.evaluate, shard)
    if parts := split_parts(getattr(data, "splits", ()), split):
        each = (eval_batches(data, f"{split}/{part}", shard) for part in parts)
        return itertools.chain.from_iterable(each)
    if hasattr(data, "splits") and _parameters(data.evaluate).keys() - _KEYWORDS:
        return iter(data.evaluate(split, **keywords))
    if split != "test":
        raise data_error(
            f"The data set has a {split} split, but its evaluate() takes no argument. It must be "
            "evaluate(split), which yields the batches of that split.",
        )
    return iter(data.evaluate(**keywords))


def _keywords(method: Callable[..., Any], shard: DataShard | None) -> dict[str, int]:
    return shard._asdict() if shard is not None and takes_shard(method) else {}


def _parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(method).parameters)
    except (TypeError, ValueError):  # some functions in C have no signature
        return {}


_SPLIT = re.compile(rf"({'|'.join(PREFIXES)})(/[\w.-]+)?")
LOOKED_FOR = {"min": "smaller", "max": "larger"}  # mode -> the values that are better


def split_sizes(data: Any) -> dict[str, int | None]:
    """Returns split -> number of examples, validation first; None if the data does not say."""
    # A data set without an attribute `splits` has a test split only. A split that consists of named
    # parts is listed as these, such as "validation/code".
    splits = getattr(data, "splits", ("test",))
    listed = isinstance(splits, Collection) and not isinstance(splits, str)
    if not listed or not splits or not all(_SPLIT.fullmatch(str(split)) for split in splits):
        needed = (
            " Every run needs a validation or a test split to evaluate: give data.tokens the "
            "shards of one as validation= or test=, such as 'val_*.bin'."
        )
        raise ValueError(
            f"The data set has splits {splits!r}.{needed if listed and not splits else ''} The "
            "attribute must list what evaluate(split) takes: 'validation', 'test' or both, or "
            "named parts of them, such as 'validation/code'; or be a dict from these names to "
            "numbers of examples. A data set without it is evaluated with evaluate(), as its test "
            "split."
        )
    if both := next((split for split in splits if split_parts(splits, split)), None):
        raise ValueError(
            f"The data set has splits {list(splits)!r}, and {both!r} consists of its named parts: "
            "list either these or the whole."
        )
    sizes = splits if isinstance(splits, Mapping) else dict.fromkeys(splits)
    # In the order in which the splits are evaluated.
    return {x: sizes[x] for whole in PREFIXES for x in sizes if x.partition("/")[0] == whole}


def split_parts(splits: Iterable[str], split: str) -> list[str]:
    """Returns the names of the parts of a split, such as "code" of "validation/code"."""
    return [x.removeprefix(f"{split}/") for x in splits if x.startswith(f"{split}/")]


def whole_splits(splits: Iterable[str]) -> list[str]:
    """Returns "validation", "test" or both, of which `splits` has all or named parts."""
    wholes = {split.partition("/")[0] for split in splits}
    return [split for split in PREFIXES if split in wholes]


def split_metrics(metrics: Collection[str], split: str, splits: Iterable[str]) -> list[str]:
    """Returns the names of metrics of a split, and of its parts, such as "code/accuracy"."""
    parts = split_parts(splits, split)
    return [*metrics, *(f"{part}/{name}" for part in parts for name in metrics)]


def best_row(best_metric: str, metrics: Sequence[str], splits: Collection[str]) -> str:
    """Returns the name in metrics.jsonl of the metric that ranks checkpoints; raises ValueError."""
    # "accuracy" means that of the validation split, or of the test split if there is no other, and
    # "code/accuracy" that of its part; "validation/accuracy" and "eval/accuracy" name the split.
    first, *_ = wholes = whole_splits(splits)
    rows = [PREFIXES[x] + name for x in wholes for name in split_metrics(metrics, x, splits)]
    row = PREFIXES[first] + best_metric
    if {row, best_metric}.isdisjoint(rows):
        raise ValueError(
            f"best_metric is {best_metric!r}, but the metrics are {', '.join(metrics)}; with their "
            f"splits, {', '.join(rows)}."
        )
    return row if row in rows else best_metric


def wrong_mode(name: str, mode: str, metrics: Mapping[str, Any]) -> Literal["min", "max"] | None:
    """Returns the mode that a metric wants, if `mode` is the other one, or else None."""
    # `name` may begin with a split and a part of it. The loss wants "min"; the class of a metric
    # may have `smaller_is_better`.
    bare = next((x for x in ("loss", *metrics) if f"/{name}".endswith(f"/{x}")), "")
    smaller = bare == "loss" or getattr(metrics.get(bare), "smaller_is_better", None)
    wanted = "min" if smaller else "max"
    return None if smaller is None or mode == wanted else wanted


def ranking_warnings(experiment: Any) -> list[str]:
    """Warns if the best checkpoint is probably the worst, or chosen on the test split."""
    # A `best_metric` that names the test split itself is no warning.
    metric, mode, row = experiment.best_metric, experiment.best_mode, experiment.best_row or ""
    found = []
    if row.startswith(PREFIXES["test"]) and row != metric:
        found.append(
            f"best_metric is {metric!r}, and the data set has no validation split: the best "
            f"checkpoint is chosen by {row}, on the test split, where its value is then optimistic."
            f" Hold out a part, such as by data.validation=0.1, or write {row!r} if you mean it."
        )
    if wanted := wrong_mode(row, mode, experiment.metrics):
        found.append(
            f"best_metric is {metric!r}, of which {LOOKED_FOR[wanted]} values are better, but "
            f"best_mode is {mode!r}: the worst checkpoint would be kept. Set best_mode to "
            f"{wanted!r}."
        )
    return found


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
        raise data_error(
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
        raise data_error(
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
