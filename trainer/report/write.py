"""Writes a report into a folder, which is replaced as a whole, so that it is never incomplete."""

import contextlib
import csv
import io
import json
import numbers
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from trainer.config.wording import listing
from trainer.messages import UserError, printable
from trainer.report import DEFAULT_FORMATS
from trainer.report.document import Cell, Report, Table
from trainer.report.figures import drawing
from trainer.report.formats.latex import latex
from trainer.report.formats.markdown import markdown
from trainer.report.html.page import page
from trainer.writers.json_files import DamagedFile, read_json

_STEM = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_FORMULA = ("=", "+", "-", "@")  # a text that begins so is a formula for spreadsheets


def write(report: Report, folder: Path, formats: Collection[str] | None = None) -> list[Path]:
    """Writes a report into a folder, in place of an earlier one; returns the files, page first."""
    # Without `formats`, it is a page and Markdown. The same report gives the same bytes. Raises
    # UserError as `replaced` does, and ValueError if a figure or table has a name that is not a
    # name of a file, or that of another.
    formats = formats or DEFAULT_FORMATS
    _check_names("tables", [table.name for table in report.tables])
    _check_names("figures", [figure.name for figure in report.figures])
    folder = Path(folder).absolute()
    with replaced(folder) as staged:
        files = []
        for name, content in _files(report, formats):
            files.append(staged / name)
            files[-1].parent.mkdir(exist_ok=True)
            files[-1].write_bytes(content.encode("utf-8", "backslashreplace"))
        drawn = [each for each in ("pdf", "png") if each in formats]
        for figure in report.figures if drawn else ():
            (staged / "figures").mkdir(exist_ok=True)
            files += drawing.save(figure, report.arms, staged / "figures" / figure.name, drawn)
    return [folder / file.relative_to(staged) for file in files]


def _files(report: Report, formats: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the relative path and the content of each text file."""
    tables = {table.name: f"tables/{table.name}.csv" for table in report.tables}
    seen = report.shown()
    if "html" in formats:
        yield "index.html", page(seen)
    if "markdown" in formats:
        pictures = {each.name: f"figures/{each.name}.png" for each in report.figures}
        linked = tables if "csv" in formats else {}
        yield "report.md", markdown(seen, pictures if "png" in formats else {}, linked)
    if "csv" in formats:
        yield from ((tables[table.name], csv_of(table)) for table in report.tables)
    if "latex" in formats:
        drawn = {each.name: f"../figures/{each.name}.pdf" for each in report.figures}
        files = latex(seen, drawn if "pdf" in formats else {})
        yield from ((f"latex/{name}.tex", text) for name, text in files.items())


def _check_names(what: str, names: Sequence[str]) -> None:
    bad = [name for name in names if not _STEM.fullmatch(name)]
    # Some file systems do not distinguish upper and lower case.
    folded = [name.casefold() for name in names]
    twice = [name for name in names if folded.count(name.casefold()) > 1]
    if bad or twice:
        raise ValueError(f"The {what} {bad + twice} of the report cannot be names of files.")


def csv_of(table: Table) -> str:
    r"""Writes a table as CSV (RFC 4180), for programs.

    The first line has the names of the columns. Numbers have all of their digits, without units and
    without separators of thousands: reading them gives the same float64; seconds stay seconds, and
    shares are fractions of 1. None is an empty field. A number that is not finite is nan, inf or
    -inf, which `float`, NumPy, pandas and R read. Lines end with CR LF. A text that a spreadsheet
    would compute, because it begins with =, +, - or @, gets an apostrophe in front; control
    characters are written as their escapes.

    Example:
        >>> from trainer.report.document import Column
        >>> columns = (Column("arm", "arm"), Column("mean", "mean", "number"))
        >>> csv_of(Table("means", "Means", columns, (("muon, tuned", 1 / 3), ("sgd", None))))
        'arm,mean\r\n"muon, tuned",0.3333333333333333\r\nsgd,\r\n'
    """
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        # csv writes a row of one empty field as "", so that its line is not empty.
        writer.writerow([_field(value) for value in row])
    return file.getvalue()


def _field(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = printable(value)
        return f"'{text}" if text.startswith(_FORMULA) else text
    # Convert NumPy's numbers first: their repr is "np.float64(0.5)".
    return str(int(value)) if isinstance(value, numbers.Integral) else repr(float(value))


_SWAP = 1.0  # more seconds than the two renames of `_swap` take
_LIST = ".report.json"  # names the files of a report; a folder without it is not a report


class _Written(TypedDict):
    files: list[str]


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside that of a report, which replaces the latter at the end."""
    # Files in the old folder that no report wrote, such as the output of LaTeX, are kept. A process
    # that is killed meanwhile leaves the old folder, or leaves it under another name, from which
    # the next one restores it. The path must be absolute. Raises UserError if the folder is not
    # that of a report, or if the disk cannot be written.
    folder = folder.resolve() if folder.is_symlink() else folder
    staged = _sibling(folder, "tmp")
    try:
        _clean(folder)
        kept = _others(folder)
        staged.mkdir(parents=True)
        yield staged
        files = sorted(_paths(staged))
        for name in kept:
            target = staged / name
            if os.path.lexists(target):
                raise UserError(
                    f"{folder / name} is not of the last report, and the new one has a file of this"
                    " name. Nothing was written. Move it away, or choose another folder with"
                    " --output."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, target, follow_symlinks=False)
        (staged / _LIST).write_text(json.dumps({"files": files}, indent=1) + "\n", "utf-8")
        _swap(staged, folder)
    except OSError as e:
        raise UserError(
            f"The report cannot be written to {folder}: {e.strerror or e}. What was there before "
            f"is unchanged. Make room or get the permission to write to {folder.parent}, or choose "
            "another folder with --output."
        ) from e
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _others(folder: Path) -> list[str]:
    """Returns the files that no report wrote; raises UserError if the folder is no report's."""
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir():
        raise UserError(
            f"{folder} is a file, and a report is a folder. Choose another with --output."
        )
    names = sorted(_paths(folder))
    try:
        written = set(read_json(folder / _LIST, _Written, "")["files"])
    except FileNotFoundError:
        if not names:
            return []
        raise UserError(
            f"{folder} is not the folder of a report: it has {listing(names, 3)}, and no {_LIST}. "
            "Nothing was written there. Choose a folder that is empty or does not exist with "
            "--output."
        ) from None
    except DamagedFile as e:
        raise UserError(
            f"{folder / _LIST}, the list of the files of a report, cannot be read. Nothing was "
            f"written there. Remove {folder} or choose another folder with --output."
        ) from e
    return [name for name in names if name not in written and name != _LIST]


def _paths(folder: Path) -> Iterator[str]:
    """Yields the paths of all files below a folder, relative to it."""
    for root, folders, names in os.walk(folder):
        for name in [*names, *(each for each in folders if Path(root, each).is_symlink())]:
            yield Path(root, name).relative_to(folder).as_posix()


def _swap(staged: Path, folder: Path) -> None:
    old = _sibling(folder, "old")
    there = folder.exists()
    if there:
        os.rename(folder, old)
    try:
        os.rename(staged, folder)
    except BaseException:
        if there:
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(folder: Path, suffix: str) -> Path:
    # In the same parent, because renaming works only within a file system.
    return folder.with_name(f".{folder.name}.{_host()}.{os.getpid()}.{suffix}")


def _host() -> str:
    return re.sub(r"\W", "-", socket.gethostname())  # dots separate the parts of the name


def _clean(folder: Path) -> None:
    """Restores the folder, and removes what is beside it, if a process was killed."""
    # It removes only what processes of this host left: whether one of another host is alive, and
    # still fills its folder, is not known.
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.([\w-]+)\.(\d+)\.(tmp|old)")
    for path in sorted(folder.parent.glob(".*.*.*.*")):
        if (found := pattern.fullmatch(path.name)) is None:
            continue
        if found[3] == "old" and _is_missing_for_long(folder):
            os.rename(path, folder)
        elif found[1] == _host() and not _is_alive(int(found[2])):
            shutil.rmtree(path, ignore_errors=True)


def _is_missing_for_long(folder: Path) -> bool:
    """Returns whether a folder is missing for longer than a process takes to replace it."""
    end = time.monotonic() + _SWAP
    while not (there := folder.exists()) and time.monotonic() < end:
        time.sleep(_SWAP / 10)
    return not there


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return process != os.getpid()  # this process left nothing: an earlier one had its id
