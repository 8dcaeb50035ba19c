"""Images of yours: a folder for each class, with files that pillow reads."""

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 16  # pixels of an image as the model gets it


def images(folder: str, split: str, share: float = 0.2, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the images of a split: "image", float32 [examples, SIDE, SIDE, 3], and "label".

    Classes are numbered in the order of their folders' names. All images are held in memory; for
    more than fit, prepare a data set of TFDS and use `data.tfds_images`.

    Args:
        folder: has one folder for each class; relative to the folder of the command.
        split: "train" or "test".
        share: the fraction of the images of each class in the test split.
        seed: which images these are.
    """
    found, labels = [], []
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    for label, one_class in enumerate(classes):
        files = sorted(path for path in one_class.iterdir() if path.is_file())
        order = np.random.default_rng([seed, label]).permutation(len(files))
        tested = round(share * len(files))
        for index in order[:tested] if split == "test" else order[tested:]:
            with Image.open(files[index]) as image:
                found.append(np.asarray(image.convert("RGB").resize((SIDE, SIDE))))
            labels.append(label)
    return {
        "image": np.stack(found).astype(np.float32) / 255,
        "label": np.array(labels, np.int32),
    }
