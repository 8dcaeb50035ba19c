"""How wide a wave may be, and which trials cannot be computed in their waves."""

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trainer.sweep.removal import remove_set_aside, set_aside
from trainer.writers.files import replace_file
from trainer.writers.json_files import DamagedFile, read_json

MOST_ERRORS = 3  # errors of a trial's own code before it counts as failed

# A wave's folder and files take time, of which each of 16 trials has a small share; only short
# trials gain from wider waves.
_USEFUL_OPERATIONS = 2**38  # FLOPs of a wave: about a minute on two cores
_USEFUL, _MOST = 16, 64  # trials


class _Content(TypedDict):
    widths: NotRequired[dict[str, int]]
    alone: NotRequired[list[str]]
    faults: NotRequired[dict[str, int]]


def useful_width(operations: int) -> int:
    """Returns the number of trials, with so many FLOPs each, beyond which a wave gains nothing."""
    return min(_MOST, max(_USEFUL, _USEFUL_OPERATIONS // max(1, operations)))


def wave_width(trials: int, *most: int) -> int:
    """Returns the width of waves if trials are divided into as few as possible, of equal widths.

    `most` are upper bounds of the width, at least one.

    Example:
        >>> wave_width(32, 64, 23)
        16
    """
    waves = math.ceil(trials / max(1, min(most)))
    return math.ceil(trials / waves)


class Limits:
    """Trials that cannot be computed in their waves, as was learned, in waves/limits.json."""

    # `exclusive` keeps other workers from the file.

    def __init__(self, path: Path, exclusive: Callable[[], AbstractContextManager[None]]):
        self.path, self._exclusive = path, exclusive

    def read(self) -> dict[str, Any]:
        """Returns the limits; empty ones if the file is missing or damaged."""
        # "widths" is index of a program, as text -> the most trials of a wave; "alone" are the
        # folders of trials that are computed as runs of their own; "faults" is folder of a trial ->
        # number of errors.
        empty: dict[str, Any] = {"widths": {}, "alone": [], "faults": {}}
        # The limits of a lost file are learned again.
        with contextlib.suppress(FileNotFoundError, DamagedFile):
            return empty | read_json(self.path, _Content, "remove it.")
        return empty

    def halve_width(self, program: int, width: int) -> None:
        """Makes later waves of a program at most half as wide as one that cannot be computed."""
        # The width of that one is at least 2.
        with self._changing() as limits:
            limits["widths"][str(program)] = width // 2

    def compute_alone(self, folder: str) -> None:
        """Lets a trial be computed as a run of its own, after a rollback in its wave."""
        with self._changing() as limits:
            limits["alone"].append(folder)

    def has_failed(self, folder: str) -> bool:
        """Counts an error of a trial; returns whether it has failed for good."""
        with self._changing() as limits:
            count = limits["faults"][folder] = limits["faults"].get(folder, 0) + 1
        return count >= MOST_ERRORS

    def forget_faults(self, folders: Collection[str]) -> None:
        """Forgets the errors of trials that are to be computed again."""
        with self._changing() as limits:
            for folder in folders:
                limits["faults"].pop(folder, None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Yields the limits, and writes what the caller makes of them."""
        with self._exclusive():
            limits = self.read()
            yield limits
            if self.path.is_dir():
                remove_set_aside(set_aside(self.path))
            replace_file(self.path, json.dumps(limits).encode())
