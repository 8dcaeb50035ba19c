"""The share of steps whose gradients clip_norm scaled down, for the diagnostic "clipped"."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.engine.diagnostics import counts_clipped
from trainer.engine.program import Program
from trainer.train.nonfinite import Log, RetriedFile, Write
from trainer.train.pending import CheckedBlock
from trainer.writers.json_files import DamagedFile, read_json

CLIPPED_FILE = "clipped.json"
_KEPT = 100  # more checkpoints than a run keeps, but for those that it keeps for good


class ClippedSteps(RetriedFile):
    """Counts the clipped steps since the last row of metrics."""

    # The step returns the norm of its gradients anyway, so that no step computes more for this. If
    # a state is saved between two rows, clipped.json has the counts at its step, so that a resumed
    # run writes the same row. If it lacks them, the first row has no share.

    def __init__(self, program: Program, folder: Path, write: Write, log: Log):
        super().__init__(CLIPPED_FILE, write, log)
        experiment = program.experiment
        self._program = program
        self._on = counts_clipped(experiment.diagnostics, experiment.optimizer.clip_norm)
        self._bound: Callable[[int], np.float32] | None = None
        # Step of a saved state -> clipped steps and all steps since the last row before it.
        self._saved: dict[int, tuple[int, int]] = {}
        if self._on:
            # The file may be lost: only a row lacks its share.
            with contextlib.suppress(OSError, DamagedFile, ValueError):
                rows = read_json(folder / CLIPPED_FILE, dict[str, list[int]], "remove it.")
                self._saved = {int(step): (clipped, all_) for step, (clipped, all_) in rows.items()}
        self._now: tuple[int, int] | None = (0, 0)

    def begin(self, step: int) -> None:
        """Begins after a step, with the state that was saved there or is the first."""
        self._now = self._saved.get(step, None if step else (0, 0))
        if self._on:  # not before: the first trace of a program may drop inputs
            self._bound = self._program.clip_norm_of_steps()

    def add(self, block: CheckedBlock) -> None:
        """Counts the steps of a block. One that was not finite, and skipped, is not clipped."""
        if self._bound is None or self._now is None:
            return
        steps = np.arange(block.first, block.last + 1)
        norms = block.metrics.column("grad_norm")[: len(steps)]
        bounds = np.asarray([self._bound(step) for step in steps.tolist()])
        clipped = (norms > bounds) & ~np.isin(steps, block.bad)
        self._now = self._now[0] + int(clipped.sum()), self._now[1] + len(steps)

    def take(self) -> dict[str, float]:
        """Returns the share for a row, by the name of the diagnostic, and begins the next row."""
        found, self._now = self._now, (0, 0)
        return {"clipped": found[0] / found[1]} if self._on and found and found[1] else {}

    def save(self, step: int) -> None:
        """Writes the counts at the step of a state that is to be saved."""
        if not self._on:
            return
        # Later states are not on the path of a run that went back.
        kept = {at: counts for at, counts in self._saved.items() if at < step}
        self._saved = kept if self._now is None else kept | {step: self._now}
        newest = sorted(self._saved)[-_KEPT:]
        self.write(json.dumps({str(at): self._saved[at] for at in newest}) + "\n")
