"""Writes a report as one HTML page, which needs no other file and no network.

The figures are drawn here, so that the page can be read without its script. The script highlights
arms, shows values, sorts and filters trials, and draws again what a filter changes. `arms` are the
names of all arms of the report; an arm is their index.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import count
from string import Template
from typing import Any
from urllib.parse import quote

from trainer.report.document import Block, Cell, Column, Figure, Panel, Report, Table, Trials
from trainer.report.figures.svg import MARKERS, dashes, legend_sample, marker, style, svg, xml

_STATIC_ROWS = 10  # trials that are shown without the script, and in print
_HALF = 56  # the most characters in a row of a table that fits half the width of the page
_SCRIPTS = ("figures.js", "filter.js", "selection.js", "trials.js", "page.js")
_MANY = 8  # with more columns, a table has less space between them
_LONG = 40  # with more rows, a table is written in short
_NUMERIC = {"integer", "number", "p", "share", "seconds"}


def page(report: Report) -> str:
    """Returns the page of a report."""
    styles = [style(i) for i in range(len(report.arms))]
    colors = "".join(
        f"--a{i}:light-dark({each.color},{each.color_on_dark});" for i, each in enumerate(styles)
    )
    rules = "".join(f'[data-a="{i}"]{{--c:var(--a{i})}}' for i in range(len(styles)))
    arms = "".join(f"<li>{_arm_name(i, report.arms, True)}</li>" for i in range(len(report.arms)))
    numbers = count(1)
    verdict = "".join(f"<p>{_prose(each, report.arms)}</p>" for each in report.verdict)
    parts = {
        "title": xml(report.title),
        "style": f":root{{{colors}}}{rules}{_packaged('page.css')}",
        "marks": _marks(report.arms),
        # Keep "p = 0.01" in a line.
        "verdict": re.sub(r" (=|&lt;) (?=\d)", "\u00a0\\1\u00a0", verdict),
        "contents": "".join(
            f'<li><a href="#{_id(panel)}">{xml(panel.title)}</a></li>' for panel in report.sections
        ),
        "legend": f'<h2>Arms</h2><ul class="arms">{arms}</ul>' if arms else "",
        "body": "".join(_panel(panel, report, numbers) for panel in report.sections),
        "made": _prose(report.made),
        "arms": _embedded(list(report.arms)),
        "scripts": "\n".join(map(_packaged, _SCRIPTS)),
    }
    skeleton = _packaged("page.html").replace("\n", "")
    return f"<!DOCTYPE html>\n{Template(skeleton).substitute(parts)}\n"


def _packaged(name: str) -> str:
    text = files("trainer.report.html").joinpath(name).read_text(encoding="utf-8")
    return "\n".join(line for each in text.splitlines() if (line := each.strip()))


def _id(panel: Panel) -> str:
    return "panel-" + re.sub(r"[^\w-]", "-", _link(panel.name))


def _panel(panel: Panel, report: Report, numbers: Iterator[int]) -> str:
    name = _id(panel)
    quiet = ' class="quiet"' if panel.name == "verdict" else ""
    rows = "".join(
        f'<div class="blocks{" beside" if beside else ""}">'
        f"{''.join(_block(block, panel, report, numbers) for block in blocks)}</div>"
        for blocks, beside in _rows(panel.blocks)
        if blocks
    )
    if panel.name == "trials":
        tables = "".join(_trials(each, i, report) for i, each in enumerate(report.trials))
        rows += f'<div class="blocks">{tables}</div>'
    return (
        f'<section id="{name}" class="panel" data-kind="{panel.kind}" aria-labelledby="{name}-h">'
        f'<h2 id="{name}-h"{quiet}>{xml(panel.title)}</h2>'
        f"{rows}</section>"
    )


def _rows(blocks: Sequence[Block]) -> list[tuple[Sequence[Block], bool]]:
    """Returns the blocks of a panel in groups, and whether those of a group are side by side."""
    # Workloads are, unless their tables are too wide; then their figures are, above the tables.
    if len(blocks) < 2 or not all(block.title for block in blocks):
        return [(blocks, False)]
    if all(_characters(shown) <= _HALF for block in blocks for shown in block.tables):
        return [(blocks, True)]
    if not all(block.figures for block in blocks):
        return [(blocks, False)]
    figures = [replace(block, tables=()) for block in blocks]
    tables = [Block(block.title, tables=block.tables) for block in blocks]
    return [(figures, True), (tables, False)]


def _characters(shown: Table) -> int:
    """Returns how wide a table is, in characters, with the space between columns."""
    lengths = (
        [*map(len, column.title.split()), *(len(column.text_of(cell)) for cell in cells)]
        for column, cells in shown.by_column
    )
    return sum(4 + max(each, default=0) for each in lengths)


def _block(block: Block, panel: Panel, report: Report, numbers: Iterator[int]) -> str:
    known = [trials for trials in report.trials if trials.workload == block.title]
    if not known and len(report.trials) == 1:
        known = list(report.trials)
    mine = f' data-trials="{report.trials.index(known[0])}"' if known else ""
    texts = [t for t in block.text if panel.name != "verdict" or t not in report.verdict]
    copied = ' class="text copied"' if panel.name == "methods" else ' class="text"'
    parts = [
        f"<h3>{xml(block.title)}</h3>" if block.title else "",
        f"<div{copied}>{''.join(f'<p>{_prose(t)}</p>' for t in texts)}</div>" if texts else "",
        *(
            f'<p class="warning" role="note"><strong>Warning.</strong> {_prose(each)}</p>'
            for each in block.warnings
        ),
    ]
    if block.figures:
        trials = known[0].table.cells("trial") if known else []
        places = {str(name): i for i, name in enumerate(trials)}
        drawn = "".join(_figure(f, next(numbers), report.arms, places) for f in block.figures)
        parts.append(f'<div class="figures">{drawn}</div>')
    parts += [_table(each, report.arms) for each in block.tables]
    return f'<div class="block"{mine}>{"".join(parts)}</div>'


def _trials(trials: Trials, number: int, report: Report) -> str:
    best = trials.best_first[:_STATIC_ROWS]
    rows = "".join(_row(cells, trials.table.columns, report.arms) for cells in best)
    widths = ""  # fixed, so that they do not change while rows scroll by
    for column, cells in trials.table.by_column:
        lengths = [len(column.text_of(cell)) for cell in cells]
        longest = max([len(column.title) + 4, *lengths]) + (4 if column.name == "arm" else 0)
        widths += f'<col style="width:{round(0.95 * min(longest, 28) + 3, 1)}ch">'
    title = f"<h3>{xml(trials.workload)}</h3>" if len(report.trials) > 1 else ""
    data = _embedded(_trials_data(trials, report.arms))
    return (
        f'<div class="block trials" data-number="{number}">{title}<div class="filter"></div>'
        '<p class="shown" role="status">'
        f"The best {len(best)} of {len(trials.table.rows):,} trials.</p>"
        f"{_scrolling(trials.table, f'<colgroup>{widths}</colgroup>', rows)}"
        f'<script type="application/json">{data}</script></div>'
    )


def _prose(text: str, arms: Sequence[str] = ()) -> str:
    """Returns text as HTML; code is between backticks, arms of three letters or more are marked."""
    return "".join(
        f"<code>{' '.join(map(_word, part.split(' ')))}</code>" if i % 2 else _with_arms(part, arms)
        for i, part in enumerate(re.split(r"`([^`]+)`", text))
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
    if not (names := sorted((arm for arm in arms if len(arm) > 2), key=len, reverse=True)):
        return _breakable(text)
    pattern = "|".join(map(re.escape, names))
    parts = re.split(rf"(?<![\w.-])({pattern})(?![\w-])", text)
    return "".join(
        f'<span class="arm" data-a="{arms.index(part)}">{xml(part)}</span>'
        if i % 2
        else _breakable(part)
        for i, part in enumerate(parts)
    )


def _marks(arms: Sequence[str]) -> str:
    """Returns the markers that all figures and legends of the page use."""
    markers = "".join(map(marker, range(len(arms))))
    keys = "".join(
        f'<symbol id="k{arm}" viewBox="0 0 60 24"><path d="M0 12h60" fill="none" '
        f'stroke="var(--a{arm})" stroke-width="4"{dashes(arm)}/><path transform="translate(30 12)" '
        f'd="{MARKERS[style(arm).marker]}" fill="var(--a{arm})" stroke="var(--paper)" '
        'stroke-width="1.5"/></symbol>'
        for arm in range(len(arms))
    )
    return markers + keys


def _arm_name(arm: int, arms: Sequence[str], button: bool = False) -> str:
    """Returns an arm's mark and name, which highlight it while pointed at; a button keeps that."""
    key = f'<svg class="key" aria-hidden="true"><use href="#k{arm}"/></svg>'
    if button:
        return (
            f'<button type="button" class="arm" data-a="{arm}" aria-pressed="false">'
            f"{key}{xml(arms[arm])}</button>"
        )
    return f'<span class="arm" data-a="{arm}" tabindex="0">{key}{xml(arms[arm])}</span>'


def _table(shown: Table, arms: Sequence[str]) -> str:
    """Returns a table."""
    write = _short_row if len(shown.rows) > _LONG else _row
    if not (rows := "".join(write(cells, shown.columns, arms) for cells in shown.rows)):
        rows = f'<tr><td class="none" colspan="{len(shown.columns)}">There are no rows.</td></tr>'
    caption = f"<caption>{xml(shown.title)}</caption>"
    return f'<div class="table">{_scrolling(shown, caption, rows)}</div>'


def _scrolling(shown: Table, above: str, rows: str) -> str:
    """Returns a table in a region that scrolls sideways if it is wide, and its note."""
    heads = "".join(f'<th scope="col">{xml(column.title)}</th>' for column in shown.columns)
    note = f'<p class="note">{_prose(shown.note)}</p>' if shown.note else ""
    classes = ["many"] if len(shown.columns) > _MANY else []
    # Align the columns of numbers to the right.
    classes += [f"n{i}" for i, column in enumerate(shown.columns, 1) if column.kind in _NUMERIC]
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{xml(shown.title)}">'
        f'<table class="{" ".join(classes)}">{above}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _row(cells: Sequence[Cell], columns: Sequence[Column], arms: Sequence[str]) -> str:
    """Returns a row of a table."""
    shown = "".join(
        f"<td>{_cell(cell, column, arms)}</td>" for cell, column in zip(cells, columns, strict=True)
    )
    return f"<tr{_whose(cells, columns, arms)}>{shown}</tr>"


def _short_row(cells: Sequence[Cell], columns: Sequence[Column], arms: Sequence[str]) -> str:
    """Returns a row without the end tags that HTML does not need, for tables with many rows."""
    texts = (xml(c.text_of(cell)) for cell, c in zip(cells, columns, strict=True))
    return f"<tr{_whose(cells, columns, arms)}><td>{'<td>'.join(texts)}"


def _whose(cells: Sequence[Cell], columns: Sequence[Column], arms: Sequence[str]) -> str:
    names = [str(c) for c, column in zip(cells, columns, strict=True) if column.name == "arm"]
    return f" data-a={arms.index(names[0])}" if names and names[0] in arms else ""


def _cell(cell: Cell, column: Column, arms: Sequence[str]) -> str:
    if column.name == "arm" and cell in arms:
        return _arm_name(arms.index(str(cell)), arms)
    text = column.text_of(cell)
    if column.name == "folder" and cell:
        return f'<a href="{_link(str(cell))}">{xml(text)}</a>'
    coded = column.kind == "code" and cell is not None
    return f"<code>{_breakable(text, 1)}</code>" if coded else xml(text)


def _link(path: str) -> str:
    """Returns the address of a path from `os.fsdecode`, whose bytes may not be valid text."""
    return quote(re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", path), errors="surrogateescape")


def _figure(shown: Figure, number: int, arms: Sequence[str], places: dict[str, int]) -> str:
    """Returns a figure, numbered from 1, with its legend, its description and its numbers."""
    # `places` is the name of a trial -> its row in the table of trials of the same workload.
    data = _embedded(_figure_data(shown, places))
    present = {series.arm for series in shown.series}
    items = [_arm_name(i, arms, button=True) for i, arm in enumerate(arms) if arm in present]
    items += [
        f'<span class="kind"><svg class="key" viewBox="0 0 60 24" aria-hidden="true">'
        f"{legend_sample(kind, faint)}</svg>{xml(label)}</span>"
        for (kind, label), faint in shown.legend.items()
    ]
    legend = f'<div class="legend">{"".join(items)}</div>' if items else ""
    return (
        f'<figure id="f{number}"><figcaption><span class="number">Figure {number}</span> '
        f"{xml(shown.title)}</figcaption>{legend}"
        f'<div class="drawing">{svg(shown, arms, f"f{number}")}</div>'
        f'<p class="description">{_prose(shown.description)}</p>'
        f"<details><summary>The numbers of figure {number}</summary>"
        f"{_table(shown.table, arms)}</details>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _embedded(data: Any) -> str:
    """Returns data as JSON that can be in a script element; numbers must be finite."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.translate({60: "\\u003c", 62: "\\u003e", 38: "\\u0026", 0x2028: "\\u2028"})


def _figure_data(figure: Figure, places: dict[str, int]) -> dict[str, Any]:
    """Returns the values with which the script shows a figure and draws it again."""
    # Faint lines and bands have none: the script reads their points from their paths.
    all_series: list[dict[str, Any]] = []
    previous: list[float | None] = []
    for series in figure.series:
        data: dict[str, Any] = {} if series.kind == "line" else {"k": series.kind}
        if series.label and series.label != series.arm and (series.label,) != series.trials:
            data["l"] = series.label
        if series.recipe:
            data["r"] = series.recipe
        if series.trials:
            data["t"] = [places.get(name, name) for name in series.trials]
        if series.kind != "band" and not (series.faint and series.kind in {"line", "steps"}):
            columns = {"x": series.x, "y": series.y, "h": series.high}
            data |= {key: [*map(_short, values)] for key, values in columns.items() if len(values)}
        if data.get("x") == previous and len(previous) > 1:
            del data["x"]  # a series without x has the x of the one before, for the script
        previous = data.get("x", previous)
        all_series.append(data)
    labels = {"xl": list(figure.x.labels), "yl": list(figure.y.labels)}
    return {"x": figure.x.title, "y": figure.y.title, **labels, "s": all_series}


def _short(value: float) -> float | None:
    """Returns a value with five digits; None if it is not finite."""
    rounded = float(f"{float(value):.5g}")
    if not math.isfinite(rounded):
        return None
    return int(rounded) if rounded.is_integer() else rounded


def _trials_data(trials: Trials, arms: Sequence[str]) -> dict[str, Any]:
    """Returns the table of trials, column by column; `arms` are all arms of the report."""
    columns = trials.table.columns
    names = [column.name for column in columns]
    return {
        "workload": trials.workload,
        "columns": [{"name": c.name, "title": c.title, "kind": c.kind} for c in columns],
        "cells": [[_plain(x, column) for x in cells] for column, cells in trials.table.by_column],
        "arms": list(arms),
        **{name: names.index(name) for name in ("trial", "arm", "end")},
        "folder": names.index("folder") if "folder" in names else -1,
        "goal": names.index(trials.goal),
        "better": trials.better,
        "axes": [names.index(axis) for axis in trials.axes],
        "command": trials.command,
    }


def _plain(cell: Cell, column: Column) -> Cell:
    if not isinstance(cell, float):
        return cell
    if not math.isfinite(cell):
        return column.text_of(cell)
    cell = float(f"{cell:.9g}")
    return int(cell) if cell.is_integer() and abs(cell) < 2**53 else cell
