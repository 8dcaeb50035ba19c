"""Files that are whole at every moment: replaced by a rename, or growing by whole records."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # as replace_file names them


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: write, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
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
      sound: takes what the file holds at first and returns how many of its bytes are whole
        records; the rest is cut off. Without it the file is begun anew.
      log: takes a line when writing fails, once, and when it works again.
    """

    def __init__(
        self, path: Path, sound: Callable[[bytes], int] | None, log: Callable[[str], None]
    ) -> None:
        self.path = path
        self.end = 0  # offset after the last whole record
        self.error: str | None = None
        self._sound = sound
        self._log = log
        self._file: BinaryIO | None = None

    def write(self, data: bytes, at: int | None = None) -> bool:
        """Writes records at the end, or in place of those from offset `at` on.

        Returns whether it could. If not, `error` says why, the file is as it was before, and the
        caller may try the same later.
        """
        try:
            file = self._opened()
            start = self.end if at is None else at
            file.seek(start)
            replaced = file.read(self.end - start)
            try:
                self._put(file, start, data)
            except OSError:
                with contextlib.suppress(OSError):
                    self._put(file, start, replaced)
                raise
        except OSError as e:
            self._failed(e)
            return False
        if self.error is not None:
            self.error = None
            self._log(f"{self.path} can be written again.")
        return True

    def _put(self, file: BinaryIO, start: int, data: bytes) -> None:
        file.seek(start)
        done = 0
        while done < len(data):
            done += file.write(data[done:])
        file.truncate(start + done)
        self.end = start + done

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = open(os.open(self.path, flags, 0o644), "r+b", buffering=0)
            self.end = self._sound(file.read()) if self._sound else 0
            file.truncate(self.end)
            self._file = file
        return self._file

    def _failed(self, error: OSError) -> None:
        first, self.error = self.error is None, f"{self.path} could not be written: {error}"
        if first:
            self._log(f"{self.error}. What is missing is kept, and the next write tries again.")
