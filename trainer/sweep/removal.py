"""Removes the folders of waves, so that a process that is killed meanwhile does no harm."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from trainer.writers.files import remove_temporaries, sync

_REMOVED = ".removed-"


def set_aside(file: Path) -> Path:
    """Removes waves/NAME.json, whatever it is, and renames the folder; needs the sweep's lock."""
    # Returns a folder for `remove_set_aside`, which may be called after the lock is released,
    # because it may take long. If this process is killed meanwhile, what is left is not mistaken
    # for a wave.
    removed = Path(tempfile.mkdtemp(prefix=_REMOVED, dir=file.parent))
    with contextlib.suppress(FileNotFoundError):
        os.rename(file.with_suffix(""), removed / file.stem)
    if file.is_dir() and not file.is_symlink():
        os.rename(file, removed / file.name)
    file.unlink(missing_ok=True)
    sync(file.parent)
    return removed


def set_aside_result(folder: Path, waves: Path) -> Path:
    """Takes the folder of a trial out of the sweep, which must be locked; as `set_aside` does."""
    removed = Path(tempfile.mkdtemp(prefix=_REMOVED, dir=waves))
    os.rename(folder, removed / folder.name)
    sync(folder.parent)
    return removed


def remove_set_aside(folder: Path) -> None:
    """Removes what `set_aside` returned, as far as possible."""
    with contextlib.suppress(OSError):  # `ignore_errors` does not ignore all of them
        shutil.rmtree(folder, ignore_errors=True)


def clean(waves: Path) -> None:
    """Removes what workers that were killed have left in waves/; the sweep must be locked."""
    remove_temporaries(waves)
    for removed in waves.glob(f"{_REMOVED}*"):
        remove_set_aside(removed)  # perhaps at the same time as a worker that is alive
