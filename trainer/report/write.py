"""Writes a report into a folder: a page, Markdown, CSV, LaTeX, and its figures as PDF and PNG."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from trainer.report import FORMATS
from trainer.report.document import Report
from trainer.report.figures import drawing
from trainer.report.formats.latex import latex
from trainer.report.formats.markdown import markdown
from trainer.report.formats.tables import csv_of
from trainer.report.html.page import page
from trainer.report.replacement import replaced

_STEM = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def write(report: Report, folder: Path, formats: Collection[str] = FORMATS) -> list[Path]:
    """Writes a report into a folder, in the place of a report that is there.

    The folder has index.html, report.md, tables/*.csv, figures/*.pdf, figures/*.png and
    latex/*.tex; the same report gives the same bytes. Files that a user put there are kept. If the
    process is killed, or the disk is full, the folder has the report from before.

    Args:
        report: the report.
        folder: created with its parents if it does not exist.
        formats: which files are written, of `FORMATS`; default: all.

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
        files = []
        for name, content in _files(report, formats):
            files.append(_new(staged / name))
            files[-1].write_bytes(content.encode("utf-8", "backslashreplace"))
        drawn = [each for each in ("pdf", "png") if each in formats]
        for figure in report.figures if drawn else ():
            stem = _new(staged / "figures" / figure.name)
            files += drawing.save(figure, report.arms, stem, drawn)
    return [folder / file.relative_to(staged) for file in files]


def _files(report: Report, formats: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the relative path and the content of each text file."""
    tables = {table.name: f"tables/{table.name}.csv" for table in report.tables}
    seen = report.shown()
    if "html" in formats:
        yield "index.html", page(seen)
    if "markdown" in formats:
        pictures = {each.name: f"figures/{each.name}.png" for each in report.figures}
        yield (
            "report.md",
            markdown(
                seen,
                pictures if "png" in formats else {},
                tables if "csv" in formats else {},
            ),
        )
    if "csv" in formats:
        yield from ((tables[table.name], csv_of(table)) for table in report.tables)
    if "latex" in formats:
        drawn = {each.name: f"../figures/{each.name}.pdf" for each in report.figures}
        files = latex(seen, drawn if "pdf" in formats else {})
        yield from ((f"latex/{name}.tex", text) for name, text in files.items())


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
