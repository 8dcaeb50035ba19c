"""Data sets of TFDS whose images differ in size, such as ImageNet, read from their records.

The images are decoded while the devices compute: `ImageStream`.
"""

import collections
import functools
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.absent import DataAbsent
from trainer.data.arrays import choose_validation
from trainer.data.folders import base_name, data_root, opened, prepared_directory
from trainer.data.images import WORDS, Crops, Pixels, crop_at_random, crop_center
from trainer.data.order import examples_at, process_rows, random_words
from trainer.messages import UserError, check_positive

_AHEAD = 2  # batches whose decoding begins before they are asked for
_CHUNK = 8  # images that a thread reads and decodes at once
_FORMATS = ("JPEG", "PNG")  # pillow starts programs for some others, and others are rarely tested

Batch = dict[str, np.ndarray]
Pending = tuple[Batch, list[Future[None]]]
"""A batch, and the tasks of the threads that are still writing its rows."""


class EncodedRecords:
    """The encoded images and the labels of a split, which several threads read."""

    def __init__(self, source: Any, fingerprint: str):
        self._source, self.fingerprint = source, fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        """Returns the encoded images and the labels of examples."""
        found = self._source.__getitems__(list(indices))
        return [(example["image"], int(example["label"])) for example in found]


class ImageStream:
    """Images cropped to squares: float32 [batch, size, size, 3], and labels, int32 [batch]."""

    # The order of the images in an epoch is a function of seed and epoch (see `order.shuffled`),
    # and the crop of an image one of seed, batch index and place in the batch. Each process reads
    # and decodes its share of a batch only, in threads, while the devices compute the steps before.
    # Batch sizes are over all processes; `eval_batch_size` None is `batch_size`. `held_out`, bool
    # [training examples], are those of the validation split, None for no such split; `threads` None
    # is one per core. Raises ValueError for an argument out of its range.

    def __init__(
        self,
        train: EncodedRecords,
        test: EncodedRecords,
        crops: Crops,
        pixels: Pixels,
        *,
        batch_size: int,
        eval_batch_size: int | None = None,
        held_out: np.ndarray | None = None,
        threads: int | None = None,
    ):
        name = self._name = pixels.name
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        if threads is None:  # one per core that this process may use; macOS does not tell
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
            threads = cores or os.cpu_count() or 1
        sizes = {"batch_size": batch_size, "eval_batch_size": self.eval_batch_size}
        check_positive(name, size=crops.size, **sizes, threads=threads)
        if not 0 < crops.min_area <= 1:
            raise ValueError(f"{name} needs 0 < min_area <= 1, but got min_area={crops.min_area}.")
        self._train, self._test = train, test
        # The numbers of the examples of a split; None for all.
        self._chosen: dict[str, np.ndarray | None] = {"train": None, "test": None}
        self.splits = {"test": len(test)}
        if held_out is not None:
            self._chosen["train"] = np.flatnonzero(~held_out)
            self._chosen["validation"] = np.flatnonzero(held_out)
            self.splits = {"validation": int(held_out.sum()), **self.splits}
        self.num_examples = len(train) - self.splits.get("validation", 0)
        if batch_size > self.num_examples:
            raise ValueError(
                f"{name} has {self.num_examples} training examples, fewer than the batch_size of "
                f"{batch_size}. Choose at most {self.num_examples}."
            )
        self._crops, self._pixels, self._threads = crops, pixels, threads

    @property
    def element_spec(self) -> dict[str, Any]:
        """Key -> shape and dtype of a training batch, over all processes."""
        import jax

        side = self._crops.size
        shape = (self.batch_size, side, side, 3)
        return {
            "image": jax.ShapeDtypeStruct(shape, np.float32),
            "label": jax.ShapeDtypeStruct(shape[:1], np.int32),
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the stored examples, the cut of the validation split, and the conversion."""
        parts = [self._train.fingerprint, self._test.fingerprint]
        parts += [str(self._crops.size), self._pixels.scaling()]
        if (held_out := self._chosen.get("validation")) is not None:
            parts.append(hashlib.sha256(held_out.astype("<i8").tobytes()).hexdigest())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def train(
        self, batch_index: int = 0, seed: int = 0, rank: int | None = None, size: int | None = None
    ) -> Iterator[Batch]:
        """Yields a part of the training batches from `batch_index` on, without end."""
        # It is part `rank` of `size` equal parts of each batch; None for that of this process.
        # Raises UserError if an image cannot be decoded.
        rows = process_rows(self.batch_size, self._name, rank, size)

        def start(index: int) -> Pending:
            first = index * self.batch_size + rows.start
            found = examples_at(seed, first, rows.stop - rows.start, self.num_examples)
            # Words for the whole batch, so that it does not depend on the number of parts.
            words = random_words(seed, index, 1, WORDS * self.batch_size)
            return self._start("train", found, words.reshape(self.batch_size, WORDS)[rows])

        # From batch index and seed alone, so that a resumed run reads the same batches.
        return _ahead(start, itertools.count(batch_index))

    def evaluate(
        self, split: str = "test", rank: int | None = None, size: int | None = None
    ) -> Iterator[Batch]:
        """Yields a part of each batch of a split in order, once."""
        # The last batch is padded with zeros to full size: `mask`, float32 [batch], is 1 for an
        # example of the split and 0 for padding. For `rank`, `size` and the error, see `train`.
        rows = process_rows(self.eval_batch_size, self._name, rank, size)
        count = self.splits[split]

        def start(first: int) -> Pending:
            found = np.arange(first, first + self.eval_batch_size)[rows]
            batch, tasks = self._start(split, found[found < count], None, len(found))
            return {**batch, "mask": (found < count).astype(np.float32)}, tasks

        return _ahead(start, range(0, count, self.eval_batch_size))

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="decode")

    def _start(
        self, split: str, found: np.ndarray, words: np.ndarray | None, rows: int | None = None
    ) -> Pending:
        """Starts to read and decode a batch of `rows` images, the first of which are `found`."""
        rows, side = len(found) if rows is None else rows, self._crops.size
        chosen = self._chosen[split]
        indices = (found if chosen is None else chosen[found]).tolist()
        batch = {
            "image": np.zeros((rows, side, side, 3), np.float32),
            "label": np.zeros(rows, np.int32),
        }
        records, owner = (self._test, "test") if split == "test" else (self._train, "training")

        def decode(first: int) -> None:
            chunk = indices[first : first + _CHUNK]
            for row, (encoded, label) in enumerate(records.read(chunk), first):
                try:
                    image = self._decode(encoded, None if words is None else words[row].tolist())
                except Exception as error:  # pillow raises many types for damaged images
                    raise UserError(
                        f"{self._name} cannot decode image {indices[row]} of the {owner} examples "
                        f"as stored ({type(error).__name__}: {error}). Prepare the data set again."
                    ) from error
                batch["image"][row], batch["label"][row] = image, label

        return batch, [self._pool.submit(decode, at) for at in range(0, len(indices), _CHUNK)]

    def _decode(self, encoded: bytes, words: list[int] | None) -> np.ndarray:
        from PIL import Image

        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as opened:
            image = opened.convert("RGB")
        if words is None:
            image = crop_center(image, self._crops.size)
        else:
            image = crop_at_random(image, words, *self._crops)
        return self._pixels.convert(np.asarray(image))


def _ahead(start: Callable[[int], Pending], numbers: Iterable[int]) -> Iterator[Batch]:
    """Yields the batches of `numbers` in order, with `_AHEAD` more of them begun."""
    numbers, pending = iter(numbers), collections.deque[Pending]()
    try:
        while True:
            pending.extend(map(start, itertools.islice(numbers, _AHEAD + 1 - len(pending))))
            if not pending:
                return
            batch, tasks = pending.popleft()
            for task in tasks:
                task.result()
            yield batch
    finally:
        for _, tasks in pending:
            for task in tasks:
                task.cancel()


# Data sets that can be planned with before they are prepared: their numbers of examples.
_DECLARED = {"imagenet2012": {"train": 1_281_167, "validation": 50_000, "test": 100_000}}


def tfds_images(
    name: str = "imagenet2012",
    batch_size: int = 1024,
    size: int = 224,
    min_area: float = 0.08,
    flip: bool = True,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    train_split: str = "train",
    test_split: str = "validation",
    eval_batch_size: int | None = None,
    data_dir: str | None = None,
    validation: float | None = None,
    validation_seed: int = 0,
    threads: int | None = None,
) -> ImageStream:
    """Returns a data set of TFDS whose images have any sizes, decoded while it trains.

    `data.tfds` is for images of one size, which fit into memory. Here, a training image is a random
    part of the stored one (see `images.random_box`), and an evaluation image the central square
    after the short side was resized to size / 0.875; both are resized by pillow's bilinear filter.
    `image` is float32 [batch, size, size, 3], normalized by `mean` and `std`, `label` is int32
    [batch]. The order and the crops are functions of seed and step.

    The data set must be prepared as array_record and have encoded images as `image` and a class as
    `label`; other features are dropped. The fingerprint covers the description of the data set and
    the sizes of its files, but not what is in them.

    Args:
        name: the name in TFDS. ImageNet's labelled splits are "train" and "validation".
        batch_size: examples per training batch, over all processes.
        size: side of the images in pixels.
        min_area: the smallest share of an image's area that a training crop has, above 0 and at
            most 1.
        flip: in training, mirror images left to right with probability 1/2.
        mean: mean of the pixels, for black 0 and white 1: one number, or one per channel.
        std: standard deviation of the pixels, in the same form.
        train_split: the split to train on.
        test_split: the split to evaluate on as the test split.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        data_dir: the folder of data sets; None for $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.
        validation: the share of the training examples that are a validation split and not trained
            on, between 0 and 1, such as 0.01; None for no such split.
        validation_seed: seed of the choice of these examples.
        threads: threads that decode, which do not change the batches; None for one a core.

    Raises:
        DataAbsent: the data set is not prepared, and its sizes are known without it (imagenet2012).
        ValueError: the name is not in TFDS's form, the data set is not prepared or cannot be read,
            it has features that are not TFDS's own, or an argument is out of range.
    """
    root = data_root(data_dir)
    directory = prepared_directory(name, root)
    wanted = (train_split, test_split)
    said = (
        f"The data set {name!r} is not prepared as array_record in {root}. "
        f"Prepare it with `python -m trainer.data.prepare {name}`; for imagenet2012, add "
        "`--files=FOLDER` with its archives, in an environment with the extra [tensorflow]."
    )
    # Of a data set that is planned with, only the numbers of examples are asked.
    declared = {split: range(count) for split, count in _DECLARED.get(base_name(name), {}).items()}
    splits: Any = _open(directory, wanted) if directory else declared
    if directory is None and not set(wanted) <= set(splits):
        raise ValueError(said)
    train, held_out = splits[train_split], None
    if validation is not None:
        held_out = choose_validation(validation, validation_seed, len(train), "data.tfds_images")
    dataset = ImageStream(
        train,
        splits[test_split],
        Crops(size, min_area, flip),
        Pixels(mean=mean, std=std, name="data.tfds_images"),
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        held_out=held_out,
        threads=threads,
    )
    if directory is None:
        raise DataAbsent("data.tfds_images", said, dataset)
    return dataset


def images_differ(directory: Path) -> bool:
    """Returns whether the images of a prepared data set have different sizes."""
    try:
        features = json.loads((directory / "features.json").read_bytes())
        shape = features["featuresDict"]["features"]["image"]["image"]["shape"]["dimensions"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return "-1" in shape


def count_examples(directory: Path) -> dict[str, int]:
    """Returns split -> number of examples, and reads the first example of each split."""
    splits = _open(directory)
    for records in splits.values():
        records.read([0])
    return {split: len(records) for split, records in splits.items()}


def _open(directory: Path, names: Sequence[str] | None = None) -> dict[str, EncodedRecords]:
    """Opens splits of a prepared data set, all of them if `names` is None."""
    hint = "Remove" if names is None else "Choose another split, or remove"
    with opened(directory, hint) as builder:
        import tensorflow_datasets

        features = dict(builder.info.features)
        wanted = None if names is None else {name: name for name in names}
        # Not decoded by TFDS, which would take one thread and all formats of pillow.
        skip = tensorflow_datasets.decode.SkipDecoding()
        sources = builder.as_data_source(wanted, decoders={"image": skip})
        # Of the description of the data set, and of the names and sizes of its files.
        described = [(directory / x).read_bytes() for x in ("dataset_info.json", "features.json")]
        for path in sorted(directory.glob("*.array_record*")):
            described.append(f"{path.name} {path.stat().st_size}\n".encode())
    kinds = tensorflow_datasets.features
    for key, kind, needed in (
        ("image", kinds.Image, "encoded images. data.tfds reads images that are not encoded"),
        ("label", kinds.ClassLabel, "a class"),
    ):
        found = features.get(key)
        if not isinstance(found, kind):
            raise ValueError(
                f"The feature {key!r} of the data set in {directory} "
                f"{'is absent' if found is None else f'is {found!r}'}, but must be {needed}."
            )
    hashes = {x: hashlib.sha256(b"".join([f"{x}\n".encode(), *described])) for x in sources}
    return {
        name: EncodedRecords(source, hashes[name].hexdigest()) for name, source in sources.items()
    }
