"""How the tests compile programs, and the folder of compiled programs that all of them share.

Much of the time of the tests is that of compiling, mostly the same programs: in several test
processes, in the processes that they start, and in the next session. A folder in the checkout keeps
them, and not that of the user, which tests would read and fill. jax finds a program by a hash of
its operations, its options and the versions; it has the bits of one that is compiled again.

The variable LOCKSTEP_COMPILED names another folder, which several checkouts on a machine may share,
also at the same time: `LOCKSTEP_COMPILED=~/.cache/lockstep-tests make test`.

Programs are compiled with few optimizations, in a third of the time; numbers differ in their last
bits from those of users. `XLA_FLAGS= make test` compiles as users do; .ci/run asks that of tests
with `bits_of` or `same_bits` in their names.
"""

import hashlib
import os
import platform
import zlib
from importlib.metadata import version
from pathlib import Path

# What a quick compilation asks of XLA, and the defaults.
_QUICK: dict[str, tuple[int | bool, int | bool]] = {
    "xla_backend_optimization_level": (0, 3),
    "xla_llvm_disable_expensive_passes": (True, False),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # 0.11.2 knows no such option
    _QUICK["xla_cpu_use_fusion_emitters"] = (False, True)
_MOST_BYTES = 2**30


def xla_flags(devices: int = 0) -> str:
    """Returns the XLA_FLAGS of this process, or those of a quick compilation if it has none.

    Args:
        devices: how many simulated devices are asked for in addition; 0 asks for none.
    """
    quick = (f"--{name}={str(value).lower()}" for name, (value, _) in _QUICK.items())
    flags = os.environ.get("XLA_FLAGS", " ".join(quick))
    return f"{flags} --xla_force_host_platform_device_count={devices}" if devices else flags


def as_users() -> dict[str, int | bool]:
    """Returns options for `jax.jit` with which one program is compiled as by users."""
    return {name: default for name, (_, default) in _QUICK.items()}


def folder() -> Path:
    """Returns the folder, one for each kind of CPU: others may not execute its programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    name = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:16]
    named = os.environ.get("LOCKSTEP_COMPILED")
    root = Path(named).expanduser() if named else Path(__file__).parents[1] / ".compiled"
    return root.resolve() / name


def clean() -> None:
    """Creates the folder, and removes what a killed process did not write whole.

    All programs are removed if they are more than 1 GiB, as after many changes. Programs that an
    earlier session found whole are not read again: a file beside the folder keeps the time.
    """
    folder().mkdir(parents=True, exist_ok=True)
    checked = folder().with_suffix(".checked")
    last = checked.stat().st_mtime if checked.exists() else 0.0
    checked.touch()
    files = [(file, stat) for file in folder().iterdir() if (stat := _stat(file))]
    full = sum(stat.st_size for _, stat in files) > _MOST_BYTES
    for file, stat in files:
        if full or (stat.st_mtime >= last and not _whole(file)):
            file.unlink(missing_ok=True)


def _stat(file: Path) -> os.stat_result | None:
    """Returns what the system says of a file, or None if another session has just removed it."""
    try:
        return file.stat()
    except FileNotFoundError:
        return None


def _whole(file: Path) -> bool:
    try:
        zlib.decompress(file.read_bytes())
    except (zlib.error, FileNotFoundError):
        return False
    return True
