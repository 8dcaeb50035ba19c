"""Supplies a run with batches, ahead of the steps, and measures how long the devices wait for them.

Batches that are made quickly are made by the main thread, while the devices compute earlier steps.
Batches that take longer are made ahead by another thread. Either way a run gets the same batches in
the same order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from trainer.engine.contracts import Batch

_LONG = 1e-3  # mean seconds of a batch above which a thread makes the next ones
_NEWEST = 0.1  # weight of the newest batches in this mean
_POLL = 5e-4  # seconds between two looks at the devices while the steps wait for a batch
_PATIENCE = 5.0  # seconds that `close` waits for a thread that still makes a batch


@dataclass
class _Made:
    """What a thread has made; each has its own, as one may outlive `BatchPrefetcher.close`."""

    batches: deque[Batch] = field(default_factory=deque)  # that were not taken yet
    error: BaseException | None = None  # what the data set raised instead of the next one
    closed: bool = False

    @property
    def waiting(self) -> bool:
        """Whether there is a batch or an error to take."""
        return bool(self.batches) or self.error is not None


class BatchPrefetcher:
    """The training batches of a loop, of which a thread makes up to `ahead` ahead; 0 has none."""

    # `busy` returns whether the devices still compute steps. `waited` are the seconds in which they
    # had nothing to compute because a batch was missing.

    def __init__(
        self, ahead: int, busy: Callable[[], bool], now: Callable[[], float] = time.perf_counter
    ):
        self.waited, self._ahead = 0.0, ahead
        self._busy, self._now = busy, now
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._made = _Made()
        self.start(iter(()))

    def start(self, batches: Iterator[Batch]) -> None:
        """Supplies the batches of another endless iterator, which nothing else may read."""
        self.close()
        self._batches = batches
        self._mean: float | None = None
        self._made = _Made()

    def take(self, count: int) -> list[Batch]:
        """Returns the next `count` batches; raises what the data set raised when it made one."""
        if self._thread is not None:
            return [self._next() for _ in range(count)]
        start = self._now()
        taken = list(islice(self._batches, count))
        seconds = self._now() - start
        # One look after all batches: if the devices became idle meanwhile, this is an upper bound.
        if not self._busy():
            self.waited += seconds
        # The first batches do not count: making them may open files or shuffle an epoch.
        if self._mean is None:
            self._mean = 0.0
        else:
            self._mean += _NEWEST * (seconds / count - self._mean)
        if self._ahead and self._mean > _LONG:
            self._thread = threading.Thread(
                target=self._make, args=(self._batches, self._made), name="batches", daemon=True
            )
            self._thread.start()
        return taken

    def close(self) -> None:
        """Ends the thread, if there is one; the batches that it made ahead are lost."""
        with self._changed:
            self._made.closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        self._thread = None

    def _next(self) -> Batch:
        """Takes a batch that the thread made; waits for it if there is none."""
        made = self._made
        with self._changed:
            looked = self._now()  # when the devices were last seen at work
            idle: float | None = None  # about when they ran out of work
            while not made.waiting:
                idle, looked = self._look(idle, looked)
                self._changed.wait(_POLL if idle is None else None)
                if made.waiting:
                    idle, _ = self._look(idle, looked)
            if idle is not None:
                self.waited += self._now() - idle
            if not made.batches:
                assert made.error is not None
                raise made.error
            batch = made.batches.popleft()
            self._changed.notify_all()
        return batch

    def _look(self, idle: float | None, looked: float) -> tuple[float | None, float]:
        now = self._now()
        if idle is None and not self._busy():
            idle = (looked + now) / 2
        return idle, now

    def _make(self, batches: Iterator[Batch], made: _Made) -> None:
        """Makes batches until `made` is closed; runs in the thread."""
        while True:
            try:
                batch = next(batches)
            except BaseException as error:  # raised where the batch is taken
                with self._changed:
                    made.error = error
                    self._changed.notify_all()
                return
            with self._changed:
                made.batches.append(batch)
                self._changed.notify_all()
                self._changed.wait_for(lambda: made.closed or len(made.batches) < self._ahead)
                if made.closed:
                    return
