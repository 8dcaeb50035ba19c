"""Fashion-MNIST, prepared by the unmodified TFDS builder."""

from trainer.data.arrays import ArrayDataset
from trainer.data.folders import data_root
from trainer.data.images import Pixels
from trainer.data.tfds_arrays import prepared_arrays


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
