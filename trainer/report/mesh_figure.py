"""Draws which parameter lies where on a mesh, and what fills the memory of a device."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.engine.explanation import BATCH, GRADIENTS, ROLES, HeldParameter, Holdings
from trainer.engine.memory import in_words
from trainer.messages import plural, printable
from trainer.report.figures.drawing import save_as
from trainer.report.figures.svg import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 40  # parameters that have a row, those with most bytes
_LONGEST = 36  # characters of a path
_WHOLE, _FREE, _PALE = "#E2E2E2", "#FFFFFF", "#555555"
_ROLES = {
    ROLES["params"]: "#3C3C3C",
    GRADIENTS: "#8A8A8A",
    ROLES["opt_state"]: "#C4C4C4",
    BATCH: "#E69F00",
}
_TEXT, _SMALL = 8.5, 7.5  # points
_WIDTH, _ROW = 10.0, 0.27  # inches
_ABOVE, _BELOW = 1.45, 0.3  # inches above and below the rows


def save_mesh_figure(holdings: Holdings, limit: int | None, file: str | os.PathLike[str]) -> None:
    """Draws what each device of a mesh holds into a .png, .pdf or .svg; else raises UserError."""
    # `limit` is the memory of a device in bytes; None if it is not known. At the top is the memory
    # of a device. Below it, each parameter has a row: its dimensions, in the color of the axes that
    # split them, and the bytes of a device for it, its gradient and its state.
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    rows = sorted(holdings.parameters, key=lambda one: -_size(one))
    more, rows = len(rows) - len(rows[:_MOST]), rows[:_MOST]
    height = _ABOVE + _ROW * len(rows) + _BELOW
    figure = Figure(figsize=(_WIDTH, height), dpi=150)
    _memory(figure.add_axes((0.02, 1 - 0.52 / height, 0.96, 0.2 / height)), holdings, limit)
    names, dimensions, sizes = (
        figure.add_axes((left, _BELOW / height, width, _ROW * len(rows) / height))
        for left, width in ((0.02, 0.25), (0.28, 0.40), (0.70, 0.21))
    )
    heads = "parameter", "dimensions, and into how many parts each is split", "bytes of a device"
    for axes, head in zip((names, dimensions, sizes), heads, strict=True):
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 1), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(head, loc="left", fontsize=_TEXT, pad=18)
    for index, one in enumerate(rows):
        path = printable(one.held.path)
        path = path if len(path) <= _LONGEST else f"...{path[3 - _LONGEST :]}"
        names.text(0, index, path, va="center", fontsize=_TEXT)
    _dimensions(dimensions, rows, holdings)
    _bytes(sizes, rows)
    if more:
        text = f"and {plural(more, 'parameter')} with fewer bytes"
        figure.text(0.02, 0.08 / height, text, fontsize=_SMALL, color=_PALE)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a "$" in a name does not begin a formula
    save_as(figure, file)


def _size(one: HeldParameter) -> int:
    return one.held.size + one.gradient + one.state


def _memory(axes: "Axes", holdings: Holdings, limit: int | None) -> None:
    """Draws a bar of what a device holds, and of the memory that it leaves."""
    total = sum(holdings.totals.values())
    count = plural(math.prod(holdings.mesh.values()), "device")
    of_memory = "" if limit is None else f" of its {in_words(limit)}"
    title = f"One of {count} (mesh {holdings.mesh_text}) holds {in_words(total)}{of_memory}"
    axes.set_title(title, loc="left", fontsize=_TEXT + 1.5)
    whole, start, keys = max(total, limit or 0), 0.0, []
    for index, (name, size) in enumerate(holdings.totals.items()):
        color = _ROLES.get(name, style(3 + index).color)
        axes.barh(0, size / whole, left=start, color=color, height=1)
        start += size / whole
        keys.append((color, f"{name} {in_words(size)}"))
    if limit is not None and total <= limit:
        keys.append((_FREE, f"free {in_words(limit - total)}"))
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5), xticks=[], yticks=[])
    if limit is not None and total > limit:
        axes.axvline(limit / whole, color="black", linewidth=2)
    _keys(axes, keys, below=True)


def _dimensions(axes: "Axes", rows: Sequence[HeldParameter], holdings: Holdings) -> None:
    """Draws a box for each dimension of each parameter, the last ones below each other."""
    from matplotlib.patches import Rectangle

    most = max(1, *(len(one.held.shape) for one in rows))
    colors: dict[tuple[str, ...], str] = {
        (name,): style(index).color for index, name in enumerate(("fsdp", "tensor", "data"))
    }
    used: dict[tuple[str, ...], str] = {}
    for index, (held, _, _) in enumerate(rows):
        first = most - len(held.shape)
        for i, names in enumerate(held.axes):
            color, ink = _WHOLE, "#333333"
            text = f"{held.shape[i]:,}"
            if names:
                color, ink = colors.setdefault(names, style(len(colors)).color), "white"
                used[names] = color
                text += f" / {held.shape[i] // held.shard[i]}"
            box = ((first + i) / most + 0.004, index - 0.4), 1 / most - 0.008, 0.8
            axes.add_patch(Rectangle(*box, color=color, linewidth=0))
            middle = {"ha": "center", "va": "center", "fontsize": _SMALL, "color": ink}
            axes.text((first + i + 0.5) / most, index, text, **middle)
    sizes = {names: math.prod(holdings.mesh[name] for name in names) for names in used}
    keys = [(used[names], f"{' + '.join(names)} ({sizes[names]})") for names in used]
    _keys(axes, [*keys, (_WHOLE, "not split")])


def _bytes(axes: "Axes", rows: Sequence[HeldParameter]) -> None:
    """Draws what a device holds of each parameter, its gradient and its state."""
    longest = max(1, *(_size(one) for one in rows))
    roles = ROLES["params"], ROLES["opt_state"], GRADIENTS
    for index, one in enumerate(rows):
        start = 0.0
        for role, size in zip(roles, (one.held.size, one.state, one.gradient), strict=True):
            axes.barh(index, size / longest, left=start, color=_ROLES[role], height=0.8)
            start += size / longest
        axes.text(start + 0.02, index, in_words(_size(one)), va="center", fontsize=_SMALL)
    words = "parameter", "its state", "gradient"
    _keys(axes, [(_ROLES[role], word) for role, word in zip(roles, words, strict=True)])


def _keys(axes: "Axes", keys: Sequence[tuple[str, str]], below: bool = False) -> None:
    """Draws a row of colors with what they mean, above the axes or below them."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, edgecolor="#888888", linewidth=0.4) for color, _ in keys]
    axes.legend(
        handles,
        [text for _, text in keys],
        loc="upper left" if below else "lower left",
        bbox_to_anchor=(0, -0.1 if below else 1),
        ncols=len(keys),
        frameon=False,
        fontsize=_SMALL,
        borderpad=0,
        borderaxespad=0.1,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1.1,
    )
