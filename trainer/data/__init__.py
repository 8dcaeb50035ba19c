"""The data sets a config can name; a batch depends only on a seed and its index."""

from trainer.data.arrays import ArrayDataset
from trainer.data.digits import digits
from trainer.data.mixture import mixture
from trainer.data.text import text
from trainer.data.tfds_arrays import fashion_mnist, tfds
from trainer.data.tfds_images import tfds_images
from trainer.data.tokens import tokens

__all__ = [
    "ArrayDataset",
    "digits",
    "fashion_mnist",
    "mixture",
    "text",
    "tfds",
    "tfds_images",
    "tokens",
]
