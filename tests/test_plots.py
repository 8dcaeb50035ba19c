"""Figures of metrics: styles of series, curves, and the command `plot`."""

import itertools

import numpy as np
import pytest

from trainer.report.style import style

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: linear RGB as people with protanopia,
# deuteranopia and tritanopia see it. Ottosson 2020: linear RGB to OKLab.
SEEN = {
    "three primary colors": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def linear(color: str) -> np.ndarray:
    """Returns "#rrggbb" as linear RGB, [3]."""
    rgb = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.2."""
    low, high = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] for color in (one, other))
    return float((high + 0.05) / (low + 0.05))


def distance(one: str, other: str, seen: str) -> float:
    """Returns the distance in OKLab of two colors, as some people see them."""
    rgb = np.array([np.array(SEEN[seen]) @ linear(color) for color in (one, other)])
    lab = np.cbrt(np.clip(rgb @ np.array(TO_CONES).T, 0, None)) @ np.array(TO_LAB).T
    return float(np.linalg.norm(lab[0] - lab[1]))


def test_colors_can_be_seen_on_white_and_on_dark() -> None:
    assert min(contrast(style(index).color, "#ffffff") for index in range(8)) > 2.2
    assert min(contrast(style(index).color_on_dark, "#16181d") for index in range(8)) > 3


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("field", ["color", "color_on_dark"])
def test_colors_can_be_told_apart(field, seen) -> None:
    colors = [getattr(style(index), field) for index in range(8)]
    closest = min(distance(*pair, seen) for pair in itertools.combinations(colors, 2))
    # On white 0.076 as in the original. On dark, light grey and yellow have 0.059.
    assert closest > (0.075 if field == "color" else 0.055)


def test_styles_without_color_repeat_after_35_series_and_with_color_after_280() -> None:
    assert len({style(index)[2:] for index in range(35)}) == 35
    assert len({style(index) for index in range(280)}) == 280
