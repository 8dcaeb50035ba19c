"""The locks in the folder of a sweep, which the system releases when their holder dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.messages import UserError


def lock(descriptor: int, *, wait: bool) -> bool:
    """Locks an open file; returns whether it could.

    Args:
        descriptor: of the file.
        wait: whether to wait for a process that holds the lock.

    Raises:
        UserError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        from trainer.workdir.lock import UNSUPPORTED  # imports jax, which `sweep status` does not

        if error.errno not in UNSUPPORTED:
            raise
        raise UserError(
            "The file system of the sweep's folder has no locks, which keep two workers from the"
            " same trials: choose a --workdir on another file system."
        ) from error
    return True


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
