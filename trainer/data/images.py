"""From stored pixels to what a model sees: gathering, random crops and flips, scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


@dataclasses.dataclass(eq=False)
class Pixels:
    """Says how stored images [examples, height, width, channels] become what a model sees.

    Args:
        unit: the stored value that stands for 1, as 255 for bytes.
        mean: subtracted after division by `unit`: one number, or one a channel.
        std: divided by after that, likewise.
        crop: in training an image is moved by up to so many pixels in each direction, at random,
            and filled up by stored zeros: a random crop of the image with that padding.
        flip: in training an image is mirrored left to right with probability 1/2.
        name: what error messages call the data set.

    Raises:
        ValueError: `crop` is negative, or a standard deviation is not positive.
    """

    unit: float = 255.0
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    crop: int = 0
    flip: bool = False
    name: str = "data"

    def __post_init__(self):
        if self.crop < 0:
            raise ValueError(f"{self.name} needs crop to be 0 pixels or more, but got {self.crop}.")
        if np.min(self.std) <= 0:
            raise ValueError(f"{self.name} needs std to be positive, but got {self.std}.")
        # x / unit / std - mean / std, rounded to float32 once.
        std = np.asarray(self.std, np.float64)
        self._factor = (1 / (self.unit * std)).astype(np.float32)
        self._offset = (-np.asarray(self.mean, np.float64) / std).astype(np.float32)
        self._windows: tuple[np.ndarray, np.ndarray] | None = None

    def check(self, images: np.ndarray) -> None:
        """Raises a ValueError if a crop could move one of the images out of sight altogether.

        Args:
            images: [examples, height, width, channels].
        """
        height, width = images.shape[1:3]
        if self.crop >= min(height, width):
            raise ValueError(
                f"{self.name} moves images by up to crop={self.crop} pixels, but they are {height} "
                f"by {width}. Choose fewer than {min(height, width)}."
            )

    @property
    def random(self) -> bool:
        """Whether training images are changed at random."""
        return self.crop > 0 or self.flip

    def scaling(self) -> str:
        """Names what is done to every image, in training and in evaluation."""
        return f"unit={self.unit!r} mean={self.mean!r} std={self.std!r}"

    def gather(
        self, images: np.ndarray, indices: np.ndarray, words: np.ndarray | None
    ) -> np.ndarray:
        """Returns the images at `indices` as the model sees them, float32.

        Args:
            images: [examples, height, width, channels].
            indices: [batch], which of them.
            words: [batch] random words, uint64, that say how each is moved and mirrored; None
                leaves them as they are.
        """
        if words is None or not self.crop:
            picked = images[indices]
        else:
            reach = np.uint64(2 * self.crop + 1)
            down, right = words % reach, (words >> np.uint64(16)) % reach
            picked = self._moved(images)[indices, down.astype(np.intp), right.astype(np.intp)]
        if words is not None and self.flip:
            mirrored = (words >> np.uint64(63)).astype(bool)
            picked[mirrored] = picked[mirrored, :, ::-1]
        seen = picked.astype(np.float32, order="C")
        seen *= self._factor
        seen += self._offset
        return seen

    def _moved(self, images: np.ndarray) -> np.ndarray:
        """Returns a view [examples, down, right, height, width, channels] of all moved images."""
        if self._windows is None or self._windows[0] is not images:
            border = (self.crop, self.crop)
            padded = np.pad(images, ((0, 0), border, border, (0, 0)))
            view = sliding_window_view(padded, images.shape[1:3], axis=(1, 2))  # type: ignore[call-overload]
            self._windows = (images, view.transpose(0, 1, 2, 4, 5, 3))
        return self._windows[1]
