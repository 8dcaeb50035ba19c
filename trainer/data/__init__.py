"""The data sets a config can name; they are in memory, and a batch depends on its step only."""

from trainer.data.arrays import ArrayDataset
from trainer.data.digits import digits
from trainer.data.fashion_mnist import fashion_mnist
from trainer.data.tfds_arrays import tfds

__all__ = ["ArrayDataset", "digits", "fashion_mnist", "tfds"]
