"""The lock of a workdir, which names its holder, and a fence against a former holder.

The lock is an flock, which the system releases when its holder dies. If the holder's node is gone
and the file system still keeps the lock, another process may take it over. The epoch, a number in a
file that grows with every holder, then keeps the old holder from writing if it resumes. A random
word follows the number: two processes that take over at the same moment may write the same number,
but the file ends up with the word of only one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from trainer.messages import UserError
from trainer.writers import holders
from trainer.writers.files import replace_file
from trainer.writers.json_files import DamagedFile

_TRIES, _PAUSE = 5, 0.1  # how often a dead holder's lock is tried, and seconds between two tries
_BEATS = 3  # how many beats of a holder on another machine to wait for a change of its count


class WorkdirTakenOver(RuntimeError):
    """Raised if this process is no longer the holder of its workdir."""


class Lock:
    """Reserves a workdir for this process, from construction to `close`.

    Args:
        directory: the workdir.
        take_over: whether to take the lock from a holder on a host that is gone.
        beat: whether this process counts up in the file of the lock, so that others see that it
            lives, also on another machine to which the file system does not show the lock.

    Raises:
        UserError: another process has the lock.

    Attributes:
        epoch: the number of this holder, greater than those of all earlier ones.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, take_over: bool = False, beat: bool = False
    ) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "lock"
        self._epoch_path = self.directory / "epoch"
        self._heartbeat: holders.Heartbeat | None = None
        self._descriptor: int | None = self._acquire(take_over)
        try:
            # Write the holder's name first: a waiting process must not read that of a dead one.
            os.ftruncate(self._descriptor, 0)
            name = holders.this_process()
            if beat:
                self._heartbeat = holders.Heartbeat(self._descriptor, name)
            else:
                os.pwrite(self._descriptor, json.dumps(name).encode() + b"\n", 0)
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
            what = (
                f"taken over by {holders.describe(holders.read(self.path))}" if there else "removed"
            )
            raise WorkdirTakenOver(
                f"The workdir {self.directory} was {what}. This process writes nothing more there."
            )

    def close(self) -> None:
        """Releases the lock."""
        if self._heartbeat is not None:
            self._heartbeat.close()
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
                    # If the file was replaced meanwhile, nobody else looks at this lock: try again.
                    if _same_file(descriptor, self.path):
                        if not take_over:
                            self._refuse_living(holders.read(self.path))
                        return descriptor
                else:
                    holder = holders.read(self.path)
                    if not take_over and not holders.has_ended(holder):
                        raise UserError(_refusal(self.directory, holder))
                    tries_left -= 1
                    if take_over or tries_left < 0:
                        # Take over once only: the new file may soon have a living holder.
                        take_over = False
                        self._replace(descriptor)
                    else:  # its new holder may not have written its name yet
                        time.sleep(_PAUSE)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _refuse_living(self, holder: dict[str, Any]) -> None:
        """Raises UserError if a process on another machine lives that did not release the lock."""
        if holders.is_here(holder) or "count" not in holder:
            return
        end = time.monotonic() + _BEATS * holders.BEAT
        while time.monotonic() < end:
            time.sleep(_PAUSE)
            now = holders.read(self.path)
            if now and now.get("count") != holder["count"]:
                raise UserError(
                    f"{_refusal(self.directory, holder)} The file system does not show its lock to"
                    " this machine."
                )

    def _replace(self, descriptor: int) -> None:
        """Replaces the lock file by a new one, if its lock will never be released.

        A forked child may keep the lock of a process that died.
        """
        if _same_file(descriptor, self.path):
            replace_file(self.path, b"")


def _flock(descriptor: int) -> bool:
    """Takes the lock of an open file without waiting; returns whether it could."""
    locked = holders.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if locked is not None:
        return locked
    # The file system has no locks: find out by its process id whether the holder is alive.
    holder = holders.parse(os.pread(descriptor, 4096, 0))
    return not holder or holders.has_ended(holder)


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


def _refusal(directory: Path, holder: dict[str, Any]) -> str:
    return (
        f"The workdir {directory} is in use by {holders.describe(holder)}: stop that process, "
        "or choose another workdir. If its node is gone for good, start with --take_over."
    )
