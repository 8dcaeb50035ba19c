"""Prepares the process before jax starts: memory, compiled programs kept on disk."""

import ctypes
import os
import stat
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_KEEP = 1 << 30


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory up to 1 GiB instead of giving it back to the system.

    XLA frees its temporaries after every step; without this each step faults them in anew, a third
    of a small step's time. Does nothing where the C library is another.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP)
    except (OSError, AttributeError):
        pass


def keep_compiled_programs() -> None:
    """Lets jax keep compiled programs in a folder that only this user can write.

    What lies there is machine code that later runs trust: the folder must belong to the user, with
    mode 0700. Set JAX_COMPILATION_CACHE_DIR for another folder, or to "" for none.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "lockstep" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return  # a home that cannot be written costs compile time and nothing else
    if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        jax.config.update("jax_compilation_cache_dir", str(folder))
