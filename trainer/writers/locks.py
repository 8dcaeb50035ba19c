"""Locks: who holds a file, whether that process is alive, and how a folder is kept to one process.

Three parts, each of which uses the one before it:

- A process is named by its host, its id and when it started, and increases a count in a file, its
  heartbeat. On one machine the id tells whether it is alive. A process on another machine is alive
  if its count changes within seconds of the observer's own clock; the clocks of two machines are
  never compared.
- The locks in the folder of a sweep: those of the file system, and `file_lock` where it has none.
- `WorkdirLock`, the lock of a run's folder, with a fence against a former holder.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.messages import UserError
from trainer.writers.files import replace_file
from trainer.writers.json_files import DamagedFile

BEAT = 2.0  # seconds between two counts
_BEATS = 3  # beats without a new count after which a holder is taken for dead
_PAUSE = 0.1  # seconds between two attempts to get a lock
_TRIES = 5  # attempts to get a workdir's lock after its holder has died
_WIDTH = 510  # bytes to which a record is padded, so that it overwrites all of the one before

# The errors of flock on file systems that have no locks.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


def flock(descriptor: int, operation: int) -> bool | None:
    """Locks an open file; returns whether it could, or None on a file system without locks."""
    # `operation` is that of `fcntl.flock`; with LOCK_NB it does not wait for the holder.
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None
    return True


def this_process() -> dict[str, Any]:
    """Returns the record of this process: host, id, and what tells it from others with this id."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "started": _stat(pid)[1],
    }


def machine() -> str | None:
    """Returns an id of the running kernel and of its process namespace (that of a container)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str | None, str | None]:
    """Returns the state of a process, and its start in ticks since boot; None if unknown."""
    # Process ids are reused, so that only id and starting time identify a process.
    try:
        # Fields 3 and 22 of proc(5). The name in field 2 may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None, None


def parse_holder(content: bytes | str) -> dict[str, Any]:
    """Returns the record of a process; empty if the content of a file is not such a record."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def read_holder(path: Path) -> dict[str, Any]:
    """Returns the record of a process in a file; empty if the file is missing or has none."""
    try:
        return parse_holder(path.read_bytes())
    except OSError:
        return {}


def is_here(holder: Mapping[str, Any]) -> bool:
    """Returns whether the process ran on this machine, so that its id can be looked up here."""
    own = machine()
    return own is not None and holder.get("machine") == own


def has_ended(holder: Mapping[str, Any]) -> bool:
    """Returns whether a process has surely ended: it ran on this machine, and no longer does."""
    pid, started = holder.get("pid"), holder.get("started")
    if not is_here(holder) or not isinstance(pid, int) or started is None:
        return False
    state, now = _stat(pid)
    return now != started or state in ("Z", "X")  # ended, but its parent has not waited for it yet


def is_stopped(holder: Mapping[str, Any]) -> bool:
    """Returns whether a process of this machine is stopped, for example by SIGSTOP."""
    pid = holder.get("pid")
    return is_here(holder) and isinstance(pid, int) and _stat(pid)[0] in ("T", "t")


def describe_holder(holder: Mapping[str, Any]) -> str:
    """Returns the process as a part of a sentence."""
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"


class Heartbeat:
    """Increases a count in an open file, from a thread of its own, until `close`."""

    # The caller owns the descriptor. `record` is what the file holds besides the count. Raises
    # OSError if the file cannot be written.

    def __init__(self, descriptor: int, record: Mapping[str, Any]):
        self._descriptor: int | None = descriptor
        self._record = dict(record)
        self._count = 0
        self._writing = threading.Lock()
        self._end = threading.Event()
        self.write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def write(self, **changes: Any) -> None:
        """Changes parts of the record and increases the count; raises OSError if it cannot."""
        with self._writing:
            if self._descriptor is None:
                return
            self._record |= changes
            self._count += 1
            text = json.dumps(self._record | {"count": self._count})
            os.pwrite(self._descriptor, f"{text:<{_WIDTH}}\n".encode(), 0)
            os.fsync(self._descriptor)  # other machines see only what was synced

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(OSError):  # a full disk, perhaps only for now
                self.write()

    def close(self) -> None:
        """Stops counting; the caller may close the file afterwards."""
        self._end.set()
        with self._writing:
            self._descriptor = None


# The locks in the folder of a sweep.


def lock(descriptor: int, *, wait: bool) -> bool:
    """Locks an open file; returns whether it could; UserError if the file system has no locks."""
    locked = flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    if locked is None:  # not an OSError: another start cannot help
        raise UserError(
            "The file system of the sweep's folder has no locks, which keep two workers from the"
            " same trials: add --locks=heartbeat, or choose a --workdir on another file system."
        )
    return locked


def is_locked(file: Path) -> bool:
    """Returns whether a process holds the lock of a file, as far as this machine sees."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        return not lock_shared(descriptor)
    finally:
        os.close(descriptor)


def lock_shared(descriptor: int) -> bool:
    """Keeps others from locking an open file, until it is closed; returns whether it could."""
    # Several processes may do so at the same time. On a file system without locks it does nothing,
    # and returns True.
    return flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB) is not False


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Waits for the lock of a sweep's folder, which guards claims and plan.json, and holds it."""
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


@contextlib.contextmanager
def file_lock(
    file: Path, name: Callable[[], str], may_live: Callable[[str], bool]
) -> Iterator[None]:
    """Holds a file that exists while a process has the lock, for file systems without locks."""
    # The system does not release it: other processes remove the file of a holder that has died. The
    # file contains the name of the holder; `name` returns that of this process, which `may_live`
    # may change, and `may_live` whether the process of a name may be alive.
    while not _make(file, written := name()):
        _remove_of_the_dead(file, name, may_live)
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # others remove the file once this process has ended
            if file.read_text() == written:
                file.unlink()


def _make(file: Path, content: str) -> bool:
    """Makes a file and syncs it; returns False if there is one."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content.encode())
        os.fsync(descriptor)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return True


def _remove_of_the_dead(
    file: Path, name: Callable[[], str], may_live: Callable[[str], bool]
) -> None:
    """Removes the file once its holder showed no sign of life for a few beats."""
    with contextlib.suppress(FileNotFoundError):
        holder, unseen = file.read_text(), 0.0
        while unseen < _BEATS * BEAT:
            # The file is empty until its process has written its name, which it may never do.
            if file.read_text() != holder or may_live(holder):
                return
            time.sleep(_PAUSE)
            unseen += _PAUSE
        aside = file.with_name(f".{file.name}-{name()}")
        os.rename(file, aside)
        if aside.read_text() != holder:  # another process has just taken it: put it back
            with contextlib.suppress(OSError):
                os.link(aside, file)
        aside.unlink()


# The lock of a workdir.
#
# It is an flock, which the system releases when its holder dies. If the holder's node is gone and
# the file system still keeps the lock, another process may take it over. The epoch, a number in a
# file that grows with every holder, then keeps the old holder from writing if it wakes up again. A
# random word follows the number: two processes that take over at the same moment may write the same
# number, but the file ends up with the word of only one of them.


class WorkdirTakenOver(RuntimeError):
    """Raised if this process is no longer the holder of its workdir."""


class WorkdirLock:
    """Reserves a workdir for this process until `close`; raises UserError if another has it."""

    # With `beat` this process counts up in the file of the lock, so that others see that it lives,
    # also on another machine to which the file system does not show the lock. `epoch` is greater
    # than those of all earlier holders.

    def __init__(
        self, directory: str | os.PathLike[str], *, take_over: bool = False, beat: bool = False
    ) -> None:
        self.directory = Path(directory)
        self.path = self.directory / "lock"
        self._epoch_path = self.directory / "epoch"
        self._heartbeat: Heartbeat | None = None
        self._descriptor: int | None = self._acquire(take_over)
        try:
            # Write the holder's name first: a waiting process must not read that of a dead one.
            os.ftruncate(self._descriptor, 0)
            name = this_process()
            if beat:
                self._heartbeat = Heartbeat(self._descriptor, name)
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
        """Raises WorkdirTakenOver if this process does not hold the workdir any more."""
        # Called just before anything is written or renamed there. Also raised if the workdir was
        # removed or closed.
        if self._descriptor is None:
            raise WorkdirTakenOver(f"The workdir {self.directory} was closed by this process.")
        if _read_epoch(self._epoch_path) != (self.epoch, self._word):
            holder = describe_holder(read_holder(self.path))
            what = f"taken over by {holder}" if self._epoch_path.exists() else "removed"
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
                if (locked := flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
                    # The file system has no locks: it is free if its holder is known to have ended.
                    holder = parse_holder(os.pread(descriptor, 4096, 0))
                    locked = not holder or has_ended(holder)
                if locked:
                    # If the file was replaced meanwhile, nobody else looks at this lock: try again.
                    if _same_file(descriptor, self.path):
                        if not take_over:
                            self._refuse_living(read_holder(self.path))
                        return descriptor
                else:
                    holder = read_holder(self.path)
                    if not take_over and not has_ended(holder):
                        raise UserError(_refusal(self.directory, holder))
                    tries_left -= 1
                    if take_over or tries_left < 0:
                        # Take over once only: the new file may soon have a living holder.
                        take_over = False
                        # A forked child may keep the lock of a process that died, so that it would
                        # never be released: replace the file by a new one.
                        if _same_file(descriptor, self.path):
                            replace_file(self.path, b"")
                    else:  # its new holder may not have written its name yet
                        time.sleep(_PAUSE)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _refuse_living(self, holder: dict[str, Any]) -> None:
        """Raises UserError if a holder on another machine, which did not release it, is alive."""
        if is_here(holder) or "count" not in holder:
            return
        end = time.monotonic() + _BEATS * BEAT
        while time.monotonic() < end:
            time.sleep(_PAUSE)
            now = read_holder(self.path)
            if now and now.get("count") != holder["count"]:
                raise UserError(
                    f"{_refusal(self.directory, holder)} The file system does not show its lock to"
                    " this machine."
                )


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
        f"The workdir {directory} is in use by {describe_holder(holder)}: stop that process, "
        "or choose another workdir. If its node is gone for good, start with --take_over."
    )
