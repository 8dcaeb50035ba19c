"""Finds the files of texts, each once, with one look at each: there may be many."""

import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.data.folders import matching


class Stamp(NamedTuple):
    """Values of which at least one changes when a file is written, replaced or gets other times."""

    size: int
    modified: int  # ns
    changed: int  # ns; no program can set it
    inode: int


class Found(NamedTuple):
    """A file."""

    path: str  # as it was named, or below a folder that was named
    real: str  # the path with all links resolved
    stamp: Stamp


def find_files(files: str | Sequence[str]) -> list[Found]:
    """Returns the files that paths, folders and globs name, each once."""
    # Of a folder it takes all files below it, but none whose name or folder begins with a dot.
    # Raises ValueError if there is no such file, or a file is empty, not a regular file or cannot
    # be read.
    found: list[Found] = []
    for pattern in [files] if isinstance(files, str) else files:
        below = [each for match in matching(pattern) for each in _files_of(str(match))]
        if not below:
            raise ValueError(
                f"files has {_nothing(pattern)}. Give paths of texts, of folders with texts, or "
                "globs such as 'books/*.txt'."
            )
        found += below
    if not found:
        raise ValueError("files is an empty list. Give at least one file, folder or glob.")
    # A file that is named twice would be in the training split and in another one.
    once: dict[str, Found] = {}
    for each in found:
        once.setdefault(each.real, each)
    return list(once.values())


def _nothing(pattern: str) -> str:
    """Returns why a pattern names no file."""
    matches = matching(pattern)
    where = "" if os.path.isabs(os.path.expanduser(pattern)) else f" in {Path.cwd()}"
    if matches:
        names = ", ".join(repr(str(path)) for path in matches[:3])
        return (
            f"the folder{'s' * (len(matches) > 1)} {names}{where}, with no file whose name does "
            "not begin with a dot"
        )
    if glob.has_magic(pattern):
        return f"the glob {pattern!r}, which matches nothing{where}"
    return f"{pattern!r}, but there is no such file or folder{where}"


def _files_of(path: str) -> list[Found]:
    """Returns a file, or the files below a folder by name, with one stat of each."""
    if not os.path.isdir(path):
        return [_found(path, os.path.realpath(path))]
    found: list[Found] = []
    # The real path of each folder is kept, because os.path.realpath of each file takes long.
    pending = [("" if path == "." else path, os.path.realpath(path), True)]
    while pending:
        path, real, is_folder = pending.pop()
        if is_folder:
            pending += _entries(path, real)
        else:
            found.append(_found(path, real))
    return found


def _entries(folder: str, real: str) -> list[tuple[str, str, bool]]:
    """Returns path, real path and whether it is a folder of each entry, the last name first."""
    # `_files_of` takes them from the end, so by name.
    try:
        listed = [each for each in os.scandir(folder or ".") if each.name[0] != "."]
    except OSError as error:
        raise ValueError(f"{folder} cannot be listed ({error.strerror}).") from error
    entries: list[tuple[str, str, bool]] = []
    for entry in sorted(listed, key=lambda each: each.name, reverse=True):
        path, below = os.path.join(folder, entry.name), os.path.join(real, entry.name)
        if not entry.is_symlink():
            entries.append((path, below, entry.is_dir()))
        elif not os.path.isdir(path):  # links to folders are not followed: they may form circles
            entries.append((path, os.path.realpath(path), False))
    return entries


def _found(path: str, real: str) -> Found:
    try:
        seen = os.stat(path)
    except FileNotFoundError:  # a link to nothing
        seen = None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from error
    if seen is None or not stat.S_ISREG(seen.st_mode):  # opening a pipe would wait for its writer
        raise ValueError(f"files has {path!r}, which is not a regular file.")
    if not seen.st_size:
        raise ValueError(
            f"{path} is empty, and an empty document has nothing to learn. Remove the file, or "
            "leave it out of `files`."
        )
    return Found(path, real, Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino))
