"""A TFDS builder of small pictures of different sizes, in two encodings."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

SIZES = {"train": 20, "validation": 7}


def picture(number: int) -> np.ndarray:
    """Returns a smooth picture, uint8 [height, width, 3], of a size of its own."""
    height, width = 24 + 3 * (number % 5), 40 - number % 7
    y, x = np.mgrid[:height, :width]
    waves = [np.sin((x * (1 + c) + y * (number % 4) + number) / 9) for c in range(3)]
    return (127 * (1 + np.stack(waves, -1))).astype(np.uint8)


def encoded(number: int, split: str) -> tuple[bytes, int]:
    """Returns a JPEG or a PNG, and its label."""
    number += 100 * (split != "train")
    buffer = io.BytesIO()
    Image.fromarray(picture(number)).save(buffer, format="JPEG" if number % 2 else "PNG")
    return buffer.getvalue(), number % 3


class TinyPhotos(tfds.core.GeneratorBasedBuilder):
    """20 pictures to train on, and 7 to validate."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=3),
            "file_name": tfds.features.Text(),
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SIZES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in range(SIZES[split]):
            image, label = encoded(number, split)
            yield number, {"image": image, "label": label, "file_name": str(number)}
