"""Runs a program: asks for blocks of steps, writes metrics, evaluates and saves, in this order.

Start with `Loop._blocks`. `Boundaries` says where a block must end and what follows it, and
`Loop.save` saves no state that is ahead of what the files of the run say. What the loop needs of
its caller, a run or a wave of trials, comes first, and the calls of the config's `hooks`.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax

from trainer.config import wording
from trainer.config.build import exception_text
from trainer.engine import every
from trainer.engine.block import Block, Computed
from trainer.engine.contracts import Batch
from trainer.engine.diagnostics import names_computed
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.hooks import HookContext
from trainer.messages import DONE, FAILED, STOPPED, UserError, plural
from trainer.train import rollback as rollbacks
from trainer.train.batch_prefetcher import BatchPrefetcher
from trainer.train.multihost import broadcast_from_host0, raise_on_all
from trainer.train.nonfinite import NonFiniteLog, Write, advise, describe_fault, fault_at_end
from trainer.train.pending import CheckedBlock, ClippedSteps, PendingBlocks
from trainer.train.rows import Clock, Ended, Results, Stopwatch, Utilization
from trainer.train.trained import to_save
from trainer.train.watchdog import Watchdog
from trainer.writers import MultiWriter
from trainer.writers.base import Log


class Consensus(Protocol):
    """Decides when to stop and to save, as `StopSaveConsensus` of a run and `WaveConsensus`."""

    @property
    def stop(self) -> str | None: ...  # noqa: D102
    def sync(self, after: str = "block") -> None: ...  # noqa: D102
    def save_now(self) -> bool: ...  # noqa: D102
    def record_save(self, delay: float) -> None: ...  # noqa: D102


class StateKeeper(Protocol):
    """Keeps states; see `checkpoint.Checkpoints`."""

    @property
    def error(self) -> str | None: ...  # noqa: D102
    def latest(self) -> int | None: ...  # noqa: D102
    def save(self, step: int, state: Any, *, metric: float | None = None) -> bool: ...  # noqa: D102
    def record_metric(self, step: int, metric: float) -> None: ...  # noqa: D102
    def wait(self) -> None: ...  # noqa: D102
    def prune(self) -> None: ...  # noqa: D102


class Halted(NamedTuple):
    """A step was not finite, and the run must end."""

    why: str  # the error message
    step: int
    replays: bool = False  # whether a replay of the step, from a checkpoint before it, tells more

    def ended(self) -> Ended:
        """Returns how the run ends, if it does not continue elsewhere."""
        return Ended("diverged", FAILED, self.step, self.why)


Observer = Callable[[int, Sequence[Batch], State], None]
"""Called after a block with its last step, its batches and the state after it."""

Blocks = Generator[Block, Computed, Ended | rollbacks.RollbackTarget | Halted]
"""Yields the blocks to compute, and is sent what was computed."""

At = Literal["log", "evaluation"]


def called_at(hooks: Sequence[Any], at: At) -> bool:
    """Returns whether any hook is called at log steps ("log") or after evaluations."""
    # A hook without an attribute `at` is called at log steps.
    return any(getattr(hook, "at", "log") == at for hook in hooks)


class Hooks:
    """The hooks of a run; `fence` is called before a file in its folder is written."""

    def __init__(self, program: Program, folder: Path, log: Log, fence: Callable[[], None]):
        self._program = program
        self._folder, self._log, self._fence = folder, log, fence
        self._hooks: Sequence[Any] = program.experiment.hooks
        self._functions: list[Callable[..., object]] = []

    def bind(self, kept: int) -> None:
        """Binds the hooks that ask for it to the run, whose results up to the step `kept` stay."""
        context = HookContext(
            self._program.experiment, self._program.mesh, self._folder, kept, self._log, self._fence
        )
        self._functions = [
            self._try(index, hook.bind, "cannot begin", context) if hasattr(hook, "bind") else hook
            for index, hook in enumerate(self._hooks)
        ]

    def call(self, at: At, step: int, metrics: Mapping[str, float], state: State) -> None:
        """Calls every hook of that time, until one raises; UserError then names it."""
        # Each hook receives a copy of `metrics`. The next step reuses the memory of `state`, so
        # that a hook must copy what it keeps, for example with `jax.device_get`.
        if at == "log":
            given: tuple[Any, ...] = (state.params,)
        else:
            given = (self._program.evaluation.params(state), state.model_state)
        for index, hook in enumerate(self._hooks):
            if called_at([hook], at):
                function, doing = self._functions[index], f"failed after step {step}"
                self._try(index, function, doing, step, dict(metrics), *given)

    def _try(self, index: int, function: Callable[..., Any], doing: str, *given: Any) -> Any:
        try:
            return function(*given)
        except Exception as error:  # whatever a user's function raises
            hook = self._hooks[index]
            while isinstance(hook, partial):
                hook = hook.func
            module = getattr(hook, "__module__", None) or type(hook).__module__
            name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
            text = f"{exception_text(error)}{wording.location(error)}"
            raise UserError(f"hooks[{index}], {module}.{name}, {doing}: {text}") from error


class Records:
    """What a run notes in small files of its folder, besides the metrics."""

    def __init__(self, program: Program, folder: Path, write: Write, log: Log):
        self.nonfinite = NonFiniteLog(folder, write, program.experiment, log)
        self.rollbacks = rollbacks.RollbackLog(folder, write, log)
        self.clipped = ClippedSteps(program, folder, write, log)


class Services(NamedTuple):
    """What a loop calls besides the program, in a run or in a trial of a wave."""

    checkpoints: StateKeeper
    writer: MultiWriter
    results: Results  # of the rows so far
    records: Records
    hooks: Hooks
    consensus: Consensus
    watchdog: Watchdog
    log: Log


class _Stopped(Exception):
    """Raised between two batches of an evaluation if the run is to stop."""


class Loop:
    """Runs the blocks from a state to the last step."""

    # All metrics up to a step are on disk before its state is saved, and a state after a step that
    # was not finite is never saved. `until` is the step after which the loop stops as after a
    # signal, None for the last one; `also_save` has steps after which a state is saved besides,
    # which does not change what is computed. `observers` are called after every block. `clock` runs
    # while steps of this loop are computed; None if no other loop uses the devices.

    def __init__(
        self,
        program: Program,
        services: Services,
        *,
        until: int | None = None,
        also_save: Collection[int] = (),
        observers: Sequence[Observer] = (),
        clock: Clock | None = None,
    ):
        self.program, self.experiment = program, program.experiment
        self._services = services
        self._checkpoints, self._writer = services.checkpoints, services.writer
        self._consensus, self._watchdog = services.consensus, services.watchdog
        self._records, self._hooks, self._log = services.records, services.hooks, services.log
        self._boundaries = Boundaries(program, services.records.rollbacks, until, also_save)
        self._observers, self._clock = observers, clock
        asked = "noise_scale" in program.experiment.diagnostics
        self._noise_scale = services.results.noise_scale if asked else None
        self._newest: dict[str, float] = {}  # the metrics that were written last
        self._evaluated: dict[str, float] = {}  # the results of the last complete evaluation
        self._behind: str | None = None  # why no state can be saved now; None if one can
        self._counters = rollbacks.Counters()
        # All processes must compute the same blocks.
        self._steps_per_call = broadcast_from_host0(program.block_rule.steps)
        # Blocks that the host may be ahead of the devices: enough to keep them busy.
        self._ahead = 1 if program.simulated else 2

    def run(self, state: State, began: float | None = None, *, unevaluated: bool = False) -> Blocks:
        """Runs to the last step, or until a signal or a step that is not finite."""
        # Yields every block, and is sent what `Program.advance` returns for it: the caller computes
        # the blocks, because trials of a sweep are computed side by side. `state` is donated.
        # `began` is the process's `time.perf_counter()`. `unevaluated` says that the state has yet
        # to be evaluated, which is done first.
        step, use = int(state.step), Utilization(self.program)
        seconds = self._services.results.seconds_at(step)
        self._stopwatch = Stopwatch(step, self.experiment.data, seconds, self._clock, use)
        self._pending = PendingBlocks(self.program, step)
        self._records.clipped.begin(step)
        # Batches for one block while another one is computed. None where other loops share the
        # devices and the data.
        ahead = 2 * self._steps_per_call if self._clock is None else 0
        self._prefetcher = BatchPrefetcher(ahead, self._pending.busy)
        with contextlib.closing(self._prefetcher):
            return (yield from self._blocks(state, began, unevaluated))

    def _blocks(self, state: State, began: float | None, unevaluated: bool) -> Blocks:
        # Do not change the order of operations below: a block is checked and its metrics are
        # written before its state is evaluated, and a state is evaluated before it is saved.
        boundaries, step = self._boundaries, int(state.step)
        evaluated, metric = not unevaluated, None
        stop = self._consensus.stop
        raise_on_all(lambda: self._hooks.bind(step - unevaluated))
        if unevaluated and not stop:
            evaluated, metric = self._evaluate(state, step)
            self._writer.flush()
            if metric is not None:
                self._checkpoints.record_metric(step, metric)
            stop = self._consensus.stop
        state = self._read_after(state, step)
        while step < boundaries.end and not stop:
            first, steps = step + 1, boundaries.steps_to_next(step, self._steps_per_call)
            self._watchdog.begin_block(first, steps)
            with self._save_before_error(state, step, metric):
                block = self._prefetcher.take(steps)
            diagnosed = None
            if boundaries.diagnoses(first):  # before the step, which donates the state
                diagnosed = self.program.diagnose(state, block[0])
            state, metrics = yield state, block
            step += steps
            self._consensus.sync()
            stop = self._consensus.stop
            after = boundaries.after_block(step, self._save_now(stop))
            check = after.log or after.evaluate or after.save
            self._pending.add(first, steps, metrics, state, check, diagnosed)
            if (bad := self._check(0 if after.wait else self._ahead)) is not None:
                return self._not_finite(bad)
            if began is not None:
                jax.block_until_ready(state)
                which = "First step" if steps == 1 else f"First {steps} steps"
                self._log(f"{which} after {time.perf_counter() - began:.1f} s.")
                began = None
            for observe in self._observers:
                observe(step, block, state)
            self._writer.progress(step)
            if after.hooks:
                self._call_hooks("log", state, step)
            evaluated, metric = True, None
            if after.evaluate:
                evaluated, metric = self._evaluate(state, step)
                stop = self._consensus.stop
                # Ask again: after a long evaluation, a save may be due.
                after = boundaries.after_block(step, self._save_now(stop))
            if after.save:
                self.save(state, step, metric)
            if after.rollback:
                state = self._read_after(state, step)
        return self._finish(state, step, evaluated)

    def _read_after(self, state: State, step: int) -> State:
        """Begins to read the batches after a step; applies a rollback to it to the state first."""
        state = rollbacks.apply_rollback(state, self._records.rollbacks.counters.get(step))
        self._counters = rollbacks.counters_of(state.run_state)
        self._prefetcher.start(self.program.feed.batches(step + self._counters.skipped_batches))
        return state

    def _save_now(self, stop: str | None) -> bool:
        return stop is not None or self._consensus.save_now()

    def _check(self, pending: int) -> CheckedBlock | None:
        """Checks the oldest blocks until `pending` are left, and writes their rows of metrics."""
        # Returns the first block with a step for which the run must stop; None if there is none.
        clipped, bad, rows = self._records.clipped, None, {}
        while len(self._pending) > pending and bad is None:
            block = self._pending.check_oldest()
            self._watchdog.end_block(block.last - block.first + 1)
            for step in block.bad:
                self._records.nonfinite.add(step, self._batch_index(step), block.row(step))
            if block.end is not None:
                self._pending.clear()  # later steps build on the bad one
                bad = block
                continue
            clipped.add(block)
            if self._boundaries.after_block(block.last).log:
                rows[block.last] = self._newest = block.row(block.last) | clipped.take()
        if rows:
            # One lap for all rows: nobody saw when the devices finished the earlier blocks.
            self._stopwatch.lap(max(rows), self._prefetcher.waited if self._clock is None else None)
            for step, row in rows.items():
                smoothed = self._noise_scale.add(row) if self._noise_scale else {}
                self._writer.write_scalars(step, row | smoothed | self._stopwatch.row(step))
        return bad

    @contextlib.contextmanager
    def _save_before_error(
        self, state: State, step: int, metric: float | None = None
    ) -> Iterator[None]:
        """Saves a state if the data set raises UserError, such as for a changed file."""
        # Several processes save nothing: they save together, and the error may be in one of them.
        try:
            yield
        except UserError:
            alone = jax.process_count() == 1
            if alone and self._check(0) is None and self.program.params_finite(state):
                self.save_last(state, step, metric)
            raise

    def _evaluate(self, state: State, step: int) -> tuple[bool, float | None]:
        """Returns whether the evaluation came to its end, and the metric that ranks checkpoints."""
        # Writes the results, but nothing if the run is to stop.
        progress = self._stopwatch.progress(step)
        batches = partial(self._batches_until_stopped, step)
        try:
            with self._stopwatch.paused(), self._save_before_error(state, step):
                self._evaluated = self.program.evaluation.run_splits(state, batches)
                self._writer.write_scalars(step, self._evaluated | progress)
        except _Stopped:
            return False, None
        metric = self._evaluated.get(self.experiment.best_row or "")
        if called_at(self.experiment.hooks, "evaluation"):
            self._call_hooks("evaluation", state, step, metric)
        return True, metric

    def _batches_until_stopped(self, step: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._watchdog.begin_other(f"the evaluation at step {step}")
            # A signal must not wait for the end of a long evaluation.
            self._consensus.sync("batch")
            if self._consensus.stop:
                raise _Stopped
            yield batch

    def _call_hooks(self, at: At, state: State, step: int, metric: float | None = None) -> None:
        """Calls the user's functions; saves the state and raises UserError if one raises."""
        self._watchdog.begin_other(f"the call of the hooks after step {step}")
        metrics = self._newest if at == "log" else self._evaluated
        try:
            with self._stopwatch.paused():
                raise_on_all(lambda: self._hooks.call(at, step, metrics, state))
        except UserError:  # raised in all processes, which save together
            self.save_last(state, step, metric)
            raise

    def _batch_index(self, step: int) -> int:
        return step - 1 + self._counters.skipped_batches  # steps count from 1, batches from 0

    def _not_finite(self, block: CheckedBlock) -> rollbacks.RollbackTarget | Halted:
        bad, policy = block.bad[-1], self.experiment.on_nonfinite
        values = block.row(bad)
        since = self._pending.params_finite_at + 1 if policy == "halt" else bad
        text = f"At step {bad} {describe_fault(values, (since, bad))}."
        if policy == "skip":
            most = plural(self.experiment.max_consecutive_skips or 0, "step")
            text += f" With it, {most} in a row had to be skipped (max_consecutive_skips)."
        if policy == "rollback":
            back = rollbacks.rollback_target(self._counters, bad, self.experiment.first_step)
            if back is not None:
                self._log(f"{text} The run goes back to step {back.step} and skips the batch.")
                return back
            most = rollbacks.MOST_ROLLBACKS
            text = f"Step {bad} is not finite, and the run went back {most} times before."
        else:
            self._writer.write_scalars(bad, values | self._stopwatch.progress(bad))
        advice = advise(self.program, self._batch_index(bad))
        return Halted(f"{text} {advice}", bad, replays=policy != "rollback")

    def _finish(self, state: State, step: int, evaluated: bool) -> Ended | Halted:
        self._writer.flush()
        self.save_last(state, step)
        lost = ""
        if self._checkpoints.latest() != step:
            why = self._behind or self._checkpoints.error
            lost = f"The state at step {step} could not be saved: {why}"
        elif self._writer.error:
            lost = f"The metrics up to step {step} could not be written: {self._writer.error}"
        if lost:
            self._log(lost)
            return Ended("failed", FAILED, step, lost)
        self._checkpoints.prune()
        if step < self.experiment.steps or not evaluated:
            text = f"Stopped at step {step} by {self._consensus.stop or '--until'}; saved."
            again = "the same command again" if self._consensus.stop else "it without --until"
            self._log(f"{text} Start {again} to resume.")
            return Ended("stopped", STOPPED, step, text)
        if why := fault_at_end(self.program, state, self._evaluated):
            return Halted(why, step)
        results = ", ".join(f"{name} {value:.4g}" for name, value in self._evaluated.items())
        self._log(f"Done: {plural(step, 'step')}. {results}")
        return Ended("done", DONE, step)

    def save(self, state: State, step: int, metric: float | None = None) -> None:
        """Saves the state after a step, unless something before it cannot be written."""
        # `metric` ranks the checkpoint; None if the state was not evaluated.
        self._watchdog.begin_other(f"the save of step {step}")
        start = time.perf_counter()
        with self._stopwatch.paused():
            self._records.clipped.save(step)
            if self._all_written():
                self._checkpoints.save(step, to_save(state), metric=metric)
        self._consensus.record_save(time.perf_counter() - start)

    def save_last(self, state: State, step: int, metric: float | None = None) -> None:
        """Saves the last state, unless it is saved already, and waits for the save."""
        self._checkpoints.wait()
        if self._checkpoints.latest() != step:
            self.save(state, step, metric)
            self._checkpoints.wait()

    def _all_written(self) -> bool:
        """Writes what must be on disk before a state; returns whether that worked."""
        # The first of several failures is logged.
        self._writer.flush()
        self._records.nonfinite.flush()
        self._records.clipped.flush()
        before = self._behind
        self._behind = self._records.rollbacks.flush() or self._writer.behind
        if self._behind and not before:
            self._log("Until then no state is saved.")
        return broadcast_from_host0(self._behind is None)  # only process 0 has the files


class AfterBlock(NamedTuple):
    """What follows a block."""

    log: bool  # a row of training metrics
    hooks: bool  # the user's functions of log steps
    evaluate: bool
    save: bool  # a checkpoint
    rollback: bool  # the counters of a rollback replace those of the state
    wait: bool  # whether all steps must be checked first


class Boundaries:
    """The steps after which the host does something."""

    def __init__(
        self,
        program: Program,
        rollback_log: rollbacks.RollbackLog,
        until: int | None = None,
        also_save: Collection[int] = (),
    ):
        self._experiment, self._rollback_log = program.experiment, rollback_log
        # The check of the parameters runs collectives. On simulated devices they must not be in
        # flight with those of the next steps.
        self._wait_for_logs = program.simulated
        self.end = min(self._experiment.steps, until or self._experiment.steps)
        self._also_save = also_save

    def steps_to_next(self, step: int, most: int) -> int:
        """Returns the number of steps of the block after `step`, at most `most`."""
        experiment = self._experiment
        intervals = (experiment.log_every, experiment.eval_every, experiment.save_every)
        ends = [step + most, self.end, *(every.next_due(x, step) for x in intervals)]
        ends += [at for at in (*self._rollback_log.counters, *self._also_save) if at > step]
        if self.diagnoses(following := min(ends)) and following > step + 1:
            following -= 1  # the logged step is a block of its own, before which it is diagnosed
        return following - step

    def diagnoses(self, step: int) -> bool:
        """Returns whether the diagnostics of a step are computed: those of each logged step."""
        return bool(names_computed(self._experiment.diagnostics)) and self.after_block(step).log

    def after_block(self, step: int, save_now: bool = False) -> AfterBlock:
        """Returns what follows a block whose last step is `step`."""
        # `save_now` asks for a save although `save_every` does not.
        experiment = self._experiment
        last = step == experiment.steps
        log = last or step % experiment.log_every == 0
        hooks = log and called_at(experiment.hooks, "log")
        evaluate = experiment.evaluates(step)
        due = step % experiment.save_every == 0 or step in self._also_save
        save = save_now or last or due or step == self.end
        rollback = step in self._rollback_log.counters
        wait = hooks or evaluate or save or rollback or (log and self._wait_for_logs)
        return AfterBlock(log, hooks, evaluate, save, rollback, wait)
