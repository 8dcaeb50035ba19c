"""Which checkpoints to keep, and removing the others so that no kill leaves a half of one."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

REMOVED = "removed"


class Retention(NamedTuple):
    """Keeps the newest checkpoints, and the best by a metric that is finite."""

    latest: int
    best: int
    mode: str  # 'max' or 'min'; of equals the earlier one is better

    def superfluous(self, steps: Collection[int], metrics: Mapping[int, float]) -> set[int]:
        """Returns the steps that need not be kept."""
        sign = -1 if self.mode == "max" else 1
        finite = [step for step in steps if math.isfinite(metrics.get(step, math.nan))]
        best = sorted(finite, key=lambda step: (sign * metrics[step], step))[: self.best]
        return set(steps) - set(sorted(steps)[-self.latest :]) - set(best)


def remove(directory: Path, steps: Collection[int]) -> None:
    """Removes checkpoints of a directory, the newest first; raises OSError.

    Each is renamed before its files go: a checkpoint under its own name is whole, at any moment.
    """
    sweep(directory)
    home = directory / REMOVED
    for step in sorted(steps, reverse=True):
        home.mkdir(mode=0o700, exist_ok=True)
        (directory / str(step)).rename(home / str(step))
    sweep(directory)


def sweep(directory: Path) -> None:
    """Deletes what was removed, by a process that was killed too.

    What cannot be deleted now (a reader on NFS holds it) is tried again after the next save.
    """
    shutil.rmtree(directory / REMOVED, ignore_errors=True)
