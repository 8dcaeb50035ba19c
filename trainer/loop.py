"""Runs a program: step, write, evaluate, save. The order is written down once, here."""

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from trainer.advice import advise, replay_command
from trainer.cadence import Stopwatch
from trainer.checkpoint import Checkpoints
from trainer.nonfinite import (
    Counters,
    NonFinite,
    Record,
    RollBack,
    Turns,
    counters_of,
    describe,
    go_back,
    turned,
)
from trainer.processes import Wishes, as_first_says
from trainer.program import Program
from trainer.step import Batch, State
from trainer.watchdog import Watchdog
from trainer.writers import MultiWriter

DONE, FAILED, STOPPED = 0, 1, 75  # exit codes; 75 is EX_TEMPFAIL: start the same command again

Observer = Callable[[int, Batch, State], None]


class Metrics(NamedTuple):
    """The metrics of a step, still on the device."""

    step: int
    values: dict[str, jax.Array]

    def fetch(self) -> dict[str, float]:
        values = jax.device_get({k: x for k, x in self.values.items() if k != "finite"})
        return {name: float(x) for name, x in values.items()}


class _Interrupted(Exception):
    """A signal came during evaluation."""


class Loop:
    """Takes a run from a state to its last step.

    No checkpoint is ahead of metrics.jsonl: all that is logged up to a step is on disk before the
    state of that step is saved. A state after a step that was not finite is never saved.

    Args:
        program: the compiled experiment.
        checkpoints: where the state is saved.
        writer: takes the metrics.
        wishes: says when to stop, and when to save besides every `save_every` steps.
        log: takes a line for the user.
        record: takes the steps that are not finite.
        turns: where the run went back to before, and the state gets other counters.
        until: the step to stop after, as a signal would; None for the last one.
        observe: is shown every step: its number, its batch and the state after it.
        vocabulary: packages of the user's, for the command that an error suggests.
    """

    def __init__(
        self,
        program: Program,
        checkpoints: Checkpoints,
        writer: MultiWriter,
        wishes: Wishes,
        log: Callable[[str], None],
        *,
        record: Record,
        turns: Turns,
        until: int | None = None,
        observe: Observer | None = None,
        vocabulary: Sequence[str] = (),
    ):
        self.program = program
        self.experiment = program.experiment
        self.checkpoints = checkpoints
        self.writer = writer
        self.wishes = wishes
        self.log = log
        self.results: dict[str, float] = {}
        self._record = record
        self._turns = turns
        self._end = min(self.experiment.steps, until or self.experiment.steps)
        self._vocabulary = vocabulary
        self._observe = observe or (lambda *_: None)
        self._watchdog = Watchdog(self.experiment.watchdog, log)
        self._waiting: Metrics | None = None
        self._unchecked: collections.deque[Metrics] = collections.deque()
        self._counters = Counters()
        self._behind: str | None = None  # why nothing is saved now
        # Steps that the host may be ahead of the device: enough to keep it busy, and few, because
        # simulated devices on few cores deadlock in their collectives when many are in flight.
        simulated = program.mesh.size > 1 and program.mesh.devices.flat[0].platform == "cpu"
        self._ahead = 1 if simulated else 2

    def run(self, state: State, began: float | None = None, *, unevaluated: bool = False) -> int:
        """Runs to the last step, or until a signal.

        Args:
            state: where to start from; its buffers are donated.
            began: the `time.perf_counter()` at which the process began, to tell how long the first
                step took to come.
            unevaluated: the evaluation that belongs to this state was interrupted, and comes first.

        Returns:
            The exit code: 0 done, 75 stopped by a signal after a saved checkpoint, 1 where the
            last state or the last metrics could not be saved.

        Raises:
            NonFinite: a loss or a gradient is not finite, and the experiment halts then.
            RollBack: one is not, and the experiment goes back then.
        """
        step = start = int(state.step)
        evaluated = not unevaluated
        self._stopwatch = Stopwatch(step)
        with self._watchdog:
            if unevaluated and not self.wishes.stop:
                evaluated = self._evaluate_again(state, step)
            for step, state in self._steps(state, start):  # noqa: B020
                if began is not None and step == start + 1:
                    jax.block_until_ready(state)
                    self.log(f"First step after {time.perf_counter() - began:.1f} s.")
                evaluated = self._after_step(state, step)
            return self._finish(state, step, evaluated)

    # Steps.

    def _steps(self, state: State, step: int) -> Iterator[tuple[int, State]]:
        """Yields (finished steps, state) after every step, until the end or a signal."""
        experiment = self.experiment
        state, batches = self._turned(state, step)
        while step < self._end and not self.wishes.stop:
            self._watchdog.step(step + 1)
            batch = next(batches)
            state, metrics = self.program.step(state, self.program.put(batch))
            step += 1
            self._unchecked.append(Metrics(step, metrics))
            if len(self._unchecked) > self._ahead:
                self._check_oldest()
            if step % experiment.log_every == 0 or step == experiment.steps:
                self._flush()
                self._waiting = self._unchecked[-1]
            self._observe(step, batch, state)
            self.writer.progress(step)
            self.wishes.meet()
            yield step, state
            if self._turns.at(step) is not None:
                self._settle()
                state, batches = self._turned(state, step)

    def _turned(self, state: State, step: int) -> tuple[State, Iterator[Batch]]:
        """Makes the turn that the run makes at a step, if any; the batches go on as it says."""
        state = turned(state, self._turns.at(step))
        self._counters = counters_of(state.hyper)
        return state, self.program.batches(step + self._counters.left_out)

    def _after_step(self, state: State, step: int) -> bool:
        """Evaluates and saves where it is time to; returns False for a broken-off evaluation."""
        experiment = self.experiment
        last, evaluated, metric = step == experiment.steps, True, None
        if last or step % experiment.eval_every == 0:
            try:
                metric = self._evaluate(state, step)
            except _Interrupted:
                evaluated = False
        asked = last or step % experiment.save_every == 0 or step == self._end
        if asked or self.wishes.stop or self.wishes.save_now():
            self._save(state, step, metric)
        return evaluated

    def _save(self, state: State, step: int, metric: float | None) -> None:
        self._settle()
        self._flush()
        self._watchdog.other(f"the save of step {step}")
        start = time.perf_counter()
        with self._stopwatch.stopped():
            if self._all_written():
                self.checkpoints.save(step, state, metric=metric)
        self.wishes.saved(time.perf_counter() - start)

    def _all_written(self) -> bool:
        """Writes what a state must not be ahead of; says once where that cannot be."""
        self.writer.flush()
        self._record.flush()
        before = self._behind
        self._behind = self._turns.flush() or self.writer.behind
        if self._behind and not before:
            self.log("Until then no state is saved.")
        return as_first_says(self._behind is None)

    # What was not finite.

    def _settle(self) -> None:
        """Waits for every step so far, and sees whether it was finite."""
        while self._unchecked:
            self._check_oldest()

    def _check_oldest(self) -> None:
        oldest = self._unchecked.popleft()
        finite = np.asarray(oldest.values["finite"]).item()  # waits until the step is done
        if self._waiting is not None and oldest.step == self._waiting.step:
            self._stopwatch.lap(oldest.step)
        if not finite:
            self._not_finite(oldest)

    def _not_finite(self, bad: Metrics) -> None:
        self._record.add(bad.step, self._counters.left_out, bad.values)
        if self.experiment.on_nonfinite == "skip":
            return
        self._unchecked.clear()
        if self._waiting is not None and self._waiting.step >= bad.step:
            self._waiting = None
        self._flush()
        values = bad.fetch()
        said, advice = describe(values), advise(self.program, bad.step, self._counters)
        if self.experiment.on_nonfinite == "rollback":
            step, counters = go_back(self._counters, bad.step, advice)
            self.log(f"At step {bad.step} {said}: back to step {step}, and on without that batch.")
            raise RollBack(step, counters)
        self.writer.write_scalars(bad.step, values)
        command = replay_command(self.checkpoints.directory.parent, bad.step, self._vocabulary)
        kept = f"The checkpoints before it are kept, and `{command}` names the operation."
        raise NonFinite(f"At step {bad.step} {said}. {advice} {kept}")

    # Metrics.

    def _flush(self) -> None:
        """Writes the metrics that wait: by now the device has long computed them."""
        while self._unchecked and self._waiting and self._unchecked[0].step <= self._waiting.step:
            self._check_oldest()
        if self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        speed = self._stopwatch.speed(self.experiment.data.batch_size)
        self.writer.write_scalars(waiting.step, waiting.fetch() | speed)

    def _evaluate(self, state: State, step: int) -> float | None:
        """Evaluates, writes the results, and returns the one that "best" is judged by."""
        self._settle()
        self._flush()
        with self._stopwatch.stopped():
            self.results = self.program.evaluate(state, self._eval_batches(step))
        self.writer.write_scalars(step, {f"eval/{k}": v for k, v in self.results.items()})
        return self.results.get(self.experiment.best_metric or "")

    def _eval_batches(self, step: int) -> Iterator[Batch]:
        for batch in self.experiment.data.evaluate():
            self._watchdog.other(f"the evaluation at step {step}")
            self.wishes.meet("batch")
            if self.wishes.stop:
                raise _Interrupted
            yield batch

    def _evaluate_again(self, state: State, step: int) -> bool:
        try:
            metric = self._evaluate(state, step)
        except _Interrupted:
            return False
        self.writer.flush()
        if metric is not None:
            self.checkpoints.judge(step, metric)
        return True

    # The end.

    def _finish(self, state: State, step: int, evaluated: bool) -> int:
        self._settle()
        self._flush()
        self.writer.flush()
        self.checkpoints.wait()
        if self.checkpoints.latest() != step:
            self._save(state, step, None)
            self.checkpoints.wait()
        if self.checkpoints.latest() != step:
            why = self._behind or self.checkpoints.error
            self.log(f"The state at step {step} could not be saved: {why}")
            return FAILED
        if self.writer.error:
            self.log(f"The metrics up to step {step} could not be written: {self.writer.error}")
            return FAILED
        self.checkpoints.prune()
        if step < self.experiment.steps or not evaluated:
            why = self.wishes.stop or "--until"
            self.log(
                f"Stopped at step {step} by {why}; saved. Start the same command again to go on."
            )
            return STOPPED
        results = ", ".join(f"{name} {value:.4g}" for name, value in self.results.items())
        self.log(f"Done: {step:,} steps. {results}")
        return DONE
