"""Commits and removes checkpoints so that no crash leaves an incomplete one.

The order is safe against a loss of power too. First the files that a checkpoint must not be ahead
of are synced, then every file and folder of the checkpoint. Only then does it get its name, which
is synced before older checkpoints are removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from trainer.checkpoint import integrity
from trainer.checkpoint.errors import CheckpointError, reason
from trainer.checkpoint.file_list import ARRAYS, COMMITTED, FILES, SizeAndCrc, file_list
from trainer.checkpoint.folders import DAMAGED, REMOVED, TEMPORARY
from trainer.writers.durable import sync, sync_tree

Fence = Callable[[], None]


def commit(
    temporary: Path,
    final: Path,
    before: Callable[[], None],
    fence: Fence,
    known: Mapping[str, SizeAndCrc] | None = None,
) -> None:
    """Writes the list of a step's files, syncs them, and renames the step to its final name.

    Args:
        temporary: the folder in which the step was written.
        final: its path in checkpoints/.
        before: syncs the files that the checkpoint must not be ahead of.
        fence: called just before the rename.
        known: files of the step whose size and CRC-32 were computed as they were written.

    Raises:
        OSError: the disk cannot be written, or the folder has no arrays.
        Exception: any exception of `before` and `fence`.
    """
    # tensorstore encodes paths in UTF-8; under another encoding it writes to another folder.
    if not (temporary / ARRAYS).is_file():
        raise OSError(f"the index of its arrays, {ARRAYS}, was not written to {temporary}")
    listing = {"format": integrity.FORMAT, "files": file_list(temporary, known)}
    (temporary / FILES).write_text(integrity.seal(listing))
    (temporary / COMMITTED).write_text(f"Committed as {final.name}.\n")
    before()
    sync_tree(temporary)
    # As late as possible: syncing takes time, in which another process may take the workdir over.
    fence()
    temporary.rename(final)
    sync(final.parent)
    sync(final.parent.parent)  # checkpoints/ itself may be new


def remove(directory: Path, steps: Collection[int], fence: Fence) -> None:
    """Removes checkpoints of a directory, the newest first.

    Each is renamed before its files are deleted: under its own name, a checkpoint is complete at
    any moment.

    Args:
        directory: checkpoints/ of a run.
        steps: those to remove.
        fence: called before anything is changed; its exceptions are passed on.

    Raises:
        OSError: a checkpoint cannot be renamed; those before it were removed.
    """
    if not steps and not (directory / REMOVED).exists():
        return
    fence()
    sync(directory)  # those that stay: a killed process may not have synced them
    sweep(directory)
    home = directory / REMOVED
    for step in sorted(steps, reverse=True):
        fence()
        home.mkdir(mode=0o700, exist_ok=True)
        (directory / str(step)).rename(free_name(home, step))
    # The new names first: what has the name of a step must have all of its files.
    sync(directory)
    sweep(directory)


def sweep(directory: Path) -> None:
    """Deletes the folder of removed checkpoints, including those of a killed process.

    Files that cannot be deleted now (a reader on NFS has them open) are deleted after the next
    save.

    Args:
        directory: checkpoints/ of a run.
    """
    home = directory / REMOVED
    if home.is_symlink() or home.is_file():
        home.unlink()
    shutil.rmtree(home, ignore_errors=True)


def remove_unfinished(directory: Path, step: int | None = None) -> None:
    """Deletes the temporary folders that a failed or killed save left.

    Args:
        directory: checkpoints/ of a run.
        step: the step that was being saved; None for those of any step.
    """
    for rest in directory.glob(f"{'*' if step is None else step}{TEMPORARY}*"):
        shutil.rmtree(rest, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Moves a damaged step to damaged/, beside the steps.

    Args:
        path: the step's folder.

    Returns:
        Its new path.

    Raises:
        CheckpointError: the folder cannot be moved.
    """
    home = path.parent / DAMAGED
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        return path.rename(free_name(home, int(path.name)))
    except OSError as e:
        why = "it is a file" if isinstance(e, FileExistsError) else reason(e)
        raise CheckpointError(
            f"The damaged checkpoint {path} cannot be moved to the folder {home}: {why}. Move it "
            "away, and start the same command again."
        ) from e


def free_name(home: Path, step: int) -> Path:
    """Returns an unused path for a step, such as damaged/100 or damaged/100.1.

    Args:
        home: the folder, which may already have that step.
        step: the number of the step.
    """
    names = (f"{step}.{i}" if i else str(step) for i in range(1000))
    return next(home / name for name in names if not (home / name).exists())
