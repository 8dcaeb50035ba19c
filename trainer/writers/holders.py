"""Names the process that holds a file, and tells others whether it lives.

On one machine the process id tells. A process on another machine counts up in a file, its
heartbeat: who sees the count change within seconds of its own clock knows that the process lives.
No clocks of two machines are compared.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEAT = 2.0  # seconds between two counts
_WIDTH = 510  # bytes of a record, so that a new one covers the one before

# The errors of flock on file systems that have no locks.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


def flock(descriptor: int, operation: int) -> bool | None:
    """Locks an open file; returns whether it could, or None on a file system without locks.

    Args:
        descriptor: of the file.
        operation: of `fcntl.flock`; with LOCK_NB it does not wait for the holder of the lock.
    """
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
    """Returns what names this process: host, pid, and what tells them from later ones."""
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
    """Returns the state of a process, and when it started, in ticks since boot.

    Process ids are reused, so that the time belongs to the name of a process.
    """
    try:
        # Fields 3 and 22 of proc(5); field 2, the name in parentheses, may contain spaces and
        # parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None, None


def parse(content: bytes | str) -> dict[str, Any]:
    """Returns what names a process; empty if the content is no such record.

    Args:
        content: of a file.
    """
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def read(path: Path) -> dict[str, Any]:
    """Returns what names a process in a file; empty if the file is missing or is no such record.

    Args:
        path: the file.
    """
    try:
        return parse(path.read_bytes())
    except OSError:
        return {}


def is_here(holder: Mapping[str, Any]) -> bool:
    """Returns whether the process ran on this machine, so that its id says something.

    Args:
        holder: what names it.
    """
    own = machine()
    return own is not None and holder.get("machine") == own


def has_ended(holder: Mapping[str, Any]) -> bool:
    """Returns whether a process has surely ended: it ran on this machine, and no longer does.

    Args:
        holder: what names it.
    """
    pid, started = holder.get("pid"), holder.get("started")
    if not is_here(holder) or not isinstance(pid, int) or started is None:
        return False
    state, now = _stat(pid)
    return now != started or state in ("Z", "X")  # its parent has not asked for its exit code yet


def is_stopped(holder: Mapping[str, Any]) -> bool:
    """Returns whether a process of this machine is stopped, as by SIGSTOP.

    Args:
        holder: what names it.
    """
    pid = holder.get("pid")
    return is_here(holder) and isinstance(pid, int) and _stat(pid)[0] in ("T", "t")


def describe(holder: Mapping[str, Any]) -> str:
    """Returns the process as a part of a sentence.

    Args:
        holder: what names it.
    """
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"


class Heartbeat:
    """Counts up in an open file, from a separate thread, until `close`.

    Args:
        descriptor: of the file, which stays that of the caller.
        record: what the file says besides.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, descriptor: int, record: Mapping[str, Any]):
        self._descriptor: int | None = descriptor
        self._record = dict(record)
        self._count = 0
        self._writing = threading.Lock()
        self._end = threading.Event()
        self.write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def write(self, **changes: Any) -> None:
        """Changes what the file says, and counts up.

        Args:
            **changes: parts of the record.

        Raises:
            OSError: the file cannot be written.
        """
        with self._writing:
            if self._descriptor is None:
                return
            self._record |= changes
            self._count += 1
            text = json.dumps(self._record | {"count": self._count})
            os.pwrite(self._descriptor, f"{text:<{_WIDTH}}\n".encode(), 0)
            os.fsync(self._descriptor)  # other machines see only what left this one

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(OSError):  # a full disk, perhaps only for now
                self.write()

    def close(self) -> None:
        """Ends the counting; the file may be closed then."""
        self._end.set()
        with self._writing:
            self._descriptor = None
