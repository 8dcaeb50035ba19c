"""Keeps the blocks that were dispatched, until they are checked for values that are not finite.

It also counts the steps whose gradients clip_norm scaled down, for the diagnostic "clipped".
"""

import collections
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from trainer.engine.diagnostics import COUNTED
from trainer.engine.program import Program
from trainer.engine.step import State, StepMetrics
from trainer.train.nonfinite import Log, RetriedFile, Write
from trainer.writers.json_files import DamagedFile, read_json


class _Pending(NamedTuple):
    first: int
    metrics: Sequence[StepMetrics]
    params_finite: jax.Array | None
    steps: int
    diagnosed: StepMetrics | None


class CheckedBlock(NamedTuple):
    """A block that the devices have computed."""

    first: int  # counted from 1, as `last`
    last: int
    metrics: StepMetrics  # [steps], on the host
    bad: list[int]  # the steps that are not finite, up to `end`
    diagnosed: Mapping[str, float]  # the diagnostics of the last step; empty if it has none
    end: int | None = None  # the step after which the run cannot go on; None if it can

    def row(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step, as they are logged."""
        values = {name: float(x[step - self.first]) for name, x in self.metrics.items()}
        del values["finite"]
        values.pop("proceed", None)
        return {**values, **(self.diagnosed if step == self.last else {})}


class PendingBlocks:
    """A queue of dispatched blocks, each to be checked once the devices have computed it."""

    # Under on_nonfinite="halt" the parameters are checked only at log steps, evaluations and
    # checkpoints: one that is not finite makes nearly every later loss not finite as well, and
    # reading all of them at every step costs 5% of a small model's step. Under the other two
    # policies the step itself checks everything: "skip" undoes its update, and "rollback" needs to
    # know the first step that was not finite.
    # `params_finite_at` is the last step after which they were found finite; at first, that of the
    # first state.

    def __init__(self, program: Program, step: int):
        self.params_finite_at, self._program = step, program
        self._policy = program.experiment.on_nonfinite
        self._blocks: collections.deque[_Pending] = collections.deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def busy(self) -> bool:
        """Returns whether the devices still compute the newest block."""
        return bool(self._blocks) and not self._blocks[-1].metrics[-1].arrays[0].is_ready()

    def add(
        self,
        first: int,
        steps: int,
        metrics: Sequence[StepMetrics],
        state: State,
        check: bool,
        diagnosed: StepMetrics | None = None,
    ) -> None:
        """Adds a dispatched block: its metrics, from `Program.advance`, and the state after it."""
        # `first` is its first step, counted from 1. `check` asks to check the parameters of the
        # state as well. `diagnosed` are the diagnostics of its last step, from `Program.diagnose`.
        checked = self._program.params_finite(state) if check and self._policy == "halt" else None
        self._blocks.append(_Pending(first, metrics, checked, steps, diagnosed))

    def check_oldest(self) -> CheckedBlock:
        """Waits for the oldest block, and removes it from the queue."""
        block = self._blocks.popleft()
        last = block.first + block.steps - 1
        metrics = StepMetrics.stack_on_host(block.metrics)
        bad, ends = (
            [block.first + int(index) for index in np.flatnonzero(column[: block.steps] == 0)]
            for column in (metrics.column("finite"), metrics.proceeds)
        )
        end = min(ends, default=None)
        # After it, the steps of a block may have been computed, or not.
        bad = [step for step in bad if end is None or step <= end]
        if not bad and block.params_finite is not None and not block.params_finite:
            bad, end = [last], last
        if not bad and (block.params_finite is not None or self._policy != "halt"):
            self.params_finite_at = last
        diagnosed = {name: float(x) for name, x in (block.diagnosed or {}).items()}
        return CheckedBlock(block.first, last, metrics, bad, diagnosed, end)

    def clear(self) -> None:
        """Removes every block."""
        self._blocks.clear()


CLIPPED_FILE = "clipped.json"
_KEPT = 100  # more checkpoints than a run keeps, but for those that it keeps for good


class ClippedSteps(RetriedFile):
    """Counts the clipped steps since the last row of metrics."""

    # The step returns the norm of its gradients anyway, so that no step computes more for this. If
    # a state is saved between two rows, clipped.json has the counts at its step, so that a resumed
    # run writes the same row. If it lacks them, the first row has no share.

    def __init__(self, program: Program, folder: Path, write: Write, log: Log):
        super().__init__(CLIPPED_FILE, write, log)
        asked, clips = program.experiment.diagnostics, program.experiment.optimizer.clip_norm
        self._program = program
        self._on = clips is not None and (asked == "all" or COUNTED in asked)
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
        return {COUNTED: found[0] / found[1]} if self._on and found and found[1] else {}

    def save(self, step: int) -> None:
        """Writes the counts at the step of a state that is to be saved."""
        if not self._on:
            return
        # Later states are not on the path of a run that went back.
        kept = {at: counts for at, counts in self._saved.items() if at < step}
        self._saved = kept if self._now is None else kept | {step: self._now}
        newest = sorted(self._saved)[-_KEPT:]
        self.write(json.dumps({str(at): self._saved[at] for at in newest}) + "\n")
