"""Sends the metrics of a run to loggers, W&B and MLflow, by threads that no step waits for.

A logger gets each row of metrics.jsonl once, also after a run was killed and resumed. A logger that
fails is reported once, and the run continues without it.
"""

import hashlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import ArrayLike

from trainer.config.wording import shorten
from trainer.writers.base import Log, Writer, real_number
from trainer.writers.files import Fence, Outage
from trainer.writers.lines import iterate_metrics
from trainer.writers.summary import Summary

# Logger -> the package that it needs, which the extra with the name of the logger installs.
LOGGERS = {"wandb": "wandb", "mlflow": "mlflow"}
ID_FILE = "logger_id"

_MOST_WAITING = 10_000  # rows that may wait for a logger that is slower than the run
_PAUSE = 60.0  # seconds between a failure and the next attempt
# Seconds that the end of a run waits for its last rows to be sent: by a logger that works; by one
# that failed before; and after a signal, whose sender does not wait for long.
_LONGEST_WAIT, _WAIT_AFTER_FAILURE, _WAIT_AFTER_SIGNAL = 90.0, 2.0, 10.0


@dataclass(frozen=True)
class RunIdentity:
    """What a logger calls a run."""

    id: str  # 16 characters; the same for every process that computes the run
    name: str  # what a user reads, such as "muon_vit-1a2b3c4d" or "trials/muon/0007/0"
    folder: Path  # for files of loggers that keep some
    config: Mapping[str, Any] = field(default_factory=dict)  # see `trainer.config.hparams`
    group: str = ""  # the runs with which it is compared, such as "muon_vs_adamw/muon"


def identity_of_run(folder: Path, config: Mapping[str, Any]) -> RunIdentity:
    """Returns what loggers call a single run, whose folder keeps the id."""
    return RunIdentity(_stable_id(folder), folder.resolve().name, folder, config)


def identity_of_trial(sweep: Path, trial: str, arm: str, config: Mapping[str, Any]) -> RunIdentity:
    """Returns what loggers call a trial, by its folder in that of the sweep, which keeps an id."""
    id = hashlib.sha256(f"{_stable_id(sweep)} {trial}".encode()).hexdigest()[:16]
    return RunIdentity(id, trial, sweep, config, f"{sweep.resolve().name}/{arm}")


def _stable_id(folder: Path) -> str:
    """Returns the id that a folder keeps; the first of several processes determines it."""
    file = folder / ID_FILE
    if not file.exists():
        temporary = folder / f".{ID_FILE}.{secrets.token_hex(8)}"
        temporary.write_text(f"{secrets.token_hex(8)}\n")
        try:
            os.link(temporary, file)  # atomic, and never replaces an existing file
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return file.read_text().strip()


class Row(NamedTuple):
    """The metrics of a step."""

    step: int  # number of finished steps
    values: dict[str, int | float]  # name -> value


class Logger(Protocol):
    """A client of a logging service; one thread calls all methods, which may raise anything."""

    def open(self) -> int:
        """Finds the run, or the place for a new one; returns the last step of its rows, or -1."""
        ...

    def write(self, rows: Sequence[Row]) -> None:
        """Adds complete rows; their steps increase from call to call."""
        ...

    def close(self, summary: Summary | None) -> None:
        """Ends the work of this process on the run; the summary is None if an error ended it."""
        ...


class Reporter:
    """Reports on the loggers of a process, which may compute many runs at once."""

    def __init__(self, log: Log):
        self._log = log
        self._outages = {name: Outage(log) for name in LOGGERS}
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def is_failing(self, name: str) -> bool:
        """Returns whether a logger has failed, and not worked since."""
        return self._outages[name].error is not None

    def failed(self, name: str, why: str) -> None:
        """Logs the first of several failures in a row; `why` has no full stop."""
        with self._lock:
            self._outages[name].failed(
                f"warning: the writer {name!r} failed: {why}",
                "The run goes on, and metrics.jsonl has every row.",
            )

    def succeeded(self, name: str) -> None:
        """Logs the first success after failures."""
        with self._lock:
            self._outages[name].ended(f"The writer {name!r} works again.")

    def log_once(self, line: str) -> None:
        """Logs a line that was not logged before."""
        with self._lock:
            if line not in self._said:
                self._said.add(line)
                self._log(line)


class LoggerWriter(Writer):
    """Sends the rows of a run to a logger, in a thread."""

    # A row is sent once it is complete: when the row of a later step begins, or the run has ended.
    # Rows of metrics.jsonl (`rows`) that the logger lacks are sent, up to the step `resumed`; this
    # process writes the later ones. `make` is called in the thread, because importing its package
    # takes long. `fence` is called before every write; it raises if this process must not write.

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        reporter: Reporter,
        *,
        rows: Path,
        resumed: int,
        fence: Fence = None,
    ):
        self._name, self._make, self._reporter = name, make, reporter
        self._fence = fence or (lambda: None)
        self._summary: Summary | None = None
        self._queue: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._given = 0  # rows that this process has queued
        self._taken = 0  # rows that the thread has taken from the queue
        self._done = 0  # how many of them the logger has
        self._overflowed = self._closed = False
        # The thread alone uses the following.
        self._made: Logger | None = None
        self._is_open = False
        self._sent = -1  # the last step of which the logger has a row
        self._complete: list[Row] = []
        self._newest: Row | None = None  # values may still be added to it
        self._again_at = 0.0
        arguments = (rows, resumed)
        # A daemon thread: the process must not wait for a server that does not answer.
        self._thread = threading.Thread(target=self._follow, args=arguments, daemon=True, name=name)
        self._thread.start()

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Queues scalars of a step; see `Writer.write_scalars`."""
        self._fence()
        values = {name: real_number(name, value) for name, value in scalars.items()}
        if self._overflowed:
            return
        if self._given - self._done >= _MOST_WAITING:
            # Skip all later rows too: the next process sends the rest from metrics.jsonl.
            self._overflowed = True
            why = f"it takes rows more slowly than the run writes them, and {_MOST_WAITING:,} wait"
            self._reporter.failed(self._name, why)
            return
        self._given += 1
        self._queue.put(Row(int(step), values))

    def finish(self, summary: Summary) -> None:
        """Stores how the run ended, or stopped, for `close`."""
        self._summary = summary

    def close(self) -> None:
        """Has the last rows sent, and waits for that, but no longer than a limit."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        longest = _LONGEST_WAIT
        if self._summary is not None and self._summary.end == "stopped":
            longest = _WAIT_AFTER_SIGNAL
        if self._reporter.is_failing(self._name):
            longest = _WAIT_AFTER_FAILURE
        self._thread.join(longest)
        if self._thread.is_alive():
            why = f"it has not taken the last rows within {longest:g} seconds"
            self._reporter.failed(self._name, why)

    # In the thread.

    def _follow(self, rows: Path, resumed: int) -> None:
        """Sends the rows of the file, and then those of the queue, until the writer is closed."""
        self._try(self._logger)  # imports its package, while the main thread compiles the program
        try:
            for values in iterate_metrics(rows):
                if values["step"] <= resumed:  # the main thread writes the later ones meanwhile
                    self._add(Row(values.pop("step"), values))
        except Exception as error:
            return self._reporter.failed(self._name, f"{rows} cannot be read: {error}")
        while (row := self._queue.get()) is not None:
            self._add(row)
            self._taken += 1
            # Not if the logger failed a moment ago.
            if self._queue.empty() and self._complete and time.monotonic() >= self._again_at:
                self._try(self._write)
        # A logger that lacks the last rows is not told that the run ended: it would look complete.
        self._end(None if self._overflowed else self._summary)

    def _add(self, row: Row) -> None:
        """Adds a row, or values to the newest one."""
        if self._newest is not None and self._newest.step == row.step:
            self._newest.values.update(row.values)
            return
        self._complete_newest()
        self._newest = Row(row.step, dict(row.values))

    def _end(self, summary: Summary | None) -> None:
        """Sends the last rows, and closes the logger."""
        # A run that will be resumed may evaluate its last state again, and add to the newest row.
        ended = summary is not None and summary.end in ("done", "diverged")
        if ended:
            self._complete_newest()
        # Create no run in the service for one without rows, such as one that is stopped at once.
        if self._complete or ended or self._is_open:
            self._try(lambda: self._close(summary))

    def _complete_newest(self) -> None:
        if self._newest is not None:
            self._complete.append(self._newest)
            self._newest = None

    def _logger(self) -> Logger:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _write(self) -> None:
        logger = self._logger()
        if not self._is_open:
            self._sent = logger.open()
            self._is_open = True
        if new := [row for row in self._complete if row.step > self._sent]:
            logger.write(new)
            self._sent = new[-1].step
        self._complete.clear()
        self._done = self._taken
        self._reporter.succeeded(self._name)

    def _close(self, summary: Summary | None) -> None:
        self._write()
        self._logger().close(summary)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            # The next attempt opens a new logger, which asks the service which rows it has.
            self._made, self._is_open = None, False
            self._again_at = time.monotonic() + _PAUSE
            text = shorten(" ".join(str(error).split()), 200).rstrip(".")
            kind = type(error).__name__
            self._reporter.failed(self._name, f"{kind}: {text}" if text else kind)
