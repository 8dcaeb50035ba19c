"""Reports steps that take far too long, while they do."""

import faulthandler
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TextIO

_LOOK = 0.25  # seconds between two looks at what is done
# Seconds that count for one look at most. While the process is stopped, as by SIGSTOP, or has no
# core, this thread does not run either, and the steps must not count as slow.
_MOST_OF_A_LOOK = 1.0
_SHORTEST = 1.0  # seconds; shorter pauses occur on any machine and are not reported
_BETWEEN_STEPS = 60.0  # seconds that a batch of an evaluation, or a save, may take
_STALLED = 300.0  # seconds without any progress, after which the stacks of all threads are printed
_ENOUGH = 5  # times of steps that must be known before their median is used


class _Activity(NamedTuple):  # compared by identity: two of the same text differ
    what: str
    is_block: bool


class SlowLines:
    """Limits the lines about slow steps, which come one after the other on a busy machine."""

    # There are `between` seconds between two lines; if that is infinite, there is a single one.
    # `stacks` prints the stacks of all threads after each.

    def __init__(self, between: float = 60.0, *, stacks: bool = False):
        self.stacks, self._between = stacks, between
        self._last: float | None = None

    def take(self) -> bool:
        """Returns whether a line may be printed now; counts it as printed then."""
        now = time.monotonic()
        if self._last is not None and now - self._last < self._between:
            return False
        self._last = now
        return True


class Watchdog:
    """Watches the steps from a separate thread; used as a context manager around them."""

    # The loops of several trials may share one: they compute the same steps, in turns. A step may
    # take `multiple` times as long as the median; None disables the watchdog. After five minutes
    # without any progress a line and the stacks of all threads are printed, whatever `lines` says.
    # `stream` takes the stacks, and must have a descriptor; None for stderr.

    def __init__(
        self,
        multiple: float | None,
        log: Callable[[str], None],
        lines: SlowLines,
        stream: TextIO | None = None,
    ):
        self._multiple, self._log = multiple, log
        self._lines, self._stream = lines, stream
        self._seconds: deque[float] = deque(maxlen=101)  # of a step
        # Since the first block with the newest number began: when, the seconds in which something
        # else was done, and the steps that the devices have finished.
        self._first, self._elsewhere, self._done = 0, 0.0, 0
        self._since: float | None = None
        self._left: float | None = None  # when the blocks were left for something else
        self._unfinished = 0  # steps that were begun
        self._state: _Activity | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_block(self, first: int, steps: int) -> None:
        """Records that a block begins; cheap enough to be called at every block."""
        now = time.monotonic()
        if self._left is not None:
            self._elsewhere += now - self._left
            self._left = None
        if self._since is None:
            self._since, self._elsewhere = now, 0.0
        elif first != self._first and self._done:
            # From one `first` to the next, each trial that shares this watchdog computes a block:
            # the devices are as far behind the host at the end as they were at the beginning.
            self._seconds.append((now - self._since - self._elsewhere) / self._done)
            self._since, self._elsewhere, self._done = now, 0.0, 0
        self._first = first
        self._unfinished += steps
        what = f"the block of steps {first} to {first + steps - 1}"
        self._state = _Activity(f"step {first}" if steps == 1 else what, True)

    def end_block(self, steps: int) -> None:
        """Records that the devices have finished a block of so many steps."""
        self._done += steps
        self._unfinished -= steps
        if self._state is not None:
            self._state = _Activity(*self._state)

    def begin_other(self, what: str) -> None:
        """Records that something other than a block begins, such as "a save"."""
        # The text is used in the warning "Slow: a save has taken 70.0 s so far".
        if self._left is None:
            self._left = time.monotonic()
        self._state = _Activity(what, False)

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
        seen: _Activity | None = None
        seconds, slow, stalled = 0.0, False, False
        before = time.monotonic()
        while not self._end.wait(_LOOK):
            now = time.monotonic()
            seconds, before = seconds + min(now - before, _MOST_OF_A_LOOK), now
            if (state := self._state) is not seen:
                seen, seconds, slow, stalled = state, 0.0, False, False
            if state is None:
                continue
            usual = (self._multiple or 0.0) * self._median() * max(1, self._unfinished)
            if not stalled and seconds > max(usual, _STALLED):
                slow = stalled = True
                self._log(f"Nothing has moved for {seconds:.0f} s: {self._said(state, seconds)}")
                self._print_stacks()
            elif not slow and len(self._seconds) >= _ENOUGH:
                slow = seconds > max(usual, _SHORTEST if state.is_block else _BETWEEN_STEPS)
                if slow and self._lines.take():
                    self._log(f"Slow: {self._said(state, seconds)}")
                    if self._lines.stacks:
                        self._print_stacks()

    def _median(self) -> float:
        """Returns the median time of a step; 0 if none is known."""
        try:
            seconds = list(self._seconds)
        except RuntimeError:  # the other thread appended to it meanwhile
            return self._median()
        return statistics.median(seconds) if seconds else 0.0

    def _said(self, state: _Activity, seconds: float) -> str:
        known = f"; the median step takes {self._median():.3g} s" if self._seconds else ""
        return f"{state.what} has taken {seconds:.1f} s so far{known}."

    def _print_stacks(self) -> None:
        self._log("What every thread does now:")
        try:
            faulthandler.dump_traceback(self._stream or sys.__stderr__ or 2, all_threads=True)
        except (OSError, ValueError, AttributeError, RuntimeError):
            pass  # there is no descriptor to write to; the lines were logged
