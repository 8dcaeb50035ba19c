"""Reads the part of each batch that a process holds from a data set.

The part is that of `mesh.data_shard`: processes whose devices differ only along "tensor" hold the
same examples. A data set whose `train` and `evaluate` take the keywords `rank` and `size` yields
any part. One whose methods do not is asked for no part, and yields that of its process.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from trainer.engine.contracts import Batch, ComponentError
from trainer.engine.mesh import DataShard
from trainer.messages import plural

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
    raise ComponentError(
        "data",
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
    if hasattr(data, "splits") and _parameters(data.evaluate).keys() - _KEYWORDS:
        return iter(data.evaluate(split, **keywords))
    if split != "test":
        raise ComponentError(
            "data",
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
