"""The lines of metrics.jsonl: how one is written and read, and how the file is cut to a step.

A line is {"step": 100, "train/loss": 0.5, ...}. JSON has no NaN and no infinity: they are written
as the strings "NaN", "Infinity" and "-Infinity", which float() reads back, and pandas' to_numeric.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.writers.base import number
from trainer.writers.files import after_newline, replace_file

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def whole_lines(file: BinaryIO) -> int:
    """Returns how many bytes of a file are whole lines."""
    return after_newline(file, file.seek(0, os.SEEK_END))


def encode(step: int, values: Mapping[str, Any]) -> bytes:
    """Returns the line, newline included, of one step."""
    row: dict[str, Any] = {"step": int(step)}
    for name, value in values.items():
        value = number(name, value)
        if not math.isfinite(value):
            value = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        row[name] = value
    return _line(row)


def _line(row: Mapping[str, Any]) -> bytes:
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


def last_line(path: Path) -> tuple[int, dict[str, Any], int] | None:
    """Returns step, values and offset of the last whole line of a file, if there is one."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return None
    with file:
        end = whole_lines(file)
        start = after_newline(file, end - 1)
        file.seek(start)
        row = _decode(file.read(end - start))
    if row is None:
        return None
    step = row.pop("step")
    return step, _values(row), start


def lines_of(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line of a file with its object, None where it is torn or is not ours."""
    with open(path, "rb") as file:
        for line in file:
            yield line, _decode(line)


def file_of(path: str | os.PathLike[str]) -> Path:
    """Returns the metrics.jsonl of a workdir, or the file that is given."""
    path = Path(path)
    return path / "metrics.jsonl" if path.is_dir() else path


def iterate_metrics(path: str | os.PathLike[str], about: str = "") -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics.jsonl, or that of a workdir, as they stand, one at a time.

    Args:
        path: the file, or a workdir; where there is none there are no rows.
        about: yields only rows with a metric whose name begins so, and reads over the others fast.
    """
    name = json.dumps(about, ensure_ascii=False)[:-1].encode()
    file = file_of(path)
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
    for _, row in lines_of(file_of(path)):
        if row is not None:
            steps[row["step"]] = steps.get(row["step"], {}) | _values(row)
    return [steps[step] for step in sorted(steps)]


class Truncated(NamedTuple):
    """How many rows `truncate_after` left in a file, and how many lines it dropped."""

    rows: int
    dropped: int


def truncate_after(
    path: str | os.PathLike[str], step: int, fence: Callable[[], None] | None = None
) -> Truncated:
    """Drops the lines of later steps than `step`, and torn ones; returns how many it dropped.

    The file is cut off where they are its last ones, which a full disk allows too, and else
    replaced by a rename. A fence is called just before that, and what it raises is raised.
    """
    file = Path(path)
    if not file.exists():
        return Truncated(0, 0)

    def keeps(row: dict[str, Any] | None) -> bool:
        return row is not None and row["step"] <= step

    # Later steps stand at the end: what is kept is most often the file up to some line.
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
    return Truncated(rows, dropped)


def merge_lines(now: Iterable[bytes], before: Iterable[bytes]) -> list[bytes]:
    """Puts the rows that a file held before into what it holds now; returns its lines by step.

    Values that both have are those of now. Rows of now that are later than all rows before are of
    no step that this run has made, and are left out.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in b"".join(before).splitlines(keepends=True):
        row = _decode(line)
        if row is not None:
            rows[row["step"]] = row
    last = max(rows, default=None)
    for line in now:
        row = _decode(line)
        if row is not None and (last is None or row["step"] <= last):
            rows[row["step"]] = rows.get(row["step"], {}) | row
    return [_line(rows[step]) for step in sorted(rows)]
