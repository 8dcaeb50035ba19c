"""The TFDS builder of scikit-learn's digits; imported only when the data set is prepared."""

from typing import Any

import numpy as np
import tensorflow_datasets as tfds


class SklearnDigits(tfds.core.GeneratorBasedBuilder):
    """Builds scikit-learn's copy of the UCI handwritten digits with a fixed split."""

    # Sorted by class, in each class in scikit-learn's order, every fifth example, beginning with
    # the first, is a test example: 1437 training and 360 test examples, stratified by class.

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "1437 training and 360 test examples."}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://scikit-learn.org/stable/datasets/toy_dataset.html",
            description="Handwritten digits, 8 by 8 pixels with values 0 to 16.",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(False), "test": self._generate_examples(True)}

    def _generate_examples(self, test: bool):
        from sklearn.datasets import load_digits

        pixels, labels = map(np.asarray, load_digits(return_X_y=True))
        images = np.asarray(pixels, np.uint8).reshape(-1, 8, 8, 1)
        for position, index in enumerate(np.argsort(labels, kind="stable").tolist()):
            if (position % 5 == 0) == test:
                yield index, {"image": images[index], "label": int(labels[index])}
