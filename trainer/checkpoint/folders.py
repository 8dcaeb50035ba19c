"""The folders in checkpoints/: the committed steps, and those with other names beside them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.checkpoint.errors import CheckpointError, reason

DAMAGED, REMOVED = "damaged", "removed"  # folders beside the steps
TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that is being written


def step_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Lists the committed steps in a checkpoints/ directory.

    Args:
        directory: may not exist.

    Returns:
        Step -> absolute path of its folder, oldest first.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    root = Path(directory)
    try:
        root = root.absolute()  # orbax does not accept relative paths
        if not root.is_dir():
            return {}
        # Names as a save writes them: int() would also read '007' and '1_0'. 18 digits fit int64.
        names = [path for path in root.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", path.name)]
        return dict(sorted((int(path.name), path) for path in names if path.is_dir()))
    except OSError as e:
        raise CheckpointError(f"{root} cannot be listed: {reason(e)}.") from e


def holds_results(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoints/ directory has more than the files of an interrupted save.

    Args:
        directory: may not exist.
    """
    root = Path(directory)
    if not root.is_dir():
        return root.exists()
    return any(TEMPORARY not in path.name and path.name != REMOVED for path in root.iterdir())


def check_not_lost(directory: str | os.PathLike[str]) -> None:
    """Checks that a run has not lost every checkpoint.

    A run must not start anew in such a folder, because it would erase the metrics.

    Args:
        directory: a checkpoints/ directory, which may not exist yet.

    Raises:
        CheckpointError: every checkpoint was set aside as damaged.
    """
    home = Path(directory) / DAMAGED
    if not step_directories(directory) and home.is_dir() and any(home.iterdir()):
        raise CheckpointError(
            f"Every checkpoint of this run was damaged and moved to {home}. Starting anew "
            "would erase its metrics: remove that folder to do so, choose another --workdir, or "
            f"move a repaired checkpoint back to {directory}."
        )
