"""Keeps the blocks that were dispatched, until they are checked for values that are not finite."""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from trainer.engine.program import Program
from trainer.engine.step import State, StepMetrics


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
