"""Colors, dashes and markers that distinguish the series of a figure."""

from typing import NamedTuple


class Style(NamedTuple):
    """How one series of a figure is drawn."""

    color: str  # on white, "#rrggbb"
    color_on_dark: str
    dash: tuple[float, ...]  # lengths of dashes and gaps, in widths of the line; () is a solid line
    # of matplotlib: "o" circle, "s" square, "^" triangle, "D" diamond, "v" triangle that points
    # down, "P" plus, "X" cross (both filled)
    marker: str


# Okabe and Ito's colors (Color Universal Design, 2008), those with most contrast on white first.
# Two are replaced: black on a dark background, and on white the yellow, whose contrast is 1.3. For
# people who see two primary colors, the dark yellow is as far from the other seven as these are
# from each other (OKLab distance 0.076; severity 1 of Machado et al. 2009); a lighter one is not.
# tests/report/test_plots.py computes both.
_COLORS = (
    ("#0072B2", "#0072B2"),  # blue
    ("#D55E00", "#D55E00"),  # vermillion
    ("#009E73", "#009E73"),  # bluish green
    ("#CC79A7", "#CC79A7"),  # reddish purple
    ("#000000", "#D9D9D9"),  # black
    ("#E69F00", "#E69F00"),  # orange
    ("#56B4E9", "#56B4E9"),  # sky blue
    ("#6B5D00", "#F0E442"),  # yellow
)
_DASHES = ((), (4, 1.5), (1, 1.2), (6, 1.5, 1, 1.5), (3, 1.2, 1, 1.2, 1, 1.2))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def style(index: int) -> Style:
    """Returns the style of the series with a number from 0.

    35 series differ in dash and marker, so that they can be told apart in black and white, and 280
    in color, dash and marker.

    Example:
        >>> style(0)
        Style(color='#0072B2', color_on_dark='#0072B2', dash=(), marker='o')
        >>> style(9).color == style(1).color, style(9).dash == style(1).dash
        (True, False)
    """
    # The periods have no common divisor, so that combinations repeat as late as possible.
    color, on_dark = _COLORS[index % len(_COLORS)]
    return Style(color, on_dark, _DASHES[index % len(_DASHES)], _MARKERS[index % len(_MARKERS)])
