"""Which processes change the folder of a sweep now, and which of its locks they can trust.

    SWEEP/workers/NAME    a process: its host, the wave that it computes, and a count, its heartbeat
    SWEEP/held            with --locks=heartbeat: the process that claims a wave now

Each process holds the lock of its file. If another one gets that lock although the process lives,
the file system shows a lock to one machine only, as some do, and two machines would compute the
same trials. A process of another machine counts as alive if its count changes within seconds of the
observer's own clock; clocks of two machines are never compared.

With --locks=heartbeat nothing depends on locks: a process keeps others out as long as it lives. One
that was taken for dead, and is not, finds by the fence of the wave's folder that it has lost the
wave, and writes nothing more there.
"""

import contextlib
import os
import re
import secrets
import socket
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.messages import UserError
from trainer.writers import locks

Mode = Literal["flock", "heartbeat"]

SILENT = 30.0  # seconds without a change of its count, after which a process counts as dead
_PROBED = 3  # beats for which a process watches the others before it begins
_DYING = 0.2  # seconds after which a process that released its locks has ended


@dataclass
class _Seen:
    """What was observed of the count of a process on another machine."""

    count: Any
    at: float
    moved: bool = False
    silent: float = 0.0  # seconds

    def record_beat(self, count: Any) -> None:
        now = time.monotonic()
        if count != self.count:
            self.count, self.moved, self.silent = count, True, 0.0
        else:
            # This process may have been stopped since its last look, and the other one with it.
            self.silent += min(now - self.at, locks.BEAT)
        self.at = now


class Presence:
    """Announces this process in the folder of a sweep, and watches the others."""

    # It does so as a context manager; before and after, it only locks. The mode "flock" relies on
    # the locks of the file system, "heartbeat" does not.

    def __init__(self, folder: Path, mode: Mode = "flock"):
        self.mode: Mode = mode
        self._sweep, self._folder = folder, folder / "workers"
        self._name: str | None = None
        self._heartbeat: locks.Heartbeat | None = None
        self._descriptor: int | None = None
        self._new = True
        self._seen: dict[str, _Seen] = {}
        self._trusted: set[str] = set()  # processes whose locks this machine sees
        self._others: dict[str, dict[str, Any]] = {}  # processes that may live, but for the trusted

    # This process.

    def __enter__(self) -> "Presence":
        try:
            self._announce()
            self._probe()
            self._heartbeat.write(new=False)  # type: ignore[union-attr]
            self._new = False
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._withdraw()
        self._new = True
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # if it is empty

    def _announce(self) -> None:
        host = re.sub(r"[^\w.-]", "-", socket.gethostname())
        self._name = f"{host}-{secrets.token_hex(8)}"
        # It is created under a hidden name: whoever sees the file must find it locked.
        hidden = self._folder / f".{self._name}"
        while self._descriptor is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # The last of the others may have removed the folder meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self._descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self.mode == "flock":
            locks.lock(self._descriptor, wait=False)
        record = locks.this_process() | {"locks": self.mode, "new": self._new, "wave": None}
        self._heartbeat = locks.Heartbeat(self._descriptor, record)
        os.rename(hidden, self._folder / self._name)

    def _withdraw(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._name is not None:
            for name in (f".{self._name}", self._name):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._heartbeat, self._name, self._descriptor = None, None, None

    def _probe(self) -> None:
        """Looks until it is known which of the others live, for a few beats at most."""
        end = time.monotonic() + _PROBED * locks.BEAT
        while True:
            self.find_living()
            undecided = any(not seen.moved for seen in self._seen.values())
            if not undecided or time.monotonic() > end:
                return
            time.sleep(locks.BEAT / 20)

    def announce(self, wave: str | None) -> None:
        """Tells others which wave this process computes; None for no wave any more."""
        if self._heartbeat is not None:
            self._heartbeat.write(wave=wave)

    # The others.

    def find_living(self) -> None:
        """Finds out which other processes live; raises UserError if one cannot be worked with."""
        # That one has locks that this process does not see, or has another mode.
        try:
            names = sorted(os.listdir(self._folder))
        except FileNotFoundError:
            names = []
        if self._name is not None and self._name not in names:  # it was taken for dead
            self._withdraw()
            self._announce()
        self._others = {}
        for name in names:
            if name != self._name and name not in self._trusted:
                self._look_at(name)
        for name in self._seen.keys() - self._others.keys():
            del self._seen[name]

    def _look_at(self, name: str) -> None:
        file = self._folder / name
        # The lock comes first: if it is free because the process died, its count stays the same.
        locked = self.mode == "flock" and locks.is_locked(file)
        record = locks.read_holder(file)
        if locks.has_ended(record):
            file.unlink(missing_ok=True)
            return
        if "count" not in record:
            return  # it has ended, or is just beginning
        if record.get("locks") == "flock" and locked:
            self._trusted.add(name)
            return
        here = locks.is_here(record)
        if not here:
            seen = self._seen.setdefault(name, _Seen(record["count"], time.monotonic()))
            seen.record_beat(record["count"])
            if seen.silent > SILENT:
                file.unlink(missing_ok=True)
                return
        self._others[name] = record
        lives = here or self._seen[name].moved
        # A process that is just beginning checks this one itself.
        if not lives or (record.get("new") and not self._new):
            return
        changed = f"The sweep in {self._sweep} is changed by {locks.describe_holder(record)}"
        if record.get("locks") != self.mode:
            raise UserError(
                f"{changed} with --locks={record.get('locks')}, and by this process with"
                f" --locks={self.mode}: use the same for all."
            )
        if self.mode == "flock":
            time.sleep(_DYING)
            if not locks.has_ended(record) and not locks.is_locked(file) and file.exists():
                raise UserError(
                    f"{changed}, and this process on {socket.gethostname()} does not see its locks,"
                    " so that both would compute the same trials: the file system shows locks to"
                    " one machine only. Stop all workers of this sweep, and start them again with"
                    " --locks=heartbeat."
                )

    def tidy(self) -> None:
        """Removes what killed processes of this machine have left."""
        self._trusted.clear()
        with contextlib.suppress(UserError):
            self.find_living()

    def take(self, wave: str, descriptor: int) -> bool:
        """Takes a wave by locking the descriptor of its file; returns whether that worked."""
        # It does not if, by the last look, another process computes the wave, or may do so.
        if any(record.get("wave") == wave for record in self._others.values()):
            return False
        return self.mode == "heartbeat" or locks.lock(descriptor, wait=False)

    def exclusive(self) -> AbstractContextManager[None]:
        """Keeps others from claims and from plan.json, and waits while another process does."""
        # Raises UserError if the file system has no locks.
        if self.mode == "flock":
            return locks.exclusive(self._sweep)
        return locks.FileLock(self._sweep / "held", self._announced_name, self._may_live)

    def _announced_name(self) -> str:
        assert self._name is not None, "only a process that is announced keeps others out"
        return self._name

    def _may_live(self, name: str) -> bool:
        self.find_living()
        return name in self._others


def announced(folder: Path) -> list[dict[str, Any]]:
    """Returns records of the processes on a sweep, as far as this machine can tell."""
    # They have "host", "pid", "locks", "wave" and "count". A process of another machine that was
    # killed may be among them.
    try:
        names = os.listdir(folder / "workers")
    except OSError:
        return []
    records = [locks.read_holder(folder / "workers" / name) for name in names]
    return [each for each in records if "count" in each and not locks.has_ended(each)]
