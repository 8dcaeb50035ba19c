"""Makes this process one of another host, which shares a file system with the others."""

import datetime
import fcntl
import os
import socket
import sys
import time
import types
from pathlib import Path

import trainer.__main__
from tests import runs
from tests.chaos_worker import slowly
from trainer.sweep import presence
from trainer.workdir import folder
from trainer.writers import locks


def become(host: str, ahead: float = 0.0, apart: Path | None = None, hurry: float = 1.0) -> None:
    """Changes what this process knows of its machine, for good.

    Args:
        host: the name of the host; its process ids say nothing on others.
        ahead: seconds by which its clock is ahead.
        apart: the folder of the locks that this host alone sees; None for the file system's.
        hurry: divides the seconds after which a silent process counts as dead.
    """
    locks.machine = lambda: host
    socket.gethostname = lambda: host
    locks.BEAT /= hurry
    presence.SILENT /= hurry
    _shift(ahead)
    if apart is not None:
        _keep_locks_in(apart / host)


def _shift(ahead: float) -> None:
    real = time.time
    time.time = lambda: real() + ahead

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=ahead)

    # Not for all modules: C extensions of other packages rely on the real class.
    shifted = types.SimpleNamespace(datetime=Shifted, UTC=datetime.UTC)
    locks.datetime = folder.datetime = shifted  # type: ignore[assignment]


def _keep_locks_in(folder: Path) -> None:
    """Locks a file of a folder instead of each file, as long as that is open."""
    folder.mkdir(parents=True, exist_ok=True)
    real_flock, real_close = fcntl.flock, os.close
    kept: dict[int, int] = {}

    def flock(descriptor, operation):
        if descriptor not in kept:
            file = os.fstat(descriptor)
            path = folder / f"{file.st_dev}-{file.st_ino}"
            kept[descriptor] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        real_flock(kept[descriptor], operation)

    def close(descriptor):
        if descriptor in kept:
            real_close(kept.pop(descriptor))
        real_close(descriptor)

    fcntl.flock, os.close = flock, close


def main() -> int:
    """Runs a command of the trainer on a host: HOST AHEAD LOCKS HURRY STEPS_PER_SECOND ..."""
    host, ahead, locks, hurry, speed, *command = sys.argv[1:]
    become(host, float(ahead), Path(locks) if locks else None, float(hurry))
    sys.path.insert(0, str(runs.LAB))
    slowly(float(speed))
    return trainer.__main__.main(command)


if __name__ == "__main__":
    sys.exit(main())
