"""The loss and the metrics of single examples, whose weighted means are those of the split."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Batch = Mapping[str, Any]  # as in trainer.protocols, which would import jax

# By how much the sum over the examples of a batch may differ from what the metric says of the whole
# batch, as a share of the sum of absolute values: both are sums in float32.
_ROUNDING = 1e-4
_EQUAL = 1e-6  # relative


class ExampleSums(NamedTuple):
    """A metric that is a mean: its sums over a batch, and what each example adds to them."""

    totals: Any  # what each example adds to `total`, [batch]
    counts: Any  # what each example adds to `count`, [batch]; 0 for padding
    total: Any  # the sum over the whole batch, as the metric computes it
    count: Any  # the number by which the metric divides `total`


@dataclass(frozen=True)
class Examples:
    """The loss and other metrics of a split's examples, in the order of the data set."""

    # metric -> [examples]; that of a sequence is the mean over its positions that count
    values: Mapping[str, NDArray]
    # metric -> what each example counts in its mean, [examples]: 1, or the number of positions
    weights: Mapping[str, NDArray]
    sha256: str  # of all fields of these examples; it does not depend on the size of a batch
    complete: bool  # whether these are all examples of the split, and not the first ones


class ExampleCollector:
    """Collects the values of the first `most` examples of a split from its batches."""

    # A metric is left out if its values for single examples do not add up to those of their
    # batches. So is a loss that is the same number for all examples of each batch, because it is
    # one of the whole batch. Neither is a mean over examples.

    def __init__(self, most: int):
        self._left = most
        self._complete = True
        self._totals: dict[str, list[NDArray]] = {}
        self._counts: dict[str, list[NDArray]] = {}
        self._wrong: set[str] = set()
        self._loss_varies: bool | None = None  # within batches; None if none has two examples
        self._fields: dict[str, Any] = {}  # header of a field -> hash of its rows

    def is_full(self, batch: _Batch) -> bool:
        """Returns whether a batch has examples, and none of them is to be kept."""
        # `result` then says that the examples are not complete.
        full = not self._left and bool(_counted(batch).any())
        self._complete &= not full
        return full

    def add(self, batch: _Batch, found: Mapping[str, ExampleSums]) -> None:
        """Adds a batch with its mask, on the host, and the sums of each metric over it."""
        kept = np.flatnonzero(_counted(batch))
        self._complete &= len(kept) <= self._left
        kept = kept[: self._left]
        self._left -= len(kept)
        for name, sums in found.items():
            totals, counts = np.asarray(sums.totals, float), np.asarray(sums.counts, float)
            same = float(counts.sum()) == float(sums.count)
            apart = abs(float(totals.sum()) - float(sums.total))
            if not (same and apart <= _ROUNDING * float(np.abs(totals).sum())):  # also for NaN
                self._wrong.add(name)
            self._totals.setdefault(name, []).append(totals[kept])
            self._counts.setdefault(name, []).append(counts[kept])
        if "loss" in found and len(kept) > 1:
            values = self._totals["loss"][-1] / self._counts["loss"][-1]
            differ = bool(np.ptp(values) > _EQUAL * abs(values[0]))
            self._loss_varies = bool(self._loss_varies) or differ
        self._hash(batch, kept)

    def _hash(self, batch: _Batch, kept: NDArray) -> None:
        for name, x in batch.items():
            rows = np.asarray(x)
            if name == "mask" and rows.ndim == 1:
                continue  # 1 for all that are kept
            header = f"{name} {rows.dtype} {rows.shape[1:]}"
            digest = self._fields.setdefault(header, hashlib.sha256())
            digest.update(np.ascontiguousarray(rows[kept]).data)

    def result(self) -> Examples:
        """Returns what was collected."""
        values, weights = {}, {}
        for name in self._totals:
            totals, counts = (np.concatenate(x[name]) for x in (self._totals, self._counts))
            of_the_batch = name == "loss" and self._loss_varies is False
            if name not in self._wrong and not of_the_batch and (counts > 0).all():
                values[name], weights[name] = totals / counts, counts
        fields = [f"{header} {x.hexdigest()}" for header, x in sorted(self._fields.items())]
        sha256 = hashlib.sha256("\n".join(fields).encode()).hexdigest()
        return Examples(values, weights, sha256, self._complete)


def _counted(batch: _Batch) -> NDArray[np.bool_]:
    """Returns which examples of a batch count, or have a position that does."""
    mask = np.asarray(batch["mask"])
    return np.asarray(mask.reshape(len(mask), -1).any(axis=1))
