"""Series and markers of figures as elements of SVG."""

import re
from html import escape

from trainer.report.document import Series
from trainer.report.figures.paths import Pixels, marks, path
from trainer.report.figures.style import style

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

MARKERS = {
    "o": "M8 0A8 8 0 1 1-8 0A8 8 0 1 1 8 0z",
    "s": "M-7-7h14v14h-14z",
    "^": "M0-9.5L9 6.5H-9z",
    "D": "M0-9.5L9.5 0L0 9.5L-9.5 0z",
    "v": "M0 9.5L9-6.5H-9z",
    "P": "M-3-9h6v6h6v6h-6v6h-6v-6h-6v-6h6z",
    "X": "M-4.5-9L0-4.5L4.5-9L9-4.5L4.5 0L9 4.5L4.5 9L0 4.5L-4.5 9L-9 4.5L-4.5 0L-9-4.5z",
}


def xml(text: str) -> str:
    """Returns text as HTML and XML can hold it; characters that they forbid become "�".

    Args:
        text: any text.
    """
    return escape(_FORBIDDEN.sub("�", text))


def paint(arm: int | None, alone: bool) -> str:
    """Returns the color of an arm in SVG.

    Args:
        arm: its index, or None for what belongs to none.
        alone: whether the drawing is a file of its own; the page has variables.
    """
    if arm is None:
        return "#666" if alone else "var(--soft)"
    return style(arm).color if alone else f"var(--a{arm})"


def marker(arm: int, name: str, alone: bool) -> str:
    """Returns the definition of the marker of an arm, to be used as `marker-mid` and so on.

    Args:
        arm: its index.
        name: its id.
        alone: whether the drawing is a file of its own.
    """
    edge = "#fff" if alone else "var(--paper)"
    return (
        f'<marker id="{name}" markerUnits="userSpaceOnUse" markerWidth="24" markerHeight="24" '
        f'viewBox="-12 -12 24 24"><path d="{MARKERS[style(arm).marker]}" stroke="{edge}" '
        f'stroke-width="1.5" fill="{paint(arm, alone)}"/></marker>'
    )


def draw(
    series: Series,
    arm: int | None,
    places: tuple[Pixels, Pixels, Pixels, tuple[int, ...]],
    prefix: str,
) -> str:
    """Returns a series as SVG.

    Args:
        series: the series.
        arm: the index of its arm; None if it belongs to none.
        places: where its x, y and high values lie, and the frame of the axes.
        prefix: what ids begin with in the page; "" in a file of its own.
    """
    alone = not prefix
    mine = "" if arm is None else f' data-a="{arm}"'
    if series.faint and series.kind in {"line", "steps"} and not alone:
        # Hundreds of these: on a grid of whole pixels, and with all else in the stylesheet.
        x, y, high, box = places
        data = path(series, x / 2, y / 2, high, tuple(side // 2 for side in box))
        return f'<path class="s f"{mine} d="{data}"/>'
    data = path(series, *places)
    drawn = f'<path d="{data}"{_look(series, arm, alone)}/>'
    x, y = places[:2]
    if series.kind in {"line", "steps"} and not series.faint and arm is not None:
        drawn += f'<path stroke="none" d="{marks(x, y)}"{_marked(arm, alone)}/>'
    if alone:
        return drawn
    name = xml(": ".join(filter(None, [series.arm, series.label])))
    kind = "s f" if series.faint else "s"
    return f'<g class="{kind}" tabindex="0" role="img" aria-label="{name}"{mine}>{drawn}</g>'


def _look(series: Series, arm: int | None, alone: bool) -> str:
    color = paint(arm, alone)
    if series.kind == "points":
        stands = ' opacity=".4"' if series.faint else ""
        if arm is None:
            return f' stroke="{color}" stroke-width="14" stroke-linecap="round"{stands}'
        return f' stroke="none"{_marked(arm, alone)}{stands}'
    if series.kind == "band":
        return f' fill="{color}" opacity="{0.08 if series.faint else 0.16}"'
    if series.kind == "rule":
        return f' stroke="{color}" stroke-width="3" stroke-dasharray="3 7" stroke-linecap="round"'
    if series.kind == "interval":
        return f' stroke="{color}"'
    dash = "" if arm is None else " ".join(f"{4 * length:g}" for length in style(arm).dash)
    dashed = f' stroke-dasharray="{dash}"' if dash and not series.faint else ""
    thin = ' stroke-width="1.5" opacity=".35"' if series.faint else ""
    return f' stroke="{color}"{dashed}{thin}'


def _marked(arm: int, alone: bool) -> str:
    name = f"url(#figure-m{arm})" if alone else f"url(#m{arm})"
    return f' marker-start="{name}" marker-mid="{name}" marker-end="{name}"'


def sample(kind: str, faint: bool, color: str = "var(--soft)") -> str:
    """Returns what a legend shows of a kind of series, in a box of 60 by 24.

    Args:
        kind: of the series.
        faint: whether it is faint.
        color: in which it is drawn.
    """
    opacity = ' opacity=".5"' if faint else ""
    line = f'fill="none" stroke="{color}"'
    if kind == "band":
        return f'<path d="M4 3H56V21H4z" fill="{color}" opacity=".3"/>'
    if kind == "points":
        return f'<circle cx="30" cy="12" r="7" fill="{color}"{opacity}/>'
    if kind == "interval":
        return f'<path d="M30 1v22M23 1h14M23 23h14" {line} stroke-width="4"/>'
    dash = ' stroke-dasharray="3 7" stroke-linecap="round"' if kind == "rule" else ""
    width = 2 if faint else 4
    return f'<path d="M2 12h56" {line} stroke-width="{width}"{dash}{opacity}/>'
