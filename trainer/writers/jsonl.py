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
from typing import Any

from trainer.writers.base import Log, Writer, number, to_stderr
from trainer.writers.files import RecordFile, replace_file

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _whole_lines(content: bytes) -> int:
    return content.rfind(b"\n") + 1


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
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    end = _whole_lines(content)
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    row = _decode(content[start:end])
    if row is None:
        return None
    step = row.pop("step")
    return step, _values(row), start


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    with open(path, "rb") as file:
        for line in file:
            yield line, _decode(line)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl, or that of a workdir: one dict a step, sorted by step.

    Lines of one step are merged, torn ones are left out, and "NaN" is a float again.
    """
    file = Path(path)
    file = file / "metrics.jsonl" if file.is_dir() else file
    steps: dict[int, dict[str, Any]] = {}
    for _, row in _rows(file):
        if row is not None:
            steps[row["step"]] = steps.get(row["step"], {}) | _values(row)
    return [steps[step] for step in sorted(steps)]


def truncate_after(path: str | os.PathLike[str], step: int) -> int:
    """Drops the lines of later steps than `step`, and torn ones; returns how many.

    The file is replaced by a rename, or left as it is when nothing is to be dropped.
    """
    file = Path(path)
    if not file.exists():
        return 0
    kept, dropped = [], 0
    for line, row in _rows(file):
        if row is None or row["step"] > step:
            dropped += 1
        else:
            kept.append(line)
    if dropped:
        replace_file(file, b"".join(kept))
    return dropped


class JsonlWriter(Writer):
    """Writes scalars to metrics.jsonl, one line a step.

    Values of one step are merged until another step comes or flush() is called; what comes for the
    last written step after that is merged into its line, also where an earlier process wrote it.

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
        path = Path(path)
        self.path = path / "metrics.jsonl" if path.is_dir() else path
        self._file = RecordFile(self.path, _whole_lines, log)
        self._fence = fence
        self._pending: dict[int, dict[str, Any]] = {}
        self._adopted = False
        self._last: tuple[int, dict[str, Any], int] | None = None  # step, values, offset of line

    @property
    def error(self) -> str | None:
        """Why the newest values are not in the file, or None."""
        return self._file.error

    def truncate_after(self, step: int) -> int:
        """Drops the lines of later steps and torn ones, before anything is written.

        Returns how many lines were dropped. The run that goes on from `step` writes them again.
        """
        if self._fence is not None:
            self._fence()
        self._file.close()
        self._adopted = False
        return truncate_after(self.path, step)

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
        if self._file.write(b"".join(encoded), at):
            last = next(reversed(lines))
            self._last = (last, lines[last], self._file.end - len(encoded[-1]))
            self._pending = {}

    def close(self) -> None:
        """Writes the pending lines and closes the file."""
        self.flush()
        self._file.close()
