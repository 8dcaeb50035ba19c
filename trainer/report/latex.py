"""Writes the tables of a report as LaTeX, with booktabs and siunitx."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.report.document import Block, Cell, Column, Panel, Report, Table
from trainer.report.latex_text import prose, tex

PANELS = ("verdict", "arms", "pairs", "ledger", "target")
_ROWS = 45  # a longer table does not fit on a page
_HEAD = 14  # characters of a line of a heading
_LONG = 40  # characters of a cell that is broken into lines

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
\begin{document}
"""


@dataclass(frozen=True)
class _Typeset:
    """A column of a table in LaTeX.

    Attributes:
        spec: its letter and options, for two columns if `span` is 2.
        head: its heading, plain text.
        cells: one a row; with a "&" in it if `span` is 2.
        span: how many columns of LaTeX it has.
    """

    spec: str
    head: str
    cells: list[str]
    span: int = 1


def latex(report: Report) -> dict[str, str]:
    r"""Writes the tables that a paper needs: of the arms, the pairs, the ledger and the target.

    A column of numbers is an S column of siunitx, whose format fits its cells. Columns "low" and
    "high" (or "..._low" and "..._high") that follow another and lie around it symmetrically become
    the half of an interval's width, behind a plus-minus sign. With several workloads, "results" has
    the means of all of them, an arm a row. Tables of more than 45 rows are left out.

    Args:
        report: the report.

    Returns:
        The name of a file without its suffix -> its text. Each is a table with caption and label,
        for `\input`; "report" is a document with all of them.
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
                    files[table.name] = _table(table, _typeset(table), _caption(table, block))
                elif table.rows:
                    skipped.append(f"% {table.name} has {len(table.rows)} rows, too many.\n")
    body = [f"\\section*{{{tex(report.title)}}}\n"]
    body += [f"\n{prose(sentence)}\n" for sentence in report.verdict]
    body += [*skipped, *(f"\\input{{{name}}}\n" for name in files)]
    return {**files, "report": "".join([_DOCUMENT, *body, "\\end{document}\n"])}


def _caption(table: Table, block: Block) -> str:
    title = table.title.rstrip(".")
    if block.title and block.title not in title:
        title = f"{title}: {block.title}"
    return " ".join(part for part in (f"{title}.", table.note) if part)


def _table(table: Table, columns: Sequence[_Typeset], caption: str) -> str:
    """Returns the floating table; `columns` are those of the table, or others in their place."""
    if any(column.span == 2 for column in columns):
        caption += " The number after ± is half of the width of the interval."
    heads = [textwrap.wrap(" ".join(column.head.split()), _HEAD) or [""] for column in columns]
    lines = []
    for back in range(max(map(len, heads)), 0, -1):  # from the top; short headings are at the foot
        words = [head[-back] if back <= len(head) else "" for head in heads]
        lines.append([_head(word, each) for word, each in zip(words, columns, strict=True)])
    rows = list(zip(*(column.cells for column in columns), strict=True))
    dense = "  \\small\n  \\setlength{\\tabcolsep}{4pt}\n" if len(columns) > 7 else ""
    return (
        f"{_NEEDS}\\begin{{table}}[htbp]\n  \\centering\n{dense}"
        f"  \\caption{{{prose(caption)}}}\n  \\label{{tab:{table.name}}}\n  \\medskip\n"
        f"  \\begin{{tabular}}{{\n{''.join(f'    {column.spec}{chr(10)}' for column in columns)}"
        f"  }}\n    \\toprule\n{_lines(lines)}    \\midrule\n{_lines(rows)}    \\bottomrule\n"
        "  \\end{tabular}\n\\end{table}\n"
    )


def _head(word: str, column: _Typeset) -> str:
    # In braces, because siunitx would read a number in it.
    return f"\\multicolumn{{2}}{{c}}{{{tex(word)}}}" if column.span == 2 else f"{{{tex(word)}}}"


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"    {' & '.join(cells)} \\\\\n" for cells in rows)


def _typeset(table: Table) -> list[_Typeset]:
    cells = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    result, index = [], 0
    while index < len(table.columns):
        column = table.columns[index]
        ends = [each.name.rpartition("_")[2] for each in table.columns[index + 1 : index + 3]]
        interval = None
        if column.kind in ("number", "share") and ends == ["low", "high"]:
            interval = _plus_minus(column, *cells[index : index + 3])
        result.append(interval or _column(column, cells[index]))
        index += 3 if interval else 1
    return result


def _results(panel: Panel) -> str | None:
    """Returns the table of the means of all workloads, or None if there are not several."""
    note = ""
    means: list[tuple[str, dict[str, tuple[Cell, ...]], Column]] = []
    for block in panel.blocks:
        for table in block.tables:
            names = [column.name for column in table.columns]
            if {"arm", "mean", "low", "high"} <= set(names):
                at = [names.index(name) for name in ("mean", "low", "high")]
                rows = {str(row[names.index("arm")]): row for row in table.rows}
                values = {arm: tuple(row[i] for i in at) for arm, row in rows.items()}
                means.append((block.title, values, table.columns[at[0]]))
                note = note or table.note
                break
    if len(means) < 2:
        return None
    arms = list(dict.fromkeys(arm for _, values, _ in means for arm in values))
    columns = [_Typeset("l", "arm", [tex(arm) for arm in arms])]
    for workload, values, column in means:
        mean, low, high = zip(*(values.get(arm, (None,) * 3) for arm in arms), strict=True)
        named = Column(column.name, workload, column.kind)
        columns.append(_plus_minus(named, mean, low, high) or _column(named, mean))
    title = "Means of the arms on all workloads"
    return _table(Table("results", title, (), ()), columns, f"{title}. {note}".rstrip())


def _plus_minus(
    column: Column, middle: Sequence[Cell], low: Sequence[Cell], high: Sequence[Cell]
) -> _Typeset | None:
    """Returns a mean with half of its interval, or None if some interval is not symmetric."""
    scale = 100 if column.kind == "share" else 1
    values = [_finite(value, scale) for value in middle]
    halves: list[float | None] = []
    for value, below, above in zip(values, low, high, strict=True):
        if below is None and above is None:
            halves.append(None)
            continue
        bottom, top = _finite(below, scale), _finite(above, scale)
        if value is None or bottom is None or top is None:
            return None
        if abs((top - value) - (value - bottom)) > 1e-6 * max(top - bottom, abs(value)):
            return None
        halves.append((top - bottom) / 2)
    known = [half for half in halves if half]
    sizes = [abs(value) for value in values if value]
    if not known or not sizes or max(sizes) >= 1e6 or max(sizes) < 1e-3:
        return None
    places = min(max(0, 1 - math.floor(math.log10(min(known)))), 6)  # two digits of the half
    cells = [
        _missing(cell) if value is None else f"{value:.{places}f}"
        for cell, value in zip(middle, values, strict=True)
    ]
    texts = ["" if half is None else f"{half:.{places}f}" for half in halves]
    widest = max(map(len, texts))
    ends = [text and f"$\\pm$\\,{_room(widest - len(text))}\\num{{{text}}}" for text in texts]
    pairs = [f"{cell} & {end}" for cell, end in zip(cells, ends, strict=True)]
    return _Typeset(f"S[table-format={_format(cells)}]@{{\\,}}l", _title(column), pairs, span=2)


def _room(digits: int) -> str:
    """Returns empty space as wide as some digits."""
    return f"\\phantom{{{'0' * digits}}}" if digits else ""


def _column(column: Column, cells: Sequence[Cell]) -> _Typeset:
    if column.kind in ("text", "code") or any(isinstance(cell, str) for cell in cells):
        return _texts(column, cells)
    unit, size = _unit(column, cells)
    values = [_finite(cell, size) for cell in cells]
    numbers = list(_numbers(column.kind, values))
    shown = [
        _missing(cell) if number is None else number
        for cell, number in zip(cells, numbers, strict=True)
    ]
    return _Typeset(f"S[table-format={_format(shown)}]", _title(column, unit), shown)


def _texts(column: Column, cells: Sequence[Cell]) -> _Typeset:
    texts = ["--" if cell is None else tex(str(cell)) for cell in cells]
    if column.kind == "code":
        # A path may be broken after each of its folders.
        texts = [
            f"\\texttt{{{text.replace('/', '/' + chr(92) + 'allowbreak{}')}}}" for text in texts
        ]
    if max((len(str(cell)) for cell in cells), default=0) <= _LONG:
        return _Typeset("l", column.title, texts)
    return _Typeset(">{\\raggedright\\arraybackslash}p{0.25\\linewidth}", column.title, texts)


def _title(column: Column, unit: str = "") -> str:
    title = "time" if unit and column.title == "seconds" else column.title
    unit = "%" if column.kind == "share" else unit
    return f"{title} ({unit})" if unit else title


def _unit(column: Column, cells: Sequence[Cell]) -> tuple[str, float]:
    """Returns the unit of a column and the factor from its numbers to those that are written."""
    if column.kind == "share":
        return "%", 100
    if column.kind != "seconds":
        return "", 1
    largest = max((abs(value) for cell in cells if (value := _finite(cell)) is not None), default=0)
    return ("s", 1) if largest < 120 else ("min", 1 / 60) if largest < 7200 else ("h", 1 / 3600)


def _numbers(kind: str, values: Sequence[float | None]) -> Iterator[str | None]:
    """Yields numbers as siunitx reads them: four significant digits, in one style for a column."""
    sizes = [abs(value) for value in values if value]
    whole = kind == "integer" and max(sizes, default=0) < 1e9
    wide = bool(sizes) and (max(sizes) >= 1e6 or min(sizes) < 1e-4)
    for value in values:
        if value is None:
            yield None
        elif whole:
            yield f"{value:.0f}"
        elif kind == "p":
            yield "< 0.0001" if value < 1e-4 else _plain(value, 2)
        elif wide:
            mantissa, _, exponent = f"{value:.3e}".partition("e")
            yield f"{mantissa}e{int(exponent)}"
        else:
            yield _plain(value, 3 if kind in ("share", "seconds") else 4)


def _plain(value: float, digits: int) -> str:
    if not value:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def _format(cells: Sequence[str]) -> str:
    """Returns the table-format that has room for all cells of a column."""
    numbers = [cell for cell in cells if not cell.startswith("{")]
    compared = any(cell.startswith("<") for cell in numbers)
    plain = [cell.lstrip("< ") for cell in numbers]
    bases = [number.partition("e")[0].lstrip("-") for number in plain]
    powers = [number.partition("e")[2] for number in plain if "e" in number]
    whole = max((len(base.partition(".")[0]) for base in bases), default=1)
    places = max((len(base.partition(".")[2]) for base in bases), default=0)
    text = "<" if compared else "-" if any(number.startswith("-") for number in plain) else ""
    text += f"{whole}.{places}" if places else f"{whole}"
    if powers:
        sign = "-" if any(power.startswith("-") for power in powers) else ""
        text += f"e{sign}{max(len(power.lstrip('-')) for power in powers)}"
    return text


def _finite(cell: Cell, scale: float = 1) -> float | None:
    if cell is None or isinstance(cell, str) or not math.isfinite(cell):
        return None
    return float(cell) * scale


def _missing(cell: Cell) -> str:
    """Returns what is written for a cell that is no number."""
    if isinstance(cell, int | float) and math.isinf(cell):
        return "{$\\infty$}" if cell > 0 else "{$-\\infty$}"
    return "{--}" if cell is None else "{not a number}"
