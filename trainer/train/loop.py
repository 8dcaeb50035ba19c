"""Runs a program: asks for blocks of steps, writes metrics, evaluates and saves, in this order."""

import contextlib
import time
from collections.abc import Callable, Sequence

import jax

from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import DONE, FAILED, STOPPED, UserError, plural
from trainer.train.advice import advise, replay_command
from trainer.train.boundaries import Boundaries
from trainer.train.evaluations import Evaluations
from trainer.train.hooks import At, Hooks, called_at
from trainer.train.multihost import broadcast_from_host0, raise_on_all
from trainer.train.nonfinite import NonFiniteLog, describe
from trainer.train.pending import CheckedBlock, PendingBlocks
from trainer.train.rollback import (
    MOST_ROLLBACKS,
    Counters,
    GoBack,
    RollbackLog,
    apply_rollback,
    counters_of,
    go_back,
)
from trainer.train.saves import Saves
from trainer.train.services import Blocks, Consensus, Ended, Halted, Observer, StateKeeper
from trainer.train.stopwatch import Clock, Stopwatch
from trainer.train.supply import Supply
from trainer.train.utilization import Utilization
from trainer.train.watchdog import Watchdog
from trainer.writers import MultiWriter


class Loop:
    """Runs the blocks from a state to the last step.

    No checkpoint is ahead of metrics.jsonl: all metrics up to a step are on disk before the state
    of that step is saved. A state after a step that was not finite is never saved.

    Args:
        program: the compiled experiment.
        checkpoints: saves the state.
        writer: writes the metrics.
        consensus: decides when to stop, and when to save besides every `save_every` steps.
        watchdog: watches the blocks, between its `__enter__` and its `__exit__`.
        log: takes a line for the user.
        nonfinite_log: records the steps that are not finite.
        hooks: the functions of the user that it calls.
        rollback_log: the rollbacks before now, whose counters the state takes at their steps.
        until: stop after this step as after a signal; None for the last step.
        observe: called after every block with its last step, its batches and the state after it.
        vocabulary: the user's packages, for the command that an error suggests.
        seconds: the time of the steps before the first state.
        clock: runs while steps of this loop are computed; None if no other loop uses the devices.
    """

    def __init__(
        self,
        program: Program,
        checkpoints: StateKeeper,
        writer: MultiWriter,
        consensus: Consensus,
        watchdog: Watchdog,
        log: Callable[[str], None],
        *,
        nonfinite_log: NonFiniteLog,
        hooks: Hooks,
        rollback_log: RollbackLog,
        until: int | None = None,
        observe: Observer | None = None,
        vocabulary: Sequence[str] = (),
        seconds: float = 0.0,
        clock: Clock | None = None,
    ):
        self.program = program
        self.experiment = program.experiment
        self.checkpoints = checkpoints
        self.writer = writer
        self.consensus = consensus
        self.log = log
        self._nonfinite_log = nonfinite_log
        self._hooks = hooks
        self._rollback_log = rollback_log
        self._boundaries = Boundaries(program, rollback_log, until)
        self._vocabulary = vocabulary
        self._observe = observe or (lambda *_: None)
        self._watchdog = watchdog
        self._evaluations = Evaluations(program, writer, consensus, self._watchdog)
        self._seconds = seconds
        self._clock = clock
        self._newest: dict[str, float] = {}  # the metrics that were written last
        self._counters = Counters()
        # All processes compute the same blocks.
        self._steps_per_call = broadcast_from_host0(program.block_rule.steps)
        # Blocks that the host may be ahead of the devices: enough to keep them busy.
        self._ahead = 1 if program.simulated else 2

    def run(self, state: State, began: float | None = None, *, unevaluated: bool = False) -> Blocks:
        """Runs to the last step, or until a signal or a step that is not finite.

        Yields every block, and is sent what `Program.advance` returns for it: the caller computes
        the blocks, because the trials of a sweep are computed side by side.

        Args:
            state: the first state; its buffers are donated.
            began: the `time.perf_counter()` at which the process started, to log the time until
                the end of the first block; None logs nothing.
            unevaluated: whether the evaluation of this state was interrupted, and is done first.

        Returns:
            How the run ended, or where it continues under on_nonfinite="rollback".
        """
        step, data = int(state.step), self.experiment.data
        use = Utilization(self.program)
        self._stopwatch = Stopwatch(step, data, self._seconds, self._clock, use)
        self._pending = PendingBlocks(self.program, step)
        self._saves = Saves(
            self.checkpoints,
            self.writer,
            self._nonfinite_log,
            self._rollback_log,
            self.consensus,
            self._watchdog,
            self._stopwatch.stopped,
            self.log,
        )
        # Enough for a block of each of those in flight. Other loops share the devices and the data.
        ahead = 2 * self._steps_per_call if self._clock is None else 0
        self._supply = Supply(ahead, self._pending.busy)
        with contextlib.closing(self._supply):
            return (yield from self._blocks(state, began, unevaluated))

    def _blocks(self, state: State, began: float | None, unevaluated: bool) -> Blocks:
        boundaries, step = self._boundaries, int(state.step)
        evaluated, metric = not unevaluated, None
        stop = self.consensus.stop
        raise_on_all(lambda: self._hooks.bind(step - unevaluated))
        if unevaluated and not stop:
            evaluated = self._evaluate_again(state, step)
            stop = self.consensus.stop
        state = self._apply_rollback(state, step)
        while step < boundaries.end and not stop:
            first, steps = step + 1, boundaries.steps_to_next(step, self._steps_per_call)
            self._watchdog.block(first, steps)
            with self._saves.before_error(state, step, metric, self._is_finite):
                block = self._supply.take(steps)
            state, metrics = yield state, block
            step += steps
            self.consensus.sync()
            stop = self.consensus.stop
            due = boundaries.due(step, self._save_now(stop))
            self._pending.add(first, steps, metrics, state, check=due.check)
            if (bad := self._check(0 if due.wait else self._ahead)) is not None:
                return self._not_finite(bad)
            if began is not None:
                self._log_first(began, steps, state)
                began = None
            self._observe(step, block, state)
            self.writer.progress(step)
            if due.hooks:
                self._call_hooks("log", state, step)
            evaluated, metric = True, None
            if due.evaluate:
                evaluated, metric = self._evaluate(state, step)
                stop = self.consensus.stop
                due = boundaries.due(step, self._save_now(stop))  # it may have been long
            if due.save:
                self._saves.save(state, step, metric)
            if due.rollback:
                state = self._apply_rollback(state, step)
        return self._finish(state, step, evaluated)

    # Blocks.

    def _apply_rollback(self, state: State, step: int) -> State:
        """Applies the rollback to a step, if there is one, and reads the batches after it."""
        state = apply_rollback(state, self._rollback_log.at(step))
        self._counters = counters_of(state.run_state)
        self._supply.read(self.program.feed.batches(step + self._counters.skipped_batches))
        return state

    def _save_now(self, stop: str | None) -> bool:
        return stop is not None or self.consensus.save_now()

    def _check(self, pending: int) -> CheckedBlock | None:
        """Checks the oldest blocks until so many are left, and writes their rows of metrics.

        Returns:
            The first block with a step for which the run must stop; None if there is none.
        """
        bad, rows = None, {}
        while len(self._pending) > pending and bad is None:
            block = self._pending.check_oldest()
            self._watchdog.finished(block.last - block.first + 1)
            for step in block.bad:
                self._nonfinite_log.add(step, self._batch_index(step), block.row(step))
            if block.bad and self.experiment.on_nonfinite != "skip":
                self._pending.clear()  # the steps after it build on it
                bad = block
            elif self._boundaries.due(block.last).log:
                rows[block.last] = self._newest = block.row(block.last)
        if rows:
            # One lap for all: when the devices finished the earlier ones was not observed.
            self._stopwatch.lap(max(rows), self._supply.waited if self._clock is None else None)
            for step, row in rows.items():
                self.writer.write_scalars(step, row | self._stopwatch.row(step))
        return bad

    def _is_finite(self, state: State) -> bool:
        return self._check(0) is None and bool(self.program.params_finite(state))

    def _log_first(self, began: float, steps: int, state: State) -> None:
        jax.block_until_ready(state)
        which = "First step" if steps == 1 else f"First {steps} steps"
        self.log(f"{which} after {time.perf_counter() - began:.1f} s.")

    # What follows a block.

    def _evaluate(self, state: State, step: int) -> tuple[bool, float | None]:
        """Returns whether the evaluation came to its end, and the metric that ranks checkpoints."""
        progress = self._stopwatch.progress(step)
        with self._stopwatch.stopped():
            with self._saves.before_error(state, step, None, self._is_finite):
                finished = self._evaluations.run(state, step, progress)
        metric = self._evaluations.best() if finished else None
        if finished and called_at(self.experiment.hooks, "evaluation"):
            self._call_hooks("evaluation", state, step, metric)
        return finished, metric

    def _evaluate_again(self, state: State, step: int) -> bool:
        finished, metric = self._evaluate(state, step)
        self.writer.flush()
        if metric is not None:
            self.checkpoints.record_metric(step, metric)
        return finished

    def _call_hooks(self, at: At, state: State, step: int, metric: float | None = None) -> None:
        """Calls the user's functions; saves the state and raises UserError if one raises."""
        self._watchdog.other(f"the call of the hooks after step {step}")
        metrics = self._newest if at == "log" else self._evaluations.results
        try:
            with self._stopwatch.stopped():
                raise_on_all(lambda: self._hooks.call(at, step, metrics, state))
        except UserError:  # in all processes, which save together
            self._saves.save_last(state, step, metric)
            raise

    # Steps that are not finite.

    def _batch_index(self, step: int) -> int:
        return step - 1 + self._counters.skipped_batches  # steps count from 1, batches from 0

    def _not_finite(self, block: CheckedBlock) -> GoBack | Halted:
        bad = block.bad[0]
        values = block.row(bad)
        found = f"At step {bad} {describe(values, (self._pending.params_finite_at + 1, bad))}."
        if self.experiment.on_nonfinite == "rollback":
            back = go_back(self._counters, bad)
            if back is not None:
                self.log(f"{found} The run goes back to step {back.step} and skips the batch.")
                return back
            advice = advise(self.program, self._batch_index(bad))
            return Halted(
                f"Step {bad} is not finite, and the run went back {MOST_ROLLBACKS} times before. "
                f"{advice}",
                bad,
            )
        self.writer.write_scalars(bad, values | self._stopwatch.progress(bad))
        advice = advise(self.program, self._batch_index(bad))
        command = replay_command(self.checkpoints.directory.parent, bad, self._vocabulary)
        kept = f"The checkpoints before it are kept, and `{command}` names the operation."
        return Halted(f"{found} {advice}", bad, kept)

    # The end.

    def _finish(self, state: State, step: int, evaluated: bool) -> Ended:
        self.writer.flush()
        self._saves.save_last(state, step)
        if self.checkpoints.latest() != step:
            why = self._saves.behind or self.checkpoints.error
            return self._failed(step, f"The state at step {step} could not be saved: {why}")
        if why := self.writer.error:
            return self._failed(step, f"The metrics up to step {step} could not be written: {why}")
        self.checkpoints.prune()
        if step < self.experiment.steps or not evaluated:
            text = f"Stopped at step {step} by {self.consensus.stop or '--until'}; saved."
            again = "the same command again" if self.consensus.stop else "it without --until"
            self.log(f"{text} Start {again} to resume.")
            return Ended("stopped", STOPPED, step, text)
        self.log(f"Done: {plural(step, 'step')}. {self._evaluations.describe()}")
        return Ended("done", DONE, step)

    def _failed(self, step: int, why: str) -> Ended:
        self.log(why)
        return Ended("failed", FAILED, step, why)
