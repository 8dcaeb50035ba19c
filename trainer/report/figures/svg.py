"""Writes figures as SVG, for the page or alone. Lengths are integers, in half pixels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.report.document import Figure, Series
from trainer.report.figures.axes import Scale, scales
from trainer.report.figures.shapes import draw, marker, paint, sample, xml
from trainer.report.figures.style import style

WIDTH, HEIGHT = 1120, 680
TEXT = 25  # the size of text
_LARGE = 32  # its size on narrow screens, for which the margins leave room
_EM = 0.54  # the mean width of a character, in sizes
_LONGEST = 30  # characters of a turned label


@dataclass(frozen=True)
class Frame:
    """Where a figure stands in its drawing.

    Attributes:
        x: the scale of the horizontal axis.
        y: the scale of the vertical axis.
        box: left, top, right and bottom of the axes.
        height: of the whole drawing.
        turned: whether the labels of the horizontal axis are turned, because they are long.
    """

    x: Scale
    y: Scale
    box: tuple[int, int, int, int]
    height: int
    turned: bool

    @property
    def slot(self) -> float:
        """The width that each category of the horizontal axis has."""
        return (self.box[2] - self.box[0]) / max(1, len(self.x.labels))

    def places(self, series: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns where the x, y and high values of a series lie."""
        left, top, right, bottom = self.box
        x = left + (right - left) * self.x.at(series.x)
        ends = series.y, series.high
        if series.kind == "band":
            ends = self.y.limited(series.y), self.y.limited(series.high)
        y, high = (bottom - (bottom - top) * self.y.at(each) for each in ends)
        return x, y, high


def frame(figure: Figure) -> Frame:
    """Returns the frame of a figure, with margins that hold its labels.

    Args:
        figure: the figure.
    """
    x, y = scales(figure)
    longest = max((len(tick.text) for tick in y.ticks()), default=0)
    left = round(min(max(56, longest * _EM * _LARGE + 18), 0.42 * WIDTH))
    right = WIDTH - 28
    bottom = HEIGHT - 96
    height = HEIGHT if figure.x.title else HEIGHT - 36
    slot = (right - left) / max(1, len(x.labels))
    turned = any(len(line) * _EM * TEXT > slot for label in x.labels for line in wrap(label, slot))
    if turned:
        long = [min(len(label), _LONGEST) * _EM * 27 for label in x.labels]
        reach = [0.8 * each - slot * (i + 0.5) for i, each in enumerate(long)]
        left = max(left, round(max(reach)))
        height += round(0.6 * max(long)) - 20
    elif any(len(wrap(label, slot)) > 1 for label in x.labels):
        height += 30
    return Frame(x, y, (left, 58, right, bottom), height, turned)


def shortened(label: str) -> str:
    """Returns the label of a category as it fits where labels are turned.

    Args:
        label: the label.
    """
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def wrap(label: str, width: float) -> list[str]:
    """Returns a label in one line or two, broken after a space, "_", "-" or "/" if it is long.

    Args:
        label: the label.
        width: the width that it may have.
    """
    if len(label) * _EM * _LARGE <= width:
        return [label]
    breaks = [m.end() for m in re.finditer(r"[\s_/−-]+", label) if m.end() < len(label)]
    if not breaks:
        return [label]
    at = min(breaks, key=lambda i: max(i, len(label) - i))
    return [label[:at].rstrip(), label[at:]]


def svg(figure: Figure, arms: Sequence[str], prefix: str = "") -> str:
    """Returns a figure as SVG.

    Args:
        figure: the figure.
        arms: the names of all arms of the report, in the order that gives them their styles.
        prefix: what ids begin with, in the page, whose stylesheet has the colors; "" for a file
            of its own, in the colors for white paper and with a legend.
    """
    alone = not prefix
    prefix = prefix or "figure"
    at = frame(figure)
    indices = {arm: i for i, arm in enumerate(arms)}
    present = sorted({indices[s.arm] for s in figure.series if s.arm in indices})
    left, top, right, bottom = at.box
    rows = _legend(figure, arms, present, at.height) if alone else ([], 0)
    parts = [
        _opening(figure, prefix, at, at.height + rows[1], alone),
        f'<clipPath id="{prefix}-c"><path d="M{left - 8} {top - 8}H{right + 9}V{bottom + 8}'
        f'H{left - 8}z"/></clipPath>',
        *([_markers(present, prefix)] if alone else []),
        *_axes(figure, at),
        f'<g class="data" fill="none" stroke-width="4" stroke-linejoin="round" '
        f'clip-path="url(#{prefix}-c)">',
    ]
    for series in figure.series:
        arm = indices.get(series.arm)
        parts.append(draw(series, arm, (*at.places(series), at.box), "" if alone else prefix))
    return "".join([*parts, "</g>", *rows[0], "</svg>"])


def _opening(figure: Figure, prefix: str, at: Frame, height: int, alone: bool) -> str:
    size = f' width="{WIDTH // 2}" height="{height // 2}"' if alone else ""
    left, top, right, bottom = at.box
    data = (
        ""
        if alone
        else f' class="plot" data-box="{left} {top} {right} {bottom}"'
        + "".join(
            f' data-{name}="{scale.low:.8g} {scale.high:.8g} {int(scale.log)}"'
            for name, scale in (("x", at.x), ("y", at.y))
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg"{size} viewBox="0 0 {WIDTH} {height}" '
        f'role="group" aria-labelledby="{prefix}-t {prefix}-d" '
        f'font-family="system-ui, sans-serif" font-size="{TEXT}" fill="currentColor"{data}>'
        f'<title id="{prefix}-t">{xml(figure.title)}</title>'
        f'<desc id="{prefix}-d">{xml(figure.description)}</desc>'
    )


def _axes(figure: Figure, at: Frame) -> list[str]:
    left, top, right, bottom = at.box
    grid, minor, small, texts = "", "", "", []
    for tick, share in zip(at.y.ticks(), at.y.at([t.value for t in at.y.ticks()]), strict=True):
        place = round(bottom - (bottom - top) * share)
        if tick.text:
            grid += f"M{left} {place}H{right}"
            texts.append(_text(tick.text, left - 14, place + 9, "end"))
        else:
            minor += f"M{left - 8} {place}h8"
    below = []
    for tick, share in zip(at.x.ticks(), at.x.at([t.value for t in at.x.ticks()]), strict=True):
        place = round(left + (right - left) * share)
        small += f"M{place} {bottom}v{10 if tick.text else 6}"
        if tick.text:
            below.append(_below(tick.text, place, at))
    middle = (left + right) // 2
    empty = _text("no finite values", middle, (top + bottom) // 2, "middle")
    return [
        f'<g class="grid" fill="none" stroke="currentColor" stroke-width="1.5">'
        f'<path class="y" opacity=".16" d="{grid}"/>'
        f'<path class="ym" opacity=".55" d="{minor}"/>'
        f'<path opacity=".55" d="M{left} {bottom}H{right}{small}"/></g>',
        f'<g class="yt">{"".join(texts)}</g>' + "".join(below),
        _text(figure.y.title, 0, 26, "start", "title"),
        _text(figure.x.title, middle, at.height - 14, "middle", "title"),
        empty if at.y.empty or (at.x.empty and not at.y.labels) else "",
    ]


def _below(label: str, place: int, at: Frame) -> str:
    bottom = at.box[3]
    if at.turned:
        turn = f' transform="rotate(-37 {place} {bottom + 26})"'
        return _text(shortened(label), place + 4, bottom + 30, "end", "turned", turn)
    lines = wrap(label, at.slot) if at.x.labels else [label]
    return "".join(_text(t, place, bottom + 40 + 30 * i, "middle") for i, t in enumerate(lines))


def _text(text: str, x: int, y: int, anchor: str, kind: str = "", more: str = "") -> str:
    said = f' class="{kind}"' if kind else ""
    anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{said} x="{x}" y="{y}"{anchored}{more}>{xml(text)}</text>'


def _markers(present: Sequence[int], prefix: str) -> str:
    return "".join(marker(arm, f"{prefix}-m{arm}", True) for arm in present)


def _legend(
    figure: Figure, arms: Sequence[str], present: Sequence[int], height: int
) -> tuple[list[str], int]:
    parts, x, y = [], 0.0, height + 34
    for arm in present:
        width = 90 + len(arms[arm]) * _EM * TEXT
        if x and x + width > WIDTH:
            x, y = 0.0, y + 38
        dash = " ".join(f"{4 * length:g}" for length in style(arm).dash)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<path d="M{x:.0f} {y - 9}h30h30" fill="none" stroke="{paint(arm, True)}" '
            f'stroke-width="4"{dashed} marker-mid="url(#figure-m{arm})"/>'
            + _text(arms[arm], round(x + 72), y, "start")
        )
        x += width + 30
    for (kind, label), faint in figure.legend.items():
        width = 90 + len(label) * _EM * TEXT
        if x and x + width > WIDTH:
            x, y = 0.0, y + 38
        shown = sample(kind, faint, paint(None, True))
        parts.append(f'<g transform="translate({x:.0f} {y - 21})">{shown}</g>')
        parts.append(_text(label, round(x + 72), y, "start"))
        x += width + 30
    return parts, y + 20 - height if parts else 0
