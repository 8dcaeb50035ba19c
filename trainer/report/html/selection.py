"""The data that the script of the page needs about figures and trials, as JSON inside the page."""

import json
import math
from collections.abc import Sequence
from typing import Any

from trainer.report.document import Cell, Figure, Series, Trials, text_of


def embedded(data: Any) -> str:
    """Returns data as JSON that can be in a script element; numbers must be finite."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.translate({60: "\\u003c", 62: "\\u003e", 38: "\\u0026", 0x2028: "\\u2028"})


def figure_data(figure: Figure, places: dict[str, int]) -> dict[str, Any]:
    """Returns the values with which the script shows a figure and draws it again."""
    # Faint lines and bands have none: the script reads their points from their paths. `places` is
    # the name of a trial -> its row in the table of trials of the same workload.
    series = [_series(each, places) for each in figure.series]
    previous: list[float | None] = []
    for each in series:  # a series without x has the x of the one before, for the script
        if each.get("x") == previous and len(previous) > 1:
            del each["x"]
        previous = each.get("x", previous)
    labels = {"xl": list(figure.x.labels), "yl": list(figure.y.labels)}
    return {"x": figure.x.title, "y": figure.y.title, **labels, "s": series}


def _series(series: Series, places: dict[str, int]) -> dict[str, Any]:
    data: dict[str, Any] = {} if series.kind == "line" else {"k": series.kind}
    if series.label and series.label != series.arm and (series.label,) != series.trials:
        data["l"] = series.label
    if series.recipe:
        data["r"] = series.recipe
    if series.trials:
        data["t"] = [places.get(name, name) for name in series.trials]
    if series.kind != "band" and not (series.faint and series.kind in {"line", "steps"}):
        columns = {"x": series.x, "y": series.y, "h": series.high}
        data |= {key: list(map(_short, values)) for key, values in columns.items() if len(values)}
    return data


def _short(value: float) -> float | None:
    """Returns a value with five digits; None if it is not finite."""
    rounded = float(f"{float(value):.5g}")
    if not math.isfinite(rounded):
        return None
    return int(rounded) if rounded.is_integer() else rounded


def trials_data(trials: Trials, arms: Sequence[str]) -> dict[str, Any]:
    """Returns the table of trials, column by column; `arms` are all arms of the report."""
    columns = trials.table.columns
    names = [column.name for column in columns]
    return {
        "workload": trials.workload,
        "columns": [{"name": c.name, "title": c.title, "kind": c.kind} for c in columns],
        "cells": [
            [_plain(x, column.kind) for x in cells] for column, cells in trials.table.by_column
        ],
        "arms": list(arms),
        **{name: names.index(name) for name in ("trial", "arm", "end")},
        "folder": names.index("folder") if "folder" in names else -1,
        "goal": names.index(trials.goal),
        "better": trials.better,
        "axes": [names.index(axis) for axis in trials.axes],
        "command": trials.command,
    }


def _plain(cell: Cell, kind: str) -> Cell:
    if not isinstance(cell, float):
        return cell
    if not math.isfinite(cell):
        return text_of(kind, cell)
    cell = float(f"{cell:.9g}")
    return int(cell) if cell.is_integer() and abs(cell) < 2**53 else cell
