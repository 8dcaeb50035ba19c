"""Writes the tables of a report as LaTeX, with booktabs and siunitx."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import NamedTuple

from trainer.messages import printable
from trainer.report.document import Block, Cell, Column, Panel, Report, Table


class Typeset(NamedTuple):
    """A column of a table in LaTeX."""

    spec: str  # column type and options; of two columns if `span` is 2
    head: str  # plain text
    cells: list[str]  # one a row; with a "&" in it if `span` is 2
    span: int = 1  # how many columns of LaTeX it has


def typeset(table: Table, width: int) -> list[Typeset]:
    """Returns the columns of a table; a mean and the ends of its interval become one column."""
    # Cells longer than `width` characters have several lines.
    columns, result = table.by_column, []
    while columns:
        (column, cells), *columns = columns
        ends = [each.name.rpartition("_")[2] for each, _ in columns[:2]]
        interval = None
        if column.kind in ("number", "share") and ends == ["low", "high"]:
            interval = _plus_minus(column, cells, *(end for _, end in columns[:2]))
        if interval:
            result.append(interval)
            del columns[:2]
        elif column.kind in ("text", "code") or any(isinstance(cell, str) for cell in cells):
            shown = ["–" if cell is None else str(cell) for cell in cells]
            result.append(texts(column.title, shown, width, code=column.kind == "code"))
        else:
            result.append(_numbers_of(column, cells))
    return result


def _plus_minus(
    column: Column, middle: Sequence[Cell], low: Sequence[Cell], high: Sequence[Cell]
) -> Typeset | None:
    """Returns means with half of the width of their intervals; None if one is not symmetric."""
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
    if not known or not sizes or max(sizes) >= 1e6 or max(sizes) < 1e-6:
        return None
    places = min(max(0, 1 - math.floor(math.log10(min(known)))), 9)  # two digits of the half
    cells = [
        _missing(cell) if value is None else f"{value:.{places}f}"
        for cell, value in zip(middle, values, strict=True)
    ]
    texts = ["" if half is None else f"{half:.{places}f}" for half in halves]
    widest = max(map(len, texts))
    pairs = []
    for cell, text in zip(cells, texts, strict=True):
        room = "0" * (widest - len(text))  # empty space as wide as so many digits
        phantom = f"\\phantom{{{room}}}" if room else ""
        end = f"$\\pm$\\,{phantom}\\num{{{text}}}" if text else ""
        pairs.append(f"{cell} & {end}")
    return Typeset(f"S[table-format={_format(cells)}]@{{\\,}}l", _title(column), pairs, span=2)


def _numbers_of(column: Column, cells: Sequence[Cell]) -> Typeset:
    unit, size = ("%", 100.0) if column.kind == "share" else ("", 1.0)
    if column.kind == "seconds":
        known = (abs(value) for cell in cells if (value := _finite(cell)) is not None)
        largest = max(known, default=0)
        units = {120: ("s", 1.0), 7200: ("min", 1 / 60), math.inf: ("h", 1 / 3600)}
        unit, size = next(of for limit, of in units.items() if largest < limit)
    values = [_finite(cell, size) for cell in cells]
    numbers = _numbers(column.kind, values)
    pairs = zip(cells, numbers, strict=True)
    shown = [_missing(cell) if number is None else number for cell, number in pairs]
    return Typeset(f"S[table-format={_format(shown)}]", _title(column, unit), shown)


def texts(title: str, cells: Sequence[str], width: int, code: bool = False) -> Typeset:
    """Returns a column of texts, one a row, which are broken into lines of `width` characters."""
    typeset = []
    for cell in cells:
        lines = [f"\\texttt{{{tex(s)}}}" if code else tex(s) for s in wrapped(cell, width)]
        text = r" \\ ".join(lines)
        nested = f"\\begin{{tabular}}[t]{{@{{}}l@{{}}}}{text}\\end{{tabular}}"
        typeset.append(nested if len(lines) > 1 else text)
    return Typeset("l", title, typeset)


def _title(column: Column, unit: str = "") -> str:
    title = "time" if unit and column.title == "seconds" else column.title
    unit = "%" if column.kind == "share" else unit
    return f"{title} ({unit})" if unit else title


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
    pattern = r"(<?) ?(-?)(\d+)\.?(\d*)e?(-?)(\d*)"
    numbers = [re.findall(pattern, cell)[0] for cell in cells if not cell.startswith("{")]
    longest = (max(part, key=len) for part in zip(("", "", "0", "", "", ""), *numbers, strict=True))
    compared, negative, whole, places, minus, power = longest
    text = f"{compared or negative}{len(whole)}{f'.{len(places)}' if places else ''}"
    return text + (f"e{minus}{len(power)}" if power else "")


def _finite(cell: Cell, scale: float = 1) -> float | None:
    if cell is None or isinstance(cell, str) or not math.isfinite(cell):
        return None
    return float(cell) * scale


def _missing(cell: Cell) -> str:
    """Returns what is written for a cell without a number."""
    if isinstance(cell, int | float) and math.isinf(cell):
        return "{$\\infty$}" if cell > 0 else "{$-\\infty$}"
    return "{--}" if cell is None else "{not a number}"


PANELS = ("verdict", "arms", "pairs", "ladder", "ledger", "target")
_LINES = 45  # lines of text; a longer table does not fit on a page
_HEAD = 11  # characters in a line of a heading
_CELL = 24  # characters in a line of a cell
_CELL_OF_LONG = 48  # the same, for tables that are too long with _CELL


def latex(report: Report, figures: Mapping[str, str] | None = None) -> dict[str, str]:
    """Writes what a paper needs; returns name of a file without its suffix -> its text."""
    # Columns "low" and "high" that lie symmetrically around the one before become a plus-minus.
    # Columns of counts that are all 0 are named in the caption; tables of more than 45 lines are
    # left out. `figures` is name -> path of the PDF, relative to the files; others are left out.
    files: dict[str, str] = {}
    skipped = []
    for panel in (each for each in report.panels if each.name in PANELS):
        if panel.name == "arms" and (combined := _results(panel)) is not None:
            files["results"] = combined
        for block in panel.blocks:
            for table in filter(lambda each: each.rows, block.tables):
                if written := _table(table, block):
                    files[table.name] = written
                else:
                    skipped.append(f"% {table.name} has {len(table.rows)} rows, too many.\n")
    body = [f"\\section*{{{tex(report.title)}}}\n"]
    body += [f"\n{prose(sentence)}\n" for sentence in report.verdict]
    if warnings := [w for panel in report.panels for block in panel.blocks for w in block.warnings]:
        items = (f"  \\item {prose(warning)}\n" for warning in warnings)
        body += ["\n\\begin{itemize}\n", *items, "\\end{itemize}\n"]
    body += [*skipped, *(f"\\input{{{name}}}\n" for name in files)]
    paths = figures or {}
    for figure in (each for each in report.figures if each.name in paths):
        caption = prose(f"{figure.title.rstrip('.')}. {figure.description}")
        path = paths[figure.name]
        body.append(_written("figure.tex", path=path, caption=caption, name=figure.name))
    for panel in report.panels:
        if panel.name == "methods":
            body.append("\n\\clearpage\n\\section*{Methods}\n")
            body += [f"\n{prose(text)}\n" for block in panel.blocks for text in block.text]
    return {**files, "report": _written("report.tex", body="".join(body))}


def _written(file: str, **texts: str) -> str:
    """Returns the text of a file of this folder, with `texts` in place of their names."""
    template = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return Template(template).substitute(texts)


def _caption(table: Table, block: Block) -> str:
    title = table.title.rstrip(".")
    if block.title and block.title not in title:
        title = f"{title}: {block.title}"
    return " ".join(part for part in (f"{title}.", table.note) if part)


def _table(table: Table, block: Block) -> str | None:
    """Returns the floating table, or None if it is too long for a page."""
    if len(table.rows) > _LINES:
        return None
    # Leave out counts that are 0 in all of several rows: the note names them.
    kept = table.only(
        lambda column, cells: (
            column.kind != "integer" or len(cells) < 2 or any(cell != 0 for cell in cells)
        )
    )
    if titles := [column.title for column in table.columns if column not in kept.columns]:
        note = f"{table.note} Columns that are 0 in all rows: {', '.join(titles)}."
        table = replace(kept, note=note.strip())
    for width in (_CELL, _CELL_OF_LONG):
        columns = typeset(table, width)
        if sum(map(_height, zip(*(column.cells for column in columns), strict=True))) <= _LINES:
            return _float(table, columns, _caption(table, block))
    return None


def _height(cells: Sequence[str]) -> int:
    """Returns how many lines of text a row has."""
    return 1 + max(cell.count(r"\\") for cell in cells)


def _float(table: Table, columns: Sequence[Typeset], caption: str) -> str:
    """Returns the floating table, with `columns` in place of the columns of the table."""
    if any(column.span == 2 for column in columns):
        level = re.search(r"\d+%", " ".join(column.title for column in table.columns))
        interval = f"{level[0]} interval" if level else "interval"
        caption += f" The number after ± is half of the width of the {interval}."
    heads = [wrapped(column.head, _HEAD) for column in columns]
    lines = []
    for back in range(max(map(len, heads)), 0, -1):  # short headings are aligned at the bottom
        words = [head[-back] if back <= len(head) else "" for head in heads]
        # Braces keep siunitx from reading a number in a word.
        lines.append(
            [
                f"\\multicolumn{{2}}{{c}}{{{tex(word)}}}" if each.span == 2 else f"{{{tex(word)}}}"
                for word, each in zip(words, columns, strict=True)
            ]
        )
    rows = list(zip(*(column.cells for column in columns), strict=True))
    apart = "    \\addlinespace[2pt]\n" if any(_height(row) > 1 for row in rows) else ""
    return _written(
        "table.tex",
        columns="".join(f"    {column.spec}\n" for column in columns),
        heads=_lines(lines),
        rows=apart.join(_lines([row]) for row in rows),
        caption=prose(caption),
        name=table.name,
    )


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
    arms = list(dict.fromkeys(str(arm) for _, table in found for arm in table.cells("arm")))
    columns = [texts("arm", arms, _CELL)]
    for workload, table in found:
        own, *ends = (table.cells(name) for name in ("arm", "mean", "low", "high"))
        means = dict(zip(map(str, own), zip(*ends, strict=True), strict=True))
        mean, low, high = zip(*(means.get(arm, (None,) * 3) for arm in arms), strict=True)
        column = replace(table.columns[table.place("mean")], title=workload)
        columns.append(_plus_minus(column, mean, low, high) or _numbers_of(column, mean))
    first = found[0][1]
    same = all(table.title == first.title for _, table in found)
    title = f"{first.title.rstrip('.') if same else 'Means'}, on all workloads"
    combined = Table("results", title, first.columns, (), first.note if same else "")
    return _float(combined, columns, _caption(combined, Block()))


def _commands(text: str) -> dict[str, str]:
    """Reads characters, each with its command behind it."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_TEXT = r"""
\ backslash ^ asciicircum ~ asciitilde < less > greater | bar ` asciigrave " quotedbl ' quotesingle
"""
_ASCII = {c: rf"\text{name}{{}}" for c, name in _commands(_TEXT).items()}
_ASCII |= {c: rf"\{c}" for c in "{}$&#%_"}
# Two hyphens would be a dash; two commas, and ! or ? before `, would become another character.
_ASCII |= {c: f"{c}{{}}" for c in "-,!?"}
_ASCII |= {c: f"{{{c}}}" for c in "[]*"}  # after \\ they would begin an argument
# The first \mu is of the micro sign, which is not the Greek letter.
_MATH = _commands(r"""
− - ± \pm × \times · \cdot ≤ \leq ≥ \geq ≈ \approx ≠ \neq → \rightarrow ← \leftarrow ∞ \infty
Δ \Delta Σ \Sigma Ω \Omega ϵ \epsilon ϕ \phi µ \mu
α \alpha β \beta γ \gamma δ \delta ε \varepsilon ζ \zeta η \eta θ \theta ι \iota κ \kappa λ \lambda
μ \mu ν \nu ξ \xi π \pi ρ \rho σ \sigma τ \tau υ \upsilon φ \varphi χ \chi ψ \psi ω \omega
""")
_MATH |= {chr(0x2080 + digit): f"_{digit}" for digit in range(10)}
_TYPES = {"–": "--", "—": "---", "‘": "`", "’": "'", "“": "``", "”": "''", "…": r"\ldots{}"}
_PART = r".+?(?:\s+|(?<=\w)[./=_-](?=[^\W\d_])|$)"  # of a text, after which a line may end
# Letters below U+0180 that no font of pdfLaTeX's usual encoding, T1, has.
_MISSING = "\u0126\u0127\u0138\u013f\u0140\u0149\u0166\u0167\u017f"


def tex(text: str) -> str:
    r"""Returns a text in one line, as LaTeX shows it with pdfLaTeX and the T1 encoding.

    A character that pdfLaTeX has no font for is written as its number, such as U+4E2D.

    Example:
        >>> tex("a_b & 100% #1"), tex("β≥中")
        ('a\\_b \\& 100\\% \\#1', '$\\beta$$\\geq$U+4E2D')
    """
    return _escaped(" ".join(text.split()))


def wrapped(text: str, width: int) -> list[str]:
    """Returns the lines of a text: as few as possible, and then as short as possible.

    It is broken at spaces, and in names and paths after a point, slash, sign or underscore. A line
    is longer than `width` characters only if it has no such place.

    Example:
        >>> wrapped("optimizer.learning_rate.peak_value", 24)
        ['optimizer.learning_', 'rate.peak_value']
        >>> wrapped("log_uniform 0.0001 to 0.01", 24)
        ['log_uniform', '0.0001 to 0.01']
    """
    parts = re.findall(_PART, " ".join(text.split()))
    lines = _filled(parts, width)
    narrower = (_filled(parts, each) for each in range(1, width))
    return next((each for each in narrower if len(each) == len(lines)), lines)


def _filled(parts: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for part in parts:
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def prose(text: str) -> str:
    """Returns a paragraph as LaTeX, with what is between backticks as code."""
    return "".join(
        f"\\texttt{{{_escaped(part)}}}" if index % 2 else _escaped(part)
        for index, part in enumerate(re.split(r"`([^`]+)`", " ".join(text.split())))
    )


def _escaped(text: str) -> str:
    return "".join(map(_character, printable(text)))


def _character(c: str) -> str:
    if c in _MATH:
        return f"${_MATH[c]}$"
    if c.isascii():
        return _ASCII.get(c, c)
    known = "\u00a0" < c < "\u0180" and c not in _MISSING
    return _TYPES.get(c, c if known else f"U+{ord(c):04X}")
