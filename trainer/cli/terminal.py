"""Terminal output: escapes control characters, and never ends a run that cannot print."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TextIO

from trainer.messages import printable

_KEPT = "\n\t"


def show(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Prints a text, and escapes control characters except tabs and line breaks."""
    # All output of commands must use this function, because names in configs, of files and of
    # metrics may have any characters. tests/house/test_house.py checks it.
    print(printable(text, keep=_KEPT), file=stream or sys.stdout, end=end, flush=True)


def log(line: str) -> None:
    """Prints a line to stderr."""
    show(line, sys.stderr)


class Redrawn:
    """Lines at the end of a terminal that are redrawn in place, below all other lines."""

    # The terminal must understand the control sequences of ECMA-48.

    def __init__(self, stream: TextIO):
        self._stream, self._drawn = stream, 0

    def draw(self, lines: Sequence[str], above: str = "") -> None:
        """Replaces the lines drawn before, as many as fit; `above` stays above them for good."""
        width, height = 80, 24
        # shutil.get_terminal_size would ask stdout, which may be a file.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if all(size := os.get_terminal_size(self._stream.fileno())):
                width, height = size
        # Leave out the last column and row, where a terminal would wrap a line, or scroll.
        lines = [printable(line)[: width - 1] for line in lines[: height - 1]]
        text = f"{printable(above, keep=_KEPT)}\n" if above else ""
        text += "".join(f"{line}\n" for line in lines)
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        # A single write, so that the terminal never shows lines that are half drawn.
        print(f"{up}\r\x1b[J{text}", file=self._stream, end="", flush=True)
        self._drawn = len(lines)


class BestEffortStream:
    """A context manager that replaces stdout or stderr with a stream that never raises."""

    # Text that cannot be written is dropped, so that a closed terminal, a pipe without a reader or
    # a full disk does not end a run, prevent its last checkpoint or change its exit code. A stream
    # that is None, because the process was started without it, is not replaced.

    def __init__(self, name: Literal["stdout", "stderr"]):
        self._name = name
        self._stream: Any = None
        self._error: OSError | None = None

    @property
    def error(self) -> OSError | None:
        """The first error of a write, or None."""
        # A reader that closes its pipe early, as in `... explain | head`, does not count.
        return None if isinstance(self._error, BrokenPipeError) else self._error

    def __enter__(self) -> "BestEffortStream":
        self._stream = getattr(sys, self._name)
        if self._stream is not None:
            setattr(sys, self._name, self)
        return self

    def __exit__(self, *raised: object) -> None:
        setattr(sys, self._name, self._stream)
        if self._stream is None:
            return
        self.flush()
        if self._error is not None:
            # Python flushes the stream again when it exits, and exits with 120 if that fails.
            with contextlib.suppress(OSError, ValueError):
                null_device = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null_device, self._stream.fileno())
                os.close(null_device)

    def write(self, text: str) -> int:
        """Writes a text, or drops it; returns its length in either case."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._error = self._error or error
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes or drops each of several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream, or drops what cannot be flushed."""
        try:
            self._stream.flush()
        except OSError as error:
            self._error = self._error or error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
