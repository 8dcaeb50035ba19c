"""Draws figures into PDF, PNG and SVG, from the same data, scales and styles as svg.py."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.messages import UserError, printable
from trainer.report.document import Figure, Series
from trainer.report.figures.svg import WIDTH, Frame, frame, shortened, style, wrap

if TYPE_CHECKING:  # imported where it is used: it takes long, and most commands do not draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_UNIT = 200  # units of svg.py in an inch: its width is 5.6 inches, as the text of many papers
_ROW = 36  # the height of a row of the legend
_TEXT = 8.5  # points
_LINE = 34  # the height of a line of the title
_GREY = "#666666"
_CENTERED: dict[str, Any] = {"ha": "center", "fontsize": _TEXT}
_LOOKS: dict[str, dict[str, Any]] = {  # of kinds of series in a legend
    "rule": {"linestyle": (0, (1, 2)), "linewidth": 1.0},
    "points": {"linestyle": "none", "marker": "o", "markersize": 4.5},
    "interval": {"linestyle": "none", "marker": "|", "markersize": 9, "markeredgewidth": 1.2},
}
# No date, so that a figure that is drawn again has the same bytes.
_METADATA: Mapping[str, dict[str, Any]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
# Text stays text, which can be searched, and PDFs have no Type 3 fonts, which journals refuse.
_SETTINGS: Any = {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "pdf.fonttype": 42}


def draw(figure: Figure, arms: Sequence[str], headline: str = "") -> "Drawing":
    """Returns a figure as one of matplotlib; `arms` are all arms, in the order of their styles."""
    # `headline` stands above the axes, in one line or more.
    from matplotlib.figure import Figure as Drawing

    # Use the margins of svg.py: computing matplotlib's own layout takes longer than all the rest.
    at = frame(figure)
    handles, columns = _legend(figure, arms)
    above = _LINE * len(headline.splitlines())
    height = above + at.height + _ROW * -(-len(handles) // columns)
    left, top, right, bottom = at.box
    drawing = Drawing(figsize=(WIDTH / _UNIT, height / _UNIT))
    place = (
        left / WIDTH,
        1 - (above + bottom) / height,
        (right - left) / WIDTH,
        (bottom - top) / height,
    )
    axes = drawing.add_axes(place)
    _prepare(axes, at)
    drawing.text(0.004, 1 - 8 / height, _escaped(headline), fontsize=_TEXT + 1, va="top")
    drawing.text(0.004, 1 - (above + 26) / height, _escaped(figure.y.title), fontsize=_TEXT)
    across = (left + right) / 2 / WIDTH
    below = 1 - (above + at.height - 14) / height
    drawing.text(across, below, _escaped(figure.x.title), **_CENTERED)
    indices = {arm: i for i, arm in enumerate(arms)}
    for order, series in enumerate(figure.series):
        _series(axes, series, indices.get(series.arm), order, at)
    if at.y.empty or (at.x.empty and not at.y.labels):
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, **_CENTERED)
    if handles:
        shape = {"ncols": columns, "frameon": False, "handlelength": 3.2, "borderpad": 0.2}
        drawing.legend(handles=handles, loc="lower left", fontsize=_TEXT, **shape)
    return drawing


def save(
    figure: Figure,
    arms: Sequence[str],
    stem: str | os.PathLike[str],
    formats: Sequence[str] = ("pdf", "png"),
) -> list[Path]:
    """Writes a figure as PDF, and as PNG with 150 dots per inch; returns the paths."""
    # `arms` are those of `draw`; `stem` is the path without its suffix, in a folder that exists.
    drawing = draw(figure, arms)
    paths = [Path(f"{os.fspath(stem)}.{name}") for name in formats]
    for path in paths:
        about = {"Title": _plain(figure.title)} if path.suffix == ".pdf" else {}
        _write(drawing, path, about)
    return paths


def save_as(drawing: "Drawing", file: str | os.PathLike[str]) -> None:
    """Writes a drawing into a file; raises UserError if that cannot be, as for another suffix."""
    path = Path(file)
    if path.suffix[1:].lower() not in _METADATA:
        known = ", .".join(_METADATA)
        raise UserError(f"{file} cannot be written: its suffix is not one of .{known}.")
    try:
        _write(drawing, path, {}, bbox_inches="tight")  # a long name in a legend is not cut
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"{file} cannot be written: {reason}.") from error


def _write(drawing: "Drawing", path: Path, about: Mapping[str, str], **options: Any) -> None:
    import matplotlib

    metadata = {**about, **_METADATA[path.suffix[1:].lower()]}
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", r"(?s)Glyph \d+ .*missing from")
        drawing.savefig(path, metadata=metadata, dpi=150, **options)


def _plain(text: str) -> str:
    """Returns text without characters that cannot be shown, and without surrogates."""
    return printable(text, keep="\n").encode("utf-8", "replace").decode()


def _escaped(text: str) -> str:
    """Returns such text in which matplotlib finds no formula."""
    return _plain(text).replace("$", r"\$")


def _prepare(axes: "Axes", at: Frame) -> None:
    for scale, axis, limit, name in (
        (at.x, axes.xaxis, axes.set_xlim, axes.set_xscale),
        (at.y, axes.yaxis, axes.set_ylim, axes.set_yscale),
    ):
        name("log" if scale.log else "linear")
        limit(scale.low, scale.high)
        ticks = scale.ticks()
        shown = {tick.value: tick.text for tick in ticks if tick.text}
        labels = list(shown.values())
        if scale.labels and scale is at.x:
            labels = [shortened(x) if at.turned else "\n".join(wrap(x, at.slot)) for x in labels]
        axis.set_ticks(list(shown), labels=list(map(_escaped, labels)))
        axis.set_ticks([t.value for t in ticks if not t.text], labels=[], minor=True)
        axis.set_tick_params(which="both", labelsize=_TEXT, color=_GREY, labelcolor="#444444")
    axes.grid(axis="y", which="major", color="#000000", alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", which="major", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(color=_GREY, linewidth=0.8)
    if at.turned:
        turned = {"rotation": 37, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(axes.get_xticks(), [t.get_text() for t in axes.get_xticklabels()], **turned)


def _series(axes: "Axes", series: Series, arm: int | None, order: int, at: Frame) -> None:
    color = _GREY if arm is None else style(arm).color
    look: dict[str, Any] = {"color": color, "zorder": 2 + order / 1e4}
    if series.kind == "rule":
        for value in series.y if len(series.y) else series.x:
            (axes.axhline if len(series.y) else axes.axvline)(value, **look, **_LOOKS["rule"])
        return
    x, y = _placed(series.x, at.x.log), _placed(series.y, at.y.log)
    high = _placed(series.high, at.y.log)
    edge = _marked("o" if arm is None else style(arm).marker)
    if series.kind == "band":
        y, high = at.y.limited(series.y), at.y.limited(series.high)
        axes.fill_between(x, y, high, **look, alpha=0.08 if series.faint else 0.16, linewidth=0)
    elif series.kind == "interval":
        half = np.abs(high - y) / 2
        bars = {"fmt": "none", "ecolor": color, "elinewidth": 1.2, "capsize": 2.5}
        axes.errorbar(x, y + half, yerr=half, **bars, zorder=look["zorder"])
    elif series.kind == "points":
        alpha = 0.4 if series.faint else 1.0
        axes.plot(x, y, linestyle="none", alpha=alpha, clip_on=series.faint, **edge, **look)
    else:
        drawstyle = "steps-post" if series.kind == "steps" else "default"
        if series.faint:
            axes.plot(x, y, linewidth=0.4, alpha=0.35, drawstyle=drawstyle, **look)
            return
        finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        spread = np.unique(np.linspace(0, len(finite) - 1, 9).round().astype(int))
        few = finite[spread[: len(finite)]]
        dash = () if arm is None else style(arm).dash
        line = {"linewidth": 1.4, "linestyle": (0, dash) if dash else "-", "drawstyle": drawstyle}
        shown = edge if arm is not None else {}
        axes.plot(x, y, markevery=few.tolist() or None, **line, **shown, **look)


def _marked(mark: str) -> dict[str, Any]:
    return {"marker": mark, "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5}


def _placed(values: Sequence[float], log: bool) -> np.ndarray:
    """Returns values as floats, NaN for a value without a place on the axis."""
    found = np.asarray(values, np.float64)
    return np.where(np.isfinite(found) & ((found > 0) | (not log)), found, np.nan)


def _legend(figure: Figure, arms: Sequence[str]) -> tuple[list["Line2D | Patch"], int]:
    """Returns the entries of the legend and the number of its columns."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    present = {series.arm for series in figure.series}
    handles: list[Line2D | Patch] = []
    for index, arm in enumerate(arms):
        if arm in present:
            color, _, dash, mark = style(index)
            line = {"linestyle": (0, dash) if dash else "-", "linewidth": 1.4, "color": color}
            handles.append(Line2D([], [], label=_escaped(arm), **line, **_marked(mark)))
    for (kind, label), faint in figure.legend.items():
        about: dict[str, Any] = {"color": _GREY, "label": _escaped(label)}
        if kind == "band":
            handles.append(Patch(alpha=0.25, linewidth=0, **about))
        else:
            look = _LOOKS.get(kind, {"linewidth": 0.4 if faint else 1.4})
            handles.append(Line2D([], [], alpha=0.4 if faint else 1.0, **look, **about))
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    return handles, max(1, min(len(handles), 76 // (9 + longest)))
