"""Writes a report as GitHub-flavoured Markdown, which also reads well as plain text."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

from trainer.messages import printable
from trainer.report.document import Block, Cell, Column, Panel, Report, Table, Trials

_WIDTH = 100  # characters in a line of a paragraph
_PADDED = 40  # cells are padded to at most this width
_ROWS = 50  # longer tables are cut, and refer to the CSV file with all rows
_BEST = 5  # trials of an arm that are shown

# An underscore between letters or digits never begins emphasis; "[0.1, 0.3]" is not a link unless a
# parenthesis follows. Escaping them there would only make the text harder to read.
_SPECIAL = re.compile(
    r"[\\`*<|~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])|&(?=#?\w+;)|(?<=\s)#(?=#*$)"
)
# Characters that begin a list, a heading, a quote or a table at the start of a line.
_AT_START = re.compile(r"^(\d+(?=[.)](?:\s|$))|(?=[-+](?:\s|$)|[-=]+$|#|>|:-))", re.MULTILINE)
_CODE = re.compile(r"(`[^`]+`)")


def markdown(
    report: Report, figures: Mapping[str, str], tables: Mapping[str, str] | None = None
) -> str:
    """Returns a report as GitHub-flavoured Markdown, ending with a newline."""
    # `figures` and `tables` are the names of figures and tables -> the paths of their pictures and
    # CSV files, relative to the file with the Markdown. A figure without a picture is described in
    # a sentence; a table without a file is not linked.
    paths = tables or {}
    parts = [f"# {escaped(report.title)}"]
    parts += [f"**{_wrapped(sentence, _WIDTH - 4)}**" for sentence in report.verdict]
    for panel in report.sections:
        if body := list(_panel(panel, report, figures, paths)):
            parts += [f"## {escaped(panel.title)}", *body]
    if report.made:
        parts.append(_wrapped(report.made))
    return "\n\n".join(parts) + "\n"


def _panel(
    panel: Panel, report: Report, figures: Mapping[str, str], tables: Mapping[str, str]
) -> Iterator[str]:
    said = report.verdict if panel.name == "verdict" else ()  # above all panels
    for block in panel.blocks:
        if (body := list(_block(block, figures, tables, said))) and block.title:
            yield f"### {escaped(block.title)}"
        yield from body
    if panel.name == "trials":
        for trials in report.trials:
            if len(report.trials) > 1:
                yield f"### {escaped(trials.workload)}"
            yield from _trials(trials, tables.get(trials.table.name))


def _block(
    block: Block, figures: Mapping[str, str], tables: Mapping[str, str], said: tuple[str, ...]
) -> Iterator[str]:
    yield from (_wrapped(text) for text in block.text if text not in said)
    for warning in block.warnings:
        yield textwrap.indent(f"**Warning.** {_wrapped(warning, _WIDTH - 16)}", "> ")
    for figure in block.figures:
        title = figure.title
        title = f"{title}." if title and not title.endswith((".", "!", "?")) else title
        if picture := figures.get(figure.name):
            yield f"![{escaped(figure.description)}]({_quoted(picture)})"
            yield _wrapped(title)
        else:
            yield _wrapped(f"{title} {figure.description}")
        if path := tables.get(figure.table.name):
            yield f"Numbers: {_link(path)}"
    for table in block.tables:
        yield from _table(table, tables.get(table.name))


def _table(table: Table, path: str | None) -> Iterator[str]:
    if table.title:
        yield f"**{_wrapped(table.title, _WIDTH - 4)}**"
    first = replace(table, rows=table.rows[:_ROWS])
    yield _aligned(_texts(first)) if table.rows else "No rows."
    if table.note:
        yield _wrapped(table.note)
    if len(table.rows) > _ROWS:
        where = f"; {_link(path)} has all" if path else ""
        yield f"The first {_ROWS} of {len(table.rows)} rows{where}."


def _trials(trials: Trials, path: str | None) -> Iterator[str]:
    table, place = trials.table, trials.table.place("arm")
    by_arm: dict[Cell, list[tuple[Cell, ...]]] = {arm: [] for arm in table.cells("arm")}
    for row in trials.best_first:
        by_arm[row[place]].append(row)
    best = replace(table, rows=tuple(row for rows in by_arm.values() for row in rows[:_BEST]))
    if len(best.rows) < len(table.rows):
        where = f"; {_link(path)} has all" if path else ""
        yield f"The {_BEST} best of each arm, of {len(table.rows)} runs{where}."
    if not best.rows:
        yield "No trials."
        return
    texts = [(column, cells) for column, cells in _texts(best) if column.name != "folder"]
    if len(texts) < len(table.columns):  # links are last, because they are long
        links = [f"[open]({_quoted(str(x))})" if x else "" for x in best.cells("folder")]
        texts.append((Column("folder", "folder"), links))
    yield _aligned(texts)
    if table.note:
        yield _wrapped(table.note)
    if trials.command:
        yield f"To repeat a trial: {_code(trials.command)}"


def _texts(table: Table) -> list[tuple[Column, list[str]]]:
    """Returns the columns with their cells as Markdown."""
    return [(column, [_cell(column, x) for x in cells]) for column, cells in table.by_column]


def _aligned(columns: Sequence[tuple[Column, Sequence[str]]]) -> str:
    """Returns a pipe table, padded so that its columns are aligned in a terminal too."""
    padded = []
    for column, texts in columns:
        cells = [escaped(column.title), *texts]
        width = max([3, *(len(cell) for cell in cells if len(cell) <= _PADDED)])
        left = column.kind in ("text", "code")
        cells.insert(1, "-" * width if left else "-" * (width - 1) + ":")
        padded.append([cell.ljust(width) if left else cell.rjust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*padded, strict=True))


def _cell(column: Column, value: Cell) -> str:
    text = column.text_of(value)
    return _code(text) if column.kind == "code" and value else escaped(text)


def escaped(text: str) -> str:
    r"""Returns a text in one line, in which no character is Markdown.

    Example:
        >>> escaped("a_b *c* | <d>"), escaped("learning_rate in [0.1, 0.3]")
        ('a_b \\*c\\* \\| \\<d>', 'learning_rate in [0.1, 0.3]')
    """
    return _plain(" ".join(text.split()))


def _plain(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", printable(text))


def _code(text: str) -> str:
    text = printable(" ".join(text.split()))
    # A code span cannot hold these characters everywhere, for example not in a table.
    return escaped(text) if re.search(r"[`|\\]", text) else f"`{text}`"


def _wrapped(text: str, width: int = _WIDTH) -> str:
    """Returns a paragraph in lines, in which only text between backticks is Markdown."""
    pieces = _CODE.split(" ".join(text.split()))
    # Keep a command in one line, so that it can be copied.
    marked = [
        _code(piece[1:-1]).replace(" ", "\0") if _CODE.fullmatch(piece) else _plain(piece)
        for piece in pieces
    ]
    lines = textwrap.fill(
        "".join(marked), width, break_long_words=False, break_on_hyphens=False
    ).replace("\0", " ")
    return _AT_START.sub(r"\1\\", lines)


def _link(path: str) -> str:
    return f"[{escaped(path)}]({_quoted(path)})"


def _quoted(path: str) -> str:
    # The link of a name that is not valid UTF-8 has its bytes.
    return quote(path, errors="surrogateescape")
