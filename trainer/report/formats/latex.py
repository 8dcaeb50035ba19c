"""Writes the tables of a report as LaTeX, with booktabs and siunitx."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.report.document import Block, Cell, Figure, Panel, Report, Table
from trainer.report.formats.latex_columns import Typeset, typeset, with_interval
from trainer.report.formats.latex_text import prose, tex

PANELS = ("verdict", "arms", "pairs", "ledger", "target")
_ROWS = 45  # a longer table does not fit on a page
_HEAD = 14  # characters of a line of a heading
_WIDEST = 40  # characters of a cell, where those that are longer are broken into lines

_COMMAND = r"\\[a-z]+|[{}$&]"  # of TeX, which has no width

_NEEDS = r"""% Needs, in the preamble:
%   \usepackage[T1]{fontenc}
%   \usepackage{booktabs}
%   \usepackage{siunitx}  % version 3 (2021) or later
"""
_DOCUMENT = r"""% Compile in this folder: pdflatex report.tex
\documentclass{article}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[a4paper, landscape, margin=2cm]{geometry}
\usepackage{booktabs}
\usepackage{siunitx}
\usepackage{graphicx}
\begin{document}
"""


def latex(report: Report, figures: Mapping[str, str] | None = None) -> dict[str, str]:
    r"""Writes what a paper needs: the verdict, tables, figures and the paragraph of methods.

    The tables are those of the arms, the pairs, the ledger and the target.

    A column of numbers is an S column of siunitx, whose format fits its cells. Columns "low" and
    "high" (or "..._low" and "..._high") that follow another and lie around it symmetrically become
    the half of an interval's width, behind a plus-minus sign. With several workloads, "results" has
    the means of all of them, an arm a row. Tables of more than 45 rows are left out.

    Args:
        report: the report.
        figures: the name of a figure -> the path of its PDF, relative to the folder of the files;
            figures that are not named are left out.

    Returns:
        The name of a file without its suffix -> its text. Each is a table with caption and label,
        for `\input`; "report" is a document with all of them, and with the verdict, what limits
        it, the figures and the methods.
    """
    files: dict[str, str] = {}
    skipped = []
    for panel in report.panels:
        if panel.name not in PANELS:
            continue
        if panel.name == "arms" and (combined := _results(panel)) is not None:
            files["results"] = combined
        for block in panel.blocks:
            for table in block.tables:
                if 0 < len(table.rows) <= _ROWS:
                    files[table.name] = _table(table, typeset(table), _caption(table, block))
                elif table.rows:
                    skipped.append(f"% {table.name} has {len(table.rows)} rows, too many.\n")
    body = [f"\\section*{{{tex(report.title)}}}\n"]
    body += [f"\n{prose(sentence)}\n" for sentence in report.verdict]
    warnings = [w for panel in report.panels for block in panel.blocks for w in block.warnings]
    if warnings:
        body += ["\n\\begin{itemize}\n", *(f"  \\item {prose(w)}\n" for w in warnings)]
        body.append("\\end{itemize}\n")
    body += [*skipped, *(f"\\input{{{name}}}\n" for name in files)]
    paths = figures or {}
    body += [_figure(each, paths[each.name]) for each in report.figures if each.name in paths]
    methods = next((panel for panel in report.panels if panel.name == "methods"), None)
    if methods is not None:
        body.append("\n\\clearpage\n\\section*{Methods}\n")
        for block in methods.blocks:
            body += [f"\n{prose(text)}\n" for text in block.text]
    return {**files, "report": "".join([_DOCUMENT, *body, "\\end{document}\n"])}


def _figure(figure: Figure, path: str) -> str:
    caption = f"{figure.title.rstrip('.')}. {figure.description}"
    return (
        "\\begin{figure}[htbp]\n  \\centering\n"
        f"  \\includegraphics[width=0.6\\linewidth]{{{path}}}\n"
        f"  \\caption{{{prose(caption)}}}\n  \\label{{fig:{figure.name}}}\n\\end{{figure}}\n"
    )


def _caption(table: Table, block: Block) -> str:
    title = table.title.rstrip(".")
    if block.title and block.title not in title:
        title = f"{title}: {block.title}"
    return " ".join(part for part in (f"{title}.", table.note) if part)


def _table(table: Table, columns: Sequence[Typeset], caption: str) -> str:
    """Returns the floating table; `columns` are those of the table, or others in their place."""
    if any(column.span == 2 for column in columns):
        level = re.search(r"\d+%", " ".join(column.title for column in table.columns))
        interval = f"{level[0]} interval" if level else "interval"
        caption += f" The number after ± is half of the width of the {interval}."
    heads = [textwrap.wrap(" ".join(column.head.split()), _HEAD) or [""] for column in columns]
    lines = []
    for back in range(max(map(len, heads)), 0, -1):  # from the top; short headings are at the foot
        words = [head[-back] if back <= len(head) else "" for head in heads]
        lines.append([_head(word, each) for word, each in zip(words, columns, strict=True)])
    rows = list(zip(*(column.cells for column in columns), strict=True))
    return (
        f"{_NEEDS}\\begin{{table}}[htbp]\n  \\centering\n{_size(columns)}"
        "  \\sisetup{group-digits=integer}\n"
        f"  \\caption{{{prose(caption)}}}\n  \\label{{tab:{table.name}}}\n  \\medskip\n"
        f"  \\begin{{tabular}}{{\n{''.join(f'    {column.spec}{chr(10)}' for column in columns)}"
        f"  }}\n    \\toprule\n{_lines(lines)}    \\midrule\n{_lines(rows)}    \\bottomrule\n"
        "  \\end{tabular}\n\\end{table}\n"
    )


def _size(columns: Sequence[Typeset]) -> str:
    """Returns the commands that make the letters of a wide table smaller."""
    width = 0
    for column in columns:
        texts = [
            *textwrap.wrap(column.head, _HEAD),
            *(re.sub(_COMMAND, "", c) for c in column.cells),
        ]
        width += 2 + min(_WIDEST, max(map(len, texts), default=0))
    if width <= 90:
        return ""
    size = "small" if width <= 130 else "footnotesize" if width <= 170 else "scriptsize"
    return f"  \\{size}\n  \\setlength{{\\tabcolsep}}{{4pt}}\n"


def _head(word: str, column: Typeset) -> str:
    # In braces, because siunitx would read a number in it.
    return f"\\multicolumn{{2}}{{c}}{{{tex(word)}}}" if column.span == 2 else f"{{{tex(word)}}}"


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"    {' & '.join(cells)} \\\\\n" for cells in rows)


def _results(panel: Panel) -> str | None:
    """Returns the table of the means of all workloads, or None if there are not several."""
    found = [
        (block.title, table)
        for block in panel.blocks
        for table in block.tables[:1]
        if {"arm", "mean", "low", "high"} <= {column.name for column in table.columns}
    ]
    if len(found) < 2:
        return None
    means = [(workload, table, _rows_by_arm(table)) for workload, table in found]
    arms = list(dict.fromkeys(arm for _, _, rows in means for arm in rows))
    columns = [Typeset("l", "arm", [tex(arm) for arm in arms])]
    for workload, table, rows in means:
        mean, low, high = zip(*(rows.get(arm, (None,) * 3) for arm in arms), strict=True)
        column = next(column for column in table.columns if column.name == "mean")
        columns.append(with_interval(replace(column, title=workload), mean, low, high))
    first = found[0][1]
    same = all(table.title == first.title for _, table in found)
    title = f"{first.title.rstrip('.') if same else 'Means'}, on all workloads"
    combined = Table("results", title, first.columns, (), first.note if same else "")
    return _table(combined, columns, _caption(combined, Block()))


def _rows_by_arm(table: Table) -> dict[str, tuple[Cell, ...]]:
    """Returns the mean of each arm and the ends of its interval."""
    names = [column.name for column in table.columns]
    at = [names.index(name) for name in ("mean", "low", "high")]
    return {str(row[names.index("arm")]): tuple(row[i] for i in at) for row in table.rows}
