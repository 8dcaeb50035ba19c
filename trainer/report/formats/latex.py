"""Writes the tables of a report as LaTeX, with booktabs and siunitx."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.report.document import Block, Cell, Figure, Panel, Report, Table
from trainer.report.formats.latex_columns import Typeset, texts, typeset, with_interval
from trainer.report.formats.latex_text import prose, tex, wrapped

PANELS = ("verdict", "arms", "pairs", "ledger", "target")
_LINES = 45  # of text; a longer table does not fit on a page
_HEAD = 11  # characters of a line of a heading
_CELL = 24  # characters of a line of a cell, and those in a table that would be too long with them
_CELL_OF_LONG = 48

_NEEDS = r"""% Needs, in the preamble:
%   \usepackage[T1]{fontenc}
%   \usepackage{booktabs}
%   \usepackage{graphicx}
%   \usepackage{siunitx}  % version 3 (2021) or later
% A table that is wider than its column is made smaller. In a document of two columns, one that is
% wider than 4/3 of a column is set over both. To choose, say before \input that \lockstepfloat is
% table (one column) or table* (both): \newcommand{\lockstepfloat}{table*}
"""
_BOX = r"""\ifdefined\lockstepbox\else\newsavebox{\lockstepbox}\fi%
\providecommand{\lockstepfloat}{\ifdim\columnwidth<\textwidth
  \ifdim\wd\lockstepbox>1.33\columnwidth table*\else table\fi\else table\fi}%
\sbox{\lockstepbox}{\footnotesize\setlength{\tabcolsep}{4pt}\sisetup{group-digits=integer}%
"""
_FLOAT = r"""\edef\lockstepname{\lockstepfloat}%
\begin{\lockstepname}[htbp]
  \centering
"""
_SHRUNK = r"""  \medskip

  \ifdim\wd\lockstepbox>\linewidth
    \resizebox{\linewidth}{!}{\usebox{\lockstepbox}}%
  \else
    \usebox{\lockstepbox}%
  \fi
\end{\lockstepname}
"""
_DOCUMENT = r"""% Compile in this folder: pdflatex report.tex
\documentclass{article}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[a4paper, margin=2cm]{geometry}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage{siunitx}
\begin{document}
\sloppy
"""


def latex(report: Report, figures: Mapping[str, str] | None = None) -> dict[str, str]:
    r"""Writes what a paper needs: the verdict, tables, figures and the paragraph of methods.

    The tables are those of the arms, the pairs, the ledger and the target.

    A column of numbers is an S column of siunitx, whose format fits its cells. Columns "low" and
    "high" (or "..._low" and "..._high") that follow another and lie around it symmetrically become
    the half of an interval's width, behind a plus-minus sign. With several workloads, "results" has
    the means of all of them, an arm a row. Columns of counts that are 0 in all rows are named in
    the caption instead. Tables of more than 45 lines are left out.

    TeX makes a table that is wider than the line smaller; in two columns, one that is wider than
    4/3 of a column is set over both. A document may choose by defining `\lockstepfloat`.

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
            for table in filter(lambda each: each.rows, block.tables):
                written = _table(table, block)
                if written:
                    files[table.name] = written
                else:
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


def _table(table: Table, block: Block) -> str | None:
    """Returns the floating table, or None if it is too long for a page."""
    if len(table.rows) > _LINES:
        return None
    table = _without_zeros(table)
    for width in (_CELL, _CELL_OF_LONG):
        columns = typeset(table, width)
        if sum(map(_height, zip(*(column.cells for column in columns), strict=True))) <= _LINES:
            return _float(table, columns, _caption(table, block))
    return None


def _without_zeros(table: Table) -> Table:
    """Returns the table without the counts that are 0 in several rows, which its note names."""
    zero = [
        index
        for index, column in enumerate(table.columns)
        if column.kind == "integer"
        and len(table.rows) > 1
        and not any(row[index] != 0 for row in table.rows)
    ]
    if not zero:
        return table
    titles = ", ".join(table.columns[index].title for index in zero)
    note = f"{table.note} Columns that are 0 in all rows: {titles}."
    kept = [index for index in range(len(table.columns)) if index not in zero]
    return replace(table.only(kept), note=note.strip())


def _height(cells: Sequence[str]) -> int:
    """Returns the lines of text of a row."""
    return 1 + max(cell.count(r"\\") for cell in cells)


def _float(table: Table, columns: Sequence[Typeset], caption: str) -> str:
    """Returns the floating table; `columns` are those of the table, or others in their place."""
    if any(column.span == 2 for column in columns):
        level = re.search(r"\d+%", " ".join(column.title for column in table.columns))
        interval = f"{level[0]} interval" if level else "interval"
        caption += f" The number after ± is half of the width of the {interval}."
    heads = [wrapped(column.head, _HEAD) for column in columns]
    lines = []
    for back in range(max(map(len, heads)), 0, -1):  # from the top; short headings are at the foot
        words = [head[-back] if back <= len(head) else "" for head in heads]
        lines.append([_head(word, each) for word, each in zip(words, columns, strict=True)])
    rows = list(zip(*(column.cells for column in columns), strict=True))
    apart = "    \\addlinespace[2pt]\n" if any(_height(row) > 1 for row in rows) else ""
    return (
        f"{_NEEDS}{_BOX}"
        f"  \\begin{{tabular}}{{\n{''.join(f'    {column.spec}{chr(10)}' for column in columns)}"
        f"  }}\n    \\toprule\n{_lines(lines)}    \\midrule\n"
        f"{apart.join(_lines([row]) for row in rows)}    \\bottomrule\n  \\end{{tabular}}}}%\n"
        f"{_FLOAT}  \\caption{{{prose(caption)}}}\n  \\label{{tab:{table.name}}}\n{_SHRUNK}"
    )


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
    columns = [texts("arm", arms, _CELL)]
    for workload, table, rows in means:
        mean, low, high = zip(*(rows.get(arm, (None,) * 3) for arm in arms), strict=True)
        column = next(column for column in table.columns if column.name == "mean")
        columns.append(with_interval(replace(column, title=workload), mean, low, high))
    first = found[0][1]
    same = all(table.title == first.title for _, table in found)
    title = f"{first.title.rstrip('.') if same else 'Means'}, on all workloads"
    combined = Table("results", title, first.columns, (), first.note if same else "")
    return _float(combined, columns, _caption(combined, Block()))


def _rows_by_arm(table: Table) -> dict[str, tuple[Cell, ...]]:
    """Returns the mean of each arm and the ends of its interval."""
    names = [column.name for column in table.columns]
    at = [names.index(name) for name in ("mean", "low", "high")]
    return {str(row[names.index("arm")]): tuple(row[i] for i in at) for row in table.rows}
