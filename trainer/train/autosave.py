"""Decides when to save besides every `save_every` steps."""

import time
from collections.abc import Callable
from pathlib import Path

from trainer.writers.json_files import DamagedFile
from trainer.writers.run_record import read_record

_FIRST_PAUSE = 10.0  # seconds of stepping before the first autosave
_SHORTEST_PAUSE = 1.0  # seconds between two autosaves after a kill
_COST_RATIO = 20.0  # a pause is at least this many times as long as a save delays the steps


class AutosavePolicy:
    """Decides when to save besides every `save_every` steps: after 10 s, then 20 s, 40 s, ..."""

    # A kill costs at most about half of the time that a process ran. After a kill, the first save
    # follows the first block, so that a run that is killed again and again still advances. Saves
    # take at most a twentieth of the time. They do not change what is computed.

    def __init__(self, after_kill: bool = False, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pause = 0.0 if after_kill else _FIRST_PAUSE
        self._since: float | None = None

    def due(self) -> bool:
        """Returns whether to save now; cheap enough to be called after every block."""
        now = self._clock()
        if self._since is None:  # the first block compiles, which does not count
            self._since = now
        return now - self._since >= self._pause

    def record_save(self, delay: float) -> None:
        """Records a save of any kind, which delayed the steps by `delay` seconds."""
        # A save by `save_every` before the pause is over does not double the pause.
        if self._since is not None and self.due():
            self._pause = max(2 * self._pause, _SHORTEST_PAUSE)
        self._pause = max(self._pause, _COST_RATIO * delay)
        self._since = self._clock()


def was_killed(run_file: Path) -> bool:
    """Returns whether the process before this one was killed; False if run.json is unreadable."""
    # This process must be recorded there already.
    try:
        lineage = (read_record(run_file) or {"lineage": []})["lineage"]
    except (OSError, DamagedFile):
        return False
    return len(lineage) > 1 and lineage[-2].get("exit") == "killed"
