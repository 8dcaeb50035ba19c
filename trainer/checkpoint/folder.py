"""The steps of a run in a folder: which there are, and how they are committed and removed.

No crash leaves an incomplete step. The order is also safe against a loss of power: `Folder.commit`
syncs the files that the checkpoint must not be ahead of, then every file and folder of the
checkpoint. Only then does the checkpoint get its name, which is synced before older checkpoints are
removed. `bucket` does the same for a bucket.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainer.checkpoint import integrity
from trainer.checkpoint.errors import CheckpointError, one_line
from trainer.writers.files import make_folder, sync, sync_tree

Fence = Callable[[], None]

_DAMAGED, _REMOVED = "damaged", "removed"  # folders beside the steps
_TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that is being written


class Folder:
    """The steps in checkpoints/, or in another folder; nothing of it is read before it is asked."""

    # Its methods raise OSError if the disk cannot be read or written, `steps` CheckpointError. They
    # pass on what a `fence` raises, which is called before a step is committed or removed.

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def steps(self) -> dict[int, Path]:
        """Returns step -> path of the committed steps, oldest first."""
        try:
            if not self.path.is_dir():
                return {}
            # Names as a save writes them: int() also reads '007' and '1_0'. 18 digits fit int64.
            names = [x for x in self.path.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", x.name)]
            return dict(sorted((int(path.name), path) for path in names if path.is_dir()))
        except OSError as e:
            raise CheckpointError(f"{self.path} cannot be listed: {one_line(e)}.") from e

    def begin(self, run: str) -> None:
        """Makes the folder for a new run, so that a mistake is found before it computes."""
        make_folder(self.path, 0o700)

    def holds_results(self) -> bool:
        """Returns whether there is more than the files of an interrupted save."""
        if not self.path.is_dir():
            return self.path.exists()
        names = [path.name for path in self.path.iterdir()]
        return any(_TEMPORARY not in name and name != _REMOVED for name in names)

    def damaged(self) -> str | None:
        """Returns where damaged steps were moved; None if there are none."""
        home = self.path / _DAMAGED
        return str(home) if home.is_dir() and any(home.iterdir()) else None

    def open(self) -> None:
        """Makes the folder, and deletes the files of killed saves and removals."""
        make_folder(self.path, 0o700)
        self._delete_removed()
        self.forget("*")

    def make(self, step: int) -> Path:
        """Makes a place in which a step is written, and returns it."""
        # A unique name: a process that lost the workdir may still write into its own folder.
        return Path(tempfile.mkdtemp(prefix=f"{step}{_TEMPORARY}-", dir=self.path))

    def commit(
        self, temporary: Path, step: int, manifest: str, before: Callable[[], None], fence: Fence
    ) -> None:
        """Writes the manifest of a step, syncs its files and renames it."""
        # `before` syncs the files that the checkpoint must not be ahead of.
        (temporary / integrity.MANIFEST).write_text(manifest)
        before()
        sync_tree(temporary)
        # As late as possible: another process may take the workdir over while the files are synced.
        fence()
        temporary.rename(self.path / str(step))
        sync(self.path)
        sync(self.path.parent)  # the folder itself may be new

    def forget(self, step: int | str) -> None:
        """Deletes what failed saves of a step, or of any with "*", have written."""
        for rest in self.path.glob(f"{step}{_TEMPORARY}*"):
            shutil.rmtree(rest, ignore_errors=True)

    def remove(self, steps: Collection[int], fence: Fence) -> None:
        """Removes steps, the newest first."""
        # Each is renamed before its files are deleted, because a folder with the name of a step
        # must be complete at any moment. Those before one that cannot be renamed were removed.
        home = self.path / _REMOVED
        if not steps and not home.exists():
            return
        fence()
        sync(self.path)  # a killed process may not have synced the names of those that stay
        self._delete_removed()
        for step in sorted(steps, reverse=True):
            fence()
            home.mkdir(mode=0o700, exist_ok=True)
            (self.path / str(step)).rename(_free_name(home, step))
        # Sync the renames before any file is deleted, for the same reason.
        sync(self.path)
        self._delete_removed()

    def _delete_removed(self) -> None:
        """Deletes the folder of removed checkpoints, including those of a killed process."""
        # Files that a reader on NFS has open are deleted after the next save.
        home = self.path / _REMOVED
        if home.is_symlink() or home.is_file():
            home.unlink()
        shutil.rmtree(home, ignore_errors=True)

    def set_aside(self, step: Any) -> str:
        """Moves a damaged step to damaged/, or raises CheckpointError; returns its new path."""
        home = self.path / _DAMAGED
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            return str(step.rename(_free_name(home, int(step.name))))
        except OSError as e:
            why = "it is a file" if isinstance(e, FileExistsError) else one_line(e)
            raise CheckpointError(
                f"The damaged checkpoint {step} cannot be moved to the folder {home}: {why}. Move "
                "it away, and start the same command again."
            ) from e


def _free_name(home: Path, step: int) -> Path:
    """Returns an unused path for a step, such as damaged/100 or damaged/100.1."""
    names = (f"{step}.{i}" if i else str(step) for i in range(1000))
    return next(home / name for name in names if not (home / name).exists())
