"""Parts of the page as HTML: text, names of arms, tables, figures, and the data of its script.

`arms` are the names of all arms of the report; an arm is their index.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from trainer.report.document import Cell, Column, Figure, Series, Table, Trials, text_of
from trainer.report.figures.style import style
from trainer.report.figures.svg import MARKERS, dashes, marker, sample, svg, xml

_MANY = 8  # with more columns, a table has less space between them
_LONG = 40  # with more rows, a table is written in short
_NUMERIC = {"integer", "number", "p", "share", "seconds"}


def prose(text: str, arms: Sequence[str] = ()) -> str:
    """Returns text as HTML; code is between backticks, arms of three letters or more are marked."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        f"<code>{' '.join(map(_word, part.split(' ')))}</code>" if i % 2 else _with_arms(part, arms)
        for i, part in enumerate(parts)
    )


def _word(word: str) -> str:
    """Returns a word of code; options do not break at their hyphens."""
    return f'<span class="word">{xml(word)}</span>' if "-" in word and len(word) < 32 else xml(word)


def _breakable(text: str, least: int = 25) -> str:
    """Returns text in which lines may end within long words, such as paths."""
    return re.sub(
        rf"\S{{{least},}}", lambda word: re.sub("([./_=])(?=.)", r"\1<wbr>", word[0]), xml(text)
    )


def _with_arms(text: str, arms: Sequence[str]) -> str:
    names = sorted((arm for arm in arms if len(arm) > 2), key=len, reverse=True)
    if not names:
        return _breakable(text)
    pattern = "|".join(map(re.escape, names))
    parts = re.split(rf"(?<![\w.-])({pattern})(?![\w-])", text)
    return "".join(
        f'<span class="arm" data-a="{arms.index(part)}">{xml(part)}</span>'
        if i % 2
        else _breakable(part)
        for i, part in enumerate(parts)
    )


def marks(arms: Sequence[str]) -> str:
    """Returns the markers that all figures and legends of the page use, in a drawing of no size."""
    markers = "".join(map(marker, range(len(arms))))
    keys = "".join(map(_key, range(len(arms))))
    return (
        '<svg width="0" height="0" class="defs" aria-hidden="true">'
        f"<defs>{markers}{keys}</defs></svg>"
    )


def _key(arm: int) -> str:
    return (
        f'<symbol id="k{arm}" viewBox="0 0 60 24"><path d="M0 12h60" fill="none" '
        f'stroke="var(--a{arm})" stroke-width="4"{dashes(arm)}/><path transform="translate(30 12)" '
        f'd="{MARKERS[style(arm).marker]}" fill="var(--a{arm})" stroke="var(--paper)" '
        'stroke-width="1.5"/></symbol>'
    )


def arm_name(arm: int, arms: Sequence[str], button: bool = False) -> str:
    """Returns an arm's mark and name, which highlight it while pointed at; a button keeps that."""
    key = f'<svg class="key" aria-hidden="true"><use href="#k{arm}"/></svg>'
    if button:
        return (
            f'<button type="button" class="arm" data-a="{arm}" aria-pressed="false">'
            f"{key}{xml(arms[arm])}</button>"
        )
    return f'<span class="arm" data-a="{arm}" tabindex="0">{key}{xml(arms[arm])}</span>'


def table(shown: Table, arms: Sequence[str]) -> str:
    """Returns a table, in a region that scrolls sideways if it is wide."""
    heads = "".join(f'<th scope="col">{xml(column.title)}</th>' for column in shown.columns)
    write = _short_row if len(shown.rows) > _LONG else row
    rows = "".join(write(cells, shown.columns, arms) for cells in shown.rows)
    if not rows:
        rows = f'<tr><td class="none" colspan="{len(shown.columns)}">There are no rows.</td></tr>'
    note = f'<p class="note">{prose(shown.note)}</p>' if shown.note else ""
    return (
        f'<div class="table"><div class="scroll" role="region" tabindex="0" '
        f'aria-label="{xml(shown.title)}"><table class="{aligned(shown.columns)}">'
        f"<caption>{xml(shown.title)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{note}</div>"
    )


def row(cells: Sequence[Cell], columns: Sequence[Column], arms: Sequence[str]) -> str:
    """Returns a row of a table."""
    shown = "".join(
        f"<td>{_cell(cell, column, arms)}</td>" for cell, column in zip(cells, columns, strict=True)
    )
    return f"<tr{_whose(cells, columns, arms)}>{shown}</tr>"


def _short_row(cells: Sequence[Cell], columns: Sequence[Column], arms: Sequence[str]) -> str:
    """Returns a row without the end tags that HTML does not need, for tables with many rows."""
    texts = (xml(text_of(c.kind, cell)) for cell, c in zip(cells, columns, strict=True))
    return f"<tr{_whose(cells, columns, arms)}><td>{'<td>'.join(texts)}"


def _whose(cells: Sequence[Cell], columns: Sequence[Column], arms: Sequence[str]) -> str:
    names = [str(c) for c, column in zip(cells, columns, strict=True) if column.name == "arm"]
    return f" data-a={arms.index(names[0])}" if names and names[0] in arms else ""


def aligned(columns: Sequence[Column]) -> str:
    """Returns the classes of a table, which align the columns of numbers to the right."""
    many = ["many"] if len(columns) > _MANY else []
    return " ".join(
        many + [f"n{i}" for i, column in enumerate(columns, 1) if column.kind in _NUMERIC]
    )


def _cell(cell: Cell, column: Column, arms: Sequence[str]) -> str:
    if column.name == "arm" and cell in arms:
        return arm_name(arms.index(str(cell)), arms)
    text = text_of(column.kind, cell)
    if column.name == "folder" and cell:
        return f'<a href="{link(str(cell))}">{xml(text)}</a>'
    coded = column.kind == "code" and cell is not None
    return f"<code>{_breakable(text, 1)}</code>" if coded else xml(text)


def link(path: str) -> str:
    """Returns the address of a path from `os.fsdecode`, whose bytes may not be valid text."""
    return quote(re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", path), errors="surrogateescape")


def figure(shown: Figure, number: int, arms: Sequence[str], places: dict[str, int]) -> str:
    """Returns a figure, numbered from 1, with its legend, its description and its numbers."""
    # `places` is the name of a trial -> its row in the table of trials of the same workload.
    data = embedded(figure_data(shown, places))
    return (
        f'<figure id="f{number}"><figcaption><span class="number">Figure {number}</span> '
        f"{xml(shown.title)}</figcaption>{_legend(shown, arms)}"
        f'<div class="drawing">{svg(shown, arms, f"f{number}")}</div>'
        f'<p class="description">{prose(shown.description)}</p>'
        f"<details><summary>The numbers of figure {number}</summary>"
        f"{table(shown.table, arms)}</details>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _legend(shown: Figure, arms: Sequence[str]) -> str:
    present = {series.arm for series in shown.series}
    items = [arm_name(i, arms, button=True) for i, arm in enumerate(arms) if arm in present]
    items += [
        f'<span class="kind"><svg class="key" viewBox="0 0 60 24" aria-hidden="true">'
        f"{sample(kind, faint)}</svg>{xml(label)}</span>"
        for (kind, label), faint in shown.legend.items()
    ]
    return f'<div class="legend">{"".join(items)}</div>' if items else ""


# The data that the script needs about figures and trials, as JSON inside the page.


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
