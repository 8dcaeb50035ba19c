"""Draws curves of schedules and metrics into a PNG, PDF or SVG."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.messages import UserError, printable
from trainer.report.curves import Curve, Line
from trainer.report.figures.style import Style, missing_glyphs_ignored, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

FORMATS = ("png", "pdf", "svg")

_NAMED = 47  # names in a legend, which then has two columns; other curves are grey
_ROWS = 24  # names below each other
_GREY = "#C8C8C8"
_MARKED = 14  # points of a curve that is alone, with a marker each

# Without the time of day, so that a figure drawn again has the same bytes.
_METADATA: Mapping[str, dict[str, Any]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
# Text stays text: it can be searched, and journals refuse the fonts of type 3 that matplotlib
# writes into a PDF otherwise.
_SETTINGS: Any = {"svg.hashsalt": "lockstep", "svg.fonttype": "none", "pdf.fonttype": 42}


def save_figure(
    lines: Mapping[str, Line],
    file: str | os.PathLike[str],
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draws curves into a file, with a legend beside them if there are several.

    Each has a color, a dash and a marker, from `style.style`; with more than 47, the others are
    grey. A band that reaches beyond the curves
    on a logarithmic y axis is cut.

    Args:
        lines: name -> what is drawn.
        file: path of the file; its suffix is one of `FORMATS`.
        title: the text above the drawing.
        x_label: the label of the x axis.
        y_label: the label of the y axis.
        log_x: whether the x axis is logarithmic; points that are not positive are not drawn.
        log_y: the same for the y axis.

    Raises:
        UserError: the suffix of the file is another one, or the file cannot be written.
    """
    suffix = Path(file).suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        known = ", .".join(FORMATS)
        raise UserError(f"{file} cannot be written: its suffix is not one of .{known}.")
    # Not pyplot, which chooses a backend for the display and keeps every figure.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    title = printable(title, keep="\n")
    x_label, y_label = printable(x_label), printable(y_label)
    with rc_context(_SETTINGS), missing_glyphs_ignored():
        figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.title.set_fontsize("medium")
        _show_as_written(axes.title, axes.xaxis.label, axes.yaxis.label)
        # Before the curves, whose markers are spaced by their places in the figure.
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        for index, line in reversed([*enumerate(lines.values())]):  # grey lines behind the others
            if index < _NAMED:
                _draw(axes, line, style(index), len(lines))
            else:
                axes.plot(*line.curve, color=_GREY, linewidth=0.6)
        if log_y:
            _fit(axes, lines)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            _add_legend(figure, list(lines))
        try:
            figure.savefig(file, metadata=_METADATA[suffix])
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise UserError(f"{file} cannot be written: {reason}.") from error


def _draw(axes: "Axes", line: Line, look: Style, lines: int) -> None:
    for curve in line.faint:
        axes.plot(*curve, color=look.color, linewidth=0.6, alpha=0.35)
    if line.low is not None and line.high is not None:
        axes.fill_between(
            np.asarray(line.x), line.low, line.high, color=look.color, alpha=0.15, linewidth=0
        )
    few = np.size(line.y) <= _MARKED
    axes.plot(
        *line.curve,
        color=look.color,
        linestyle=(0, look.dash) if look.dash else "-",
        linewidth=1.5 if lines <= 10 else 1.1,
        marker=look.marker if few or lines > 1 else "",
        markersize=4,
        # Eight along the diagonal of the figure, beginning elsewhere for each marker.
        markevery=None if few else ((ord(look.marker) % 10) / 80, 0.125),
    )


def _fit(axes: "Axes", lines: Mapping[str, Line]) -> None:
    """Fits a logarithmic y axis to the curves: the ends of bands may be next to 0."""
    curves: list[Curve] = [c for line in lines.values() for c in (line.curve, *line.faint)]
    values = np.concatenate([np.asarray(y, float) for _, y in curves])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values):
        margin = (values.max() / values.min()) ** 0.05 if values.max() > values.min() else 2.0
        axes.set_ylim(values.min() / margin, values.max() * margin)


def _show_as_written(*texts: "Text") -> None:
    for text in texts:
        text.set_parse_math(False)  # a "$" in the name of a folder is no formula


def _label(name: str) -> str:
    """Returns the label of a name; matplotlib shows none that begins with an underscore."""
    return printable(f" {name}" if name.startswith("_") else name)


def _add_legend(figure: "Figure", names: list[str]) -> None:
    """Adds a legend to the right of the axes, and widens the figure by its width."""
    from matplotlib.lines import Line2D

    handles = []
    for index, name in enumerate(names[:_NAMED]):
        look = style(index)
        dash: Any = (0, look.dash) if look.dash else "-"
        handles.append(
            Line2D([], [], color=look.color, linestyle=dash, marker=look.marker, label=_label(name))
        )
    if len(names) > _NAMED:
        handles.append(Line2D([], [], color=_GREY, label=f"and {len(names) - _NAMED} more"))
    for handle in handles:
        handle.set_markersize(4)
    legend = figure.legend(
        handles=handles,
        frameon=False,
        loc="outside right upper",
        ncols=-(-len(handles) // _ROWS),
        fontsize=8 if len(handles) <= 12 else 7,
        handlelength=4,
    )
    _show_as_written(*legend.get_texts())
    # Otherwise the constrained layout takes the width from the axes.
    extent = legend.get_window_extent()
    figure.set_size_inches(7 + max(0.0, extent.width / figure.dpi - 0.5), 4)
