"""metrics.jsonl: one JSON object a line, one line a step, whole after every crash.

A line is {"step": 100, "train/loss": 0.5, ...}. JSON has no NaN and no infinity: they are written
as the strings "NaN", "Infinity" and "-Infinity", which float() reads back, and pandas' to_numeric.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainer.writers.base import Log, Writer, number, to_stderr
from trainer.writers.files import RecordFile, after_newline, replace_file

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _whole_lines(file: BinaryIO) -> int:
    return after_newline(file, file.seek(0, os.SEEK_END))


def encode(step: int, values: Mapping[str, Any]) -> bytes:
    """Returns the line, newline included, of one step."""
    row: dict[str, Any] = {"step": int(step)}
    for name, value in values.items():
        value = number(name, value)
        if not math.isfinite(value):
            value = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        row[name] = value
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line, None where it is torn or is not ours."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not line.endswith(b"\n") or not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _NONFINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def _last_line(path: Path) -> tuple[int, dict[str, Any], int] | None:
    """Returns step, values and offset of the last whole line of a file, if there is one."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return None
    with file:
        end = _whole_lines(file)
        start = after_newline(file, end - 1)
        file.seek(start)
        row = _decode(file.read(end - start))
    if row is None:
        return None
    step = row.pop("step")
    return step, _values(row), start


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    with open(path, "rb") as file:
        for line in file:
            yield line, _decode(line)


def _file_of(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / "metrics.jsonl" if path.is_dir() else path


def iterate_metrics(path: str | os.PathLike[str], about: str = "") -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics.jsonl, or that of a workdir, as they stand, one at a time.

    Args:
      path: the file, or a workdir; where there is none there are no rows.
      about: yields only rows with a metric whose name begins so, and reads over the others fast.
    """
    name = json.dumps(about, ensure_ascii=False)[:-1].encode()
    file = _file_of(path)
    if not file.exists():
        return
    with open(file, "rb") as lines:
        for line in lines:
            row = _decode(line) if name in line else None
            if row is not None and any(key.startswith(about) for key in row):
                yield _values(row)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl, or that of a workdir: one dict a step, sorted by step.

    Lines of one step are merged, torn ones are left out, and "NaN" is a float again.
    """
    steps: dict[int, dict[str, Any]] = {}
    for _, row in _lines(_file_of(path)):
        if row is not None:
            steps[row["step"]] = steps.get(row["step"], {}) | _values(row)
    return [steps[step] for step in sorted(steps)]


def truncate_after(
    path: str | os.PathLike[str], step: int, fence: Callable[[], None] | None = None
) -> int:
    """Drops the lines of later steps than `step`, and torn ones; returns how many.

    The file is cut off where they are its last ones, which a full disk allows too, and else
    replaced by a rename. A fence is called just before that, and what it raises is raised.
    """
    file = Path(path)
    if not file.exists():
        return 0

    def keeps(row: dict[str, Any] | None) -> bool:
        return row is not None and row["step"] <= step

    # Later steps stand at the end: what is kept is most often the file up to some line.
    kept, dropped, in_one_piece = 0, 0, True
    for line, row in _lines(file):
        if not keeps(row):
            dropped += 1
        else:
            in_one_piece = in_one_piece and not dropped
            kept += len(line)
    if dropped and in_one_piece:
        if fence is not None:
            fence()
        os.truncate(file, kept)
    elif dropped:
        with open(file, "rb") as old:
            replace_file(file, (line for line in old if keeps(_decode(line))), fence)
    return dropped


class JsonlWriter(Writer):
    """Writes scalars to metrics.jsonl, one line a step.

    Values of one step are merged until another step comes or flush() is called; what comes for the
    last written step after that is merged into its line, also where an earlier process wrote it. A
    line is never written over: the file with the merged line takes the place of the old one.

    Args:
      path: the file, or a workdir.
      log: takes a line of warning when the disk is full; values are kept meanwhile.
      fence: called before anything is written; what it raises is raised.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        log: Log = to_stderr,
        fence: Callable[[], None] | None = None,
    ) -> None:
        self.path = _file_of(path)
        self._file = RecordFile(self.path, _whole_lines, log)
        self._fence = fence
        self._pending: dict[int, dict[str, Any]] = {}
        self._adopted = False
        self._last: tuple[int, dict[str, Any], int] | None = None  # step, values, offset of line

    @property
    def error(self) -> str | None:
        """Why the newest values are not in the file, or None."""
        return self._file.error

    behind = error

    def truncate_after(self, step: int) -> int:
        """Drops the lines of later steps and torn ones, before anything is written.

        Returns how many lines were dropped. The run that goes on from `step` writes them again.
        """
        if self._fence is not None:
            self._fence()
        self._file.close()
        self._adopted = False
        return truncate_after(self.path, step, self._fence)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Merges scalars into the line of a step; raises ValueError for what is no real number."""
        values = {name: number(name, value) for name, value in scalars.items()}
        if self._pending and step not in self._pending:
            self.flush()
        self._pending.setdefault(int(step), {}).update(values)

    def flush(self) -> None:
        """Writes the pending lines to the file."""
        if not self._pending:
            return
        if self._fence is not None:
            self._fence()
        if not self._adopted:
            self._adopted, self._last = True, _last_line(self.path)
        lines, at = self._pending, None
        if self._last is not None and self._last[0] in lines:
            step, values, at = self._last
            lines = {step: values | lines[step]} | {s: v for s, v in lines.items() if s != step}
        encoded = [encode(step, values) for step, values in lines.items()]
        data = b"".join(encoded)
        if self._file.write(data) if at is None else self._file.replace_from(at, data, self._fence):
            last = next(reversed(lines))
            self._last = (last, lines[last], self._file.end - len(encoded[-1]))
            self._pending = {}

    def close(self) -> None:
        """Writes the pending lines and closes the file."""
        self.flush()
        self._file.close()
