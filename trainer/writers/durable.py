"""Syncs files and folders, so that they are on the disk after a loss of power."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

_CANNOT = (errno.EBADF, errno.EINVAL)  # a file system that has no sync for folders


def sync(path: str | os.PathLike[str]) -> None:
    """Writes the bytes of a file, or the entries of a folder, through to the disk.

    Does nothing for a folder if the file system cannot sync folders.

    Args:
        path: the file or folder.

    Raises:
        OSError: the path does not exist, or the disk cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _CANNOT or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def sync_file_system(path: str | os.PathLike[str]) -> None:
    """Writes all that was written to a file system through to its disk.

    Much faster than to sync many files one by one.

    Args:
        path: a file or folder on the file system.

    Raises:
        OSError: the path does not exist, or the disk cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))
    except AttributeError:  # a C library without syncfs
        os.sync()
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Syncs every file and folder below a folder, and the folder itself.

    Args:
        directory: the folder.

    Raises:
        OSError: as `sync` raises it.
    """
    # From the bottom: first the content, then the folder that names it.
    for folder, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            sync(os.path.join(folder, name))
        sync(folder)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder and its missing parents, and syncs their names.

    Args:
        path: the folder, absolute; may exist.
        mode: permissions of the folder itself; its parents get the usual ones.

    Raises:
        OSError: a folder cannot be created.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    # The name of a folder is an entry of its parent, from the topmost one that is new.
    for folder in reversed(missing):
        sync(folder.parent)


def _raise(error: OSError) -> None:
    raise error
