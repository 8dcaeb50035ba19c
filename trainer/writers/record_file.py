"""A file that grows by whole records, and survives a full disk and changes by other programs."""

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.writers.base import Log
from trainer.writers.files import Fence, Outage, blocks, replace_file

Merge = Callable[[Iterable[bytes], Iterable[bytes]], Iterable[bytes]]
_REMEMBERED = 1 << 20  # bytes at the end of a file that can be restored if they are cut off


class RecordFile:
    """A file that grows by whole records, even if the disk is full at times."""

    # The first write opens `path`, and creates it. `whole_records` is called with the file when it
    # is opened, and returns how many bytes at its beginning are whole records; the rest is cut off.
    # None empties the file. `log` is called with a line when a write fails for the first time, and
    # when one succeeds again. `end` is the offset after the last whole record.

    def __init__(self, path: Path, whole_records: Callable[[BinaryIO], int] | None, log: Log):
        self.path = path
        self.end = 0  # offset after the last whole record
        self._whole_records = whole_records
        self._outage = Outage(log)
        self._file: BinaryIO | None = None
        self._recent = bytearray()  # the bytes of the file from `_recent_from` to `end`
        self._recent_from = 0

    @property
    def error(self) -> str | None:
        """Why the last write failed; None if it succeeded."""
        return self._outage.error

    def write(self, data: bytes) -> bool:
        """Writes whole records at the end of the file; returns whether this succeeded."""
        # If not, `error` is the reason, the file is as before, and the caller may try again later.
        return self._try(lambda: self._append(data))

    def replace_from(self, start: int, data: bytes, fence: Fence) -> bool:
        """Replaces the records from an offset on, by a renamed file; returns as `write` does."""

        # `start` is where a record begins. A process that is killed meanwhile leaves the old
        # records or the new ones. `fence` is that of `replace_file`.
        def replace() -> None:
            file = self._open()
            file.seek(0)
            replace_file(self.path, itertools.chain(blocks(file, start), [data]), fence)
            self.close()
            self.open_existing()
            self._remember(start, data)
            self.end = start + len(data)

        return self._try(replace)

    def close(self) -> None:
        """Closes the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def open_existing(self) -> None:
        """Opens the file if it exists, so that later changes by other programs are noticed."""
        if self._file is None and self.path.exists():
            self._open()

    def change_by_others(self) -> str | None:
        """Returns what another program did to the file, such as "was deleted", or None."""
        if self._file is None:
            return None
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return "was deleted"
        except OSError:  # the next write reports the reason
            return None
        # The open file is still ours, even if the path now names another file.
        ours = os.fstat(self._file.fileno())
        if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
            return "was replaced"
        if now.st_size < self.end:
            return "was cut short"
        # After a write that failed, the file may end in a torn record of our own.
        return "was changed in place" if now.st_size > self.end and self.error is None else None

    def restore(self, merge: Merge, fence: Fence) -> bool:
        """Restores what others removed, by renaming a new file; returns as `write` does."""
        # A file that was deleted or replaced is still open here, and complete. If it was changed in
        # place, its last bytes, at least 1 MiB, are known from memory. `merge` takes the lines that
        # the file has now, and the known bytes that it had before, in pieces; it returns the new.

        def replace() -> None:
            replace_file(self.path, merge(self._lines_now(), self._before()), fence)
            # Open the new file before closing the old one, which stays in use if this fails.
            file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
            self.close()
            self._attach(file, file.seek(0, os.SEEK_END))

        return self._try(replace)

    def knows_old_content(self) -> bool:
        """Returns whether all bytes that the file had before it was changed are known."""
        return not self._was_changed_in_place() or self._recent_from == 0

    def _lines_now(self) -> Iterator[bytes]:
        if self.path.exists() and stat.S_ISREG(os.stat(self.path).st_mode):
            with open(self.path, "rb") as file:
                yield from file

    def _before(self) -> Iterator[bytes]:
        """Yields the known bytes that the file had before it was changed."""
        if self._file is not None and not self._was_changed_in_place():
            self._file.seek(0)
            yield from blocks(self._file, self.end)
        else:
            yield bytes(self._recent)

    def _was_changed_in_place(self) -> bool:
        """Returns whether the open file itself was changed, so that its old content is lost."""
        if self._file is None or os.fstat(self._file.fileno()).st_size < self.end:
            return True
        return self.change_by_others() not in ("was deleted", "was replaced")

    def _remember(self, start: int, data: bytes) -> None:
        """Records that the file has `data` from an offset on, and nothing after it."""
        if start < self._recent_from:
            self._recent, self._recent_from = bytearray(), start
        del self._recent[start - self._recent_from :]
        self._recent += data
        # Shorten it only at twice the size, so that the bytes are not moved at every write.
        if len(self._recent) > 2 * _REMEMBERED:
            self._recent_from += len(self._recent) - _REMEMBERED
            del self._recent[:-_REMEMBERED]

    def _try(self, action: Callable[[], None]) -> bool:
        """Runs an action; returns whether it raised no OSError, and reports one."""
        try:
            action()
        except OSError as e:
            self._outage.failed(
                f"{self.path} could not be written: {e}",
                "The data are kept in memory, and the next write tries again.",
            )
            return False
        self._outage.ended(f"{self.path} can be written again.")
        return True

    def _append(self, data: bytes) -> None:
        file = self._open()
        try:
            # A write that failed may have left bytes after the last whole record.
            file.seek(self.end)
            done = 0
            while done < len(data):
                # An unbuffered write may write only a part, for example on a full disk.
                done += file.write(data[done:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(self.end)
            raise
        self._remember(self.end, data)
        self.end += len(data)

    def _open(self) -> BinaryIO:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            # Unbuffered: a buffer would keep the bytes of a failed write for the next one.
            file = open(os.open(self.path, flags, 0o644), "r+b", buffering=0)
            with contextlib.ExitStack() as stack:
                stack.enter_context(file)  # closed if the disk fails
                self._attach(file, self._whole_records(file) if self._whole_records else 0)
                stack.pop_all()
            return file
        return self._file

    def _attach(self, file: BinaryIO, end: int) -> None:
        """Cuts an open file off at `end`, and writes to it from now on."""
        file.truncate(end)
        self._recent_from = max(0, end - _REMEMBERED)
        file.seek(self._recent_from)
        self._recent = bytearray(b"".join(blocks(file, end - self._recent_from)))
        self._file, self.end = file, end
