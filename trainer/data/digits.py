"""Scikit-learn's handwritten digits, prepared by a TFDS builder of this package."""

import contextlib
import hashlib
import io
from pathlib import Path

from trainer.data.arrays import ArrayDataset
from trainer.data.folders import data_root, prepare_aside
from trainer.data.images import Pixels
from trainer.data.tfds_arrays import Splits, read_splits

# sha256 of images and labels, training split first: another copy of the data would change results.
_SHA256 = "bf2aaad01d89e4ed310a9f8e8edd036abd7a680333526ecb3e06405478f7c815"


def digits(
    batch_size: int | None = 128,
    crop: int = 0,
    eval_batch_size: int | None = None,
    data_dir: str | None = None,
    validation: float | None = None,
    validation_seed: int = 0,
) -> ArrayDataset:
    """Returns scikit-learn's digits: 1797 images of 8 by 8 pixels, one channel, 10 classes.

    The data set is prepared on first use, in a few seconds and without a network, and then read
    from disk. The split is fixed: sorted by class, every fifth example is a test example, so that
    there are 1437 training examples (142, 146, 141, 147, 144, 146, 145, 143, 139, 144 of the digits
    0 to 9) and 360 test examples. `image` is float32 [batch, 8, 8, 1] with mean 0 and standard
    deviation 1 over the training split, `label` is int32 [batch].

    The images are the test split of Alpaydin and Kaynak, "Optical Recognition of
    Handwritten Digits" (UCI, 1998).

    Args:
        batch_size: examples per training batch, over all processes; None for the whole split.
        crop: in training, take random crops of the image padded by this number of black pixels.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        data_dir: the folder of data sets; None for $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.
        validation: the share of the training examples that are a validation split and not trained
            on, between 0 and 1, such as 0.1; None for no such split.
        validation_seed: seed of the choice of these examples.

    Raises:
        ValueError: an argument is out of range, or the data can neither be read nor prepared.

    Example:
        >>> from trainer import data
        >>> digits = data.digits(batch_size=32)
        >>> batch = next(digits.train(batch_index=0, seed=0))
        >>> batch["image"].shape, batch["label"].dtype
        ((32, 8, 8, 1), dtype('int32'))
    """
    pixels = Pixels(unit=16, mean=0.3058, std=0.3762, crop=crop, name="data.digits")
    splits = _load(data_root(data_dir))
    return ArrayDataset(
        splits["train"],
        splits["test"],
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        pixels={"image": pixels},
        validation=validation,
        validation_seed=validation_seed,
        name="data.digits",
    )


def _load(root: Path) -> Splits:
    """Reads the data set; prepares it first if it is absent, incomplete or damaged."""
    directory = root / "sklearn_digits" / "1.0.0"
    # `read` raises if the data set is missing or damaged.
    with contextlib.suppress(ValueError):
        splits = read_splits(directory)
        if _digest(splits) == _SHA256:
            return splits
    try:
        prepare_aside(root, _build)
    except OSError as error:
        raise ValueError(
            f"The digits cannot be prepared in {root} ({error}). Set LOCKSTEP_DATA_DIR, or the "
            "argument data_dir of data.digits, to a folder that can be written."
        ) from error
    splits = read_splits(directory)
    if _digest(splits) != _SHA256:
        raise ValueError(
            f"The digits prepared in {directory} are not those that this version expects: "
            "scikit-learn's copy of them differs. Install the versions in requirements.lock."
        )
    return splits


def _build(aside: Path) -> Path:
    """Prepares the data set in an empty folder, without output."""
    import tensorflow_datasets

    from trainer.data.digits_builder import SklearnDigits

    builder = SklearnDigits(data_dir=aside, file_format="array_record")
    tensorflow_datasets.disable_progress_bar()
    # TFDS prints to standard output, which belongs to the command.
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()
    # Raises for damaged records, and saves the arrays beside them.
    read_splits(Path(builder.data_dir))
    return Path(builder.data_dir)


def _digest(splits: Splits) -> str:
    arrays = [splits[name][key] for name in ("train", "test") for key in ("image", "label")]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
