"""The lock of a workdir, which names its holder, and a fence against a former holder.

The lock is an flock, which the system releases when its holder dies. If the holder's node is gone
and the file system still keeps the lock, another process may take it over. The epoch, a number in a
file that grows with every holder, then keeps the old holder from writing if it resumes. A random
word follows the number: two processes that take over at the same moment may write the same number,
but the file ends up with the word of only one of them.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from trainer.messages import UserError
from trainer.writers.files import replace_file
from trainer.writers.json_files import DamagedFile

_TRIES, _PAUSE = 5, 0.1  # how often a dead holder's lock is tried, and seconds between two tries
# The errors of flock on file systems that have no locks.
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class WorkdirTakenOver(RuntimeError):
    """Raised if this process is no longer the holder of its workdir."""


class Lock:
    """Reserves a workdir for this process, from construction to `close`.

    Args:
        directory: the workdir.
        take_over: whether to take the lock from a holder on a host that is gone.

    Raises:
        UserError: another process has the lock.

    Attributes:
        epoch: the number of this holder, greater than those of all earlier ones.
    """

    def __init__(self, directory: str | os.PathLike[str], *, take_over: bool = False) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "lock"
        self._epoch_path = self.directory / "epoch"
        self._descriptor: int | None = self._acquire(take_over)
        try:
            # Write the holder's name first: a waiting process must not read that of a dead one.
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_this_process()).encode() + b"\n", 0)
            self.epoch = _read_epoch(self._epoch_path)[0] + 1
            self._word = secrets.token_hex(8)
            replace_file(self._epoch_path, f"{self.epoch} {self._word}\n".encode())
        except BaseException:
            self.close()
            raise

    @property
    def held(self) -> bool:
        """Whether `close` was not called yet; another process may have taken over nevertheless."""
        return self._descriptor is not None

    def check_fence(self) -> None:
        """Checks that this process still holds the workdir.

        Called just before anything is written or renamed there.

        Raises:
            WorkdirTakenOver: another process has taken the workdir over, or the workdir was removed
                or closed.
        """
        if self._descriptor is None:
            raise WorkdirTakenOver(f"The workdir {self.directory} was closed by this process.")
        if _read_epoch(self._epoch_path) != (self.epoch, self._word):
            there = self._epoch_path.exists()
            what = f"taken over by {_describe(_read(self.path))}" if there else "removed"
            raise WorkdirTakenOver(
                f"The workdir {self.directory} was {what}. This process writes nothing more there."
            )

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                # Unlock explicitly: a forked child process shares the lock.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self, take_over: bool) -> int:
        tries_left = _TRIES
        while True:
            # O_CLOEXEC: git and other programs that this process starts must not keep the lock.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _flock(descriptor):
                    # Otherwise the file was replaced meanwhile, and nobody else looks at this lock.
                    if _same_file(descriptor, self.path):
                        return descriptor
                else:
                    holder = _read(self.path)
                    dead = _is_dead(holder)
                    if not take_over and not dead:
                        raise UserError(_refusal(self.directory, holder))
                    tries_left -= 1
                    if take_over or tries_left < 0:
                        # Once: afterwards the new file may have a holder that is alive.
                        take_over = False
                        self._replace(descriptor)
                    else:  # its new holder may not have written its name yet
                        time.sleep(_PAUSE)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _replace(self, descriptor: int) -> None:
        """Replaces the lock file by a new one, if its lock will never be released.

        A forked child may keep the lock of a process that died.
        """
        if _same_file(descriptor, self.path):
            replace_file(self.path, b"")


def _flock(descriptor: int) -> bool:
    """Takes the lock of an open file without waiting; returns whether it could."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise
        # The file system has no locks: find out by its process id whether the holder is alive.
        holder = _parse(os.pread(descriptor, 4096, 0))
        return not holder or _is_dead(holder)
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read_epoch(path: Path) -> tuple[int, str]:
    try:
        number, _, word = path.read_text().strip().partition(" ")
        return int(number), word
    except FileNotFoundError:
        return 0, ""
    except ValueError as e:
        raise DamagedFile(
            path,
            f"{path} must hold a number, and holds {path.read_bytes()[:40]!r}",
            "if no process uses this workdir, remove the file.",
        ) from e


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "started": _started(pid),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_bytes())
    except OSError:
        return {}


def _parse(content: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _machine() -> str | None:
    """Returns an id of the running kernel and of its process namespace (that of a container)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Returns when a process started, in ticks since boot, because process ids are reused."""
    try:
        # Field 22 of proc(5); field 2, the name in parentheses, may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _is_dead(holder: dict[str, Any]) -> bool:
    """Returns whether a holder has surely ended: it ran on this machine, and no longer does."""
    machine = _machine()
    if machine is None or holder.get("machine") != machine:
        return False
    pid, started = holder.get("pid"), holder.get("started")
    return isinstance(pid, int) and started is not None and _started(pid) != started


def _describe(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"


def _refusal(directory: Path, holder: dict[str, Any]) -> str:
    return (
        f"The workdir {directory} is in use by {_describe(holder)}: stop that process, "
        "or choose another workdir. If its node is gone for good, start with --take_over."
    )
