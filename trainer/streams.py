"""What is printed: a console that cannot be written loses lines, and never a run."""

import contextlib
import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TextIO

from trainer.config.tree import printable


def show(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Prints a text, with control characters other than tabs and line breaks escaped.

    Whatever a command prints goes through here, as names of a config, of files and of metrics may
    hold any character; a test holds the house to it.

    Args:
        text: what to print.
        stream: where to; None for stdout.
        end: what follows the text.
    """
    print(printable(text, keep="\n\t"), file=stream or sys.stdout, end=end, flush=True)


class Console:
    """Puts streams in place of stdout and stderr that drop what they cannot write.

    A terminal that is gone, a pipe that nobody reads, a full disk: none of them ends a run, keeps
    it from its last checkpoint, or alters its exit code. A context manager around a command.

    Attributes:
        error: why what went to stdout is not whole, or None; that the reader of a pipe has had
            enough, as in `... explain | head`, is no error.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None
        self._before: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> "Console":
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (stream and _Dropping(stream) for stream in self._before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._before is not None
        ours, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), self._before
        for stream in ours:
            if isinstance(stream, _Dropping):
                stream.end()
        if isinstance(ours[0], _Dropping) and not isinstance(ours[0].error, BrokenPipeError):
            self.error = ours[0].error


class _Dropping:
    """A text stream, but for what cannot be written to it; `error` is the first reason."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = self.error or error
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.error = self.error or error

    def end(self) -> None:
        """Flushes; what still waits then goes nowhere, or Python would exit with 120 over it."""
        self.flush()
        if self.error is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
