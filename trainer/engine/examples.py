"""The loss and the metrics of single examples, whose weighted means are those of the split."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
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
    left_out: tuple[str, ...] = ()  # metrics that were computed and have no values, sorted


def collect_examples(
    batches: Iterable[_Batch], sums_of: Callable[[_Batch], Mapping[str, ExampleSums]], most: int
) -> Examples:
    """Collects the values of the first `most` examples of a split from its batches."""
    # The batches have masks; `sums_of` returns the sums of each metric over one, on the host.
    # A metric is left out if its values for single examples do not add up to those of their
    # batches. So is a loss that is the same number for all examples of each batch, because it is
    # one of the whole batch, unless several batches have one. Neither is a mean over examples.
    left, complete = most, True
    totals: dict[str, list[NDArray]] = {}
    counts: dict[str, list[NDArray]] = {}
    wrong: set[str] = set()
    ends: list[tuple[float, float]] = []  # the losses of each batch of two examples or more
    fields: dict[str, Any] = {}  # header of a field -> hash of its rows
    for batch in batches:
        mask = np.asarray(batch["mask"])
        kept = np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))  # or a position that counts
        complete &= len(kept) <= left
        if len(kept) and not left:
            break
        kept = kept[:left]
        left -= len(kept)
        for name, sums in sums_of(batch).items():
            total, count = np.asarray(sums.totals, float), np.asarray(sums.counts, float)
            same = float(count.sum()) == float(sums.count)
            apart = abs(float(total.sum()) - float(sums.total))
            if not (same and apart <= _ROUNDING * float(np.abs(total).sum())):  # also for NaN
                wrong.add(name)
            totals.setdefault(name, []).append(total[kept])
            counts.setdefault(name, []).append(count[kept])
        if "loss" in totals and len(kept) > 1:
            losses = totals["loss"][-1] / counts["loss"][-1]
            ends.append((float(losses.min()), float(losses.max())))
        _hash(fields, batch, kept)
    alike = [high - low <= _EQUAL * abs(low) for low, high in ends]
    if ends and all(alike) and (len(ends) == 1 or np.ptp(ends) > _EQUAL * abs(ends[0][0])):
        wrong.add("loss")
    values, weights = {}, {}
    for name in totals:
        total, count = np.concatenate(totals[name]), np.concatenate(counts[name])
        if name not in wrong and (count > 0).all():
            values[name], weights[name] = total / count, count
    hashed = [f"{header} {x.hexdigest()}" for header, x in sorted(fields.items())]
    sha256 = hashlib.sha256("\n".join(hashed).encode()).hexdigest()
    return Examples(values, weights, sha256, complete, tuple(sorted(totals.keys() - values)))


def _hash(fields: dict[str, Any], batch: _Batch, kept: NDArray) -> None:
    for name, x in batch.items():
        rows = np.asarray(x)
        if name == "mask" and rows.ndim == 1:
            continue  # 1 for all that are kept
        digest = fields.setdefault(f"{name} {rows.dtype} {rows.shape[1:]}", hashlib.sha256())
        digest.update(np.ascontiguousarray(rows[kept]).data)
