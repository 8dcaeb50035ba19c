"""Tells of a step that takes far too long, with the stacks of all threads, while it hangs."""

import faulthandler
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_SHORTEST = 1.0  # seconds; a machine pauses for less than that on its own
_BETWEEN_STEPS = 60.0  # seconds that an evaluation's batch or a save may take
_ENOUGH = 5  # steps before there is a median


class Watchdog:
    """Watches the steps from a thread of its own; used as a context manager around them.

    Args:
        multiple: how many times the median a step may take; None never looks.
        log: takes a line.
        stream: where the stacks go, a file with a descriptor; None for stderr.
    """

    def __init__(
        self, multiple: float | None, log: Callable[[str], None], stream: TextIO | None = None
    ):
        self._multiple = multiple
        self._log = log
        self._stream = stream
        self._seconds: deque[float] = deque(maxlen=101)
        self._state: tuple[str, float] | None = None  # what is done now, and since when
        self._told: tuple[str, float] | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self, number: int) -> None:
        """Says that a step begins; cheap enough for every step."""
        now = time.monotonic()
        before = self._state
        if before is not None and before[0].startswith("step"):
            self._seconds.append(now - before[1])
        self._state = (f"step {number}", now)

    def other(self, what: str) -> None:
        """Says that something else begins: a batch of the evaluation, a save."""
        self._state = (what, time.monotonic())

    def __enter__(self) -> "Watchdog":
        if self._multiple is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(_SHORTEST / 4):
            state = self._state
            if state is None or state is self._told or len(self._seconds) < _ENOUGH:
                continue
            seconds = time.monotonic() - state[1]
            if seconds > self._limit(state[0]):
                self._told = state
                self._tell(state[0], seconds)

    def _limit(self, what: str) -> float:
        limit = (self._multiple or 0) * self._median()
        return max(limit, _SHORTEST if what.startswith("step") else _BETWEEN_STEPS)

    def _median(self) -> float:
        try:
            return statistics.median(self._seconds)
        except RuntimeError:  # the other thread added one meanwhile
            return statistics.median(list(self._seconds))

    def _tell(self, what: str, seconds: float) -> None:
        self._log(
            f"Slow: {what} has taken {seconds:.1f} s so far; the median step takes "
            f"{self._median():.3g} s. What every thread does now:"
        )
        try:
            faulthandler.dump_traceback(self._stream or sys.__stderr__ or 2, all_threads=True)
        except (OSError, ValueError, AttributeError, RuntimeError):
            pass  # no descriptor to write to: the line above has to do
