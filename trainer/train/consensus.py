"""Decides when the processes of a run stop and save, all of them after the same step."""

import time

import jax

from trainer.checkpoint.agreement import gather
from trainer.train.autosave import AutosavePolicy
from trainer.train.signals import StopSignals

_BETWEEN_SYNCS = 2.0  # seconds; a synchronization takes milliseconds


class _SyncInterval:
    """Counts the calls from one synchronization to the next, and times them."""

    def __init__(self):
        self.restart(1)

    def restart(self, calls: int) -> None:
        """Sets after how many calls of `is_over` the processes synchronize next."""
        self.calls = self._remaining = calls
        self._start = time.monotonic()

    def is_over(self) -> bool:
        """Counts one call, and returns whether the interval ends with it."""
        self._remaining -= 1
        return self._remaining <= 0

    def milliseconds(self) -> int:
        """Returns the time since the interval began."""
        # The processes exchange int32.
        return min(int(1000 * (time.monotonic() - self._start)), 10**9)


class StopSaveConsensus:
    """Decides, for all processes of a run together, when to stop and when to save.

    A single process decides alone and at once. Several processes synchronize every few blocks
    of steps, because all of them must compute the same steps and save the same states. When they
    synchronize is counted in blocks and not read from a clock, because no two clocks agree: each
    synchronization sets the number of blocks until the next one, from the time that the slowest
    process took.

    Args:
        signals: reports when this process is to stop.
        autosave: reports when to save besides every `save_every` steps.
    """

    def __init__(self, signals: StopSignals, autosave: AutosavePolicy):
        self._signals = signals
        self._autosave = autosave
        self._alone = jax.process_count() == 1
        self._stop: str | None = None
        self._save = False
        self._intervals = {"block": _SyncInterval(), "batch": _SyncInterval()}

    def sync(self, after: str = "block") -> None:
        """Agrees with the other processes on stopping and saving, if the interval is over.

        Every process calls it after every block of steps, and after every batch of an evaluation.

        Args:
            after: "block" or "batch": what the process has just finished.
        """
        interval = self._intervals[after]
        if self._alone or not interval.is_over():
            return
        received = self._signals.received
        names = [signal.name for signal in self._signals.SIGNALS]
        number = names.index(received) + 1 if received else 0  # integers are exchanged; 0 is none
        mine = [number, int(self._autosave.due()), interval.milliseconds()]
        # [processes, 3]: the wish of one process counts for all, and the time of the slowest one.
        stop, save, slowest = gather(mine).max(axis=0)
        self._stop = names[stop - 1] if stop else self._stop
        self._save = bool(save)
        interval.restart(calls_to_next_sync(interval.calls, int(slowest) / 1000))

    @property
    def stop(self) -> str | None:
        """The name of the signal that asked the run to stop, or None."""
        return self._signals.received if self._alone else self._stop

    def save_now(self) -> bool:
        """Returns whether to save after this block although `save_every` does not ask for it."""
        return self._autosave.due() if self._alone else self._save

    def saved(self, held_up: float) -> None:
        """Records a save.

        Args:
            held_up: seconds for which the save delayed the steps.
        """
        self._save = False
        self._autosave.saved(held_up)


def calls_to_next_sync(calls: int, seconds: float) -> int:
    """Returns after how many blocks of steps, or batches, the processes synchronize next.

    Args:
        calls: how many the last interval had; the next has at most twice as many, and lasts about
            two seconds.
        seconds: how long they took in the slowest process.
    """
    return max(1, min(2 * calls, int(calls * _BETWEEN_SYNCS / max(seconds, 1e-3))))
