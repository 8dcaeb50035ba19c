"""Converts stored pixels to a model's inputs: gathering, random crops and flips, scaling."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_CONVERTED_BYTES = 2**26  # of a split, up to which all of its converted images are kept


@dataclasses.dataclass(eq=False)
class Pixels:
    """The conversion of stored images [examples, height, width, channels] to inputs."""

    unit: float = 255.0  # the stored value that corresponds to 1, such as 255 for bytes
    # subtracted after the division by `unit`: one number, or one per channel
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0  # the divisor after that, in the same form
    crop: int = 0  # in training, random crops of the image padded by this number of stored zeros
    flip: bool = False  # in training, mirror left to right with probability 1/2
    name: str = "data"  # for messages

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
        """Raises ValueError if a crop could consist of padding only."""
        # Images are [examples, height, width, channels].
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
        """Returns converted images, float32 [batch, height, width, channels]."""
        # `images` are [examples, height, width, channels], `indices` [batch]. The crop and the flip
        # of each image are derived from `words`, [batch] random words, uint64; None for neither.
        if words is None and 4 * images.size <= _CONVERTED_BYTES:
            # Small images are converted once and not in every epoch.
            converted = next((new for old, new in self._converted if old is images), None)
            if converted is None:
                converted = self.convert(images)
                self._converted.append((images, converted))
            return converted[indices]
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
        """Returns stored images [..., channels] scaled to the model's inputs, float32."""
        # Stored images may be in Fortran order, which indexing and astype would keep.
        converted = images.astype(np.float32, order="C")
        converted *= self._factor
        converted += self._offset
        return converted

    def _moved(self, images: np.ndarray) -> np.ndarray:
        """Returns a view [examples, down, right, height, width, channels] of all possible crops."""
        if self._windows is None or self._windows[0] is not images:
            border = (self.crop, self.crop)
            padded = np.pad(images, ((0, 0), border, border, (0, 0)))
            # A view: only the padded images take memory.
            view = sliding_window_view(padded, images.shape[1:3], axis=(1, 2))  # type: ignore[call-overload]
            self._windows = (images, view.transpose(0, 1, 2, 4, 5, 3))
        return self._windows[1]


_TRIALS = 10
WORDS = 1 + 4 * _TRIALS
"""Number of random words of an image: one for the mirroring, and four for each trial of a crop."""

_SMALLEST_RATIO, _LARGEST_RATIO = 3 / 4, 4 / 3


class Crops(NamedTuple):
    """The squares that are cut from images of any sizes."""

    size: int  # side of the square, in pixels
    min_area: float = 0.08  # the smallest share of an image's area that a training crop has
    flip: bool = True  # in training, mirror left to right with probability 1/2


_RESIZED = 0.875  # the side of the central crop, as a share of the short side

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; the last two are outside of the box."""


def random_box(words: Sequence[int], width: int, height: int, min_area: float) -> Box:
    """Returns a random part of an image, as a pure function of the arguments."""
    # Its share of the area is uniform between `min_area` and 1, and the logarithm of its width over
    # its height is uniform between those of 3/4 and 4/3. A part that is larger than the image is
    # drawn again; after ten trials, it is the largest central part whose ratio is in this range.
    # Szegedy et al., "Going Deeper with Convolutions" (arXiv:1409.4842).
    # There are `WORDS` random words, integers below 2**64, of which the first is not used. Width
    # and height are in pixels.
    low, high = math.log(_SMALLEST_RATIO), math.log(_LARGEST_RATIO)
    for trial in range(_TRIALS):
        drawn = words[1 + 4 * trial : 5 + 4 * trial]
        share, ratio, x, y = ((int(word) >> 11) * 2.0**-53 for word in drawn)  # in [0, 1), 53 bits
        area = (min_area + share * (1 - min_area)) * width * height
        ratio = math.exp(low + ratio * (high - low))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = int(x * (width - wide + 1)), int(y * (height - tall + 1))
            return left, top, left + wide, top + tall
    wide = min(width, round(height * _LARGEST_RATIO))
    tall = min(height, round(width / _SMALLEST_RATIO))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


def crop_at_random(image: Any, words: Sequence[int], size: int, min_area: float, flip: bool) -> Any:
    """Returns a random part of an image of pillow, resized to a square of `size` pixels."""
    # With `flip`, it is mirrored left to right with probability 1/2. For `words` and `min_area`,
    # see `random_box`.
    from PIL import Image

    width, height = image.size
    box = random_box(words, width, height, min_area)
    # Not by the argument `box` of resize, which also reads pixels around the box.
    image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if flip and int(words[0]) >> 63:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def crop_center(image: Any, size: int) -> Any:
    """Returns the central square of an image whose short side is resized to size / 0.875."""
    from PIL import Image

    short = round(size / _RESIZED)
    width, height = (short * side // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))
