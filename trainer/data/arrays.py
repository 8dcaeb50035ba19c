"""A data set of arrays in memory, whose batches are pure functions of seed and step."""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from trainer.data.dtypes import dtype_fault, value_fault
from trainer.data.images import Pixels
from trainer.data.order import permutation, process_rows, random_words
from trainer.messages import check_positive

_GATHERED_BYTES = 1 << 18  # of small batches, which are gathered together


class ArrayDataset:
    """A data set of two dicts of arrays, to train on and to test on.

    The training stream concatenates one permutation of the examples per epoch and is cut into
    batches, so that all batches are full and a batch may span two epochs. A permutation depends on
    seed and epoch only, through the counter-based generator Philox (Salmon et al., "Parallel Random
    Numbers: As Easy as 1, 2, 3", 2011), so that training can start at any step. If the batch size
    is the number of examples, every batch has all of them, in the order stored.

    With a share as `validation`, as many training examples, drawn one by one, are a split of their
    own and not trained on. The cut depends on `validation_seed` and the number of examples only.
    Where examples belong together, as those of one patient, give the arrays of the split instead.

    Args:
        train: key -> array [examples, ...]. An array "mask", float32 [examples] or [examples,
            positions], is 1 for what counts in the loss and the metrics, and 0 for padding.
        test: key -> array, with the keys, shapes and dtypes of `train` except for the first axis.
        batch_size: examples per training batch, over all processes; None for all examples.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        pixels: key -> conversion of the stored images to the model's inputs.
        validation: the validation split, as `test`; or the share of the training examples that are
            it, between 0 and 1; None for no such split.
        validation_seed: seed of the choice of these examples.
        name: the name of the data set in error messages.

    Attributes:
        splits: split -> number of examples, of the splits that `evaluate` takes: "test", and before
            it "validation" if there is one.

    Raises:
        ValueError: a mask has another shape, dtype or value, a batch size is not positive or
            larger than the training data, jax does not have the dtype of an array or would change
            one of its values, a split is no dict of arrays, the arrays do not fit together, a crop
            is as large as the images, or `validation` is not between 0 and 1 or leaves a split
            without an example.

    Example:
        >>> import numpy as np
        >>> from trainer.data import ArrayDataset
        >>> train = {"x": np.arange(6, dtype=np.float32), "label": np.arange(6) % 2}
        >>> test = {"x": np.arange(3, dtype=np.float32), "label": np.arange(3) % 2}
        >>> dataset = ArrayDataset(train, test, batch_size=2)
        >>> next(dataset.train(batch_index=0, seed=0))["x"].shape
        (2,)
        >>> [batch["mask"].tolist() for batch in dataset.evaluate()]
        [[1.0, 1.0], [1.0, 0.0]]
        >>> dataset = ArrayDataset(train, test, batch_size=2, validation=0.5)
        >>> dataset.splits, dataset.num_examples
        ({'validation': 3, 'test': 3}, 3)
    """

    def __init__(
        self,
        train: Mapping[str, np.ndarray],
        test: Mapping[str, np.ndarray],
        *,
        batch_size: int | None,
        eval_batch_size: int | None = None,
        pixels: Mapping[str, Pixels] | None = None,
        validation: Mapping[str, np.ndarray] | float | None = None,
        validation_seed: int = 0,
        name: str = "data.ArrayDataset",
    ):
        self.num_examples = _count(train, name, "training")
        if validation is not None and not isinstance(validation, Mapping):
            chosen = choose_validation(validation, validation_seed, self.num_examples, name)
            validation = {key: array[chosen] for key, array in train.items()}
            train = {key: array[~chosen] for key, array in train.items()}
            self.num_examples -= int(chosen.sum())
        held_out = {} if validation is None else {"validation": dict(validation)}
        self._train, self._eval = dict(train), {**held_out, "test": dict(test)}
        self.splits = {split: _count(held, name, split) for split, held in self._eval.items()}
        for split, held in self._eval.items():
            if _kinds(held) != _kinds(train):
                raise ValueError(
                    f"{name} needs training and {split} arrays of the same keys, shapes and dtypes,"
                    f" but got {_kinds(train)} and {_kinds(held)}."
                )
        self.batch_size = self.num_examples if batch_size is None else batch_size
        check_positive(name, batch_size=self.batch_size)
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"{name} has {self.num_examples} training examples, fewer than the batch_size of "
                f"{self.batch_size}. Choose at most {self.num_examples}; None takes all of them."
            )
        self.eval_batch_size = self.batch_size if eval_batch_size is None else eval_batch_size
        check_positive(name, eval_batch_size=self.eval_batch_size)
        self._pixels = dict(pixels or {})
        for key, seen in self._pixels.items():
            seen.check(self._train[key])
        self._name = name

    @property
    def element_spec(self) -> dict[str, Any]:
        """Key -> shape and dtype of a training batch, over all processes."""
        import jax  # the arrays themselves need no jax

        return {
            key: jax.ShapeDtypeStruct((self.batch_size, *value.shape[1:]), value.dtype)
            for key, value in self._seen(self._train, np.zeros(1, np.intp), None).items()
        }

    @property
    def split_arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Split, "train" first -> key -> the array as it is stored, [examples, ...]."""
        return {"train": self._train, **self._eval}

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the arrays and of their conversion."""
        digest = hashlib.sha256()
        for split in (self._train, *reversed(self._eval.values())):
            for key in sorted(split):
                array = np.ascontiguousarray(split[key])
                digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
                digest.update(array.data)
        for key in sorted(self._pixels):
            digest.update(f"{key} {self._pixels[key].scaling()}\n".encode())
        return digest.hexdigest()

    def train(
        self, batch_index: int = 0, seed: int = 0, rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of the training batches from `batch_index` on, without end.

        Args:
            batch_index: the index of the first batch, from 0.
            seed: the seed of the order and of augmentation.
            rank: the part of each batch to yield, from 0; None for that of this process.
            size: into how many equal parts a batch is divided; None for the number of processes.
        """
        rows = process_rows(self.batch_size, self._name, rank, size)
        whole = self.batch_size
        examples_at = _training_order(seed, self.num_examples, whole != self.num_examples)
        random = any(pixels.random for pixels in self._pixels.values())
        many = 1 if random else self._gathered_together(whole, self.num_examples)
        # From batch index and seed alone, so that a resumed run reads the same batches.
        for index in itertools.count(batch_index, many):
            indices = examples_at(index * whole, many * whole).reshape(many, whole)[:, rows]
            # Words for the whole batch, so that it does not depend on the number of parts.
            words = random_words(seed, index, 1, whole)[rows] if random else None
            yield from _batches(self._seen(self._train, indices.reshape(-1), words), many)

    def _gathered_together(self, size: int, examples: int) -> int:
        """Returns how many batches are gathered at once: small ones take a third of the time."""
        example = self._seen(self._train, np.zeros(1, np.intp), None).values()
        fitting = _GATHERED_BYTES // max(size * sum(x.nbytes for x in example), 1)
        return max(1, min(fitting, examples // size))

    def evaluate(
        self, split: str = "test", rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of each batch of a split in order, once.

        The last batch is padded to full size. Besides the arrays a batch has `mask`, float32
        [batch], 1 for an example of the split and 0 for padding. A mask of the data set's own is 0
        for padded examples.

        Args:
            split: one of `splits`.
            rank: the part of each batch to yield, from 0; None for that of this process.
            size: into how many equal parts a batch is divided; None for the number of processes.
        """
        whole, count = self.eval_batch_size, self.splits[split]
        rows = process_rows(whole, self._name, rank, size)
        many = self._gathered_together(whole, count)
        for start in range(0, count, many * whole):
            now = min(many, math.ceil((count - start) / whole))
            indices = np.arange(start, start + now * whole).reshape(now, whole)[:, rows].reshape(-1)
            real = indices < count
            # Padding, whose mask is 0, may be any example: here the first.
            found = self._seen(self._eval[split], np.where(real, indices, 0), None)
            mask = real.astype(np.float32)
            if "mask" in found:
                mask = found["mask"] * mask.reshape(-1, *[1] * (found["mask"].ndim - 1))
            yield from _batches({**found, "mask": mask}, now)

    def _seen(
        self, split: Mapping[str, np.ndarray], indices: np.ndarray, words: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        return {
            key: self._pixels[key].gather(array, indices, words)
            if key in self._pixels
            else array[indices]
            for key, array in split.items()
        }


def _batches(arrays: Mapping[str, np.ndarray], count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches that arrays [count * batch, ...] consist of, as views."""
    # Not slices of `arrays` one after the other: the loop makes a batch and the array behind it
    # read-only, and a data set that changes our batches in place could not change the next one.
    views = [x.reshape(count, len(x) // count, *x.shape[1:]) for x in arrays.values()]
    for batch in zip(*views, strict=True):
        yield dict(zip(arrays, batch, strict=True))


def _training_order(seed: int, size: int, shuffled: bool) -> Callable[[int, int], np.ndarray]:
    """Returns a function (start, count) of the examples at places of the training stream."""
    # What is read together may span several epochs; the last one is read again.
    order = functools.lru_cache(maxsize=2)(
        lambda epoch: permutation(seed, epoch, size) if shuffled else np.arange(size)
    )

    def examples_at(start: int, count: int) -> np.ndarray:
        first, offset = divmod(start, size)
        orders = [order(epoch) for epoch in range(first, (start + count - 1) // size + 1)]
        whole = orders[0] if len(orders) == 1 else np.concatenate(orders)
        return whole[offset : offset + count]

    return examples_at


def choose_validation(share: float, seed: int, count: int, name: str) -> np.ndarray:
    """Returns which of `count` examples are the validation split, bool [count]."""
    if not 0 < share < 1:
        raise ValueError(
            f"{name} takes for validation a share of the training examples between 0 and 1, such "
            f"as 0.1, but got {share}. None makes no validation split."
        )
    if (size := round(share * count)) in (0, count):
        raise ValueError(
            f"{name} has {count} training examples, of which validation={share} leaves "
            f"{count - size} to train on and {size} to validate on. Both need at least 1."
        )
    chosen = np.zeros(count, bool)
    chosen[np.argsort(random_words(seed, 0, 2, count), kind="stable")[:size]] = True
    return chosen


def _kinds(split: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {key: (array.shape[1:], array.dtype) for key, array in sorted(split.items())}


def _count(split: Any, name: str, which: str) -> int:
    """Returns how many examples a split has; ValueError if it is not a dict of arrays for jax."""
    found = f"a value of type {type(split).__name__}"
    if isinstance(split, Mapping):
        wrong = {key: x for key, x in split.items() if not getattr(x, "shape", ())}
        found = ", ".join(f"{key!r} of type {type(x).__name__}" for key, x in wrong.items())
    if found:
        raise ValueError(
            f"{name} takes for the {which} split a dict of arrays [examples, ...], such as "
            f'{{"x": np.asarray(x), "label": np.asarray(label)}}, and was given {found}.'
        )
    for key, array in split.items():
        if (fault := dtype_fault(array.dtype) or value_fault(array)) is not None:
            found = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"{name} has a {which} array {key!r}, {found}, {fault}.")
    mask = split.get("mask", np.ones(1, np.float32))
    if mask.dtype != np.float32 or mask.ndim > 2 or not np.isin(mask, (0, 1)).all():
        raise ValueError(
            f"{name} has a {which} array 'mask', {mask.dtype}{list(mask.shape)}. It must be "
            "float32 [examples] or [examples, positions], 1 for what counts in the loss and the "
            "metrics and 0 for padding. Give an array that is something else another name."
        )
    lengths = {key: len(array) for key, array in split.items()}
    if not lengths or len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{key}: {length}" for key, length in lengths.items()) or "no arrays"
        raise ValueError(
            f"{name} needs {which} arrays with the same number of examples, at least 1, on their "
            f"leading axes, but got {found}."
        )
    return next(iter(lengths.values()))
