"""Checks the path of a run's folder, and creates the folder."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from trainer.messages import UserError
from trainer.writers.durable import make_folder


def check_name(path: str | os.PathLike[str]) -> None:
    """Checks that Python and UTF-8 encode the path of a workdir to the same bytes.

    The arrays of a checkpoint are written by C++, which encodes every path in UTF-8. They would be
    written to another folder than the other files, or not at all.

    Args:
        path: the workdir; the names of its parent folders count too.

    Raises:
        UserError: the bytes differ.
    """
    text = str(Path(path).absolute())
    with contextlib.suppress(UnicodeEncodeError):  # the path has no encoding here
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
    raise UserError(
        f"The workdir {shown} cannot hold checkpoints: their arrays are written under names in "
        f"UTF-8, and {why}, or choose another --workdir."
    )


def make(path: Path) -> None:
    """Creates a workdir, with permissions 0700, and its parents.

    Args:
        path: the folder; may exist.

    Raises:
        UserError: the folder cannot be created.
    """
    try:
        make_folder(path, mode=0o700)
    except OSError as e:
        raise UserError(
            f"The workdir {path} cannot be made: {e.strerror}. Choose another --workdir."
        ) from e
