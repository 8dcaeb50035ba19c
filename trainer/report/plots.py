"""Draws schedules and learning curves, in the terminal or as a PNG."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from trainer.writers import read_metrics

Curve = tuple[ArrayLike, ArrayLike]  # x values, y values

# How many curves have colors that can be told apart, and how many names fit below each other.
_COLORS, _ROWS = 10, 24


def draw_in_terminal(
    curves: Mapping[str, Curve], title: str, width: int = 60, height: int = 10
) -> str:
    """Draws curves with characters, with another character for each curve.

    The y axis includes 0. Values that are not finite are not drawn.

    Args:
        curves: name -> (x, y), arrays of equal length; at least one.
        title: the text above the drawing.
        width: columns of the drawing, without the labels.
        height: rows of the drawing.

    Returns:
        Lines of plain text; the last ends with a newline.
    """
    xs = np.concatenate([np.asarray(x, float) for x, _ in curves.values()])
    ys = np.concatenate([np.asarray(y, float) for _, y in curves.values()])
    ys = ys[np.isfinite(ys)] if np.isfinite(ys).any() else np.zeros(1)
    low, high = min(0.0, ys.min()), max(ys.max(), ys.min() + 1e-12)  # never an empty range
    grid = [[" "] * width for _ in range(height)]  # [row from the top][column]
    for mark, (x, y) in zip(itertools.cycle("*o+x#@"), curves.values(), strict=False):
        at = np.linspace(xs.min(), xs.max(), width)
        for column, value in enumerate(np.interp(at, np.asarray(x, float), np.asarray(y, float))):
            if np.isfinite(value):
                row = round((high - value) / (high - low) * (height - 1))
                grid[row][column] = mark
    labels = [f"{high - (high - low) * row / (height - 1):10.3g}" for row in range(height)]
    rows = [
        f"{label} |{''.join(cells).rstrip()}" for label, cells in zip(labels, grid, strict=True)
    ]
    foot = f"{xs.min():<{width // 2}.0f}{xs.max():>{width - width // 2}.0f}"
    marks = [
        f"{mark} {name}" for mark, name in zip(itertools.cycle("*o+x#@"), curves, strict=False)
    ]
    lines = [title, *rows, " " * 11 + "+" + "-" * width, " " * 12 + foot, "  " + "   ".join(marks)]
    return "\n".join(lines) + "\n"


def save_png(
    curves: Mapping[str, Curve],
    file: str | os.PathLike[str],
    title: str,
    y_label: str,
    members: Mapping[str, Sequence[Curve]] | None = None,
) -> None:
    """Draws curves over the step into a PNG.

    Args:
        curves: name -> (steps, values), arrays of equal length.
        file: path of the PNG.
        title: the text above the drawing.
        y_label: the label of the y axis.
        members: name -> the curves of which that of this name is the mean, drawn thin in its color.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix of the file is not that of a format of matplotlib.
    """
    # Not pyplot, which chooses a backend for the display and keeps every figure.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    many = len(curves) > _COLORS
    figure = Figure(figsize=(9 if many else 7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, (x, y)) in enumerate(curves.items()):
        color = colormaps["turbo"](index / (len(curves) - 1)) if many else f"C{index}"
        for each in (members or {}).get(name, ()):
            axes.plot(*each, color=color, linewidth=0.6, alpha=0.4)
        axes.plot(x, y, label=name, color=color, linewidth=1 if many else 1.5)
    axes.set(title=title, xlabel="step", ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if many:
        columns = -(-len(curves) // _ROWS)
        figure.legend(frameon=False, loc="outside right upper", ncols=columns, fontsize=7)
    elif len(curves) > 1:
        axes.legend(frameon=False)
    figure.savefig(file)


def mean(curves: Sequence[Curve]) -> Curve:
    """Returns the mean of curves, at the steps that all of them have.

    Args:
        curves: (steps, values), at least one.
    """
    if len(curves) == 1:
        return curves[0]
    tables = [dict(zip(np.asarray(x).tolist(), np.asarray(y), strict=True)) for x, y in curves]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    values = [np.mean([table[step] for table in tables]) for step in steps]
    return np.asarray(steps), np.asarray(values, float)


def runs_in(folder: Path, name: str) -> list[str]:
    """Returns the runs below a folder that is not one itself, such as those of an arm of a sweep.

    Args:
        folder: the folder; that of a run has none.
        name: of a metric; runs without it, such as those that diverged at once, are left out.
    """
    if (folder / "metrics.jsonl").exists():
        return []
    files = sorted(
        file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/metrics.jsonl")
    )
    return [str(file.parent) for file in files if any(name in row for row in read_metrics(file))]


def names_of(workdirs: Sequence[str]) -> dict[str, str]:
    """Names runs by the ends of their paths, as short as possible and all different.

    Args:
        workdirs: the runs' folders; one that is given twice counts once.

    Returns:
        name -> folder, in the order given.
    """
    paths: dict[Path, str] = {}
    for workdir in workdirs:
        paths.setdefault(Path(workdir).resolve(), workdir)
    names = {}
    for path, workdir in paths.items():
        depth = 1
        while any(other != path and other.parts[-depth:] == path.parts[-depth:] for other in paths):
            depth += 1
        names["/".join(path.parts[-depth:])] = workdir
    return names


def read_metric(workdir: str | os.PathLike[str], name: str) -> Curve:
    """Reads one metric of a run.

    Args:
        workdir: the run's folder.
        name: of the metric, such as "eval/accuracy".

    Returns:
        The steps at which it was written, and its values.

    Raises:
        ValueError: the folder has no metrics, or none of that name.
    """
    file = Path(workdir) / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{workdir} has no metrics.jsonl; name the folder of a run.")
    lines = read_metrics(file)
    found = [(line["step"], line[name]) for line in lines if name in line]
    if not found:
        names: Sequence[str] = sorted({key for line in lines for key in line} - {"step"})
        has = f"it has {', '.join(names)}" if names else "it has no rows"
        raise ValueError(f"{file} has no metric {name!r}; {has}.")
    steps, values = zip(*found, strict=True)
    return np.asarray(steps), np.asarray(values, float)
