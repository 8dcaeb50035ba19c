"""The locks in the folder of a sweep, of the file system and without its help."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.messages import UserError
from trainer.writers import holders

_PAUSE = 0.1  # seconds between two tries to get a lock
_BEATS = 3  # for which the holder of a file must not be seen, before it counts as dead


def lock(descriptor: int, *, wait: bool) -> bool:
    """Locks an open file; returns whether it could.

    Args:
        descriptor: of the file.
        wait: whether to wait for a process that holds the lock.

    Raises:
        UserError: the file system has no locks.
    """
    locked = holders.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    if locked is None:  # not an error of the disk, which may be gone at a later start
        raise UserError(
            "The file system of the sweep's folder has no locks, which keep two workers from the"
            " same trials: add --locks=heartbeat, or choose a --workdir on another file system."
        )
    return locked


def is_locked(file: Path) -> bool:
    """Returns whether a process holds the lock of a file, as far as this machine sees.

    Args:
        file: the file; one that does not exist is not locked.
    """
    try:
        # Otherwise a pipe would be waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        return not share(descriptor)
    finally:
        os.close(descriptor)


def share(descriptor: int) -> bool:
    """Keeps others from locking an open file, until it is closed; returns whether it could.

    Several processes may do so at the same time. On a file system without locks it does nothing.

    Args:
        descriptor: of the file.
    """
    return holders.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB) is not False


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other processes from claims and from plan.json, and waits while another one does.

    Args:
        folder: of the sweep.

    Raises:
        UserError: the file system has no locks, or the file `lock` is a folder.
    """
    file = folder / "lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except IsADirectoryError as error:
        raise UserError(f"{file} is a folder, where a sweep keeps a file: remove it.") from error
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


class FileLock:
    """A file that exists while a process holds the lock, for file systems without locks.

    Used as a context manager. The system does not release it: the others remove the file of a
    holder that has died.

    Args:
        file: the file, which has the name of the holder.
        name: returns the name of this process, which `may_live` may change.
        may_live: name of a process -> whether it may live.
    """

    def __init__(self, file: Path, name: Callable[[], str], may_live: Callable[[str], bool]):
        self._file, self._name, self._may_live = file, name, may_live
        self._written = ""

    def __enter__(self) -> None:
        while not self._take():
            self._remove_of_the_dead()
            time.sleep(_PAUSE)

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(OSError):  # the others then see that this process has ended
            if self._file.read_text() == self._written:
                self._file.unlink()

    def _take(self) -> bool:
        self._written = self._name()
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._written.encode())
            os.fsync(descriptor)
        except OSError:
            self._file.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _remove_of_the_dead(self) -> None:
        """Removes the file once its holder was not seen for a few beats."""
        holder, unseen = self._holder(), 0.0
        while unseen < _BEATS * holders.BEAT:
            # An empty file is that of a process that has not written its name yet, or never will.
            if holder is None or self._holder() != holder or self._may_live(holder):
                return
            time.sleep(_PAUSE)
            unseen += _PAUSE
        aside = self._file.with_name(f".{self._file.name}-{self._name()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._file, aside)
            if aside.read_text() != holder:  # another process has taken it just now
                with contextlib.suppress(OSError):
                    os.link(aside, self._file)
            aside.unlink()

    def _holder(self) -> str | None:
        try:
            return self._file.read_text()
        except FileNotFoundError:
            return None
