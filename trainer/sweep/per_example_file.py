"""per_example.npz: the loss and the metrics of a final run on each example of the test split.

    value/loss      float16, or float32 where that would change the mean; bool for 0 and 1
    weight/loss     what each example counts, such as its number of tokens; absent if all count 1
    sha256          of the examples, in their order
    complete        whether they are all examples of the split, and not the first 100,000
    left_out        names of metrics that are no means over examples, or could not be computed

Each metric that is a mean over examples has arrays like those of the loss. `numpy.load` reads it.
"""

import io
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.config.wording import listing
from trainer.engine.examples import Examples
from trainer.writers.files import open_regular

PER_EXAMPLE_FILE = "per_example.npz"
MOST_EXAMPLES = 100_000
_VALUE, _WEIGHT = "value/", "weight/"
# How much float16 may change a mean, as a share of the mean of absolute values. Rounding changes it
# by 0.0005 at most; values outside the range of float16 change it by more.
_MEAN_CHANGES = 1e-3
_MEAN_ROUNDING = 1e-4  # of a mean in float32, as a share of it
_MOST_BYTES = 640 * MOST_EXAMPLES  # of all arrays in a file, which someone else may have written


def encode_examples(examples: Examples) -> bytes:
    """Returns the content of the file; equal examples, at most 100,000, give equal bytes."""
    arrays: dict[str, NDArray] = {}
    for name, values in examples.values.items():
        arrays[_VALUE + name] = _compact(values)
        if (weights := examples.weights[name]).min() != 1 or weights.max() != 1:
            arrays[_WEIGHT + name] = weights.astype(np.float32)
    arrays["sha256"] = np.frombuffer(bytes.fromhex(examples.sha256), np.uint8)
    arrays["complete"] = np.array(examples.complete)
    if examples.left_out:
        arrays["left_out"] = np.array(examples.left_out)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _compact(values: NDArray) -> NDArray:
    if np.isin(values, (0.0, 1.0)).all():
        return values.astype(np.bool_)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    changed = abs(float(half.astype(float).mean() - values.mean()))
    close = changed <= _MEAN_CHANGES * float(np.abs(values).mean())  # False for infinities
    return half if close else values.astype(np.float32)


def unlike_means(found: Examples, metrics: Mapping[str, float]) -> Iterator[str]:
    """Yields the metrics whose mean over a run's examples is not that of its last row."""
    # `metrics` are those of the last row, by names such as "eval/loss". The first 100,000 examples
    # of more are not compared.
    for name, values in found.values.items() if found.complete else ():
        value, weight = metrics.get(f"eval/{name}"), found.weights[name].astype(float)
        each = values.astype(float)
        size = float(np.average(abs(each), weights=weight))
        within = _MEAN_ROUNDING if values.dtype == np.bool_ else 2 * _MEAN_CHANGES
        mean = float(np.average(each, weights=weight))
        if value is not None and not abs(mean - value) <= within * size:  # also for NaN
            yield f"eval/{name}"


def unlike_examples(
    folder: Path,
    arm: str,
    runs: Mapping[str, Mapping[str, float]],
    same_data: bool,
    listed: bool,
) -> Iterator[tuple[str, str]]:
    """Yields runs of an arm whose file is unlike their rows or other runs, and why."""
    # `runs` is their folder below `folder` -> the metrics of the last row. All of them have, if
    # they `listed` what they left out, the same metrics and, with `same_data`, the same test
    # examples: otherwise, who removes what one has could silence what a verdict says of other test
    # sets.
    files = {name: read_examples(folder / name) for name in runs}
    known = set[str]().union(*({*x.values, *x.left_out} for x in files.values() if x))
    complete = any(x.complete for x in files.values() if x)
    hashes = Counter(x.sha256 for x in files.values() if x and x.values)
    usual = max(hashes, key=hashes.__getitem__, default="")
    for name, found in files.items():
        has = {*found.values, *found.left_out} if found else set[str]()
        lacks = known - has if listed else set[str]()
        if listed and complete and not (found and (found.complete or not found.values)):
            lacks.add("some examples")
        if lacks:
            yield name, f"it lacks {listing(sorted(lacks))}, which other runs of {arm} have"
        if found and found.values and same_data and found.sha256 != usual:
            yield name, f"its test examples are not those of other runs of {arm}"
        if wrong := list(unlike_means(found, runs[name])) if found else []:
            yield name, f"the mean over its examples is not the {listing(wrong)} of metrics.jsonl"


def example_differences(one: Path, other: Path) -> dict[str, float]:
    """Returns what differs in the files of two runs -> its mean difference, as a share of it."""
    # It is infinite for a file or an array that only one has, and for other examples. Equal files
    # give nothing.
    a, b = read_examples(one), read_examples(other)
    if a is None or b is None:
        return {PER_EXAMPLE_FILE: math.inf} if (a, b) != (None, None) else {}
    alike = ("sha256", "complete", "left_out")
    apart = {name: math.inf for name in alike if getattr(a, name) != getattr(b, name)}
    for kind in ("values", "weights"):
        ours, theirs = getattr(a, kind), getattr(b, kind)
        for name in sorted({*ours, *theirs}):
            x, y = (np.asarray(each.get(name, ()), float) for each in (ours, theirs))
            if x.shape != y.shape:
                apart[name] = math.inf
            elif not np.array_equal(x, y):
                size = float(abs(x - y).sum() / np.maximum(abs(x), abs(y)).sum())
                apart[name] = max(apart.get(name, 0.0), size)
    return apart


def read_examples(folder: Path) -> Examples | None:
    """Returns the examples in a run's folder, as stored; None without a file that is intact."""
    try:
        with open_regular(folder / PER_EXAMPLE_FILE) as file, zipfile.ZipFile(file) as archive:
            if sum(each.file_size for each in archive.infolist()) > _MOST_BYTES:
                return None
            arrays = {}
            for name in archive.namelist():
                array = np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
                arrays[name.removesuffix(".npy")] = array
        return _examples(arrays)
    except Exception:  # zipfile and numpy may raise anything for a damaged file
        return None


def _examples(arrays: dict[str, NDArray]) -> Examples:
    values = {name.removeprefix(_VALUE): x for name, x in arrays.items() if name.startswith(_VALUE)}
    ones = np.ones(1, np.float32)
    weights = {
        name: arrays.get(_WEIGHT + name, np.broadcast_to(ones, x.shape))
        for name, x in values.items()
    }
    for name, x in values.items():
        weight = weights[name]
        finite = np.isfinite(x).all() and np.isfinite(weight).all()
        if x.ndim != 1 or x.shape != weight.shape or not finite or min(weight) <= 0:
            raise ValueError(name)
    left_out = tuple(map(str, arrays.get("left_out", ())))
    sha256, complete = arrays["sha256"].tobytes().hex(), bool(arrays["complete"])
    return Examples(values, weights, sha256, complete, left_out)
