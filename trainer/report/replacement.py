"""Replaces the folder of a report as a whole, so that it is never half of one."""

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.writers.json_files import DamagedFile, read_json

_SWAP = 1.0  # seconds that two renames take at most
_LIST = ".report.json"  # names the files that a report has, and tells that the folder is one


class _Written(TypedDict):
    files: list[str]


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Gives an empty folder, which takes the place of the one of a report in the end.

    Files in the old folder that no report wrote, such as what LaTeX made there, are kept. A process
    that is killed meanwhile leaves the old folder, or its content beside it, from where the next
    one takes it back.

    Args:
        folder: absolute; may not exist.

    Yields:
        A new folder beside it, to be filled.

    Raises:
        UserError: the folder is not that of a report, or the disk cannot be written.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
    staged = _beside(folder, "tmp")
    try:
        _clean(folder)
        kept = _others(folder)
        staged.mkdir(parents=True)
        yield staged
        files = sorted(_files(staged))
        _keep(folder, staged, kept)
        (staged / _LIST).write_text(json.dumps({"files": files}, indent=1) + "\n", "utf-8")
        _swap(staged, folder)
    except OSError as e:
        raise UserError(
            f"The report cannot be written to {folder}: {e.strerror or e}. What was there before "
            f"is unchanged. Make room or get the permission to write to {folder.parent}, or choose "
            "another folder with --output."
        ) from e
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _others(folder: Path) -> list[str]:
    """Returns the files in a report's folder that no report wrote.

    Raises:
        UserError: it is not the folder of a report.
    """
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir():
        raise UserError(
            f"{folder} is a file, and a report is a folder. Choose another with --output."
        )
    names = sorted(_files(folder))
    try:
        written = set(read_json(folder / _LIST, _Written, "")["files"])
    except FileNotFoundError:
        if not names:
            return []
        raise UserError(
            f"{folder} is not the folder of a report: it has {listing(names, 3)}, and no {_LIST}. "
            "Nothing was written there. Choose a folder that is empty or does not exist with "
            "--output."
        ) from None
    except DamagedFile as e:
        raise UserError(
            f"{folder / _LIST}, the list of the files of a report, cannot be read. Nothing was "
            f"written there. Remove {folder} or choose another folder with --output."
        ) from e
    return [name for name in names if name not in written and name != _LIST]


def _files(folder: Path) -> Iterator[str]:
    """Yields the paths of all files below a folder, relative to it."""
    for root, folders, names in os.walk(folder):
        for name in [*names, *(each for each in folders if Path(root, each).is_symlink())]:
            yield Path(root, name).relative_to(folder).as_posix()


def _keep(folder: Path, staged: Path, names: list[str]) -> None:
    """Puts a user's files into the new folder too."""
    for name in names:
        target = staged / name
        if os.path.lexists(target):
            raise UserError(
                f"{folder / name} is not of the last report, and the new one has a file of this "
                "name. Nothing was written. Move it away, or choose another folder with --output."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / name, target, follow_symlinks=False)


def _swap(staged: Path, folder: Path) -> None:
    old = _beside(folder, "old")
    there = folder.exists()
    if there:
        os.rename(folder, old)
    try:
        os.rename(staged, folder)
    except BaseException:
        if there:
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path, suffix: str) -> Path:
    # Beside it, because a rename is possible only within a file system.
    return folder.with_name(f".{folder.name}.{_host()}.{os.getpid()}.{suffix}")


def _host() -> str:
    return re.sub(r"\W", "-", socket.gethostname())  # without dots, which separate the parts


def _clean(folder: Path) -> None:
    """Takes back the folder, and removes what is beside it, if a process was killed.

    Whether a process of another host lives is not known: what it fills may be in use.
    """
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.([\w-]+)\.(\d+)\.(tmp|old)")
    for path in sorted(folder.parent.glob(".*.*.*.*")):
        found = pattern.fullmatch(path.name)
        if found is None:
            continue
        if found[3] == "old" and _stays_away(folder):
            os.rename(path, folder)
        elif found[1] == _host() and not _lives(int(found[2])):
            shutil.rmtree(path, ignore_errors=True)


def _stays_away(folder: Path) -> bool:
    """Returns whether a folder does not exist, nor is put there by a process that replaces it."""
    end = time.monotonic() + _SWAP
    while not (there := folder.exists()) and time.monotonic() < end:
        time.sleep(_SWAP / 10)
    return not there


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return process != os.getpid()  # as this one, it cannot have left anything
