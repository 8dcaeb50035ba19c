"""Arrays in memory as a data set whose batch at a step is a pure function of seed and step."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainer.data.images import Pixels

Batch = dict[str, np.ndarray]


class ArrayDataset:
    """Serves two dicts of arrays, one to train on and one to test on.

    The training stream is the concatenation of one permutation of the examples per epoch, cut into
    batches, so that all batches are full and a batch may straddle two epochs. A permutation
    depends on seed and epoch only, through the counter-based generator Philox (Salmon et al.,
    "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): training can begin at any step. With as
    many examples in a batch as there are, every batch is all of them, in the order stored.

    Args:
        train: arrays by key, the leading axis counts examples.
        test: arrays of the same keys, shapes and dtypes but for the leading axis.
        batch_size: examples in a training batch over all processes; None for all there are.
        eval_batch_size: the same for evaluation; None for `batch_size`.
        pixels: by key, how stored images become what the model sees.
        name: what error messages call this data set.

    Raises:
        ValueError: an array is called "mask", a batch size is not positive, larger than the
            training data or not divisible by the number of processes, the arrays do not fit
            together, or a crop is as large as the images.
    """

    def __init__(
        self,
        train: Mapping[str, np.ndarray],
        test: Mapping[str, np.ndarray],
        *,
        batch_size: int | None,
        eval_batch_size: int | None = None,
        pixels: Mapping[str, Pixels] | None = None,
        name: str = "data.ArrayDataset",
    ):
        self.num_examples = _count(train, name, "training")
        self.num_eval_examples = _count(test, name, "test")
        _check_same(train, test, name)
        self.batch_size = self.num_examples if batch_size is None else batch_size
        _check_batch_size(self.batch_size, self.num_examples, name, "batch_size")
        self.eval_batch_size = self.batch_size if eval_batch_size is None else eval_batch_size
        _check_batch_size(self.eval_batch_size, None, name, "eval_batch_size")
        self._train, self._test = dict(train), dict(test)
        self._pixels = dict(pixels or {})
        for key, seen in self._pixels.items():
            seen.check(self._train[key])
        self._name = name

    @property
    def element_spec(self) -> dict[str, Any]:
        """Shape and dtype of a training batch over all processes, by key."""
        import jax  # the arrays themselves need no jax

        return {
            key: jax.ShapeDtypeStruct((self.batch_size, *value.shape[1:]), value.dtype)
            for key, value in self._seen(self._train, np.zeros(1, np.intp), None).items()
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the arrays, and of how the model sees them."""
        digest = hashlib.sha256()
        for split in (self._train, self._test):
            for key in sorted(split):
                array = np.ascontiguousarray(split[key])
                digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
                digest.update(array.data)
        for key in sorted(self._pixels):
            digest.update(f"{key} {self._pixels[key].scaling()}\n".encode())
        return digest.hexdigest()

    def train(self, step: int = 0, seed: int = 0) -> Iterator[Batch]:
        """Yields this process's part of the training batches from `step` on, without end.

        Args:
            step: the number of the first batch, from 0.
            seed: chooses order and augmentation.
        """
        rows = self._rows(self.batch_size)
        order = _Order(seed, self.num_examples)
        random = any(pixels.random for pixels in self._pixels.values())
        for number in itertools.count(step):
            indices = order.positions(number * self.batch_size, self.batch_size)[rows]
            # Words for the batch of all processes, so that it does not depend on their number.
            words = random_words(seed, number, 1, self.batch_size)[rows] if random else None
            yield self._seen(self._train, indices, words)

    def evaluate(self) -> Iterator[Batch]:
        """Yields this process's part of the test split in order, once.

        The last batch is filled up by examples that do not count: beside the arrays a batch has
        `mask`, float32 [batch], 1 for an example of the split and 0 for filling.
        """
        rows = self._rows(self.eval_batch_size)
        for start in range(0, self.num_eval_examples, self.eval_batch_size):
            indices = np.arange(start, start + self.eval_batch_size)[rows]
            real = indices < self.num_eval_examples
            batch = self._seen(self._test, np.where(real, indices, 0), None)
            yield {**batch, "mask": real.astype(np.float32)}

    def _rows(self, batch_size: int) -> slice:
        """Returns the rows of a batch over all processes that are this process's."""
        import jax

        processes = jax.process_count()
        if batch_size % processes:
            raise ValueError(
                f"{self._name} shares every batch among {processes} processes, which do not divide "
                f"a batch size of {batch_size}."
            )
        part = batch_size // processes
        return slice(jax.process_index() * part, (jax.process_index() + 1) * part)

    def _seen(
        self, split: Mapping[str, np.ndarray], indices: np.ndarray, words: np.ndarray | None
    ) -> Batch:
        return {
            key: self._pixels[key].gather(array, indices, words)
            if key in self._pixels
            else array[indices]
            for key, array in split.items()
        }


class _Order:
    """Knows the training stream of one seed: which example stands at which position."""

    def __init__(self, seed: int, size: int):
        self._size = size
        self._permutation = functools.lru_cache(maxsize=2)(
            lambda epoch: permutation(seed, epoch, size)
        )

    def positions(self, start: int, count: int) -> np.ndarray:
        if count == self._size:
            return np.arange(self._size)
        epoch, offset = divmod(start, self._size)
        indices = self._permutation(epoch)[offset : offset + count]
        if len(indices) < count:
            rest = self._permutation(epoch + 1)[: count - len(indices)]
            indices = np.concatenate([indices, rest])
        return indices


def random_words(seed: int, number: int, purpose: int, count: int) -> np.ndarray:
    """Returns `count` random words, uint64, a pure function of the other arguments.

    The words are the raw output of Philox4x64-10, which no version of numpy may change.

    Args:
        seed: any integer.
        number: an epoch or a step, from 0.
        purpose: tells apart what draws with the same seed and number.
        count: how many words.
    """
    key = np.array([seed % 2**64, number], np.uint64)
    return np.random.Philox(key=key, counter=[0, 0, 0, purpose]).random_raw(count)


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the order of `size` examples in an epoch, a pure function of the arguments."""
    return np.argsort(random_words(seed, epoch, 0, size), kind="stable")


def _count(split: Mapping[str, np.ndarray], name: str, which: str) -> int:
    if "mask" in split:
        raise ValueError(
            f"{name} has {which} arrays with the key 'mask', which marks the examples that count "
            "in a batch of evaluation. Give that array another name."
        )
    lengths = {key: len(array) for key, array in split.items()}
    if not lengths or len(set(lengths.values())) > 1 or 0 in lengths.values():
        told = ", ".join(f"{key}: {length}" for key, length in lengths.items()) or "no arrays"
        raise ValueError(
            f"{name} needs {which} arrays with one same number of examples, at least 1, on their "
            f"leading axes, but got {told}."
        )
    return next(iter(lengths.values()))


def _check_same(train: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray], name: str) -> None:
    def kinds(split: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {key: (array.shape[1:], array.dtype) for key, array in sorted(split.items())}

    if kinds(train) != kinds(test):
        raise ValueError(
            f"{name} needs training and test arrays of the same keys, shapes and dtypes, but got "
            f"{kinds(train)} and {kinds(test)}."
        )


def _check_batch_size(size: int, limit: int | None, name: str, argument: str) -> None:
    if size < 1:
        raise ValueError(f"{name} needs {argument} to be at least 1, but got {size}.")
    if limit is not None and size > limit:
        raise ValueError(
            f"{name} has {limit} training examples, fewer than the {argument} of {size}. Choose at "
            f"most {limit}; None takes all of them."
        )
