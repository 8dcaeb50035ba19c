"""Turns SIGTERM, SIGINT and SIGUSR1 into a wish to stop at the next safe point."""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType


class StopSignals:
    """Notes the first stop signal; the second one ends the process at once.

    Used as a context manager around a run, in the main thread. A thread of its own reads the
    signals, so that the second one works also while the main thread compiles: Python runs no
    handler before a call into C returns.

    Attributes:
        received: the name of the signal that asked to stop, or None.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> "StopSignals":
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=self._read, args=(reading,), name="signals", daemon=True)
        thread.start()
        self._wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        if self._pipe is not None:
            os.close(self._pipe[1])  # which ends the thread

    def _read(self, reading: int) -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] in self.SIGNALS:
                self._note(numbers[0])
        os.close(reading)

    def _note(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            _tell(f"{name} again: stopping at once.")
            os._exit(128 + number)
        self.received = name
        _tell(f"{name}: stopping after a checkpoint; once more to stop at once.")


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # this thread must live, whoever reads
        os.write(2, f"{line}\n".encode())


def _nothing(number: int, frame: FrameType | None) -> None:
    """Stands for a handler, so that the signal does not end the process."""
