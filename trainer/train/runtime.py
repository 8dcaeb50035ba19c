"""Prepares the process before jax starts: memory, threads of OpenBLAS, the compilation cache."""

import ctypes
import json
import os
import stat
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from glibc's malloc.h
_KEEP = 1 << 30

_THREADS = "OPENBLAS_NUM_THREADS"  # read by OpenBLAS when it is loaded
_ours: str | None = None  # the value that this module gave the variable
_number: int | None = 0  # what `use_openblas_threads` returned last; 0 before it was called


def keep_freed_memory() -> None:
    """Tells glibc, if there is one, to keep up to 1 GiB of freed memory for this process."""
    # XLA frees its temporary buffers after every step. Without this setting each step maps them
    # again, which takes a third of a small step's time. The thresholds apply to the main arena
    # only, and XLA's threads would get arenas of their own, so that there must be one arena: call
    # this before any thread is started.
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP)
        libc.mallopt(_M_ARENA_MAX, 1)
    except (OSError, AttributeError):
        pass


def keep_compiled_programs() -> None:
    """Enables jax's compilation cache, in a folder that only this user can write."""
    # Later runs execute the machine code in it, so the folder must belong to the user and have mode
    # 0700. JAX_COMPILATION_CACHE_DIR names another folder, or "" for no cache. Programs that
    # compile in less than a second, which jax does not keep by default, are kept as well: a run has
    # a dozen of them, and a warm start takes 1.2 s instead of 1.65.
    import jax

    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "lockstep" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return  # without a writable home, programs are compiled again
    # Whoever can write there can have this user run any code.
    if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        jax.config.update("jax_compilation_cache_dir", str(folder))


def use_openblas_threads(*folders: Path) -> int | None:
    """Chooses how many threads OpenBLAS has, and returns it; None for the library's default."""
    # On a CPU, jax decomposes matrices with scipy's OpenBLAS. Its threads compete with those of XLA
    # for the cores: on two of them, a step in which SOAP decomposes large matrices takes several
    # times as long with two as with one. The bits of `eigh` depend on their number, so a run keeps
    # the number that it began with; runs of earlier versions have the default. OPENBLAS_NUM_THREADS
    # of the user comes first.
    global _ours, _number
    before = _number
    given = os.environ.get(_THREADS)
    if given is not None and given != _ours:
        _number = int(given) if given.isdecimal() and int(given) > 0 else None
    else:
        recorded = (number for number in map(_recorded_threads, folders) if number != 0)
        _number = next(recorded, 1 if before == 0 else before)
        _ours = None if _number is None else str(_number)
        if _ours is None:
            os.environ.pop(_THREADS, None)
        else:
            os.environ[_THREADS] = _ours
    if _number != before and ("numpy" in sys.modules or "scipy" in sys.modules):
        from threadpoolctl import ThreadpoolController

        loaded = ThreadpoolController().select(internal_api="openblas")
        linux = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        loaded.limit(limits=_number or cores)  # the library's default is one for each core
    return _number


def _recorded_threads(folder: Path) -> int | None:
    """Returns the number with which a run began: None for the default, 0 for no run."""
    record = folder / "run.json"
    try:
        if not record.is_file():  # a pipe would block
            return 0
        number = json.loads(record.read_text())["fingerprint"].get("openblas_threads")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0  # whoever opens the folder reports a damaged record
    return number if isinstance(number, int) and number > 0 else None
