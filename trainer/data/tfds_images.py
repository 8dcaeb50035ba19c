"""Data sets of TFDS whose images differ in size, such as ImageNet, read from their records."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.absent import DataAbsent
from trainer.data.folders import Refused, check_folder, data_root, prepared_directory
from trainer.data.image_stream import ImageStream, Records
from trainer.data.images import Pixels

# The examples of data sets that can be planned with before they are prepared.
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
    part of the stored one (see `crops.random_box`), and an evaluation image the central square
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
    directory = prepared_directory(name, data_root(data_dir))
    wanted, said = (train_split, test_split), ""
    if directory is None:
        said = (
            f"The data set {name!r} is not prepared as array_record in {data_root(data_dir)}. "
            f"Prepare it with `python -m trainer.data.prepare {name}`; for imagenet2012, add "
            "`--files=FOLDER` with its archives, in an environment with the extra [tensorflow]."
        )
        sizes = _DECLARED.get(re.split("[:/]", name)[0], {})
        if not set(wanted) <= set(sizes):
            raise ValueError(said)
        splits: list[Records] = [_Declared(sizes[split]) for split in wanted]
    else:
        splits = [_TfdsRecords(directory, split) for split in wanted]
    dataset = ImageStream(
        *splits,
        size=size,
        batch_size=batch_size,
        pixels=Pixels(mean=mean, std=std, name="data.tfds_images"),
        eval_batch_size=eval_batch_size,
        min_area=min_area,
        flip=flip,
        validation=validation,
        validation_seed=validation_seed,
        threads=threads,
        name="data.tfds_images",
    )
    if said:
        raise DataAbsent("data.tfds_images", said, dataset)
    return dataset


def images_differ(directory: Path) -> bool:
    """Returns whether the images of a prepared data set have different sizes.

    Args:
        directory: the folder of a version of the data set.
    """
    try:
        features = json.loads((directory / "features.json").read_bytes())
        shape = features["featuresDict"]["features"]["image"]["image"]["shape"]["dimensions"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return "-1" in shape


def count_examples(directory: Path) -> dict[str, int]:
    """Returns split -> number of examples, and reads the first example of each split.

    Args:
        directory: the folder of a version of the data set.

    Raises:
        ValueError: the data set cannot be read.
    """
    content = json.loads((directory / "dataset_info.json").read_bytes())
    splits = {each["name"]: _TfdsRecords(directory, each["name"]) for each in content["splits"]}
    for records in splits.values():
        records.read([0])
    return {split: len(records) for split, records in splits.items()}


class _Declared:
    """The number of examples of a split that is not on this machine."""

    fingerprint = ""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        raise ValueError(f"The {len(indices)} images are not on this machine.")


class _TfdsRecords:
    """The encoded images and the labels of a split of a prepared data set."""

    def __init__(self, directory: Path, split: str):
        try:
            # Before TFDS, which imports the classes that the files name.
            check_folder(directory)
            self._source = _open(directory, split)
            self.fingerprint = _fingerprint(directory, split)
        except Refused:
            raise
        except Exception as error:  # damaged files raise many types
            raise ValueError(
                f"The split {split!r} of the data set in {directory} cannot be read "
                f"({type(error).__name__}: {error}). Choose another split, or remove that "
                "directory and prepare the data set again."
            ) from error

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        found = self._source.__getitems__(list(indices))
        return [(example["image"], int(example["label"])) for example in found]


def _open(directory: Path, split: str) -> Any:
    """Opens a split of encoded images and classes."""
    import tensorflow_datasets

    open_directory: Any = tensorflow_datasets.builder_from_directory
    builder = open_directory(directory)
    features = builder.info.features
    kinds = tensorflow_datasets.features
    for key, kind in (("image", kinds.Image), ("label", kinds.ClassLabel)):
        found = features[key] if key in features else None
        if not isinstance(found, kind):
            raise TypeError(
                f"its feature {key!r} is {found!r}, not of the class {kind.__name__}; data.tfds "
                "reads images that are not encoded"
            )
    # Not decoded by TFDS, which would take one thread and all formats of pillow.
    skip = tensorflow_datasets.decode.SkipDecoding()
    return builder.as_data_source(split, decoders={"image": skip})


def _fingerprint(directory: Path, split: str) -> str:
    digest = hashlib.sha256(f"{split}\n".encode())
    for name in ("dataset_info.json", "features.json"):
        digest.update((directory / name).read_bytes())
    for path in sorted(directory.glob("*.array_record*")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
