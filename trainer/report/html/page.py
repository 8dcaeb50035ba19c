"""Writes a report as one HTML page, which needs no other file and no network.

The figures are drawn here, so that the page can be read without its script. The script highlights
arms, shows values, sorts and filters trials, and draws again what a filter changes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import count

from trainer.report.document import Block, Panel, Report, Table, Trials, text_of
from trainer.report.figures.style import style
from trainer.report.figures.svg import xml
from trainer.report.html import elements
from trainer.report.html.elements import aligned, arm_name, embedded, link, prose, table

_STATIC_ROWS = 10  # trials that are shown without the script, and in print
_HALF = 56  # the most characters in a row of a table that fits half the width of the page
_SCRIPTS = ("figures.js", "filter.js", "selection.js", "trials.js", "page.js")


def page(report: Report) -> str:
    """Returns the page of a report."""
    panels = report.sections
    contents = "".join(
        f'<li><a href="#{_id(panel)}">{xml(panel.title)}</a></li>' for panel in panels
    )
    arms = "".join(f"<li>{arm_name(i, report.arms, True)}</li>" for i in range(len(report.arms)))
    legend = f'<h2>Arms</h2><ul class="arms">{arms}</ul>' if arms else ""
    numbers = count(1)
    body = "".join(_panel(panel, report, numbers) for panel in panels)
    scripts = "\n".join(_packaged(name) for name in _SCRIPTS)
    verdict = "".join(f"<p>{prose(each, report.arms)}</p>" for each in report.verdict)
    verdict = re.sub(r" (=|&lt;) (?=\d)", "\u00a0\\1\u00a0", verdict)  # keeps "p = 0.01" in a line
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{xml(report.title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_colors(report.arms)}{_packaged("page.css")}'
        f"</style></head><body>{elements.marks(report.arms)}"
        '<a class="skip" href="#content">Skip to the content</a>'
        '<button type="button" id="theme" hidden>Dark</button><div class="layout">'
        f'<header><h1>{xml(report.title)}</h1><div class="verdict">{verdict}</div></header>'
        f'<aside><nav aria-label="Contents"><h2>Contents</h2><ol>{contents}</ol></nav>{legend}'
        '</aside><main id="content">'
        f"{body}<footer><p>{prose(report.made)}</p></footer></main></div>"
        '<div id="tip" role="status" aria-live="polite" hidden></div>'
        f'<script type="application/json" id="arms">{embedded(list(report.arms))}</script>'
        f"<script>{scripts}</script></body></html>\n"
    )


def _packaged(name: str) -> str:
    text = files("trainer.report.html").joinpath(name).read_text(encoding="utf-8")
    return "\n".join(line for each in text.splitlines() if (line := each.strip()))


def _colors(arms: Sequence[str]) -> str:
    styles = [style(i) for i in range(len(arms))]
    names = "".join(
        f"--a{i}:light-dark({each.color},{each.color_on_dark});" for i, each in enumerate(styles)
    )
    rules = "".join(f'[data-a="{i}"]{{--c:var(--a{i})}}' for i in range(len(arms)))
    return f":root{{{names}}}{rules}"


def _id(panel: Panel) -> str:
    return "panel-" + re.sub(r"[^\w-]", "-", link(panel.name))


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
        [*map(len, column.title.split()), *(len(text_of(column.kind, cell)) for cell in cells)]
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
        f"<div{copied}>{''.join(f'<p>{prose(t)}</p>' for t in texts)}</div>" if texts else "",
        *(
            f'<p class="warning" role="note"><strong>Warning.</strong> {prose(each)}</p>'
            for each in block.warnings
        ),
    ]
    if block.figures:
        trials = known[0].table.cells("trial") if known else []
        places = {str(name): i for i, name in enumerate(trials)}
        drawn = "".join(
            elements.figure(f, next(numbers), report.arms, places) for f in block.figures
        )
        parts.append(f'<div class="figures">{drawn}</div>')
    parts += [table(each, report.arms) for each in block.tables]
    return f'<div class="block"{mine}>{"".join(parts)}</div>'


def _trials(trials: Trials, number: int, report: Report) -> str:
    columns = trials.table.columns
    best = trials.best_first[:_STATIC_ROWS]
    rows = "".join(elements.row(cells, columns, report.arms) for cells in best)
    total = len(trials.table.rows)
    title = f"<h3>{xml(trials.workload)}</h3>" if len(report.trials) > 1 else ""
    note = f'<p class="note">{prose(trials.table.note)}</p>' if trials.table.note else ""
    data = embedded(elements.trials_data(trials, report.arms))
    return (
        f'<div class="block trials" data-number="{number}">{title}<div class="filter"></div>'
        f'<p class="shown" role="status">The best {len(best)} of {total:,} trials.</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{xml(trials.table.title)}">'
        f'<table class="{aligned(columns)}"><colgroup>{_widths(trials)}</colgroup><thead><tr>'
        + "".join(f'<th scope="col">{xml(c.title)}</th>' for c in columns)
        + f"</tr></thead><tbody>{rows}</tbody></table></div>{note}"
        f'<script type="application/json">{data}</script>'
        "</div>"
    )


def _widths(trials: Trials) -> str:
    """Returns the widths of columns, fixed so that they do not change while rows scroll by."""
    columns = ""
    for column, cells in trials.table.by_column:
        lengths = [len(text_of(column.kind, cell)) for cell in cells]
        longest = max([len(column.title) + 4, *lengths]) + (4 if column.name == "arm" else 0)
        columns += f'<col style="width:{round(0.95 * min(longest, 28) + 3, 1)}ch">'
    return columns
