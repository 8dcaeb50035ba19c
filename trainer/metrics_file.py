"""metrics.jsonl: one JSON object a line, one line a step, whole after every crash.

A line is {"step": 100, "train/loss": 0.5, ...}. JSON has no NaN and no infinity: they are written
as the strings "NaN", "Infinity" and "-Infinity", which float() reads back, and pandas' to_numeric.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RecordFile:
    """A file that grows by whole records, also where the disk is full at times.

    Args:
      path: the file; opened, and made, by the first write.
      sound: takes what the file holds at first and returns how many of its bytes are whole
        records; the rest is cut off. Without it the file is begun anew.
      log: takes a line when writing fails, once, and when it works again.
    """

    def __init__(
        self, path: Path, sound: Callable[[bytes], int] | None, log: Callable[[str], None]
    ) -> None:
        self.path = path
        self.end = 0  # offset after the last whole record
        self.error: str | None = None
        self._sound = sound
        self._log = log
        self._file: BinaryIO | None = None

    def write(self, data: bytes, at: int | None = None) -> bool:
        """Writes records at the end, or in place of those from offset `at` on.

        Returns whether it could. If not, `error` says why, what was written in part is cut off
        again, and the caller may try the same later.
        """
        try:
            file = self._opened()
            start = self.end if at is None else at
            self.end = start
            done = file.seek(start) - start
            while done < len(data):
                done += file.write(data[done:]) or 0
            self.end = start + done
            file.truncate(self.end)
        except OSError as e:
            self._failed(e)
            return False
        if self.error is not None:
            self.error = None
            self._log(f"{self.path} can be written again.")
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = open(os.open(self.path, flags, 0o644), "r+b", buffering=0)
            self.end = self._sound(file.read()) if self._sound else 0
            file.truncate(self.end)
            self._file = file
        return self._file

    def _failed(self, error: OSError) -> None:
        first, self.error = self.error is None, f"{self.path} could not be written: {error}"
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self.end)
        if first:
            self._log(f"{self.error}. What is missing is kept, and the next write tries again.")


def whole_lines(content: bytes) -> int:
    return content.rfind(b"\n") + 1


def number(name: str, value: Any) -> int | float | bool:
    """Returns a scalar (Python's, numpy's, jax's, of any shape with one element) as Python's own.

    Raises ValueError for anything else.
    """
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "OUSMmc" or array.dtype.names:
        raise ValueError(
            f"The metric {name!r} is {value!r}; a scalar is one real number. "
            "Reduce an array before it is written, or write it as a histogram."
        )
    item = array.reshape(()).item()
    return item if isinstance(item, int | float | bool) else float(item)


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
            read = {k: _NONFINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}
            steps[row["step"]] = steps.get(row["step"], {}) | read
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


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: write, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
