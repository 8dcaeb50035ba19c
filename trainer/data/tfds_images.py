"""Data sets of TFDS whose images differ in size, such as ImageNet, read from their records."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.absent import DataAbsent
from trainer.data.folders import Refused, base_name, check_folder, data_root, prepared_directory
from trainer.data.image_stream import ImageStream
from trainer.data.images import Pixels

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
    sizes = _DECLARED.get(base_name(name), {})
    declared = {split: _Declared(count) for split, count in sizes.items()}
    splits = _open(directory, wanted) if directory else declared
    if directory is None and not set(wanted) <= set(splits):
        raise ValueError(said)
    dataset = ImageStream(
        splits[train_split],
        splits[test_split],
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
    # Raises ValueError if the data set cannot be read.
    splits = _open(directory)
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

    def __init__(self, source: Any, fingerprint: str):
        self._source, self.fingerprint = source, fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        found = self._source.__getitems__(list(indices))
        return [(example["image"], int(example["label"])) for example in found]


def _open(directory: Path, names: Sequence[str] | None = None) -> dict[str, _TfdsRecords]:
    """Opens splits of a prepared data set, all of them if `names` is None."""
    try:
        # Before TFDS, which imports the classes that the files name.
        check_folder(directory)
        import tensorflow_datasets

        open_directory: Any = tensorflow_datasets.builder_from_directory
        builder = open_directory(directory)
        features = dict(builder.info.features)
        wanted = None if names is None else {name: name for name in names}
        # Not decoded by TFDS, which would take one thread and all formats of pillow.
        skip = tensorflow_datasets.decode.SkipDecoding()
        sources = builder.as_data_source(wanted, decoders={"image": skip})
        described = _describe(directory)
    except Refused:
        raise
    except Exception as error:  # damaged files raise many types
        hint = "Remove" if names is None else "Choose another split, or remove"
        raise ValueError(
            f"The data set in {directory} cannot be read ({type(error).__name__}: {error}). {hint} "
            "that directory and prepare the data set again."
        ) from error
    _check_features(features, directory)
    return {
        name: _TfdsRecords(source, hashlib.sha256(f"{name}\n".encode() + described).hexdigest())
        for name, source in sources.items()
    }


def _check_features(features: dict[str, Any], directory: Path) -> None:
    import tensorflow_datasets

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


def _describe(directory: Path) -> bytes:
    """Returns the description of a data set, and the names and sizes of its files."""
    parts = [(directory / name).read_bytes() for name in ("dataset_info.json", "features.json")]
    for path in sorted(directory.glob("*.array_record*")):
        parts.append(f"{path.name} {path.stat().st_size}\n".encode())
    return b"".join(parts)
