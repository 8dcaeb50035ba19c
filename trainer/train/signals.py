"""Turns SIGTERM, SIGINT and SIGUSR1 into a request to stop after the next checkpoint."""

import contextlib
import os
import signal
import threading


class StopSignals:
    """Records the first stop signal; the second one ends the process at once."""

    # Used as a context manager around a run, in the main thread. A separate thread reads the
    # signals, so that the second one works while the main thread compiles: Python runs signal
    # handlers only after a call into C returns. If the process ends after the context
    # (`until_exit`), they are ignored while Python shuts down, so that the exit code is that of the
    # run. `received` is the name of the first, or None.

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, until_exit: bool = False) -> None:
        self.received: str | None = None
        self._until_exit = until_exit
        self._before: dict[signal.Signals, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> "StopSignals":
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)  # as set_wakeup_fd requires
        threading.Thread(target=self._read, args=(reading,), name="signals", daemon=True).start()
        self._wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            # The default handler would end the process.
            self._before[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            after = signal.SIG_IGN if self._until_exit else handler
            signal.signal(number, after)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        if self._pipe is not None:
            os.close(self._pipe[1])  # ends the thread

    def _read(self, reading: int) -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] in self.SIGNALS:
                self._record(numbers[0])
        os.close(reading)

    def _record(self, number: int) -> None:
        """Records a signal; ends the process if another one was recorded before."""
        name = signal.Signals(number).name
        if self.received is not None:
            _print_to_stderr(f"{name} again: stopping at once.")
            os._exit(128 + number)  # the exit code that shells give a process killed by a signal
        self.received = name
        _print_to_stderr(
            f"{name}: stopping once what is computed is saved; once more to stop at once."
        )


def _print_to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed stderr must not end this thread
        os.write(2, f"{line}\n".encode())


def stop_with_the_caller() -> None:
    """Lets this process save and end when the process that started it has ended."""
    # The caller holds the other end of a pipe, which is the standard input of this process.

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(0, 1)  # nothing is ever written: returns when the caller's end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end of the caller", daemon=True).start()
