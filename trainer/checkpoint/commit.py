"""Commits and removes checkpoints so that no crash leaves an incomplete one, and lists them.

Start with `commit`. Its order is also safe against a loss of power: it syncs the files that the
checkpoint must not be ahead of, then every file and folder of the checkpoint. Only then does the
checkpoint get its name, which is synced before older checkpoints are removed.
"""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint, one_line
from trainer.checkpoint.reading import read_manifest
from trainer.writers.files import sync, sync_tree

Fence = Callable[[], None]


def commit(temporary: Path, final: Path, before: Callable[[], None], fence: Fence) -> None:
    """Syncs a step's files and renames it; raises OSError if the disk cannot be written."""
    # `before` syncs the files that the checkpoint must not be ahead of; `fence` is called just
    # before the rename. Any exception of the two is passed on.
    before()
    sync_tree(temporary)
    # As late as possible: another process may take the workdir over while the files are synced.
    fence()
    temporary.rename(final)
    sync(final.parent)
    sync(final.parent.parent)  # checkpoints/ itself may be new


def remove(directory: Path, steps: Collection[int], fence: Fence) -> None:
    """Removes checkpoints, the newest first; raises OSError if one cannot be renamed."""
    # Each is renamed before its files are deleted, because a folder with the name of a step must be
    # complete at any moment. `fence` is called first and before each rename, and its exceptions are
    # passed on. Those before a checkpoint that cannot be renamed were removed.
    if not steps and not (directory / REMOVED).exists():
        return
    fence()
    sync(directory)  # a killed process may not have synced the names of those that stay
    delete_removed(directory)
    home = directory / REMOVED
    for step in sorted(steps, reverse=True):
        fence()
        home.mkdir(mode=0o700, exist_ok=True)
        (directory / str(step)).rename(free_name(home, step))
    # Sync the renames before any file is deleted: a folder named as a step must be complete.
    sync(directory)
    delete_removed(directory)


def delete_removed(directory: Path) -> None:
    """Deletes the folder of removed checkpoints, including those of a killed process."""
    # Files that a reader on NFS has open are deleted after the next save.
    home = directory / REMOVED
    if home.is_symlink() or home.is_file():
        home.unlink()
    shutil.rmtree(home, ignore_errors=True)


def remove_unfinished(directory: Path, step: int | None = None) -> None:
    """Deletes the temporary folders of failed or killed saves, of one step or, if None, of any."""
    for rest in directory.glob(f"{'*' if step is None else step}{TEMPORARY}*"):
        shutil.rmtree(rest, ignore_errors=True)


def set_step_aside(path: Path) -> Path:
    """Moves a damaged step to damaged/, or raises CheckpointError; returns its new path."""
    home = path.parent / DAMAGED
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        return path.rename(free_name(home, int(path.name)))
    except OSError as e:
        why = "it is a file" if isinstance(e, FileExistsError) else one_line(e)
        raise CheckpointError(
            f"The damaged checkpoint {path} cannot be moved to the folder {home}: {why}. Move it "
            "away, and start the same command again."
        ) from e


def free_name(home: Path, step: int) -> Path:
    """Returns an unused path for a step, such as damaged/100 or damaged/100.1."""
    names = (f"{step}.{i}" if i else str(step) for i in range(1000))
    return next(home / name for name in names if not (home / name).exists())


# Which checkpoints there are.

DAMAGED, REMOVED = "damaged", "removed"  # folders beside the steps
TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that is being written


def step_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns step -> absolute path of the committed steps in checkpoints/, oldest first."""
    root = Path(directory)
    try:
        root = root.absolute()  # orbax does not accept relative paths
        if not root.is_dir():
            return {}
        # Names as a save writes them: int() would also read '007' and '1_0'. 18 digits fit int64.
        names = [path for path in root.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", path.name)]
        return dict(sorted((int(path.name), path) for path in names if path.is_dir()))
    except OSError as e:
        raise CheckpointError(f"{root} cannot be listed: {one_line(e)}.") from e


def holds_results(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoints/ directory has more than the files of an interrupted save."""
    root = Path(directory)
    if not root.is_dir():
        return root.exists()
    return any(TEMPORARY not in path.name and path.name != REMOVED for path in root.iterdir())


def check_not_lost(directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if every checkpoint of a run was set aside as damaged."""
    # A run must not start anew in such a folder, because it would erase the metrics.
    home = Path(directory) / DAMAGED
    if not step_directories(directory) and home.is_dir() and any(home.iterdir()):
        raise CheckpointError(
            f"Every checkpoint of this run was damaged and moved to {home}. Starting anew "
            "would erase its metrics: remove that folder to do so, choose another --workdir, or "
            f"move a repaired checkpoint back to {directory}."
        )


# Which checkpoints to keep.


class Retention:
    """Keeps the newest checkpoints, the best ones by a finite metric, and chosen steps."""

    def __init__(self, latest: int, best: int, mode: str, always: Collection[int]) -> None:
        if latest < 1 or best < 0:
            raise ValueError(
                f"keep_latest={latest} and keep_best={best} were given; "
                "keep_latest must be at least 1 and keep_best at least 0."
            )
        if mode not in ("max", "min"):
            raise ValueError(f"best_mode={mode!r} was given; it must be 'max' or 'min'.")
        self._latest, self._best = latest, best
        # sorted() puts the best metric first, and of two equal ones the earlier.
        self._sign = -1 if mode == "max" else 1
        self._always = frozenset(always)
        self._metrics: dict[int, float] = {}
        self._later_metrics: dict[int, float] = {}

    def read(self, found: Mapping[int, Path]) -> None:
        """Reads the metrics of the checkpoints on disk, given as step -> folder."""
        self._metrics = dict.fromkeys(found, math.nan)
        for step, path in found.items():
            with contextlib.suppress(CorruptCheckpoint):
                if (metric := read_manifest(path)["metric"]) is not None:
                    self._metrics[step] = float(metric)
        self._metrics |= {s: x for s, x in self._later_metrics.items() if s in found}

    def saving(self, step: int, metric: float | None) -> None:
        """Sets the metric of a checkpoint that is about to be saved; None if it has none."""
        self._later_metrics.pop(step, None)  # of an earlier checkpoint of this step
        self._metrics[step] = math.nan if metric is None else metric

    def record_metric(self, step: int, metric: float) -> None:
        """Sets the metric of a checkpoint that was saved before it was evaluated."""
        # It replaces the metric on disk in every later decision.
        self._later_metrics[step] = self._metrics[step] = metric

    def forget_after(self, step: int) -> None:
        """Forgets the metrics of later steps than `step`."""
        for known in (self._later_metrics, self._metrics):
            for later in [s for s in known if s > step]:
                del known[later]

    def superfluous(self, steps: Collection[int]) -> set[int]:
        """Returns those of `steps`, all checkpoints of the run, that need not be kept."""
        metrics = {step: self._metrics.get(step, math.nan) for step in steps}
        # Without NaNs, which have no order: orbax's own policy took a NaN for the best metric.
        finite = [step for step in steps if math.isfinite(metrics[step])]
        best = sorted(finite, key=lambda step: (self._sign * metrics[step], step))[: self._best]
        return set(steps) - set(sorted(steps)[-self._latest :]) - set(best) - self._always
