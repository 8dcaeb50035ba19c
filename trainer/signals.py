"""Turns SIGTERM, SIGINT and SIGUSR1 into a wish to stop at the next safe point."""

import os
import signal
from types import FrameType, TracebackType


class StopSignals:
    """Notes the first stop signal; the second one ends the process at once.

    Used as a context manager around a run, in the main thread.

    Attributes:
        received: the name of the signal that asked to stop, or None.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            os.write(2, f"{name} again: stopping at once.\n".encode())
            os._exit(128 + number)
        self.received = name
        os.write(2, f"{name}: stopping after a checkpoint; once more to stop at once.\n".encode())
