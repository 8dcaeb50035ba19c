"""Crops of images of any size: at random for training, central for evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_TRIALS = 10
WORDS = 1 + 4 * _TRIALS
"""Number of random words of an image: one for the mirroring, and four for each trial of a crop."""

_SMALLEST_RATIO, _LARGEST_RATIO = 3 / 4, 4 / 3
_RESIZED = 0.875  # the side of the central crop, as a share of the short side

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; the last two are outside of the box."""


def random_box(words: Sequence[int], width: int, height: int, min_area: float) -> Box:
    """Returns a random part of an image, as a pure function of the arguments.

    Its share of the area is uniform between `min_area` and 1, and the logarithm of its width over
    its height is uniform between those of 3/4 and 4/3. A part that is larger than the image is
    drawn again; after ten trials, it is the largest central part whose ratio is in this range.

    Szegedy et al., "Going Deeper with Convolutions" (arXiv:1409.4842).

    Args:
        words: `WORDS` random words, integers below 2**64, of which the first is not used.
        width: width of the image in pixels.
        height: height of the image in pixels.
        min_area: the smallest share of the area, above 0 and at most 1.
    """
    low, high = math.log(_SMALLEST_RATIO), math.log(_LARGEST_RATIO)
    for trial in range(_TRIALS):
        share, ratio, x, y = (_uniform(word) for word in words[1 + 4 * trial : 5 + 4 * trial])
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


def _uniform(word: int) -> float:
    """Returns a number of [0, 1) with 53 random bits."""
    return (int(word) >> 11) * 2.0**-53


def crop_at_random(image: Any, words: Sequence[int], size: int, min_area: float, flip: bool) -> Any:
    """Returns a random part of an image, resized to a square and perhaps mirrored.

    Args:
        image: an image of pillow.
        words: `WORDS` random words, integers below 2**64.
        size: side of the square in pixels.
        min_area: the smallest share of the area, above 0 and at most 1.
        flip: whether the image is mirrored left to right with probability 1/2.
    """
    from PIL import Image

    width, height = image.size
    box = random_box(words, width, height, min_area)
    # Not the argument `box` of resize, which reads pixels outside of it.
    image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if flip and int(words[0]) >> 63:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def crop_center(image: Any, size: int) -> Any:
    """Returns the central square of an image whose short side is resized to size / 0.875.

    Args:
        image: an image of pillow.
        size: side of the square in pixels.
    """
    from PIL import Image

    short = round(size / _RESIZED)
    width, height = (short * side // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))
