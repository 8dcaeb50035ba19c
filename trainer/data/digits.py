"""Scikit-learn's handwritten digits, through a TFDS builder of ours."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path

from trainer.data.arrays import ArrayDataset
from trainer.data.folders import data_root
from trainer.data.images import Pixels
from trainer.data.tfds_arrays import Splits, read

# sha256 of images and labels, train then test: what is read must be this, from whatever machine.
_SHA256 = "bf2aaad01d89e4ed310a9f8e8edd036abd7a680333526ecb3e06405478f7c815"


def digits(
    batch_size: int | None = 128,
    crop: int = 0,
    eval_batch_size: int | None = None,
    data_dir: str | None = None,
) -> ArrayDataset:
    """Serves scikit-learn's digits: 1797 images, 8 by 8 pixels of one channel, in 10 classes.

    They are prepared on first use, in a few seconds and without a network, and read from disk
    after that. The split is fixed: sorted by class, every fifth example is a test example, which
    leaves 1437 to train on (142, 146, 141, 147, 144, 146, 145, 143, 139, 144 of the digits 0 to 9)
    and 360 to test on. `image` is float32 [batch, 8, 8, 1] with mean 0 and standard deviation 1
    over the training split, `label` int32 [batch].

    The images are those of the test part of Alpaydin and Kaynak, "Optical Recognition of
    Handwritten Digits" (UCI, 1998).

    Args:
        batch_size: examples in a training batch over all processes; None for the whole split.
        crop: in training, random crops of the image padded by so many black pixels on each side.
        eval_batch_size: examples in a batch of evaluation, `batch_size` if None.
        data_dir: where data sets are kept; if None, $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.

    Raises:
        ValueError: a number is out of range, or the data can neither be read nor prepared.
    """
    pixels = Pixels(unit=16, mean=0.3058, std=0.3762, crop=crop, name="data.digits")
    splits = _load(data_root(data_dir))
    return ArrayDataset(
        splits["train"],
        splits["test"],
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        pixels={"image": pixels},
        name="data.digits",
    )


def _load(root: Path) -> Splits:
    """Reads the data set; prepares it first where it is absent, half there or damaged."""
    directory = root / "sklearn_digits" / "1.0.0"
    with contextlib.suppress(ValueError):
        splits = read(directory)
        if _digest(splits) == _SHA256:
            return splits
    from trainer.data.prepare import prepare_aside

    try:
        prepare_aside(root, _build)
    except OSError as error:
        raise ValueError(
            f"The digits cannot be prepared in {root} ({error}). Name a directory that can be "
            "written by LOCKSTEP_DATA_DIR or the argument data_dir of data.digits."
        ) from error
    splits = read(directory)
    if _digest(splits) != _SHA256:
        raise ValueError(
            f"The digits prepared in {directory} are not those that this version knows: "
            "scikit-learn's copy of them differs. Install the versions in requirements.lock."
        )
    return splits


def _build(aside: Path) -> Path:
    """Prepares the data set in an empty directory by the builder of ours, in silence."""
    import tensorflow_datasets

    from trainer.data.digits_builder import SklearnDigits

    builder = SklearnDigits(data_dir=aside, file_format="array_record")
    tensorflow_datasets.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()
    return Path(builder.data_dir)


def _digest(splits: Splits) -> str:
    digest = hashlib.sha256()
    for name in ("train", "test"):
        for key in ("image", "label"):
            digest.update(splits[name][key].tobytes())
    return digest.hexdigest()
