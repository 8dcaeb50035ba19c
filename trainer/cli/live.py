"""Shows the progress of a sweep, while this process computes it."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.cli.terminal import Redrawn, log

_REDRAWN, _REPORTED = 1.0, 60.0  # seconds between two tables in a terminal, or between two lines
_MOST = 0.05  # the fraction of the time that may be spent on reading the folder


class LiveView:
    """A context manager that shows the progress of a sweep on stderr, from its own thread."""

    # In a terminal it is a table below the lines of the log, redrawn about once a second; elsewhere
    # a line about once a minute. An error here never ends the sweep.
    # `table` None draws the table in a terminal; `every` is in seconds, and None is 1 or 60;
    # `quiet` shows the lines of the log only.

    def __init__(
        self,
        folder: Path,
        *,
        table: bool | None = None,
        every: float | None = None,
        quiet: bool = False,
    ):
        self._folder = folder
        table = _is_terminal() if table is None else table
        self._table = Redrawn(sys.stderr) if table else None
        self._every = every or (_REDRAWN if table else _REPORTED)
        self._quiet = quiet
        self._lines: Sequence[str] = ()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="live view", daemon=True)

    def __enter__(self) -> "LiveView":
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        if not self._quiet:
            self._thread.join(5)  # the disk may hang
        self._lines = ()
        if self._table is not None:
            with self._writing:
                self._table.draw(())

    def log(self, line: str) -> None:
        """Prints a line, above the table if there is one."""
        with self._writing:
            if self._table is None:
                log(line)
            else:
                self._table.draw(self._lines, above=line)

    def _watch(self) -> None:
        try:
            self._refresh_loop()
        except Exception as error:
            self.log(f"The table of the sweep is not shown any more: {error}")

    def _refresh_loop(self) -> None:
        from trainer.sweep.status import SweepReader, counts, progress_line

        pause = self._every
        reader = None
        while not self._stop.wait(pause):
            start = time.perf_counter()
            reader = reader or SweepReader(self._folder)
            status = reader.read()
            if self._table is None:
                self.log(progress_line(status))
            else:
                lines = ["", *counts(status, reader.plan)]
                with self._writing:
                    if not self._stop.is_set():
                        self._lines = lines
                        self._table.draw(lines)
            pause = max(self._every, (time.perf_counter() - start) / _MOST)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
