"""Commits a checkpoint, and removes others, so that no crash leaves a half of one.

The order holds for a loss of power too: what a checkpoint must not be ahead of is synced, then
every file and folder of the checkpoint; only then does it get its name, which is synced before
anything older goes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from trainer.checkpoint import integrity
from trainer.checkpoint.integrity import CheckpointError
from trainer.checkpoint.reading import DAMAGED, REMOVED, TEMPORARY
from trainer.writers.durable import sync, sync_tree

Fence = Callable[[], None]


def commit(temporary: Path, final: Path, before: Callable[[], None], fence: Fence) -> None:
    """Lists the files of a step that is written, syncs them, and gives the step its name.

    Args:
      temporary: the folder that it was written to.
      final: its name in checkpoints/.
      before: syncs what the checkpoint must not be ahead of.
      fence: called just before the rename.

    Raises OSError, also where the arrays were not written into the folder, and what before and
    fence raise.
    """
    index = integrity.ARRAYS
    if not (temporary / index).is_file():
        raise OSError(f"the index of its arrays, {index}, was not written to {temporary}")
    listing = {"format": integrity.FORMAT, "files": integrity.file_list(temporary)}
    (temporary / integrity.FILES).write_text(integrity.seal(listing))
    (temporary / integrity.COMMITTED).write_text(f"Committed as {final.name}.\n")
    before()
    sync_tree(temporary)
    fence()
    temporary.rename(final)
    sync(final.parent)
    sync(final.parent.parent)


def remove(directory: Path, steps: Collection[int], fence: Fence) -> None:
    """Removes checkpoints of a directory, the newest first; raises OSError.

    Each is renamed before its files go: a checkpoint under its own name is whole, at any moment.

    fence: called before anything is touched; what it raises is raised.
    """
    if not steps and not (directory / REMOVED).exists():
        return
    fence()
    sync(directory)  # those that stay: a process that was killed may not have come to it
    sweep(directory)
    home = directory / REMOVED
    for step in sorted(steps, reverse=True):
        fence()
        home.mkdir(mode=0o700, exist_ok=True)
        (directory / str(step)).rename(free_name(home, step))
    sync(directory)
    sweep(directory)


def sweep(directory: Path) -> None:
    """Deletes what was removed, by a process that was killed too.

    What cannot be deleted now (a reader on NFS holds it) is tried again after the next save.
    """
    home = directory / REMOVED
    if home.is_symlink() or home.is_file():
        home.unlink()
    shutil.rmtree(home, ignore_errors=True)


def remove_unfinished(directory: Path, step: int) -> None:
    """Deletes what a save that failed left of a step."""
    for rest in directory.glob(f"{step}{TEMPORARY}*"):
        shutil.rmtree(rest, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Moves a damaged step to damaged/ and returns where it is; raises CheckpointError."""
    home = path.parent / DAMAGED
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        return path.rename(free_name(home, int(path.name)))
    except OSError as e:
        why = "it is a file" if isinstance(e, FileExistsError) else integrity.reason(e)
        raise CheckpointError(
            f"The damaged checkpoint {path} cannot be moved to the folder {home}: {why}. Move it "
            "away, and start the same command again."
        ) from e


def free_name(home: Path, step: int) -> Path:
    """Returns a path for a step in a directory that may hold others of that step."""
    names = [str(step), *(f"{step}.{i}" for i in range(1, 1000))]
    return next(home / name for name in names if not (home / name).exists())
