"""The folder of compiled programs that all tests share.

Much of the time of the tests is that of compiling, mostly the same programs: in several test
processes, in the processes that they start, and in the next session. A folder in the checkout keeps
them, and not that of the user, which tests would read and fill. jax finds a program by a hash of
its operations, its options and the versions; it has the bits of one that is compiled again.
"""

import hashlib
import platform
import shutil
import zlib
from pathlib import Path

_MOST_BYTES = 2**30


def folder() -> Path:
    """Returns the folder, one for each kind of CPU, whose programs others may not execute."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    name = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:16]
    return Path(__file__).resolve().parents[1] / ".compiled" / name


def clean() -> None:
    """Creates the folder, and removes what a killed process did not write whole.

    All programs are removed if they are more than 1 GiB, as after many changes. Programs that an
    earlier session found whole are not read again: a file beside the folder keeps the time.
    """
    folder().mkdir(parents=True, exist_ok=True)
    checked = folder().with_suffix(".checked")
    last = checked.stat().st_mtime if checked.exists() else 0.0
    checked.touch()
    files = [(file, file.stat()) for file in folder().iterdir()]
    if sum(stat.st_size for _, stat in files) > _MOST_BYTES:
        shutil.rmtree(folder())
        folder().mkdir()
        return
    for file, stat in files:
        if stat.st_mtime < last:
            continue
        try:
            zlib.decompress(file.read_bytes())
        except zlib.error:
            file.unlink(missing_ok=True)
