"""Writes metrics.jsonl, one JSON object and line per step, so that it is intact after a crash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from numpy.typing import ArrayLike

from trainer.writers.base import Log, Writer, number, to_stderr
from trainer.writers.lines import (
    encode,
    file_of,
    iterate_metrics,
    last_line,
    lines_of,
    merge_lines,
    truncate_after,
    whole_lines,
)
from trainer.writers.record_file import RecordFile

Lost = Callable[[str, int], None]


class JsonlWriter(Writer):
    """Writes scalars to metrics.jsonl, one line per step.

    Values of one step are merged until values of another step arrive or flush() is called. Later
    values of the last written step are merged into its line, even if an earlier process wrote it. A
    line is never overwritten: a new file with the merged line replaces the old one.

    If another program deletes, replaces or truncates the file, the missing rows are restored and a
    warning is logged once; rows that cannot be restored are reported to `lost`.

    Args:
        path: the file, or a workdir.
        log: called with a line of warning if the disk is full; values are kept in memory meanwhile.
        fence: called before every write; raises if this process must not write any more.
        lost: called with a sentence and the number of rows that are lost; None ignores them.

    Attributes:
        rows: number of lines of the file; None before it was first read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        log: Log = to_stderr,
        fence: Callable[[], None] | None = None,
        lost: Lost | None = None,
    ) -> None:
        self.path = file_of(path)
        self.rows: int | None = None
        self._file = RecordFile(self.path, whole_lines, log)
        self._log = log
        self._fence = fence
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
        """Drops the lines of later steps, and incomplete lines, before anything is written.

        A run that was resumed from `step` writes the dropped lines again.

        Args:
            step: the last step to keep.

        Returns:
            How many lines were dropped.

        Raises:
            OSError: the file cannot be read or truncated.
            Exception: any exception of `fence`.
        """
        if self._fence is not None:
            self._fence()
        self._file.close()
        self._read_last_line = False
        self.rows, dropped = truncate_after(self.path, step, self._fence)
        self._file.open_existing()
        return dropped

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Merges scalars into the line of a step, and writes the line of an earlier step.

        Args:
            step: number of finished steps.
            scalars: name -> a number, or an array with one element.

        Raises:
            ValueError: a value is not one real number.
            Exception: any exception of `fence`.
        """
        values = {name: number(name, value) for name, value in scalars.items()}
        if self._pending and step not in self._pending:
            self.flush()
        self._pending.setdefault(int(step), {}).update(values)

    def flush(self) -> None:
        """Writes the pending lines to the file, and restores rows that another program removed."""
        change = self._file.change_by_others()
        if not self._pending and change is None:
            return
        if self._fence is not None:
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
        kept = 0

        def merge(now: Iterable[bytes], before: Iterable[bytes]) -> list[bytes]:
            nonlocal kept
            lines = merge_lines(now, before)
            kept = len(lines)
            return lines

        if not self._file.restore(merge, self._fence):
            return False
        missing = max(0, (self.rows or 0) - kept)
        self.rows, self._read_last_line = kept, False  # the last line may have changed
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
