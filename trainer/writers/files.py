"""Replaces, syncs and reads files so that they are intact after a crash or a loss of power."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

Fence = Callable[[], None] | None
"""Called just before a file is changed: raises if this process must not; None allows it."""

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # as temporary_beside names them
_BLOCK = 1 << 20
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def replace_file(path: Path, content: bytes | Iterable[bytes], fence: Fence = None) -> None:
    """Writes a new file, syncs it, and renames it to the path."""
    # A process that is killed meanwhile leaves the old file or the new one. `fence` is called just
    # before the rename; an exception of it, or of the disk, leaves the old file unchanged.
    pieces = [content] if isinstance(content, bytes) else content
    temporary = temporary_beside(path)
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
    sync(path.parent)  # before this, a loss of power may undo the rename


def temporary_beside(path: Path) -> Path:
    """Returns a name for a temporary file that can be renamed to `path`: one in the same folder."""
    # A random number, not the process id: processes on two machines may have the same id.
    return path.with_name(f".{path.name}.{secrets.randbelow(10**15)}.tmp")


def remove_temporaries(directory: Path) -> None:
    """Removes the temporary files of `replace_file` that killed processes left."""
    # Only the process that may write to the folder may call it: it would also remove those in use.
    for path in directory.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading; raises OSError at once for a pipe, a folder or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        text = f"it is {other_kind(mode)}, and not a file"
        raise IsADirectoryError(errno.EISDIR, text, str(path))
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Returns the content of a file; raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def paths_below(folder: Path, name: str, levels: int) -> Iterator[str]:
    """Yields the paths, relative to `folder`, of the entries `levels` below `folder / name`."""
    # `levels` 0 yields the name itself; a missing folder has no entries. Unlike `Path.glob` of
    # Python 3.13, it raises the errors of a disk.
    if not levels:
        yield name
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for each in os.listdir(folder / name):
            yield from paths_below(folder, f"{name}/{each}", levels - 1)


def other_kind(mode: int) -> str:
    """Returns what a file that is not regular is, such as "a folder", from its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes of a file, or those up to its end, in blocks of up to 1 MiB."""
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        size -= len(block)
        yield block


def after_newline(file: BinaryIO, end: int) -> int:
    """Returns the offset after the last newline before offset `end`; 0 if there is none."""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        if (found := b"".join(blocks(file, end - start)).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


_NO_FOLDER_SYNC = (errno.EBADF, errno.EINVAL)  # a file system that has no sync for folders


def sync(path: str | os.PathLike[str]) -> None:
    """Writes the bytes of a file, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def sync_file_system(path: str | os.PathLike[str]) -> None:
    """Writes all that was written to the file system of `path` through to its disk."""
    # This is much faster than syncing many files one by one.
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
    """Syncs every file and folder below a folder, and the folder itself."""
    # Bottom-up: first the content, then the folder that names it.
    for folder, _, names in os.walk(directory, topdown=False, onerror=raise_error):
        for name in names:
            sync(os.path.join(folder, name))
        sync(folder)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder and its missing parents, and syncs their names."""
    # The path must be absolute. `mode` is that of the folder itself; its parents get the usual one.
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    # The name of a folder is an entry of its parent; sync the topmost new one first.
    for folder in reversed(missing):
        sync(folder.parent)


def raise_error(error: OSError) -> None:
    """Raises an error, which `os.walk` ignores by default."""
    raise error


class Outage:
    """Logs the first of several failures in a row, and the success that ends them."""

    # `error` is why the operation failed last, without a full stop; None after a success.

    def __init__(self, log: Callable[[str], None]) -> None:
        self.error: str | None = None
        self._log = log

    def failed(self, error: str, consequence: str) -> None:
        """Records a failure, and logs it unless the operation failed before as well."""
        # `error` has no full stop; `consequence` says in sentences what follows until it works.
        first, self.error = self.error is None, error
        if first:
            self._log(f"{error}. {consequence}")

    def ended(self, sentence: str | None = None) -> None:
        """Records a success; logs the sentence, if any, when the operation failed before."""
        failed_before, self.error = self.error is not None, None
        if failed_before and sentence is not None:
            self._log(sentence)
