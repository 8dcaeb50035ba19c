"""Files that are whole at every moment: replaced by a rename, or growing by whole records."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.writers.durable import sync
from trainer.writers.outage import Outage

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # as replace_file names them
_BLOCK = 1 << 20
_REMEMBERED = 1 << 20  # bytes at the end of a file that can be put back if they are cut off


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
    sync(path.parent)


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
        self._sound = sound
        self._outage = Outage(log)
        self._file: BinaryIO | None = None
        self._recent = bytearray()  # what the file holds from `_recent_from` to `end`
        self._recent_from = 0

    @property
    def error(self) -> str | None:
        """Why the last write failed; None if it succeeded."""
        return self._outage.error

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
        """Closes the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # What another program does to the file.

    def watch(self) -> None:
        """Opens the file if there is one, so that a change is noticed from now on."""
        if self._file is None and self.path.exists():
            self._opened()

    def changed(self) -> str | None:
        """Returns what another program did to the file since it was written, such as "was deleted".

        None if nothing, or if this object has not opened the file.
        """
        if self._file is None:
            return None
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return "was deleted"
        except OSError:  # the next write says why
            return None
        ours = os.fstat(self._file.fileno())
        if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
            return "was replaced"
        if now.st_size < self.end:
            return "was cut short"
        # After a write that failed, the file may end in a torn record of our own.
        return "was changed in place" if now.st_size > self.end and self.error is None else None

    def restore(
        self,
        merge: Callable[[Iterable[bytes], Iterable[bytes]], Iterable[bytes]],
        fence: Callable[[], None] | None,
    ) -> bool:
        """Puts back what another program removed from the file; the file is replaced by a rename.

        A file that was deleted or replaced is still open here, and whole. Of one that was changed
        in place, the last `_REMEMBERED` bytes are known.

        Args:
            merge: takes the lines that the file holds now, and the bytes that are known of what it
                held before, in pieces; returns what it is to hold.
            fence: as `replace_file` takes it.

        Returns what write() returns.
        """

        def put_back() -> None:
            content = merge(self._lines_now(), self._before())
            replace_file(self.path, content, fence)
            file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
            self.close()
            self._attach(file, file.seek(0, os.SEEK_END))

        return self._tried(put_back)

    def knows_all(self) -> bool:
        """Tells whether all is known that a file held before it was changed."""
        return not self._in_place() or self._recent_from == 0

    def _lines_now(self) -> Iterator[bytes]:
        if self.path.exists() and stat.S_ISREG(os.stat(self.path).st_mode):
            with open(self.path, "rb") as file:
                yield from file

    def _before(self) -> Iterator[bytes]:
        """Yields what is known of the file before it was changed."""
        if self._file is not None and not self._in_place():
            self._file.seek(0)
            yield from blocks(self._file, self.end)
        else:
            yield bytes(self._recent)

    def _in_place(self) -> bool:
        if self._file is None or os.fstat(self._file.fileno()).st_size < self.end:
            return True
        return self.changed() not in ("was deleted", "was replaced")

    def _remember(self, start: int, data: bytes) -> None:
        """Notes that the file holds `data` from an offset on, and nothing after it."""
        if start < self._recent_from:
            self._recent, self._recent_from = bytearray(), start
        del self._recent[start - self._recent_from :]
        self._recent += data
        if len(self._recent) > 2 * _REMEMBERED:
            self._recent_from += len(self._recent) - _REMEMBERED
            del self._recent[:-_REMEMBERED]

    # Inside.

    def _tried(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as e:
            self._outage.failed(
                f"{self.path} could not be written: {e}",
                "What is missing is kept, and the next write tries again.",
            )
            return False
        self._outage.ended(f"{self.path} can be written again.")
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
        self._remember(self.end, data)
        self.end += len(data)

    def _replace(self, start: int, data: bytes, fence: Callable[[], None] | None) -> None:
        file = self._opened()
        file.seek(0)
        replace_file(self.path, itertools.chain(blocks(file, start), [data]), fence)
        self.close()
        self.watch()
        self._remember(start, data)
        self.end = start + len(data)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = open(os.open(self.path, flags, 0o644), "r+b", buffering=0)
            self._attach(file, self._sound(file) if self._sound else 0)
            return file
        return self._file

    def _attach(self, file: BinaryIO, end: int) -> None:
        """Takes an open file as the one to write to, and cuts off what follows `end`."""
        file.truncate(end)
        self._recent_from = max(0, end - _REMEMBERED)
        file.seek(self._recent_from)
        self._recent = bytearray(b"".join(blocks(file, end - self._recent_from)))
        self._file, self.end = file, end


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
