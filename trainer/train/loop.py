"""Runs a program: steps, writes metrics, evaluates and saves, in the order given here."""

import time
from collections.abc import Callable, Iterator, Sequence

import jax

from trainer.checkpoint import Checkpoints
from trainer.engine.contracts import Batch
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import DONE, FAILED, STOPPED, UserError
from trainer.train.advice import advise, replay_command
from trainer.train.autosave import Stopwatch
from trainer.train.consensus import StopSaveConsensus
from trainer.train.evaluations import Evaluations
from trainer.train.hooks import call_hooks
from trainer.train.multihost import broadcast_from_host0, raise_on_all
from trainer.train.nonfinite import NonFinite, NonFiniteLog, describe
from trainer.train.pending import Metrics, PendingSteps
from trainer.train.restoring import to_save
from trainer.train.rollback import (
    Counters,
    RollBack,
    RollbackLog,
    apply_rollback,
    counters_of,
    go_back,
)
from trainer.train.watchdog import Watchdog
from trainer.writers import MultiWriter

Observer = Callable[[int, Batch, State], None]


class Loop:
    """Runs the steps from a state to the last one.

    No checkpoint is ahead of metrics.jsonl: all metrics up to a step are on disk before the state
    of that step is saved. A state after a step that was not finite is never saved.

    Args:
        program: the compiled experiment.
        checkpoints: saves the state.
        writer: writes the metrics.
        consensus: decides when to stop, and when to save besides every `save_every` steps.
        log: takes a line for the user.
        nonfinite_log: records the steps that are not finite.
        rollback_log: the rollbacks before now, whose counters the state takes at their steps.
        until: stop after this step as after a signal; None for the last step.
        observe: called after every step with the step, its batch and the state after it.
        vocabulary: the user's packages, for the command that an error suggests.
    """

    def __init__(
        self,
        program: Program,
        checkpoints: Checkpoints,
        writer: MultiWriter,
        consensus: StopSaveConsensus,
        log: Callable[[str], None],
        *,
        nonfinite_log: NonFiniteLog,
        rollback_log: RollbackLog,
        until: int | None = None,
        observe: Observer | None = None,
        vocabulary: Sequence[str] = (),
    ):
        self.program = program
        self.experiment = program.experiment
        self.checkpoints = checkpoints
        self.writer = writer
        self.consensus = consensus
        self.log = log
        self._nonfinite_log = nonfinite_log
        self._rollback_log = rollback_log
        self._end = min(self.experiment.steps, until or self.experiment.steps)
        self._vocabulary = vocabulary
        self._observe = observe or (lambda *_: None)
        self._watchdog = Watchdog(self.experiment.watchdog, log)
        self._evaluations = Evaluations(program, writer, consensus, self._watchdog)
        self._waiting: Metrics | None = None
        self._counters = Counters()
        self._behind: str | None = None  # why nothing can be saved now
        # Steps that the host may be ahead of the device: enough to keep it busy, and few, because
        # simulated devices on few cores deadlock in their collectives when many are in flight.
        self._simulated = program.mesh.size > 1 and program.mesh.devices.flat[0].platform == "cpu"
        self._ahead = 1 if self._simulated else 2

    def run(self, state: State, began: float | None = None, *, unevaluated: bool = False) -> int:
        """Runs to the last step, or until a signal.

        Args:
            state: the first state; its buffers are donated.
            began: the `time.perf_counter()` at which the process started, to log the time until
                the first step; None logs nothing.
            unevaluated: whether the evaluation of this state was interrupted, and is done first.

        Returns:
            The exit code: 0 done, 75 stopped by a signal after a saved checkpoint, 1 if the last
            state or the last metrics could not be saved.

        Raises:
            NonFinite: a loss or a gradient is not finite, and on_nonfinite is "halt".
            RollBack: a loss or a gradient is not finite, and on_nonfinite is "rollback".
        """
        step = start = int(state.step)
        evaluated = not unevaluated
        self._stopwatch = Stopwatch(step)
        self._unchecked = PendingSteps(self.program, step)
        with self._watchdog:
            if unevaluated and not self.consensus.stop:
                evaluated = self._evaluate_again(state, step)
            for step, state in self._steps(state, start):  # noqa: B020
                if began is not None and step == start + 1:
                    jax.block_until_ready(state)
                    self.log(f"First step after {time.perf_counter() - began:.1f} s.")
                evaluated = self._after_step(state, step)
            return self._finish(state, step, evaluated)

    # Steps.

    def _steps(self, state: State, step: int) -> Iterator[tuple[int, State]]:
        """Yields (finished steps, state) after every step, until the last step or a signal."""
        experiment = self.experiment
        state, batches = self._apply_rollback(state, step)
        while step < self._end and not self.consensus.stop:
            self._watchdog.step(step + 1)
            batch = next(batches)
            state, metrics = self.program.step(state, self.program.to_devices(batch))
            step += 1
            newest = self._unchecked.add(step, metrics, state)
            if len(self._unchecked) > self._ahead:
                self._check_oldest()
            if step % experiment.log_every == 0 or step == experiment.steps:
                self._flush()
                self._waiting = newest
            if self._simulated and newest.params_finite is not None:
                self._settle()  # the check runs collectives, too
            self._observe(step, batch, state)
            self.writer.progress(step)
            self.consensus.sync()
            yield step, state
            if self._rollback_log.at(step) is not None:
                self._settle()
                state, batches = self._apply_rollback(state, step)

    def _apply_rollback(self, state: State, step: int) -> tuple[State, Iterator[Batch]]:
        """Applies the rollback to a step, if there is one; returns the state and its batches."""
        state = apply_rollback(state, self._rollback_log.at(step))
        self._counters = counters_of(state.run_state)
        return state, self.program.batches(step + self._counters.skipped_batches)

    def _after_step(self, state: State, step: int) -> bool:
        """Evaluates and saves if they are due; returns False if the evaluation was interrupted."""
        experiment = self.experiment
        last, evaluated, metric = step == experiment.steps, True, None
        if experiment.hooks and (last or step % experiment.log_every == 0):
            self._call_hooks(state, step)
        if last or step % experiment.eval_every == 0:
            evaluated, metric = self._evaluate(state, step)
        asked = last or step % experiment.save_every == 0 or step == self._end
        if asked or self.consensus.stop or self.consensus.save_now():
            self._save(state, step, metric)
        return evaluated

    def _save(self, state: State, step: int, metric: float | None) -> None:
        self._unchecked.add_check(state)
        self._settle()
        self._flush()
        self._watchdog.other(f"the save of step {step}")
        start = time.perf_counter()
        with self._stopwatch.stopped():
            if self._all_written():
                self.checkpoints.save(step, to_save(state), metric=metric)
        self.consensus.saved(time.perf_counter() - start)

    def _all_written(self) -> bool:
        """Writes what must be on disk before a state; returns whether that worked.

        The first of several failures is logged.
        """
        self.writer.flush()
        self._nonfinite_log.flush()
        before = self._behind
        self._behind = self._rollback_log.flush() or self.writer.behind
        if self._behind and not before:
            self.log("Until then no state is saved.")
        return broadcast_from_host0(self._behind is None)  # only process 0 has the files

    # Steps that are not finite.

    def _settle(self) -> None:
        """Waits for every dispatched step, and checks whether it was finite."""
        while self._unchecked:
            self._check_oldest()

    def _check_oldest(self) -> None:
        oldest, finite = self._unchecked.check_oldest()
        if self._waiting is not None and oldest.step == self._waiting.step:
            self._stopwatch.lap(oldest.step)
        if not finite:
            self._not_finite(oldest)

    def _not_finite(self, bad: Metrics) -> None:
        batch_index = bad.step - 1 + self._counters.skipped_batches
        self._nonfinite_log.add(bad.step, batch_index, bad.values)
        if self.experiment.on_nonfinite == "skip":
            return
        self._unchecked.clear()  # the steps after it build on it
        if self._waiting is not None and self._waiting.step >= bad.step:
            self._waiting = None
        self._flush()
        values = bad.fetch()
        description = describe(values, (self._unchecked.params_finite_at + 1, bad.step))

        def advice() -> str:
            return advise(self.program, bad.step, self._counters)

        if self.experiment.on_nonfinite == "rollback":
            step, counters = go_back(self._counters, bad.step, advice)
            self.log(
                f"At step {bad.step} {description}. The run goes back to step {step} and skips the "
                "batch."
            )
            raise RollBack(step, counters)
        self.writer.write_scalars(bad.step, values)
        command = replay_command(self.checkpoints.directory.parent, bad.step, self._vocabulary)
        kept = f"The checkpoints before it are kept, and `{command}` names the operation."
        raise NonFinite(f"At step {bad.step} {description}. {advice()} {kept}")

    # Metrics.

    def _flush(self) -> None:
        """Writes the metrics of the last log interval, which the device has long computed."""
        while self._unchecked and self._waiting and self._unchecked.oldest() <= self._waiting.step:
            self._check_oldest()
        if self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        speed = self._stopwatch.speed(self.experiment.data.batch_size)
        self.writer.write_scalars(waiting.step, waiting.fetch() | speed)

    def _evaluate(self, state: State, step: int) -> tuple[bool, float | None]:
        """Returns whether the evaluation came to its end, and the metric that ranks checkpoints."""
        self._settle()
        self._flush()
        with self._stopwatch.stopped():
            finished = self._evaluations.run(state, step)
        return finished, self._evaluations.best() if finished else None

    def _evaluate_again(self, state: State, step: int) -> bool:
        finished, metric = self._evaluate(state, step)
        self.writer.flush()
        if metric is not None:
            self.checkpoints.record_metric(step, metric)
        return finished

    def _call_hooks(self, state: State, step: int) -> None:
        """Calls the user's functions; saves the state and raises UserError if one raises."""
        self._settle()
        metrics = self._waiting.fetch() if self._waiting is not None else {}
        self._flush()
        self._watchdog.other(f"the hooks after step {step}")
        hooks = self.experiment.hooks
        try:
            with self._stopwatch.stopped():
                raise_on_all(lambda: call_hooks(hooks, step, metrics, state.params))
        except UserError:  # in all processes, which save together
            self._save(state, step, None)
            self.checkpoints.wait()
            raise

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
            why = self.consensus.stop or "--until"
            self.log(
                f"Stopped at step {step} by {why}; saved. Start the same command again to resume."
            )
            return STOPPED
        self.log(f"Done: {step:,} steps. {self._evaluations.describe()}")
        return DONE
