"""Writes a report into a folder: a page, Markdown, CSV, LaTeX, and its figures as PDF and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trainer.report.document import Figure, Report
from trainer.report.latex import latex
from trainer.report.markdown import markdown
from trainer.report.replacement import replaced
from trainer.report.tables import csv_of

if TYPE_CHECKING:  # importing it takes a second
    from matplotlib.figure import Figure as Drawing

Format = Literal["html", "markdown", "csv", "pdf", "png", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)

_STEM = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_DPI = 150  # a figure that is 7 inches wide has 1050 pixels


def write(
    report: Report,
    folder: Path,
    formats: Collection[Format] = FORMATS,
    *,
    page: Callable[[Report], str],
    draw: Callable[[Figure, Sequence[str]], Drawing],
) -> list[Path]:
    """Writes a report into a folder, in the place of a report that is there.

    The folder has index.html, report.md, tables/*.csv, figures/*.pdf, figures/*.png and
    latex/*.tex; the same report gives the same bytes. Files that a user put there are kept. If the
    process is killed, or the disk is full, the folder has the report from before.

    Args:
        report: the report.
        folder: created with its parents if it does not exist.
        formats: which files are written; default: all.
        page: returns a report as HTML.
        draw: returns the drawing of a figure, from the figure and the names of all arms.

    Returns:
        The paths of the files, the page first.

    Raises:
        UserError: the folder is not that of a report, or cannot be written.
        ValueError: a figure or table has a name that is no name of a file, or that of another.
    """
    _check_names("tables", [table.name for table in report.tables])
    _check_names("figures", [figure.name for figure in report.figures])
    folder = Path(folder).absolute()
    with replaced(folder) as staged:
        names = []
        for name, content in _files(report, formats, page):
            _new(staged / name).write_bytes(content.encode("utf-8", "backslashreplace"))
            names.append(name)
        names += _save_figures(report, staged, formats, draw)
    return [folder / name for name in names]


def _files(
    report: Report, formats: Collection[Format], page: Callable[[Report], str]
) -> Iterator[tuple[str, str]]:
    """Yields the relative path and the content of each text file."""
    tables = {table.name: f"tables/{table.name}.csv" for table in report.tables}
    if "html" in formats:
        yield "index.html", page(report)
    if "markdown" in formats:
        kind = next((kind for kind in ("png", "pdf") if kind in formats), None)
        pictures = {each.name: f"figures/{each.name}.{kind}" for each in report.figures}
        linked = tables if "csv" in formats else {}
        yield "report.md", markdown(report, pictures if kind == "png" else {}, linked)
    if "csv" in formats:
        yield from ((tables[table.name], csv_of(table)) for table in report.tables)
    if "latex" in formats:
        yield from ((f"latex/{name}.tex", text) for name, text in latex(report).items())


def _save_figures(
    report: Report,
    folder: Path,
    formats: Collection[Format],
    draw: Callable[[Figure, Sequence[str]], Drawing],
) -> list[str]:
    """Draws each figure once, saves it in each format, and returns the relative paths."""
    kinds = [kind for kind in ("pdf", "png") if kind in formats]
    names = []
    for figure in report.figures if kinds else ():
        drawing = draw(figure, report.arms)
        for kind in kinds:
            name = f"figures/{figure.name}.{kind}"
            # Without the date, so that the same figure gives the same bytes.
            metadata = {"CreationDate": None} if kind == "pdf" else None
            drawing.savefig(_new(folder / name), format=kind, dpi=_DPI, metadata=metadata)
            names.append(name)
    return names


def _new(file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    return file


def _check_names(what: str, names: Sequence[str]) -> None:
    bad = [name for name in names if not _STEM.fullmatch(name)]
    # Some file systems do not distinguish upper and lower case.
    folded = [name.casefold() for name in names]
    twice = [name for name in names if folded.count(name.casefold()) > 1]
    if bad or twice:
        raise ValueError(f"The {what} {bad + twice} of the report cannot be names of files.")
