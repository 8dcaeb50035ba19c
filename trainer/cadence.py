"""Says when to save besides every `save_every` steps, so that a kill never costs a whole run; and
how fast the steps are.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST = 10.0  # seconds of stepping before the first save that nobody asked for
_HURRIED = 1.0  # the shortest pause between two of them
_SHARE = 20.0  # a pause is at least so many times what a save held the steps up


class Cadence:
    """Spaces saves that `save_every` does not ask for: after 10 s, then 20 s, 40 s, ...

    A kill thus costs at most about half of the time that a process ran. After a process that was
    killed the first one comes right after the first step, then after 1 s, 2 s, ...: kills that come
    faster than checkpoints would still leave each process a step ahead of the one before. The
    pauses grow with what a save costs, so that saves take a twentieth of the time at most. When a
    state is saved changes nothing about what is computed.

    Args:
        hurry: whether the process before this one was killed.
        clock: seconds.
    """

    def __init__(self, hurry: bool = False, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pause = 0.0 if hurry else _FIRST
        self._since: float | None = None

    def due(self) -> bool:
        """Tells, after a step, whether to save now; cheap enough for every step."""
        now = self._clock()
        if self._since is None:  # compiling is not stepping
            self._since = now
        return now - self._since >= self._pause

    def saved(self, held_up: float) -> None:
        """Notes a save, asked for or not, and for how many seconds it held the steps up."""
        if self._since is not None and self.due():
            self._pause = max(2 * self._pause, _HURRIED)
        self._pause = max(self._pause, _SHARE * held_up)
        self._since = self._clock()


class Stopwatch:
    """Times the steps as the device finishes them, without evaluations and saves.

    Args:
        step: finished steps, now.
        clock: seconds.
    """

    def __init__(self, step: int, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._last = step, clock()
        self._rate = 0.0

    def lap(self, step: int) -> None:
        """Says that a step is finished."""
        (before, since), now = self._last, self._clock()
        self._rate = (step - before) / max(now - since, 1e-9)
        self._last = step, now

    def speed(self, batch_size: int) -> dict[str, float]:
        """Returns the steps and examples per second of the last lap, as metrics."""
        examples = self._rate * batch_size
        return {"perf/steps_per_second": self._rate, "perf/examples_per_second": examples}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves out what is done meanwhile."""
        start = self._clock()
        yield
        step, since = self._last
        self._last = step, since + self._clock() - start


def was_killed(run_file: Path) -> bool:
    """Tells from run.json whether the process before the present one was killed."""
    try:
        lineage = json.loads(run_file.read_text())["lineage"]
        return len(lineage) > 1 and lineage[-2]["exit"] == "killed"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
