"""Writes the columns of tables for siunitx: their formats, and their cells."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.report.document import Cell, Column, Table
from trainer.report.formats.latex_text import tex, wrapped


@dataclass(frozen=True)
class Typeset:
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


def typeset(table: Table, width: int) -> list[Typeset]:
    """Returns the columns of a table, where three are one if they are a mean and its interval.

    Args:
        table: the table.
        width: characters of a line of text; longer cells have several lines.
    """
    cells = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    result, index = [], 0
    while index < len(table.columns):
        column = table.columns[index]
        ends = [each.name.rpartition("_")[2] for each in table.columns[index + 1 : index + 3]]
        interval = None
        if column.kind in ("number", "share") and ends == ["low", "high"]:
            interval = _plus_minus(column, *cells[index : index + 3])
        result.append(interval or _column(column, cells[index], width))
        index += 3 if interval else 1
    return result


def with_interval(
    column: Column, middle: Sequence[Cell], low: Sequence[Cell], high: Sequence[Cell]
) -> Typeset:
    """Returns a column of means, with half of the width of their intervals if these are symmetric.

    Args:
        column: that of the means.
        middle: the means.
        low: the lower ends.
        high: the upper ends.
    """
    return _plus_minus(column, middle, low, high) or _numbers_of(column, middle)


def _plus_minus(
    column: Column, middle: Sequence[Cell], low: Sequence[Cell], high: Sequence[Cell]
) -> Typeset | None:
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
    if not known or not sizes or max(sizes) >= 1e6 or max(sizes) < 1e-6:
        return None
    places = min(max(0, 1 - math.floor(math.log10(min(known)))), 9)  # two digits of the half
    cells = [
        _missing(cell) if value is None else f"{value:.{places}f}"
        for cell, value in zip(middle, values, strict=True)
    ]
    texts = ["" if half is None else f"{half:.{places}f}" for half in halves]
    widest = max(map(len, texts))
    ends = [text and f"$\\pm$\\,{_room(widest - len(text))}\\num{{{text}}}" for text in texts]
    pairs = [f"{cell} & {end}" for cell, end in zip(cells, ends, strict=True)]
    return Typeset(f"S[table-format={_format(cells)}]@{{\\,}}l", _title(column), pairs, span=2)


def _room(digits: int) -> str:
    """Returns empty space as wide as some digits."""
    return f"\\phantom{{{'0' * digits}}}" if digits else ""


def _column(column: Column, cells: Sequence[Cell], width: int) -> Typeset:
    if column.kind in ("text", "code") or any(isinstance(cell, str) for cell in cells):
        shown = ["–" if cell is None else str(cell) for cell in cells]
        return texts(column.title, shown, width, code=column.kind == "code")
    return _numbers_of(column, cells)


def _numbers_of(column: Column, cells: Sequence[Cell]) -> Typeset:
    unit, size = _unit(column, cells)
    values = [_finite(cell, size) for cell in cells]
    numbers = list(_numbers(column.kind, values))
    shown = [
        _missing(cell) if number is None else number
        for cell, number in zip(cells, numbers, strict=True)
    ]
    return Typeset(f"S[table-format={_format(shown)}]", _title(column, unit), shown)


def texts(title: str, cells: Sequence[str], width: int, code: bool = False) -> Typeset:
    """Returns a column of texts, which are broken into lines.

    Args:
        title: its heading.
        cells: plain text, one a row.
        width: characters of a line.
        code: whether the texts are code.
    """
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
