"""Files that are whole at every moment: replaced by a rename, or growing by whole records."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # as replace_file names them
_BLOCK = 1 << 20


def replace_file(
    path: Path, content: bytes | Iterable[bytes], fence: Callable[[], None] | None = None
) -> None:
    """Writes a file whole or not at all: beside it, synced, renamed.

    Args:
      path: the file.
      content: its bytes, or pieces of them.
      fence: called just before the rename, after all that takes long; what it raises is raised.
    """
    pieces = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if fence is not None:
            fence()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_temporaries(directory: Path) -> None:
    """Removes what a process that was killed left of `replace_file`; its writer alone may."""
    for path in directory.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


class RecordFile:
    """A file that grows by whole records, also where the disk is full at times.

    Args:
      path: the file; opened, and made, by the first write.
      sound: takes what the file is at first and returns how many of its bytes are whole records;
        the rest is cut off. Without it the file is begun anew.
      log: takes a line when writing fails, once, and when it works again.
    """

    def __init__(
        self, path: Path, sound: Callable[[BinaryIO], int] | None, log: Callable[[str], None]
    ) -> None:
        self.path = path
        self.end = 0  # offset after the last whole record
        self.error: str | None = None
        self._sound = sound
        self._log = log
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> bool:
        """Writes records at the end.

        Returns whether it could. If not, `error` says why, the file is as it was before, and the
        caller may try the same later.
        """
        return self._tried(lambda: self._append(data))

    def replace_from(self, start: int, data: bytes, fence: Callable[[], None] | None) -> bool:
        """Puts records in place of those from an offset on; the file is replaced by a rename.

        A process that is killed meanwhile leaves the old records or the new ones. Returns what
        write() returns.
        """
        return self._tried(lambda: self._replace(start, data, fence))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tried(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as e:
            first, self.error = self.error is None, f"{self.path} could not be written: {e}"
            if first:
                missing = "What is missing is kept, and the next write tries again."
                self._log(f"{self.error}. {missing}")
            return False
        if self.error is not None:
            self.error = None
            self._log(f"{self.path} can be written again.")
        return True

    def _append(self, data: bytes) -> None:
        file = self._opened()
        try:
            file.seek(self.end)
            done = 0
            while done < len(data):
                done += file.write(data[done:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(self.end)
            raise
        self.end += len(data)

    def _replace(self, start: int, data: bytes, fence: Callable[[], None] | None) -> None:
        file = self._opened()
        file.seek(0)
        replace_file(self.path, itertools.chain(blocks(file, start), [data]), fence)
        self.close()
        self.end = start + len(data)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = open(os.open(self.path, flags, 0o644), "r+b", buffering=0)
            self.end = self._sound(file) if self._sound else 0
            file.truncate(self.end)
            self._file = file
        return self._file


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes of a file, or as many as there are, in blocks."""
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        size -= len(block)
        yield block


def after_newline(file: BinaryIO, end: int) -> int:
    """Returns the offset after the last newline before `end`, found from behind; 0 for none."""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = b"".join(blocks(file, end - start)).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
