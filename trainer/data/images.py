"""Converts stored pixels to a model's inputs: gathering, random crops and flips, scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_CONVERTED_BYTES = 2**26  # of a split, up to which all of its converted images are kept


@dataclasses.dataclass(eq=False)
class Pixels:
    """The conversion of stored images [examples, height, width, channels] to a model's inputs.

    Args:
        unit: the stored value that corresponds to 1, such as 255 for bytes.
        mean: subtracted after the division by `unit`: one number, or one per channel.
        std: the divisor after the subtraction of `mean`, in the same form.
        crop: in training, take random crops of the image padded by this number of stored zeros.
        flip: in training, mirror images left to right with probability 1/2.
        name: the name of the data set in error messages.

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
        self._converted: list[tuple[np.ndarray, np.ndarray]] = []  # stored, and converted

    def check(self, images: np.ndarray) -> None:
        """Raises ValueError if a crop could consist of padding only.

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
        """Returns a text of the scaling, for the data set's fingerprint."""
        return f"unit={self.unit!r} mean={self.mean!r} std={self.std!r}"

    def gather(
        self, images: np.ndarray, indices: np.ndarray, words: np.ndarray | None
    ) -> np.ndarray:
        """Returns converted images, float32 [batch, height, width, channels].

        Args:
            images: [examples, height, width, channels].
            indices: [batch], indices of images.
            words: [batch] random words, uint64, from which the crop and the flip of each image are
                derived; None for neither.
        """
        if words is None and 4 * images.size <= _CONVERTED_BYTES:
            # Small images are converted once and not in every epoch.
            return self._convert_once(images)[indices]
        if words is None or not self.crop:
            picked = images[indices]
        else:
            reach = np.uint64(2 * self.crop + 1)
            down, right = words % reach, (words >> np.uint64(16)) % reach
            picked = self._moved(images)[indices, down.astype(np.intp), right.astype(np.intp)]
        if words is not None and self.flip:
            mirrored = (words >> np.uint64(63)).astype(bool)
            # In place: indexing by arrays has copied the images.
            picked[mirrored] = picked[mirrored, :, ::-1]
        return self.convert(picked)

    def convert(self, images: np.ndarray) -> np.ndarray:
        """Returns images scaled to the model's inputs, float32, without a crop or a flip.

        Args:
            images: [..., channels], as stored.
        """
        # Stored images may be in Fortran order, which indexing and astype would keep.
        converted = images.astype(np.float32, order="C")
        converted *= self._factor
        converted += self._offset
        return converted

    def _convert_once(self, images: np.ndarray) -> np.ndarray:
        """Converts all stored images, and returns the same array when called again."""
        for stored, converted in self._converted:
            if stored is images:
                return converted
        self._converted.append((images, self.convert(images)))
        return self._converted[-1][1]

    def _moved(self, images: np.ndarray) -> np.ndarray:
        """Returns a view [examples, down, right, height, width, channels] of all possible crops."""
        if self._windows is None or self._windows[0] is not images:
            border = (self.crop, self.crop)
            padded = np.pad(images, ((0, 0), border, border, (0, 0)))
            # A view: only the padded images take memory.
            view = sliding_window_view(padded, images.shape[1:3], axis=(1, 2))  # type: ignore[call-overload]
            self._windows = (images, view.transpose(0, 1, 2, 4, 5, 3))
        return self._windows[1]
