"""Lays out figures, and writes them as SVG for the page, which has their colors and legends.

Start with `svg`. The ranges and ticks of axes, and the frame, are the same in PDF and PNG. Lengths
are integers, in half pixels; ids begin with a `prefix`.
"""

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.document import Axis, Figure, Series

Pixels = NDArray[np.float64]  # [points], NaN where a value has no place

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MARGIN = 0.03  # the part of the range that is added at each end
_CAP = 7  # half the width of the ends of an interval
_MARKS = 9  # markers on a long line
_CUT_FRONT, _CUT_FAINT = 0.8, 1.5  # the largest distance of the line from points that are left out


class Tick(NamedTuple):
    """A mark on an axis."""

    value: float
    text: str  # "" for a minor tick


class Scale(NamedTuple):
    """The map from the values of an axis to the length of the axis."""

    low: float  # at the start of the axis
    high: float  # at its end, larger than `low`
    log: bool = False  # whether equal lengths are equal ratios
    labels: tuple[str, ...] = ()  # names of categories at 0, 1, 2 and so on
    empty: bool = False  # whether nothing finite is shown, so that the range has no meaning

    def at(self, values: ArrayLike) -> NDArray[np.float64]:
        """Returns where values lie: 0 at `low`, 1 at `high`, NaN for a value without a place."""
        values = np.asarray(values, np.float64)
        low, high = self.low, self.high
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.log:
                values = np.where(values > 0, np.log10(values), np.nan)
                low, high = math.log10(low), math.log10(high)
            return np.where(np.isfinite(values), (values - low) / (high - low), np.nan)

    def limited(self, values: ArrayLike) -> NDArray[np.float64]:
        """Returns the ends of a band, where infinite ones lie just outside of the range."""
        values = np.asarray(values, np.float64)
        margin = 0.1 * (self.high - self.low)
        above = self.high * 2 if self.log else self.high + margin
        below = self.low / 2 if self.log else self.low - margin
        values = np.where(values == np.inf, above, values)
        return np.where((values == -np.inf) | ((values <= 0) & self.log), below, values)

    def ticks(self) -> list[Tick]:
        """Returns the ticks in the range, with text at those that are labelled."""
        if self.labels:
            return [Tick(float(i), label) for i, label in enumerate(self.labels)]
        if self.empty:
            return []
        if self.log and self.high / self.low >= 5:
            return self._log_ticks()
        return _linear_ticks(self.low, self.high)

    def _log_ticks(self) -> list[Tick]:
        decades = math.log10(self.high / self.low)
        every = max(1, math.ceil(decades / 6))
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        labelled = {1} if decades > 2.5 else {1, 2, 5}
        digits = range(1, 10) if every == 1 else (1,)
        powers = self.low < 1e-3 or self.high > 2e5
        ticks = []
        for exponent in range(first, last + 1):
            for digit in digits:
                value = float(f"{digit}e{exponent}")
                if self.low <= value <= self.high:
                    shown = digit in labelled and exponent % every == 0
                    ticks.append(Tick(value, _power(digit, exponent, powers) if shown else ""))
        return ticks


def scales(figure: Figure) -> tuple[Scale, Scale]:
    """Returns the scales of the x and y axis."""
    # Both hold all finite values of the series in front. Bands and faint series widen the range by
    # at most its own length at each end, and faint series only by what holds 96% of their values,
    # so that curves of diverged trials do not flatten all others; the drawings cut them there.
    faint = [each for each in figure.series if each.faint]
    bands = [each for each in figure.series if each.kind == "band" and not each.faint]
    front = [each for each in figure.series if each.kind != "band" and not each.faint]
    groups = (front, bands, faint)
    x = [[s.x for s in group if s.kind != "rule" or not len(s.y)] for group in groups]
    y = [[ends for s in group for ends in (s.y, s.high)] for group in groups]
    return _scale(figure.x, x), _scale(figure.y, y)


def _scale(axis: Axis, values: Sequence[Sequence[ArrayLike]]) -> Scale:
    # `values` are those of the series in front, of bands and of faint series.
    if axis.labels:
        return Scale(-0.5, len(axis.labels) - 0.5, False, axis.labels)
    groups = []
    for arrays in values:
        joined = np.concatenate([*(np.asarray(each, np.float64) for each in arrays), np.zeros(0)])
        groups.append(joined[np.isfinite(joined) & ((joined > 0) | (not axis.log))])
    if not any(group.size for group in groups):
        return Scale(1.0, 10.0, axis.log, empty=True)
    front, bands, faint = (np.log10(group) if axis.log else group for group in groups)
    ends = [group for group in (front, bands) if group.size]
    if faint.size:
        ends.append(np.quantile(faint, [0.02, 0.98]))
    low, high = min(float(each.min()) for each in ends), max(float(each.max()) for each in ends)
    first, last = (float(front.min()), float(front.max())) if front.size else (0.0, 0.0)
    if (length := last - first) > 0:
        low, high = max(low, first - length), min(high, last + length)
    if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
        half = 0.3 if axis.log else 0.1 * abs(low) or 0.5
        low, high = low - half, high + half
    margin = _MARGIN * (high - low)
    start = low - margin
    if not axis.log and 0 <= low < 5 * margin:
        start = 0.0 if low else -margin
    if axis.log:
        return Scale(10.0**start, 10.0 ** (high + margin), True)
    return Scale(start, high + margin)


def _linear_ticks(low: float, high: float) -> list[Tick]:
    rough = (high - low) / 5
    power = math.floor(math.log10(rough))
    step = min((m * 10.0**power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    power = math.floor(math.log10(step) + 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e6 or largest < 1e-3:
        exponent = math.floor(math.log10(largest)) if largest else 0
        return [Tick(value, _scientific(value, exponent, power)) for value in values]
    decimals = max(0, -power)
    return [Tick(v, f"{v:,.{decimals}f}".replace("-", "−")) for v in values]


def _scientific(value: float, exponent: int, power: int) -> str:
    if not value:
        return "0"
    digits = f"{value / 10.0**exponent:.{max(0, exponent - power)}f}".replace("-", "−")
    return f"{digits}×10{str(exponent).translate(_SUPERSCRIPT)}"


def _power(digit: int, exponent: int, powers: bool) -> str:
    if not powers:
        return f"{float(f'{digit}e{exponent}'):,.{max(0, -exponent)}f}"
    power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
    return power if digit == 1 else f"{digit}×{power}"


def path(series: Series, x: Pixels, y: Pixels, high: Pixels, box: tuple[int, ...]) -> str:
    """Returns the data `d` of the path that draws a series, in integers."""
    # Points without a place are left out, and interrupt a line. Points of lines are also left out
    # if nobody could see them: at most 0.4 pixels from the line in front and 1.5 in faint ones.
    # `box` is left, top, right and bottom of the frame of the axes.
    left, top, right, bottom = box
    if series.kind == "rule":
        if len(series.y):
            return "".join(f"M{left} {round(at)}H{right}" for at in y if np.isfinite(at))
        return "".join(f"M{round(at)} {top}V{bottom}" for at in x if np.isfinite(at))
    if series.kind == "interval":
        return "".join(
            f"M{round(a) - _CAP} {round(b)}h{2 * _CAP}m{-_CAP} 0V{round(c)}m{-_CAP} 0h{2 * _CAP}"
            for a, b, c in zip(x, y, high, strict=True)
            if np.isfinite([a, b, c]).all()
        )
    if series.kind == "points":
        inside = (x > left - 9) & (x < right + 9) & (y > top - 9) & (y < bottom + 9)
        return _relative(np.stack([x[inside], y[inside]], 1)) if inside.any() else ""
    away = 3 * (bottom - top)  # limits the coordinates of lines that leave the frame
    y, high = np.clip(y, top - away, bottom + away), np.clip(high, top - away, bottom + away)
    if series.kind == "band":
        return "".join(_runs([x, y, high], _ribbon))
    tolerance = _CUT_FAINT if series.faint else _CUT_FRONT
    draw = _steps if series.kind == "steps" else lambda run: _relative(_simplify(run, tolerance))
    return "".join(_runs([x, y], draw))


def marks(x: Pixels, y: Pixels) -> str:
    """Returns the data of a path whose vertices are marked points of a line, at most nine."""
    points = np.stack([x, y], 1)[np.isfinite(x) & np.isfinite(y)]
    if len(points) > _MARKS:
        points = points[[round(i * (len(points) - 1) / (_MARKS - 1)) for i in range(_MARKS)]]
    return _relative(points) if len(points) else ""


def _runs(columns: list[Pixels], draw: Callable[[NDArray[np.float64]], str]) -> list[str]:
    """Draws each sequence of points that all have a place."""
    points = np.stack(columns, 1)
    cuts = np.flatnonzero(np.diff(np.isfinite(points).all(1))) + 1
    return [draw(run) for run in np.split(points, cuts) if len(run) and np.isfinite(run).all()]


def _relative(points: NDArray[np.float64]) -> str:
    whole = np.round(points).astype(int)
    (a, b), rest = whole[0], np.diff(whole, axis=0).ravel().tolist()
    numbers = "".join(str(n) if n < 0 or i == 0 else f" {n}" for i, n in enumerate(rest))
    return f"M{a} {b}" + (f"l{numbers}" if rest else "h0")


def _steps(run: NDArray[np.float64]) -> str:
    whole = np.round(run).astype(int)
    (a, b), rest = whole[0], np.diff(whole, axis=0)
    return f"M{a} {b}" + ("".join(f"h{dx}v{dy}" for dx, dy in rest.tolist()) or "h0")


def _ribbon(run: NDArray[np.float64]) -> str:
    outline = np.concatenate([run[:, [0, 2]], run[::-1][:, [0, 1]]])
    return _relative(outline) + "z"


def _simplify(points: NDArray[np.float64], tolerance: float) -> NDArray[np.float64]:
    """Leaves out points that lie closer to the line through their neighbors than the tolerance."""
    # Douglas and Peucker's algorithm.
    keep = np.zeros(len(points), bool)
    keep[[0, -1]] = True
    spans = [(0, len(points) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        way = points[last] - points[first]
        apart = points[first + 1 : last] - points[first]
        if length := float(np.hypot(*way)):
            distance = np.abs(way[0] * apart[:, 1] - way[1] * apart[:, 0]) / length
        else:
            distance = np.hypot(apart[:, 0], apart[:, 1])
        if distance.max() > tolerance:
            middle = first + 1 + int(distance.argmax())
            keep[middle] = True
            spans += [(first, middle), (middle, last)]
    return points[keep]


WIDTH, HEIGHT = 1120, 680
TEXT = 25  # the size of text
_LARGE = 32  # the size of text on narrow screens, for which the margins leave room
_EM = 0.54  # the mean width of a character, as a part of the size
_LONGEST = 30  # characters of a turned label


class Frame(NamedTuple):
    """The scales of a figure, and the place of its axes in the drawing."""

    x: Scale
    y: Scale
    box: tuple[int, int, int, int]  # left, top, right and bottom of the axes
    height: int  # of the whole drawing
    turned: bool  # whether the labels of the horizontal axis are, because they are long

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
    """Returns the frame of a figure, with margins that hold its labels."""
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
        left = max(left, round(max([0.8 * each - slot * (i + 0.5) for i, each in enumerate(long)])))
        height += round(0.6 * max(long)) - 20
    elif any(len(wrap(label, slot)) > 1 for label in x.labels):
        height += 30
    return Frame(x, y, (left, 58, right, bottom), height, turned)


def shortened(label: str) -> str:
    """Returns the label of a category, cut to the room of turned labels."""
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def wrap(label: str, width: float) -> list[str]:
    """Returns a label in one line or two, broken after a space, "_", "-" or "/" if it is long."""
    if len(label) * _EM * _LARGE <= width:
        return [label]
    if not (breaks := [m.end() for m in re.finditer(r"[\s_/−-]+", label) if m.end() < len(label)]):
        return [label]
    at = min(breaks, key=lambda i: max(i, len(label) - i))
    return [label[:at].rstrip(), label[at:]]


def svg(figure: Figure, arms: Sequence[str], prefix: str) -> str:
    """Returns a figure as SVG; `arms` are all arms of the report, in the order of their styles."""
    at = frame(figure)
    indices = {arm: i for i, arm in enumerate(arms)}
    left, top, right, bottom = at.box
    data = "".join(
        f' data-{name}="{scale.low:.8g} {scale.high:.8g} {int(scale.log)}"'
        for name, scale in (("x", at.x), ("y", at.y))
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at.height}" '
        f'role="group" aria-labelledby="{prefix}-t {prefix}-d" '
        f'font-family="system-ui, sans-serif" font-size="{TEXT}" fill="currentColor" '
        f'class="plot" data-box="{left} {top} {right} {bottom}"{data}>'
        f'<title id="{prefix}-t">{xml(figure.title)}</title>'
        f'<desc id="{prefix}-d">{xml(figure.description)}</desc>'
        f'<clipPath id="{prefix}-c"><path d="M{left - 8} {top - 8}H{right + 9}V{bottom + 8}'
        f'H{left - 8}z"/></clipPath>',
        *_axes(figure, at),
        f'<g class="data" fill="none" stroke-width="4" stroke-linejoin="round" '
        f'clip-path="url(#{prefix}-c)">',
    ]
    drawn = (
        draw_series(each, indices.get(each.arm), at.places(each), at.box) for each in figure.series
    )
    return "".join([*parts, *drawn, "</g></svg>"])


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


_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

# As matplotlib names them: circle, square, triangle, diamond, triangle that points down, plus and
# cross (both filled).
MARKERS = {
    "o": "M8 0A8 8 0 1 1-8 0A8 8 0 1 1 8 0z",
    "s": "M-7-7h14v14h-14z",
    "^": "M0-9.5L9 6.5H-9z",
    "D": "M0-9.5L9.5 0L0 9.5L-9.5 0z",
    "v": "M0 9.5L9-6.5H-9z",
    "P": "M-3-9h6v6h6v6h-6v6h-6v-6h-6v-6h6z",
    "X": "M-4.5-9L0-4.5L4.5-9L9-4.5L4.5 0L9 4.5L4.5 9L0 4.5L-4.5 9L-9 4.5L-4.5 0L-9-4.5z",
}


class Style(NamedTuple):
    """How one series of a figure is drawn."""

    color: str  # on white, "#rrggbb"
    color_on_dark: str
    dash: tuple[float, ...]  # lengths of dashes and gaps, in widths of the line; () is a solid line
    marker: str  # of `MARKERS`


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
    marker = [*MARKERS][index % len(MARKERS)]
    return Style(color, on_dark, _DASHES[index % len(_DASHES)], marker)


def xml(text: str) -> str:
    """Returns text as HTML and XML can hold it; characters that they forbid become "�"."""
    return escape(_FORBIDDEN.sub("�", text))


def dashes(arm: int) -> str:
    """Returns the attribute for the dashes of an arm's lines; "" if these are solid."""
    lengths = " ".join(f"{4 * length:g}" for length in style(arm).dash)
    return f' stroke-dasharray="{lengths}"' if lengths else ""


def marker(arm: int) -> str:
    """Returns the definition of an arm's marker, for `marker-mid` and so on."""
    return (
        f'<marker id="m{arm}" markerUnits="userSpaceOnUse" markerWidth="24" markerHeight="24" '
        f'viewBox="-12 -12 24 24"><path d="{MARKERS[style(arm).marker]}" stroke="var(--paper)" '
        f'stroke-width="1.5" fill="var(--a{arm})"/></marker>'
    )


def draw_series(
    series: Series, arm: int | None, places: tuple[Pixels, Pixels, Pixels], box: tuple[int, ...]
) -> str:
    """Returns a series as SVG; `arm` is the index of its arm, None if it belongs to none."""
    # `places` are those of its x, y and high values, and `box` is the frame of the axes.
    x, y, high = places
    mine = "" if arm is None else f' data-a="{arm}"'
    is_line = series.kind in {"line", "steps"}
    if series.faint and is_line:
        # There are hundreds of these: they have whole pixels, and their look is in the stylesheet.
        data = path(series, x / 2, y / 2, high, tuple(side // 2 for side in box))
        return f'<path class="s f"{mine} d="{data}"/>'
    drawn = f'<path d="{path(series, x, y, high, box)}"{_line_style(series, arm)}/>'
    if is_line and arm is not None:
        drawn += f'<path stroke="none" d="{marks(x, y)}"{_marked(arm)}/>'
    name = xml(": ".join(filter(None, [series.arm, series.label])))
    kind = "s f" if series.faint else "s"
    return f'<g class="{kind}" tabindex="0" role="img" aria-label="{name}"{mine}>{drawn}</g>'


def _line_style(series: Series, arm: int | None) -> str:
    color = "var(--soft)" if arm is None else f"var(--a{arm})"
    if series.kind == "points":
        stands = ' opacity=".4"' if series.faint else ""
        if arm is None:
            return f' stroke="{color}" stroke-width="14" stroke-linecap="round"{stands}'
        return f' stroke="none"{_marked(arm)}{stands}'
    if series.kind == "band":
        return f' fill="{color}" opacity="{0.08 if series.faint else 0.16}"'
    if series.kind == "rule":
        return f' stroke="{color}" stroke-width="3" stroke-dasharray="3 7" stroke-linecap="round"'
    if series.kind == "interval":
        return f' stroke="{color}"'
    return f' stroke="{color}"{"" if arm is None else dashes(arm)}'


def _marked(arm: int) -> str:
    name = f"url(#m{arm})"
    return f' marker-start="{name}" marker-mid="{name}" marker-end="{name}"'


def legend_sample(kind: str, faint: bool) -> str:
    """Returns what a legend shows of a kind of series, in a box of 60 by 24."""
    opacity = ' opacity=".5"' if faint else ""
    line = 'fill="none" stroke="var(--soft)"'
    if kind == "band":
        return '<path d="M4 3H56V21H4z" fill="var(--soft)" opacity=".3"/>'
    if kind == "points":
        return f'<circle cx="30" cy="12" r="7" fill="var(--soft)"{opacity}/>'
    if kind == "interval":
        return f'<path d="M30 1v22M23 1h14M23 23h14" {line} stroke-width="4"/>'
    dash = ' stroke-dasharray="3 7" stroke-linecap="round"' if kind == "rule" else ""
    width = 2 if faint else 4
    return f'<path d="M2 12h56" {line} stroke-width="{width}"{dash}{opacity}/>'
