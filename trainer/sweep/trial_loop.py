"""One trial among those of a wave: the loop of a run, which is advanced by a block at a time."""

import contextlib
from functools import partial
from typing import Any

from trainer import writers
from trainer.checkpoint import Checkpoints
from trainer.config import hparams
from trainer.engine.block import Block, Computed
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import DONE, STOPPED
from trainer.sweep.kept_states import SEGMENTS, kept_steps
from trainer.sweep.plan import Trial
from trainer.sweep.wave import Wave, keep_examples, named_writers
from trainer.train.loop import Halted, Hooks, Loop, Records, Services
from trainer.train.rollback import RollbackTarget
from trainer.train.rows import Ended, Results
from trainer.train.stopwatch import Clock
from trainer.train.trained import with_hyperparams
from trainer.train.watchdog import Watchdog
from trainer.writers.base import Log, MultiWriter
from trainer.writers.files import replace_file
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
        self._last = until or experiment.steps
        self._every = plan.checkpoints == "best"
        self._own = None
        if plan.checkpoints != "none" or until is not None:
            best, mode = int(self._every), plan.goal.better
            self._own = create(
                folder / "checkpoints", keep_latest=1, keep_best=best, best_mode=mode
            )
        self._at_starts = create(folder / SEGMENTS, keep_best=0, keep_always=self.starts)
        self._all = [self._at_starts, *([] if self._own is None else [self._own])]

    @property
    def error(self) -> str | None:
        """Why the last save of the trial's own checkpoint failed; None if it did not."""
        return None if self._own is None else self._own.error

    def resume(self, step: int) -> None:
        """Removes the trial's own checkpoints after the step from which it resumes."""
        for each in self._all:
            each.discard_after(step)

    def save(self, step: int, state: State, *, metric: float | None = None) -> bool:
        """Hands over a state; see `Checkpoints.save`."""
        self.state, self._step = state, step
        if step in self.starts:
            self._at_starts.save(step, state)
        if self._own is not None and (self._every or step == self._last):
            evaluated = self._experiment.evaluates(step)
            metric = self._results.newest.get(self._goal.row) if evaluated else None
            return self._own.save(step, state, metric=metric)
        return True

    def latest(self) -> int | None:
        """Returns the step of the newest state that was handed over."""
        if self._own is not None and self._step == self._last:
            return self._own.latest()
        return self._step

    def record_metric(self, step: int, metric: float) -> None:
        """Does nothing: every evaluated state is saved with its metric."""

    def prune(self) -> None:
        """Removes superfluous checkpoints of the trial."""
        if self._own is not None:
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
            identity=wave.setting.folder.identity_of(self.trial),
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
