"""Reports a step that takes far too long, with the stacks of all threads, while it runs."""

import faulthandler
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TextIO

_SHORTEST = 1.0  # seconds; shorter pauses occur on any machine and are not reported
_BETWEEN_STEPS = 60.0  # seconds that a batch of an evaluation, or a save, may take
_ENOUGH = 5  # times of steps that must be known before their median is used
_AHEAD = 2  # blocks that the host may start before the devices have finished the ones before


class _Activity(NamedTuple):
    what: str
    began: float  # of the monotonic clock
    steps: int  # of the block; 0 for anything else


class Watchdog:
    """Watches the steps from a separate thread; used as a context manager around them.

    Args:
        multiple: how many times as long as the median a step may take; None disables it.
        log: takes a line for the user.
        stream: a file with a descriptor, to which the stacks are written; None for stderr.
    """

    def __init__(
        self, multiple: float | None, log: Callable[[str], None], stream: TextIO | None = None
    ):
        self._multiple = multiple
        self._log = log
        self._stream = stream
        self._seconds: deque[float] = deque(maxlen=101)
        # The blocks since something else was done: their number, their steps, and their beginning.
        self._blocks, self._steps, self._since = 0, 0, 0.0
        self._state: _Activity | None = None
        self._reported: _Activity | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def block(self, first: int, steps: int) -> None:
        """Records that a block of steps begins; cheap enough to be called at every block.

        Args:
            first: the number of its first step.
            steps: the number of its steps.
        """
        now = time.monotonic()
        before = self._state
        if before is None or not before.steps:
            self._blocks, self._steps, self._since = 0, 0, now
        elif self._blocks > _AHEAD:  # the first ones are only started, which takes little time
            self._seconds.append((now - before.began) / before.steps)
        self._blocks += 1
        self._steps += steps
        name = (
            f"step {first}" if steps == 1 else f"the block of steps {first} to {first + steps - 1}"
        )
        self._state = _Activity(name, now, steps)

    def other(self, what: str) -> None:
        """Records that something else than a block begins.

        Args:
            what: such as "a save"; used in the warning "Slow: a save has taken 70.0 s so far".
        """
        now = time.monotonic()
        if self._state is not None and self._state.steps:
            # The devices have finished all blocks before something else is done.
            self._seconds.append((now - self._since) / self._steps)
        self._state = _Activity(what, now, 0)

    def __enter__(self) -> "Watchdog":
        if self._multiple is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(_SHORTEST / 4):
            state = self._state
            if state is None or state is self._reported or len(self._seconds) < _ENOUGH:
                continue
            seconds = time.monotonic() - state.began
            if seconds > self._limit(state.steps):
                self._reported = state
                self._report(state.what, seconds)

    def _limit(self, steps: int) -> float:
        limit = (self._multiple or 0) * self._median() * max(1, steps)
        return max(limit, _SHORTEST if steps else _BETWEEN_STEPS)

    def _median(self) -> float:
        try:
            return statistics.median(self._seconds)
        except RuntimeError:  # the other thread appended to it meanwhile
            return statistics.median(list(self._seconds))

    def _report(self, what: str, seconds: float) -> None:
        self._log(
            f"Slow: {what} has taken {seconds:.1f} s so far; the median step takes "
            f"{self._median():.3g} s. What every thread does now:"
        )
        try:
            faulthandler.dump_traceback(self._stream or sys.__stderr__ or 2, all_threads=True)
        except (OSError, ValueError, AttributeError, RuntimeError):
            pass  # there is no descriptor to write to; the line was logged
