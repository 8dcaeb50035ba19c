"""Profiles some steps of a run, for --profile."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from trainer.engine.block import Computed
from trainer.engine.contracts import Batch
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import UserError
from trainer.train.operations import costliest

_WARM_UP = 10  # steps of this start that are left out if only a number of steps is asked for

Advance = Callable[[State, Sequence[Batch]], Computed]


class Profile:
    """Writes a profile of jax for the blocks that contain some steps, and prints a table.

    The steps before it are waited for, and nothing that is computed changes.

    Args:
        steps: the first step, counted from 1, or None for the one after the warm-up; and the number
            of steps.
        log: takes a line for the user.
    """

    def __init__(self, steps: tuple[int | None, int], log: Callable[[str], None]):
        self._first, self._count = steps
        self._log = log
        self._program: Program
        self._folder: Path
        self._running = False
        self._begun = 0  # the first step in the profile
        self._profiled = 0  # how many steps it has; after a rollback some of them are there twice

    def choose(self, before: int, end: int) -> None:
        """Chooses the steps, before the run begins.

        Args:
            before: how many steps the run has made already.
            end: the last step that it will make.

        Raises:
            UserError: the run will not make these steps.
        """
        first = before + _WARM_UP + 1 if self._first is None else self._first
        last = first + self._count - 1
        if not before < first <= last <= end:
            asked = f"--profile asks for the steps {first:,} to {last:,}"
            if self._first is None:
                asked += f", {self._count:,} after the first {_WARM_UP}"
            if before >= end:
                raise UserError(f"{asked}, but the run has made its {end:,} steps. Leave it out.")
            raise UserError(
                f"{asked}, but the run makes the steps {before + 1:,} to {end:,}. Name some of "
                f"these, as in --profile={before + 1}-{min(end, before + 10)}."
            )
        self._first = first

    def watch(
        self, program: Program, step: int, folder: Path, doing: Callable[[str], None]
    ) -> Advance:
        """Returns `Program.advance` with a profile of the chosen steps.

        Args:
            program: the compiled experiment.
            step: how many steps are finished before the first block.
            folder: the profile's folder, which is created.
            doing: told what takes long here, as `Watchdog.other`.
        """
        done = step
        self._program, self._folder = program, folder
        assert self._first is not None, "choose() comes first"
        first, last = self._first, self._first + self._count - 1

        def advance(state: State, batches: Sequence[Batch]) -> Computed:
            nonlocal done
            before, done = done, done + len(batches)
            if not self._running and before < first <= done:
                jax.block_until_ready(state)  # earlier steps are not part of it
                self._start(before + 1)
            computed = program.advance(state, batches)
            if self._running:
                self._begun = min(self._begun, before + 1)
                self._profiled += len(batches)
            if self._running and done >= last:
                jax.block_until_ready(computed)
                doing(f"the profile of the steps to {done}")
                self._finish(done)
            return computed

        return advance

    def _start(self, step: int) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the host down, and fill the file
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._running, self._begun, self._profiled = True, step, 0

    def _finish(self, step: int) -> None:
        self._running = False
        jax.profiler.stop_trace()
        found = costliest(self._folder, self._program.compiled.as_text() or "")
        self._log(
            f"The steps {self._begun:,} to {step:,} are profiled in {self._folder}. The costliest "
            "operations, by their share of the time of all:"
        )
        for each in found:
            time = 1e3 * each.seconds / self._profiled
            self._log(f"{each.share:7.1%} {time:10.3f} ms a step  {each.name}")

    def close(self) -> None:
        """Ends a profile whose last step was not reached."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log(
                f"The run ended before the profile in {self._folder}, which has the steps until "
                "then."
            )
