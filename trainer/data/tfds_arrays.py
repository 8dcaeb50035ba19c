"""Data sets prepared by TensorFlow Datasets as array_record, read into memory without TensorFlow.

Reading tens of thousands of single records takes far longer than a small training run, and
importing tfds longer than reading a file. The decoded arrays are therefore saved in the folder of
the records, as `arrays.npz`, whose checksums numpy verifies.
"""

import contextlib
import os
import secrets
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.absent import DataAbsent
from trainer.data.arrays import ArrayDataset
from trainer.data.folders import Refused, base_name, data_root, opened, prepared_directory
from trainer.data.images import Pixels

Splits = dict[str, dict[str, np.ndarray]]  # split -> key -> array

_ARRAYS = "arrays.npz"
_KEYS = ("image", "label")

# Data sets that can be planned with before they are prepared: the numbers of examples of their
# splits, and the shape of an image.
_DECLARED = {
    "cifar10": ({"train": 50_000, "test": 10_000}, (32, 32, 3)),
    "cifar100": ({"train": 50_000, "test": 10_000}, (32, 32, 3)),
    "fashion_mnist": ({"train": 60_000, "test": 10_000}, (28, 28, 1)),
    "kmnist": ({"train": 60_000, "test": 10_000}, (28, 28, 1)),
    "mnist": ({"train": 60_000, "test": 10_000}, (28, 28, 1)),
}


def tfds(
    name: str,
    batch_size: int | None = 256,
    crop: int = 0,
    flip: bool = False,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    train_split: str = "train",
    test_split: str = "test",
    eval_batch_size: int | None = None,
    data_dir: str | None = None,
    validation: float | None = None,
    validation_seed: int = 0,
) -> ArrayDataset:
    """Returns an image classification data set of TFDS, in memory.

    The data set must be prepared as array_record and have images of one size as `image` and a class
    as `label`; other features are dropped. Images are float32, normalized by `mean` and `std`,
    labels are int32.

    Args:
        name: the name in TFDS, such as "mnist", "cifar10:3.0.2" or "name/config:1.0.0".
        batch_size: examples per training batch, over all processes; None for the whole split.
        crop: in training, take random crops of the image padded by this number of black pixels.
        flip: in training, mirror images left to right with probability 1/2.
        mean: mean of the pixels, for black 0 and white 1: one number, or one per channel.
        std: standard deviation of the pixels, in the same form.
        train_split: the split to train on.
        test_split: the split to evaluate on.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        data_dir: the folder of data sets; None for $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.
        validation: the share of the training examples that are a validation split and not trained
            on, between 0 and 1, such as 0.1; None for no such split.
        validation_seed: seed of the choice of these examples.

    Raises:
        DataAbsent: the data set is not prepared, and its shapes are known without it.
        ValueError: the name is not in TFDS's form, the data set is not prepared or cannot be read,
            it has features that are not TFDS's own, or an argument is out of range.
    """
    pixels = Pixels(mean=mean, std=std, crop=crop, flip=flip, name="data.tfds")
    root = data_root(data_dir)
    absent = (
        f"The data set {name!r} is not prepared as array_record in {root}. "
        f"Prepare it with `python -m trainer.data.prepare {name}`, where there is a network."
    )
    sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size}
    cut = {"validation": validation, "validation_seed": validation_seed}
    return prepared_arrays(name, root, absent, pixels, (train_split, test_split), **sizes, **cut)


def prepared_arrays(
    name: str, root: Path, absent: str, pixels: Pixels, wanted: tuple[str, str], **options: Any
) -> ArrayDataset:
    """Returns a prepared data set, `wanted` to train and to test on; raises DataAbsent."""
    # `absent` is the message if it is not prepared: of DataAbsent if its shapes are known without
    # it, else of ValueError. `pixels` has the name of the function that a config calls.
    directory = prepared_directory(name, root)
    splits: Splits = {}
    if directory is not None:
        splits = read_splits(directory, wanted)
    else:  # zeros of the shapes that are known, which take no memory until they are indexed
        sizes, shape = _DECLARED.get(base_name(name), ({}, ()))
        image, label = np.zeros((), np.uint8), np.zeros((), np.int32)
        for split, count in sizes.items():
            images, labels = np.broadcast_to(image, (count, *shape)), np.broadcast_to(label, count)
            splits[split] = {"image": images, "label": labels}
    if not set(wanted) <= set(splits):
        raise ValueError(absent)
    train, test = (splits[split] for split in wanted)
    dataset = ArrayDataset(train, test, pixels={"image": pixels}, name=pixels.name, **options)
    if directory is None:
        raise DataAbsent(pixels.name, absent, dataset)
    return dataset


def read_splits(directory: Path, names: Sequence[str] = ("train", "test")) -> Splits:
    """Reads splits of a prepared data set into memory, `image` and `label` only."""
    # Raises ValueError if the records are damaged or not of image classification, the images differ
    # in size, or `folders.opened` refuses the folder.
    if (splits := _read_arrays(directory / _ARRAYS, names)) is None:
        with opened(directory) as builder:
            splits = {x: _read_records(builder.as_data_source(x), directory) for x in names}
        _write_arrays(directory / _ARRAYS, splits)
    return splits


def _read_records(source: Any, directory: Path) -> dict[str, np.ndarray]:
    images, labels = [], []
    for index in range(len(source)):
        example = source[index]
        images.append(example["image"])
        labels.append(example["label"])
        if images[-1].shape != images[0].shape:  # at once, since all may not fit into memory
            raise Refused(
                f"The images of the data set in {directory} differ in size: one has the shape "
                f"{images[0].shape}, another {images[-1].shape}. Use data.tfds_images, which crops "
                "them."
            )
    return {"image": np.stack(images), "label": np.array(labels, np.int32)}


def _read_arrays(path: Path, names: Sequence[str]) -> Splits | None:
    """Returns the saved arrays; None if they are missing or damaged."""
    if not path.is_file():  # opening a pipe would wait for its writer
        return None
    try:
        # Opened here, because np.load does not close a file that is not a zip file.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: {key: arrays[f"{name}/{key}"] for key in _KEYS} for name in names}
    except (OSError, KeyError, ValueError, EOFError, MemoryError, zipfile.BadZipFile):
        return None


def _write_arrays(path: Path, splits: Splits) -> None:
    """Saves the arrays in the folder of the records, if it can be written."""
    # A random name: several processes may write at once, and the last to rename wins. Two machines
    # may have processes with the same id.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flat = {f"{name}/{key}": splits[name][key] for name in splits for key in _KEYS}
    with contextlib.suppress(OSError):
        try:
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **flat)
                file.flush()
                # Before the rename, or it could be empty under its final name after a power loss.
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def fashion_mnist(
    batch_size: int | None = 256,
    crop: int = 0,
    flip: bool = False,
    eval_batch_size: int | None = None,
    data_dir: str | None = None,
    validation: float | None = None,
    validation_seed: int = 0,
) -> ArrayDataset:
    """Returns Fashion-MNIST: 60000 training and 10000 test images, 28 by 28 pixels, 10 classes.

    `image` is float32 [batch, 28, 28, 1] with mean 0 and standard deviation 1 over the training
    split, `label` is int32 [batch].

    Xiao, Rasul and Vollgraf, "Fashion-MNIST" (arXiv:1708.07747).

    Args:
        batch_size: examples per training batch, over all processes; None for the whole split.
        crop: in training, take random crops of the image padded by this number of black pixels.
        flip: in training, mirror images left to right with probability 1/2.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        data_dir: the folder of data sets; None for $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.
        validation: the share of the training examples that are a validation split and not trained
            on, between 0 and 1, such as 0.1; None for no such split.
        validation_seed: seed of the choice of these examples.

    Raises:
        DataAbsent: the data set is not prepared; the message has the command.
        ValueError: it cannot be read, or an argument is out of range.
    """
    # Mean and standard deviation of the training split, with pixels scaled to 0..1.
    pixels = Pixels(mean=0.286, std=0.353, crop=crop, flip=flip, name="data.fashion_mnist")
    root = data_root(data_dir)
    absent = (
        f"Fashion-MNIST is not prepared in {root}. Run `make fashion_mnist`, which downloads it or "
        "uses Debian's package dataset-fashion-mnist."
    )
    sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size}
    cut = {"validation": validation, "validation_seed": validation_seed}
    return prepared_arrays("fashion_mnist", root, absent, pixels, ("train", "test"), **sizes, **cut)
