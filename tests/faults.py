"""Disturbs a process in the n-th of its file operations on a folder."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Operations that Python announces before it does them; an exception of the hook ends the operation.
_ANNOUNCED = {
    *("open", "fcntl.flock", "os.chmod", "os.listdir", "os.mkdir", "os.remove", "os.rename"),
    *("os.rmdir", "os.scandir", "os.truncate"),
}
# Of `os`; these it does not announce.
_OTHERS = ("stat", "fstat", "fsync", "ftruncate", "write", "pwrite")


def fail(code: int) -> Callable[[str | None], None]:
    """Returns an action that lets an operation fail.

    Args:
        code: the error of the system, such as errno.EIO.
    """

    def action(path: str | None) -> None:
        raise OSError(code, os.strerror(code), path)

    return action


class Faults:
    """Counts the file operations of this thread on a folder, and does something before one.

    Attributes:
        seen: the operations since `on`, such as "open DIR/lock".
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._folder: Path | None = None
        self._thread = 0
        sys.addaudithook(self._announced)  # for good: Python has no way to remove one

    @contextlib.contextmanager
    def on(
        self, folder: Path, number: int = -1, action: Callable[[str | None], None] | None = None
    ) -> Iterator[None]:
        """Counts the operations on what is in a folder.

        Args:
            folder: the folder.
            number: the index of the operation before which `action` is called; -1 for none.
            action: takes the path; None of a file that is open, which an error does not name.
        """
        self._number, self._action, self.seen = number, action, []
        self._thread, self._folder = threading.get_ident(), folder
        kept = {name: getattr(os, name) for name in _OTHERS}
        for name, inner in kept.items():
            setattr(os, name, self._counted(name, inner))
        try:
            yield
        finally:
            self._folder = None
            for name, inner in kept.items():
                setattr(os, name, inner)

    def _announced(self, event: str, arguments: tuple) -> None:
        if self._folder is not None and event in _ANNOUNCED:
            self._operation(event, arguments[0])

    def _counted(self, name: str, inner: Callable) -> Callable:
        @functools.wraps(inner)
        def outer(place, *arguments, **named):
            self._operation(name, place)
            return inner(place, *arguments, **named)

        return outer

    def _operation(self, name: str, place: object) -> None:
        if self._folder is None or threading.get_ident() != self._thread:
            return
        folder, self._folder = self._folder, None  # what is done here does not count
        try:
            path = _path(place)
            if path is None or not path.startswith(f"{folder}"):
                return
            self.seen.append(f"{name} {path}")
            if len(self.seen) == self._number + 1 and self._action is not None:
                self._action(None if isinstance(place, int) else path)
        finally:
            self._folder = folder


def _path(place: object) -> str | None:
    """Returns the path of a file that is named or open; None for other files."""
    if isinstance(place, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{place}")
        return None
    return os.fspath(place) if isinstance(place, str | os.PathLike) else None
