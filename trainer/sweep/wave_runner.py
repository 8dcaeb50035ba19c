"""Computes the trials of a wave side by side: a block of steps of each in turn.

All trials share the compiled program and the form of its blocks, so that each has the bits that it
would have alone. A trial that has ended takes no time. A loop over the trials inside one program
would gain little: see `benchmarks.sweep`. Start with `WaveRunner.run`; a `TrialLoop` is one trial,
the loop of a run. The functions at the end say whether the disk, the memory, another worker or a
trial caused an exception in a worker.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainer import writers
from trainer.checkpoint import (
    CheckpointError,
    Checkpoints,
    CorruptCheckpoint,
    Retention,
    leaf_names,
)
from trainer.checkpoint.errors import ABSENT
from trainer.config import hparams, wording
from trainer.data.shards import DataChanged
from trainer.engine.block import Block, Computed
from trainer.engine.experiment import Experiment
from trainer.engine.feed import Feed
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.engine.vmapped import Vmapped
from trainer.messages import DONE, FAILED, STOPPED, UserError
from trainer.sweep.folder import identity_of
from trainer.sweep.plan import SEGMENTS, Trial, kept_steps
from trainer.sweep.wave import Wave, check_rows, keep_examples, named_writers
from trainer.train.continuation import Continuation, begin_with
from trainer.train.loop import Halted, Hooks, Loop, Records, Services
from trainer.train.multihost import AutosavePolicy, was_killed
from trainer.train.rollback import RollbackTarget
from trainer.train.rows import Clock, Ended, MetricsError, Results
from trainer.train.trained import restore_of, to_save, with_hyperparams
from trainer.train.warm_start import WarmStart
from trainer.train.watchdog import Watchdog
from trainer.workdir import WorkdirTakenOver
from trainer.writers.base import Log, MultiWriter
from trainer.writers.files import replace_file, sync_file_system
from trainer.writers.json_files import DamagedFile
from trainer.writers.summary import Summary

End = Ended | RollbackTarget | Halted


class WaveConsensus:
    """Tells the loops of a wave's trials when to save. The wave stops them, all at once."""

    # a loop never stops by itself: its wave stops after a step that all have computed and evaluated
    stop: str | None = None
    save = False  # whether each trial hands over its state after this block

    def sync(self, after: str = "block") -> None:
        """Does nothing: a worker is one process."""

    def save_now(self) -> bool:
        """Returns whether this trial is to hand over its state."""
        return self.save

    def record_save(self, delay: float) -> None:
        """Does nothing: the wave decides when to save next."""


class TrialCheckpoints:
    """Takes the states of a trial for the checkpoint of its wave, and saves the trial's own."""

    # `results` has the metric that ranks the state of an evaluated step. `starts` are the steps at
    # which segments begin, whose states stay beside the trial's own. `state` is the newest that was
    # handed over and is in no checkpoint of the wave, or None.

    def __init__(
        self, trial: Trial, wave: Wave, experiment: Experiment, results: Results, log: Log
    ):
        plan, folder, until = wave.setting.folder.plan, wave.staged(trial), wave.claim.until
        create = partial(Checkpoints, log=log, fence=wave.workdir.check_fence)
        self.state: State | None = None
        self.starts = kept_steps(experiment.steps, plan.segments, experiment.first_step)
        self._experiment, self._results, self._goal = experiment, results, plan.goal
        self._step: int | None = None
        keeps = plan.checkpoints != "none" or until is not None
        self._last = (until or experiment.steps) if keeps else None  # whose state stays
        self._every = plan.checkpoints == "best"
        best, mode = int(self._every), plan.goal.better
        self._own = create(folder / "checkpoints", Retention(1, best, mode))
        self._at_starts = create(folder / SEGMENTS, Retention(keep_best=0, keep_always=self.starts))
        self._all = self._at_starts, self._own

    @property
    def error(self) -> str | None:
        """Why the last save of the trial's own checkpoint failed; None if it did not."""
        return self._own.error

    def resume(self, step: int) -> None:
        """Removes the trial's own checkpoints after the step from which it resumes."""
        for each in self._all:
            each.discard_after(step)

    def save(self, step: int, state: State, *, metric: float | None = None) -> bool:
        """Hands over a state; see `Checkpoints.save`."""
        self.state, self._step = state, step
        if step in self.starts:
            self._at_starts.save(step, state)
        if self._every or step == self._last:
            evaluated = self._experiment.evaluates(step)
            metric = self._results.newest.get(self._goal.row) if evaluated else None
            return self._own.save(step, state, metric=metric)
        return True

    def latest(self) -> int | None:
        """Returns the step of the newest state that was handed over."""
        return self._own.latest() if self._step == self._last else self._step

    def record_metric(self, step: int, metric: float) -> None:
        """Does nothing: every evaluated state is saved with its metric."""

    def prune(self) -> None:
        """Removes superfluous checkpoints of the trial."""
        self._own.prune()

    def wait(self) -> None:
        """Waits for the saves of the trial's own checkpoints."""
        for each in self._all:
            each.wait()

    def close(self) -> None:
        """Waits for the saves in progress, and ends the threads."""
        with contextlib.ExitStack() as stack:
            for each in self._all:
                stack.callback(each.close)


class TrialLoop:
    """A trial that is computed side by side with others."""

    # `state` is donated; `restored` is its step, or None for the first state. The trial stops at
    # the cut of the wave, if that has one. `clock`, the wave's, adds up the share of one trial.

    def __init__(
        self,
        trial: Trial,
        program: Program,
        state: State,
        restored: int | None,
        wave: Wave,
        consensus: WaveConsensus,
        watchdog: Watchdog,
        clock: Clock,
    ):
        setting, experiment = wave.setting, program.experiment
        self.trial, self.program = trial, program
        self.step = experiment.first_step if restored is None else restored
        self.lines: list[str] = []
        folder, fence = wave.staged(trial), wave.workdir.check_fence
        folder.mkdir(parents=True, exist_ok=True)

        def write(name: str, text: str) -> None:
            replace_file(folder / name, text.encode(), fence)

        def warn(line: str) -> None:
            setting.log(f"{trial.folder}: {line}")

        self._clock, self._results = clock, Results()
        examples = partial(
            keep_examples, program, folder=folder, fence=fence, log=warn, watch=watchdog.begin_other
        )
        self._keep_examples = examples if setting.folder.plan.keeps_examples(trial) else None
        self._writer = self._open_writer(restored, wave, warn)
        self.checkpoints = TrialCheckpoints(trial, wave, experiment, self._results, warn)
        self.checkpoints.resume(restored or 0)
        services = Services(
            self.checkpoints,
            self._writer,
            self._results,
            Records(program, folder, write, warn),
            # The terminal shows the sweep instead of what the hooks say.
            Hooks(program, folder, lambda _: None, fence),
            consensus,
            watchdog,
            self.lines.append,
        )
        until, starts = wave.claim.until, self.checkpoints.starts
        loop = Loop(
            program, services, until=until, also_save=starts, observers=[self._observe], clock=clock
        )
        self._run = loop.run(state)
        self.block: Block | None = None

    def _open_writer(self, restored: int | None, wave: Wave, log: Log) -> MultiWriter:
        experiment, folder = self.program.experiment, wave.staged(self.trial)
        writer = writers.create(
            named_writers(self.trial.config),
            folder,
            resumed=restored or 0,
            total_steps=experiment.steps,
            batch_size=experiment.data.batch_size,
            log=log,
            fence=wave.workdir.check_fence,
            also=[self._results],
            identity=identity_of(self.trial, wave.setting.folder.path),
            reporter=wave.setting.reporter,
        )
        if restored is None:
            writer.write_hparams(hparams(self.trial.config.root))
        else:
            self._results.read(folder)  # of steps that an earlier process computed
        return writer

    def _observe(self, step: int, *_: Any) -> None:
        self.step = step

    def compute(self) -> End | None:
        """Computes `block`, and proceeds."""
        assert self.block is not None, "a trial that has ended takes no turn"
        return self.proceed(self.program.advance(*self.block))

    def proceed(self, computed: Computed | None = None) -> End | None:
        """Does what follows `block`, and asks for the next one; None if the trial has not ended."""
        # `computed` is what `Program.advance` returned for the block; None before the first one.
        try:
            self.block = next(self._run) if computed is None else self._run.send(computed)
        except StopIteration as end:
            return end.value
        return None

    def outcome(self, end: Ended | Halted) -> Summary:
        """Returns the outcome of a trial that ended, and closes its files."""
        # `end` is what `proceed` returned. Raises OSError if the results could not be written.
        try:
            if isinstance(end, Ended) and end.code not in (DONE, STOPPED):
                raise OSError(f"{self.trial.folder}: {self.lines[-1]}")
            summary = self.summary(end if isinstance(end, Ended) else end.ended())
            self._writer.finish(summary)
            if self._keep_examples is not None and isinstance(end, Ended):
                assert self.checkpoints.state is not None, "the loop hands over the last state"
                state = with_hyperparams(self.program, self.checkpoints.state)
                with self._clock.paused():
                    self._keep_examples(state)
        finally:
            with self._clock.paused():  # a logger may take a while
                self.close()
        return summary

    def summary(self, end: Ended) -> Summary:
        """Returns the summary of the trial, which ended or was stopped so."""
        return self._results.summary(end, self.program.experiment)

    def tell_stopped(self, why: str) -> None:
        """Tells the trial's writers that it is stopped, and why; it continues later."""
        self._writer.finish(self.summary(Ended("stopped", STOPPED, self.step, why)))

    def close(self) -> None:
        """Closes all files, even if one of them cannot be written."""
        with contextlib.ExitStack() as stack:
            for each in (self.checkpoints, self._writer, self._run):
                stack.callback(each.close)


class WaveRunner:
    """The trials of a wave."""

    # `vmapped` computes a block of all trials at once; None computes one after another.

    def __init__(self, wave: Wave, vmapped: Vmapped | None = None):
        self._wave, self._vmapped = wave, vmapped
        self._setting, self._log = wave.setting, wave.setting.log
        # One clock for all trials, which share the time of their wave.
        self._clock = Clock(running=False)
        # The compiled program of all trials, and what returns it with the values of one.
        self._program, self._program_of = wave.prepared.program, wave.prepared.of_trial
        self._consensus = WaveConsensus()
        self._trial_loops: list[TrialLoop] = []
        self._ended: dict[Trial, Summary] = {}  # not yet on the disk

    def run(self) -> int:
        """Computes the trials until all have ended, or a signal; returns an exit code."""
        # DONE: finished, and its trials are in the folder of the sweep; STOPPED: saved; FAILED: not
        # saved. Raises MemoryError or JaxRuntimeError if the trials do not fit into memory;
        # OSError, MetricsError or CheckpointError for the disk; DataChanged; WorkdirTakenOver.
        wave, experiment = self._wave, self._program.experiment
        with (
            Checkpoints(
                wave.workdir.checkpoints,
                Retention(keep_best=0),
                log=self._log,
                fence=wave.workdir.check_fence,
                before_commit=lambda: sync_file_system(wave.path),
            ) as checkpoints,
            Watchdog(experiment.watchdog, self._log, self._setting.slow_lines) as watchdog,
        ):
            try:
                restored, states = self._first_states(checkpoints)
                wave.workdir.record(restored=restored, computing=True)  # the first block comes next
                self._begin(restored, states, watchdog)
                first = experiment.first_step if restored is None else restored
                code = self._advance(checkpoints, first)
            finally:
                for trial_loop in self._trial_loops:
                    trial_loop.close()
        if code == DONE:
            wave.finish(self._ended)
        return code

    # The first states.

    def _first_states(self, checkpoints: Checkpoints) -> tuple[int | None, dict[Trial, State]]:
        """Returns the restored step, and the state of each trial that has not ended."""
        trials = self._wave.unfinished()
        while (step := checkpoints.latest()) is not None:
            abstract = to_save(self._program.abstract_state())
            saved: set[str] = set()
            # `restore` finds a damaged checkpoint as well, and sets it aside.
            with contextlib.suppress(CorruptCheckpoint):
                saved = {name.split("/")[1] for name in leaf_names(checkpoints.directory, step)}
            try:
                tree = checkpoints.restore({"trials": dict.fromkeys(sorted(saved), abstract)}, step)
            except CheckpointError as error:
                if checkpoints.latest() == step:  # it was not set aside
                    raise
                self._log(str(error))
                continue
            restored = [trial for trial in trials if self._key(trial) in saved]
            for trial in restored:
                check_rows(self._wave.staged(trial), step, self._program.experiment)
            return step, {
                trial: with_hyperparams(self._program_of(trial), tree["trials"][self._key(trial)])
                for trial in restored
            }
        experiment = self._program.experiment
        programs = {trial: self._program_of(trial) for trial in trials}
        if start := self._wave.claim.start:
            found = {trial: self._waiting_state(trial, programs[trial]) for trial in trials}
            return start, {trial: x for trial, x in found.items() if x is not None}
        if not experiment.warm_start:
            return None, {trial: program.init() for trial, program in programs.items()}
        return None, self._continued(programs)

    def _continued(self, programs: Mapping[Trial, Program]) -> dict[Trial, State]:
        """Computes first states from those of other runs; trials of one warm start share it."""
        starts: dict[str, WarmStart | Continuation] = {}
        states = {}
        for trial, program in programs.items():
            if (key := repr(program.experiment.warm_start)) not in starts:
                starts[key] = begin_with(program, trial.config, self._setting.vocabulary)
                self._log(starts[key].describe())
            states[trial] = starts[key].first_state(program)
        number = max(each.number for each in starts.values())
        sources = [each.source for each in starts.values()]
        self._wave.workdir.record(warm_starts=number, began_from=sources)
        return states

    def _waiting_state(self, trial: Trial, program: Program) -> State | None:
        """Returns the state of a trial at the cut where it waited, and takes up its files."""
        # If they are damaged or missing, they are removed, and a later wave begins the trial anew.
        start = self._wave.claim.start
        try:
            waited = self._wave.take_up(trial)
            check_rows(self._wave.staged(trial), start, program.experiment)
            return restore_of(program, waited, start)
        except (CheckpointError, DamagedFile, FileNotFoundError) as error:
            self._log(f"{error} {trial.folder} is computed again from its first step.")
            self._wave.give_up(trial)
            return None

    def _key(self, trial: Trial) -> str:
        return f"{self._wave.claim.trials.index(trial):04d}"

    def _begin(
        self, restored: int | None, states: Mapping[Trial, State], watchdog: Watchdog
    ) -> None:
        wave, consensus, clock = self._wave, self._consensus, self._clock
        programs = {trial: self._program_of(trial) for trial in states}
        # Trials with the same data seed share their batches.
        readers = Counter(program.experiment.seed_of_data for program in programs.values())
        feeds: dict[int, Feed] = {}
        for trial, program in programs.items():
            seed = program.experiment.seed_of_data
            program.feed = feeds.setdefault(seed, program.feed.shared(readers[seed]))
            self._trial_loops.append(
                TrialLoop(trial, program, states[trial], restored, wave, consensus, watchdog, clock)
            )
        for trial_loop in list(self._trial_loops):
            self._advance_trial(trial_loop, trial_loop.proceed)

    # Blocks.

    def _advance(self, checkpoints: Checkpoints, step: int) -> int:
        wave, consensus = self._wave, self._consensus
        autosave = AutosavePolicy(after_kill=was_killed(wave.workdir.run_file))
        steps = self._wave.claim.until or self._program.experiment.steps
        began, first = time.monotonic(), step
        while self._trial_loops:
            stop = self._setting.signals.received
            consensus.save = stop is not None or autosave.due()
            self._compute_blocks()
            if not self._trial_loops:
                break
            step = self._trial_loops[0].step
            rate = (step - first) / max(time.monotonic() - began, 1e-9)
            count, last = len(self._trial_loops), stop is not None
            wave.report(last, step=step, steps=steps, trials=count, rate=rate)
            if consensus.save:
                start = time.monotonic()
                saved = self._save(checkpoints, step)
                autosave.record_save(time.monotonic() - start)
                if stop:
                    return self._stop(checkpoints, step, saved, stop)
        return DONE

    def _compute_blocks(self) -> None:
        """Computes the next block of every trial, and does what follows it."""
        trial_loops = list(self._trial_loops)
        # A trial cannot be timed by itself: the first block after an evaluation waits for work of
        # the others that is still queued. All have one program, so that each has an equal share.
        self._clock.share = 1 / len(trial_loops)
        with self._clock.running():
            if self._vmapped is None:
                for trial_loop in trial_loops:
                    self._advance_trial(trial_loop, trial_loop.compute)
                return
            computed = self._vmapped.advance(
                [trial_loop.block for trial_loop in trial_loops if trial_loop.block]
            )
            for trial_loop, result in zip(trial_loops, computed, strict=True):
                self._advance_trial(trial_loop, partial(trial_loop.proceed, result))

    def _advance_trial(self, trial_loop: TrialLoop, proceed: Callable[[], End | None]) -> None:
        """Calls `proceed` for a trial, and removes the trial if it ended."""
        trial = trial_loop.trial
        try:
            if (end := proceed()) is None:
                return
            self._trial_loops.remove(trial_loop)
            if isinstance(end, RollbackTarget):
                trial_loop.close()
                self._setting.folder.limits.compute_alone(trial.folder)
                self._log(f"{trial.folder}: {trial_loop.lines[-1]} It is computed alone.")
                return
            outcome = trial_loop.outcome(end)
        except Exception as error:
            if not is_trial_error(error):
                raise
            self._fail(trial_loop, error)
            return
        self._ended[trial] = outcome
        if outcome.end == "diverged":
            self._log(f"{trial.folder} diverged. {outcome.why}")

    def _fail(self, trial_loop: TrialLoop, error: Exception) -> None:
        """Leaves a trial to a later wave, or marks it as failed after several errors."""
        trial = trial_loop.trial
        if trial_loop in self._trial_loops:
            self._trial_loops.remove(trial_loop)
        trial_loop.close()
        why = wording.cause(error)
        if self._setting.folder.limits.has_failed(trial.folder):
            self._log(f"{trial.folder} failed. {why}")
            self._ended[trial] = trial_loop.summary(Ended("failed", FAILED, trial_loop.step, why))
        else:
            self._log(f"{trial.folder} is computed again after an error. {why}")

    # Saving.

    def _save(self, checkpoints: Checkpoints, step: int) -> bool:
        """Saves the states of all trials; returns whether the save was started."""
        for trial, outcome in self._ended.items():
            self._wave.write_outcome(trial, outcome)
        self._ended.clear()
        states = {self._key(x.trial): x.checkpoints.state for x in self._trial_loops}
        # The trials' own checkpoints are committed before that of the wave: after a resume from it,
        # those of earlier steps are not saved again.
        for trial_loop in self._trial_loops:
            trial_loop.checkpoints.wait()
            trial_loop.checkpoints.state = None
        if None in states.values():
            self._log(f"Step {step} is not saved: the metrics of a trial could not be written.")
            return False
        return checkpoints.save(step, {"trials": states})

    def _stop(self, checkpoints: Checkpoints, step: int, saved: bool, stop: str) -> int:
        checkpoints.wait()
        if not saved and checkpoints.latest() != step:
            self._log(f"The wave could not be saved at step {step}: {checkpoints.error}.")
            return FAILED
        text = f"Stopped at step {step:,} by {stop}; saved."
        self._log(text)
        for trial_loop in self._trial_loops:
            trial_loop.tell_stopped(text)
        return STOPPED


def is_disk_error(error: BaseException) -> bool:
    """Returns whether files could not be read or written, which may work at a later start."""
    # A UserError counts by the error of the system that caused it, unless that says that something
    # does not exist or is of another kind.
    if isinstance(error, UserError) and not isinstance(error.__cause__, ABSENT):
        return isinstance(error.__cause__, OSError)
    return isinstance(error, OSError | MetricsError | CheckpointError)


def damage_in(folder: Path, error: BaseException) -> str:
    """Returns what is wrong with a file in `folder`; "" if the error has another cause."""
    if isinstance(error, DamagedFile) and error.file.is_relative_to(folder):
        return error.fault
    kinds = (IsADirectoryError, NotADirectoryError, FileExistsError)
    if isinstance(error, kinds) and Path(os.fsdecode(error.filename or "")).is_relative_to(folder):
        return f"{error.filename} is damaged ({error.strerror})"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether trials do not fit into the memory of the host or of a device."""
    out_of = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return out_of or isinstance(error, MemoryError)


def is_takeover(error: BaseException) -> bool:
    """Returns whether another process has taken a wave over from this one."""
    return isinstance(error, WorkdirTakenOver) or isinstance(error.__cause__, WorkdirTakenOver)


def is_trial_error(error: BaseException) -> bool:
    """Returns whether the code of a trial, such as its data set or hook, raised an error."""
    # The error is one that was raised while the trial was advanced.
    of_others = (is_disk_error, is_out_of_memory, is_takeover)
    others = isinstance(error, jax.errors.JaxRuntimeError | DamagedFile | DataChanged)
    return not (others or any(is_of(error) for is_of in of_others))
