"""Writes metrics.jsonl, one line per step, so that it is intact after a crash; reads and cuts it.

A line is {"step": 100, "train/loss": 0.5, ...}. JSON has no NaN and no infinity: they are written
as "NaN", "Infinity" and "-Infinity", strings that float() and pandas' to_numeric read.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import ArrayLike

from trainer.writers.base import Log, Writer, real_number, to_stderr
from trainer.writers.files import Fence, after_newline, open_regular, replace_file, sync
from trainer.writers.record_file import RecordFile

SAMPLES_FILE = "samples.jsonl"  # of `trainer.hooks.samples`
ROW_FILES = ("metrics.jsonl", SAMPLES_FILE)  # the files of a run or trial with a row per step

Lost = Callable[[str, int], None]  # takes a sentence, and the number of rows that are lost

# Split -> the prefix of the names of its metrics.
PREFIXES = {"validation": "validation/", "test": "eval/"}

_MOST = 2**63
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def whole_lines(file: BinaryIO) -> int:
    """Returns how many bytes at the beginning of a file are complete lines."""
    return after_newline(file, file.seek(0, os.SEEK_END))


def encode(step: int, values: Mapping[str, Any]) -> bytes:
    """Returns the line of one step with its newline; ValueError if a value is not one number."""
    row: dict[str, Any] = {"step": int(step)}
    for name, value in values.items():
        value = real_number(name, value)
        if not math.isfinite(value):
            value = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        row[name] = value
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any] | None:
    """Returns the row of a line; None if the line is incomplete, or was not written by a run."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # A line without a newline was torn by a crash; the run writes that step again.
    if not line.endswith(b"\n") or not isinstance(row, dict):
        return None
    step = row.get("step")
    return row if type(step) is int and 0 <= step < _MOST else None


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a row, and drops any other values: the file may have been edited."""
    found = {}
    for name, value in row.items():
        number = _NONFINITE.get(value) if isinstance(value, str) else value
        if isinstance(number, float) or (isinstance(number, int) and -_MOST < number < _MOST):
            found[name] = number
    return found


def last_line(path: Path) -> tuple[int, dict[str, Any], int] | None:
    """Reads the step, values and offset of the last complete line; None if there is none."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        end = whole_lines(file)
        start = after_newline(file, end - 1)
        file.seek(start)
        if (row := _decode(file.read(end - start))) is not None:
            return row.pop("step"), _values(row), start
    return None


def lines_of(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line of a file with its row; None for one that no run wrote completely."""
    with open_regular(path) as file:
        for line in file:
            yield line, _decode(line)


def sync_rows(folder: Path) -> None:
    """Syncs those files of rows that the folder of a run or trial has."""
    for file in filter(Path.exists, (folder / name for name in ROW_FILES)):
        sync(file)


def rows_file(path: str | os.PathLike[str]) -> Path:
    """Returns the metrics.jsonl of a workdir; any other path is returned as it is."""
    path = Path(path)
    return path / "metrics.jsonl" if path.is_dir() else path


def iterate_metrics(path: str | os.PathLike[str], about: str = "") -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics.jsonl, or of a workdir, unmerged; none if it does not exist."""
    # Only those with a metric whose name begins with `about`.
    # The beginning of a key in the file, with the quote before it but not the one after it: "eval/
    name = json.dumps(about, ensure_ascii=False)[:-1].encode()
    file = rows_file(path)
    if not file.exists():
        return
    with open_regular(file) as lines:
        for line in lines:
            # Searching the bytes is faster than parsing every row of training.
            row = _decode(line) if name in line else None
            if row is not None and any(key.startswith(about) for key in row):
                yield _values(row)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl, or that of a workdir: a dict per step, of which lines are merged."""
    steps: dict[int, dict[str, Any]] = {}
    for _, row in lines_of(rows_file(path)):
        if row is not None:
            steps[row["step"]] = steps.get(row["step"], {}) | _values(row)
    return [steps[step] for step in sorted(steps)]


def truncate_after(path: str | os.PathLike[str], step: int, fence: Fence = None) -> tuple[int, int]:
    """Drops lines of later steps, and incomplete ones; returns how many are left, and dropped."""
    # If they are the last lines, the file is cut off, which works on a full disk too; otherwise a
    # new file replaces it by a rename.
    file = Path(path)
    if not file.exists():
        return 0, 0

    def keeps(row: dict[str, Any] | None) -> bool:
        return row is not None and row["step"] <= step

    # Later steps are usually the last lines, so that the file can be cut off after `kept` bytes.
    rows, kept, dropped, in_one_piece = 0, 0, 0, True
    for line, row in lines_of(file):
        if not keeps(row):
            dropped += 1
        else:
            in_one_piece = in_one_piece and not dropped
            rows += 1
            kept += len(line)
    if dropped and in_one_piece:
        if fence is not None:
            fence()
        os.truncate(file, kept)
    elif dropped:
        with open(file, "rb") as old:
            replace_file(file, (line for line in old if keeps(_decode(line))), fence)
    return rows, dropped


def merge_lines(now: Iterable[bytes], before: Iterable[bytes]) -> list[bytes]:
    """Merges the rows that a file had before into those that it has now; returns lines by step."""
    # If both have a value, the one of `now` is used. Rows of `now` that are later than all rows of
    # `before` are dropped: this run has not computed these steps. `before` has pieces of bytes,
    # which may end anywhere; `now` has whole lines.
    rows: dict[int, dict[str, Any]] = {}
    for line in b"".join(before).splitlines(keepends=True):
        if (row := _decode(line)) is not None:
            rows[row["step"]] = _values(row)
    last = max(rows, default=None)
    for line in now:
        row = _decode(line)
        if row is not None and (last is None or row["step"] <= last):
            rows[row["step"]] = rows.get(row["step"], {}) | _values(row)
    return [encode(step, rows[step]) for step in sorted(rows)]


class JsonlWriter(Writer):
    """Writes scalars to metrics.jsonl, one line per step."""

    # Values of one step are merged until values of another step arrive or flush() is called. Later
    # values of the last written step are merged into its line, even if an earlier process wrote it.
    # A line is never overwritten: a new file with the merged line replaces the old one.
    # If another program deletes, replaces or truncates the file, the missing rows are restored and
    # a warning is logged once; rows that cannot be restored are reported to `lost`. While the disk
    # is full, values are kept in memory. `rows` is None before the file was first read.

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        log: Log = to_stderr,
        fence: Fence = None,
        lost: Lost | None = None,
    ) -> None:
        self.path = rows_file(path)
        self.rows: int | None = None
        self._file = RecordFile(self.path, whole_lines, log)
        self._log = log
        self._fence = fence or (lambda: None)
        self._lost = lost
        self._pending: dict[int, dict[str, Any]] = {}
        self._read_last_line = False
        self._last: tuple[int, dict[str, Any], int] | None = None  # step, values, offset of line

    @property
    def error(self) -> str | None:
        """Why the newest values are not in the file, or None."""
        return self._file.error

    behind = error  # MultiWriter asks only the writer of metrics.jsonl for it

    def truncate_after(self, step: int) -> int:
        """Drops the lines of later steps, which a resumed run writes again; returns how many."""
        self._fence()
        self._file.close()
        self._read_last_line = False
        self.rows, dropped = truncate_after(self.path, step, self._fence)
        self._file.open_existing()
        return dropped

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Merges scalars into the line of a step, and writes the line of an earlier step."""
        values = {name: real_number(name, value) for name, value in scalars.items()}
        if self._pending and step not in self._pending:
            self.flush()
        self._pending.setdefault(int(step), {}).update(values)

    def flush(self) -> None:
        """Writes the pending lines to the file, and restores rows that another program removed."""
        change = self._file.change_by_others()
        if not self._pending and change is None:
            return
        self._fence()
        if change is not None and not self._restore(change):
            return
        if not self._pending:
            return
        if not self._read_last_line:
            self._read_last_line, self._last = True, last_line(self.path)
            if self.rows is None:
                self.rows = sum(1 for _ in lines_of(self.path)) if self._last else 0
        lines, at = self._pending, None
        if self._last is not None and self._last[0] in lines:
            # The line of that step is the last one of the file: write its merged row first, in
            # place of that line, from `at` on.
            step, values, at = self._last
            lines = {step: values | lines[step]} | {s: v for s, v in lines.items() if s != step}
        encoded = [encode(step, values) for step, values in lines.items()]
        data = b"".join(encoded)
        if self._file.write(data) if at is None else self._file.replace_from(at, data, self._fence):
            last = next(reversed(lines))
            self._last = (last, lines[last], self._file.end - len(encoded[-1]))
            self.rows = (self.rows or 0) + len(lines) - (at is not None)
            self._pending = {}

    def _restore(self, change: str) -> bool:
        """Restores the rows that are known; returns whether the file can be written now."""
        lines: list[bytes] = []

        def merge(now: Iterable[bytes], before: Iterable[bytes]) -> list[bytes]:
            lines[:] = merge_lines(now, before)
            return lines

        if not self._file.restore(merge, self._fence):
            return False
        missing = max(0, (self.rows or 0) - len(lines))
        self.rows, self._read_last_line = len(lines), False  # the last line may have changed
        sentence = f"{self.path} {change} by another program while this run was writing to it"
        if missing:
            # The first step that has a row in the file, or will have one.
            row = next(iterate_metrics(self.path), None)
            step = row["step"] if row else next(iter(self._pending), 0)
            sentence += f": {missing} rows before step {step} are lost for good."
        else:
            sentence += "; its rows were restored, and no row is lost."
        self._log(sentence)
        if missing and self._lost is not None:
            self._lost(sentence, missing)
        return True

    def close(self) -> None:
        """Writes the pending lines and closes the file."""
        try:
            self.flush()
        finally:
            self._file.close()
