"""Prepares the process before jax starts: memory allocation and the compilation cache."""

import ctypes
import os
import stat
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from glibc's malloc.h
_KEEP = 1 << 30


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory up to 1 GiB instead of giving it back to the system.

    XLA frees its temporary buffers after every step. Without this setting each step maps them
    again, which takes a third of a small step's time. The thresholds apply to the main arena only,
    and XLA's threads would get arenas of their own, so that there must be one arena: call this
    before any thread is started. Does nothing if the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP)
        libc.mallopt(_M_ARENA_MAX, 1)
    except (OSError, AttributeError):
        pass


def keep_compiled_programs() -> None:
    """Enables jax's compilation cache, in a folder that only this user can write.

    Later runs execute the machine code in it, so the folder must belong to the user and have mode
    0700. Set JAX_COMPILATION_CACHE_DIR to another folder, or to "" for no cache. Programs that
    compile in less than a second, which jax does not keep by default, are kept as well: a run has a
    dozen of them, and a warm start takes 1.2 s instead of 1.65.
    """
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
