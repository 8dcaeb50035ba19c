"""Where a run's folder may be, and making it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from trainer.config.tree import ConfigError
from trainer.writers.durable import make_folder


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuses a workdir whose path has other bytes for this process than in UTF-8.

    The arrays of a checkpoint are written by C++, which spells every path in UTF-8: they would go
    to another folder than the rest, or nowhere.

    Args:
      path: the workdir; the folders above it count too.

    Raises ConfigError.
    """
    text = str(Path(path).absolute())
    with contextlib.suppress(UnicodeEncodeError):  # no text at all, or text that has no bytes here
        if os.fsencode(text) == text.encode():
            return
    try:
        shown = os.fsencode(text).decode()
    except UnicodeError:
        shown = text.encode(errors="backslashreplace").decode()
    encoding = sys.getfilesystemencoding()
    why = "this path is not valid UTF-8. Rename the folder"
    if encoding != "utf-8":
        why = f"names of files are read as {encoding} here. Set PYTHONUTF8=1 in the environment"
    raise ConfigError(
        f"The workdir {shown} cannot hold checkpoints: their arrays are written under names in "
        f"UTF-8, and {why}, or choose another --workdir."
    )


def make(path: Path) -> None:
    """Makes a workdir, with permissions 0700, and its parents; raises ConfigError."""
    try:
        make_folder(path, mode=0o700)
    except OSError as e:
        raise ConfigError(
            f"The workdir {path} cannot be made: {e.strerror}. Choose another --workdir."
        ) from e
