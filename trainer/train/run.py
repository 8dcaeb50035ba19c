"""Opens a run's folder, restores its state or creates a new one, and calls the loop.

`Run.start` is the whole of a run: it prepares the folder, `Run._find_start` finds the state to
start from, and every attempt of the loop uses what `Run._open_files` makes.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from trainer import config as configs
from trainer import writers
from trainer.checkpoint import CheckpointError, Checkpoints, Retention, check_not_lost, misfits
from trainer.config import wording
from trainer.engine.contracts import ComponentError
from trainer.engine.datasets import whole_splits
from trainer.engine.experiment import Experiment, with_place
from trainer.engine.mesh import data_shard
from trainer.engine.plan import Plan, located_fingerprint, make_plan
from trainer.engine.plan_text import render_plan, steps_text
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import DONE, FAILED, MISTAKE, STOPPED, UserError, plural
from trainer.train import multihost, runtime
from trainer.train.continuation import Continuation, begin_with
from trainer.train.loop import Blocks, Halted, Hooks, Loop, Observer, Records, Services
from trainer.train.nonfinite import fault_at_end, replay_command
from trainer.train.profile import Advance, Profile
from trainer.train.rollback import RollbackTarget
from trainer.train.rows import Ended, MetricsError, Rows
from trainer.train.signals import StopSignals
from trainer.train.stuck_parameters import StuckParameters
from trainer.train.trained import restore, to_save, tokenizer_text
from trainer.train.warm_start import WarmStart
from trainer.train.watchdog import SlowLines, Watchdog
from trainer.workdir import (
    Provenance,
    Workdir,
    WorkdirTakenOver,
    check_name,
    code,
    common,
    make_fingerprint,
)
from trainer.workdir.fingerprint import config_changes, indented, is_allowed, path_of
from trainer.workdir.folder import TOKENIZER_FILE, is_untouched
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import SUMMARY_FILE, read_summary

# Errors whose text is a sentence for the user.
_EXPLAINED = (UserError, CheckpointError, MetricsError, WorkdirTakenOver)


@dataclasses.dataclass
class Run:
    """A program in a workdir."""

    config: configs.Config
    program: Program
    signals: StopSignals
    log: Callable[[str], None]
    vocabulary: Sequence[str] = ()
    compiled: bool = False  # whether the program is compiled already
    slow_lines: SlowLines = dataclasses.field(default_factory=SlowLines)  # limits those lines
    # what loggers call the run; None names it after its folder
    identity: Callable[[], writers.RunIdentity] | None = None
    # how the run ended, after `start`; None if it had ended before, or an error ended it
    ended: Ended | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        self.experiment = self.program.experiment
        self._warm_start: WarmStart | Continuation | None = None

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan, made when it is first asked for: `start` asks before it creates a folder."""
        return make_plan(self.program, self.config)

    def start(
        self,
        workdir: str | Path,
        *,
        allow_changed: Sequence[str] = (),
        take_over: bool = False,
        until: int | None = None,
        observe: Observer | None = None,
        began: float | None = None,
        summarize: bool = True,
        profile: Profile | None = None,
    ) -> int:
        """Runs from the newest checkpoint to the last step; returns the exit code."""
        # It is 0 if done, 1 if failed or rows of metrics are lost, 75 if stopped after a
        # checkpoint. `began` is a `time.perf_counter()`. Raises ConfigError as `plan.make_plan`,
        # and UserError if the folder does not fit the run or cannot be written, or the run does not
        # make the profile's steps.
        self._until, self._observe, self._began = until, observe, began
        self._profile = profile
        # Several processes stop together, at their first synchronization.
        if self.signals.received and jax.process_count() == 1:
            self.log(f"Stopped by {self.signals.received} before the run began.")
            return STOPPED
        self._threads = runtime.use_openblas_threads(Path(workdir))
        plain = summarize and not (allow_changed or take_over or observe or profile)
        logged = set(self.experiment.writers) & set(writers.LOGGERS)  # which may lack its end
        run = self.config.root, lambda: self._fingerprint, self.experiment.steps
        if plain and not logged and jax.process_count() == 1 and is_untouched(Path(workdir), *run):
            self.log(_nothing_to_do(self.experiment))
            return DONE
        place = Path(workdir).absolute()  # the plan reads data, which may change the current folder
        multihost.raise_on_all(lambda: self.plan)
        multihost.raise_on_all(lambda: self._look_into(place, bool(allow_changed)))
        if jax.process_count() > 1:
            multihost.require_same(common(multihost.raise_on_all(lambda: self._fingerprint)))
        folder = multihost.raise_on_all(lambda: self._open(place, allow_changed, take_over))
        kinds = {DONE: "done", FAILED: "failed", STOPPED: "stopped"}
        end = FAILED  # for exceptions that are not caught here
        try:
            multihost.check_seen(folder.run_file)
            plan = self.plan
            groups = ", ".join(f"{name} {count:,}" for name, (count, _) in plan.groups.items())
            self.log(f"{workdir}: {steps_text(plan)} on {plan.devices}; parameters: {groups}")
            if self._warm_start is not None:
                self.log(self._warm_start.describe())
            for warning in plan.warnings:
                self.log(f"warning: {warning}")
            end = self._run_in(folder, summarize)
        except (CheckpointError, WorkdirTakenOver, MetricsError) as error:
            self.log(f"error: {error}")
        finally:
            if profile is not None:
                profile.close()
            folder.close(kinds[end])
        return end

    def _look_into(self, workdir: Path, changed: bool) -> None:
        """Raises UserError for a folder that this run cannot use, before the folder is changed."""
        check_name(workdir)
        try:
            newest = Checkpoints(workdir / "checkpoints").latest()
            if changed and newest is not None:
                _refuse_misfits(self.program, workdir, newest)
        except CheckpointError as error:
            raise UserError(str(error)) from error
        if newest is not None and newest > self.experiment.steps:
            raise UserError(
                f"The run in {workdir} has made {newest:,} steps, and this config asks for "
                f"{self.experiment.steps:,}. Ask for more, or choose another --workdir."
            )
        if changed and newest == self.experiment.steps:
            _refuse_changes_of_a_finished_run(self.config, self.experiment.steps, workdir)
        if self._profile is not None:
            end = min(self.experiment.steps, self._until or self.experiment.steps)
            done = self.experiment.first_step if newest is None else newest
            self._profile.choose_steps(done, end)
        # Before the folder is created: a mistake in the warm start's rules leaves nothing behind.
        if self.experiment.warm_start and newest is None:
            self._warm_start = begin_with(self.program, self.config, self.vocabulary)

    def _open(self, workdir: Path, allow_changed: Sequence[str], take_over: bool) -> Workdir:
        if jax.process_index() > 0:
            return cast(Workdir, multihost.NullWorkdir(workdir))
        return Workdir(
            workdir,
            self.config.root,
            Provenance(
                self._fingerprint,
                commits=code.commits(self.vocabulary),
                files=[dataclasses.asdict(file) for file in self.config.files],
                step_program=self.program.step_digest if self.vocabulary else None,
            ),
            {
                "config_full.yaml": configs.full_text(self.config, self.vocabulary),
                TOKENIZER_FILE: tokenizer_text(self.experiment.data),
                "plan.txt": render_plan(self.plan),
            },
            allow_changed=allow_changed,
            take_over=take_over,
            checkpoints=self.experiment.checkpoints,
            log=self.log,
        )

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return make_fingerprint(
            config=configs.digest(self.config.root),
            data=located_fingerprint(self.program, self.config),
            seed=self.experiment.seed,
            data_seed=self.experiment.seed_of_data,
            batch_size=self.experiment.data.batch_size,
            code=code.hashes(self.vocabulary),
            openblas_threads=self._threads,
            data_shards=data_shard(self.program.mesh).size,
        )

    def _run_in(self, folder: Workdir, summarize: bool) -> int:
        """Runs in an open folder, and writes summary.json at the end."""
        self._open_files(folder)
        try:
            self.ended = ended = self._attempts()
        except Exception as error:
            # The errors of components, such as a batch that does not fit, get a line of the config.
            named = with_place(error, self.config) if isinstance(error, ComponentError) else error
            if summarize:
                code = MISTAKE if isinstance(named, UserError) else FAILED
                explained = isinstance(named, _EXPLAINED)
                why = " ".join(str(named).split()) if explained else wording.cause(named)
                self._summarize(Ended("failed", code, self._rows.results.step, why))
            if named is error:
                raise
            raise named from error
        if summarize:
            self._summarize(ended)
        return ended.code

    def _open_files(self, folder: Workdir) -> None:
        """Makes what all attempts share: what reads and writes the folder, which is open."""
        # A run makes another attempt after a rollback.
        experiment = self.experiment
        self._folder = folder
        self._checkpoints = Checkpoints(
            folder.checkpoints,
            Retention(
                keep_latest=experiment.keep_latest,
                keep_best=0 if experiment.best_metric is None else 1,
                best_mode=experiment.best_mode,
                # Keep the first state after a warm start, which cannot be computed again.
                keep_always=[] if experiment.warm_start is None else [experiment.first_step],
            ),
            log=self.log,
            fence=folder.check_fence,
            before_commit=folder.sync_metrics,
        )
        autosave = multihost.AutosavePolicy(after_kill=multihost.was_killed(folder.run_file))
        self._consensus = multihost.StopSaveConsensus(self.signals, autosave)
        self._records = Records(self.program, folder.path, folder.write, self.log)
        identity = self.identity or (
            lambda: writers.identity_of_run(folder.path, configs.hparams(self.config.root))
        )
        self._rows = Rows(folder, experiment, self.log, identity)
        self._stuck = StuckParameters(self.program, self.log)

    def _summarize(self, ended: Ended) -> None:
        """Writes summary.json; only logs that the disk cannot be written."""
        text = self._rows.results.summary(ended, self.experiment).text()
        try:
            self._folder.write(SUMMARY_FILE, text)
        except WorkdirTakenOver:  # another process continues the run
            pass
        except OSError as error:
            self.log(f"{SUMMARY_FILE} could not be written: {error}")

    def _attempts(self) -> Ended:
        """Runs from the newest state, again from an earlier one after every rollback."""
        rollbacks = self._records.rollbacks
        check_not_lost(self._folder.checkpoints)  # before metrics are dropped
        if self._warm_start is not None:
            begun = self._warm_start
            self._folder.record(warm_starts=begun.number, began_from=[begun.source])
        first = True
        with self._checkpoints as checkpoints:
            while isinstance(outcome := self._attempt(first), RollbackTarget):
                rollbacks.add(outcome)
                # Only now that the rollback is recorded: if this process is killed here, the next
                # one finds the record, and discards the checkpoints itself.
                checkpoints.discard_after(rollbacks.newest)
                first = False
            if isinstance(outcome, Ended):
                return outcome
            why = outcome.why
            if outcome.replays:
                folder = checkpoints.directory.parent
                command = replay_command(folder, outcome.step, self.vocabulary)
                why += f" The checkpoints before it are kept, and `{command}` names the operation."
            self.log(f"error: {why}")
            return outcome.ended()

    def _attempt(self, first: bool) -> Ended | RollbackTarget | Halted:
        """Runs from the newest checkpoint to the end, or to a step that is not finite."""
        rows, folder = self._rows, self._folder
        state, restored, unevaluated = self._find_start()
        with contextlib.closing(rows.open(restored)) as writer:
            # Only once: a rollback may also lead back to the first state.
            if restored is None and first:
                writer.write_texts(0, {"plan": f"```\n{render_plan(self.plan)}```"})
                writer.write_hparams(configs.hparams(self.config.root))
            if restored == self.experiment.steps and not unevaluated:
                self._checkpoints.prune()
                self.log(_nothing_to_do(self.experiment))
                done = Ended("done", DONE, self.experiment.steps)
                fault = fault_at_end(self.program, state, rows.results.newest)
                if multihost.broadcast_from_host0(bool(fault)):  # only process 0 has the rows
                    self.log(f"error: {fault or 'Process 0 says why the run has diverged.'}")
                    done = Halted(fault, done.step).ended()
                # Loggers may lack the end of the run, such as one that was added since.
                writer.finish(rows.results.summary(done, self.experiment))
                return rows.end(done)
            self._compile(state)
            watchdog = Watchdog(self.experiment.watchdog, self.log, self.slow_lines)
            services = Services(
                self._checkpoints,
                writer,
                rows.results,
                self._records,
                Hooks(self.program, folder.path, self.log, folder.check_fence),
                self._consensus,
                watchdog,
                self.log,
            )
            observers = [each for each in (self._stuck.observe, self._observe) if each]
            loop = Loop(self.program, services, until=self._until, observers=observers)
            self._stuck.begin(int(state.step), state)
            advance = self.program.advance
            if self._profile is not None and jax.process_index() == 0:
                done, profile = int(state.step), folder.path / "profile"
                advance = self._profile.profiled(self.program, done, profile, watchdog.begin_other)
            blocks = loop.run(state, self._began if first else None, unevaluated=unevaluated)
            with watchdog:
                outcome = _compute(advance, blocks)
            if not isinstance(outcome, RollbackTarget):
                ended = outcome if isinstance(outcome, Ended) else outcome.ended()
                writer.finish(rows.results.summary(ended, self.experiment))
            if isinstance(outcome, Ended):
                writer.flush()  # puts back rows that another program removed from metrics.jsonl
                return rows.end(outcome)
            return outcome

    def _find_start(self) -> tuple[State, int | None, bool]:
        """Restores the newest checkpoint, or creates the state before the first step."""
        # Returns the state on the devices; the step of the checkpoint that it was read from, None
        # if it was created; and whether the evaluation of the restored state was interrupted.
        # Checkpoints that are no longer on the run's path are discarded. The metrics of checkpoints
        # that were evaluated after they were saved are read as well. Raises CheckpointError if no
        # checkpoint can be read, and the first state cannot be made again.
        experiment, checkpoints = self.experiment, self._checkpoints
        evaluated = _record_metrics(experiment, checkpoints, self._folder.path)
        while checkpoints.latest() is not None:
            state = restore(self.program, checkpoints)
            if self._records.rollbacks.is_on_path(state):
                step = int(state.step)
                self.log(f"Restored step {step:,}.")
                if step <= experiment.first_step or not experiment.evaluates(step):
                    return state, step, False
                return state, step, multihost.broadcast_from_host0(step not in evaluated)
            # The previous process was killed during a rollback.
            checkpoints.discard_after(self._records.rollbacks.newest)
        return _fresh_state(self.program, self._warm_start, checkpoints), None, False

    def _compile(self, state: State) -> None:
        if self.compiled or (self.signals.received and jax.process_count() == 1):
            return
        self.compiled = True
        start = time.perf_counter()
        self.program.compile(state)
        self.log(f"Compiled in {time.perf_counter() - start:.1f} s.")


def _nothing_to_do(experiment: Experiment) -> str:
    return f"Nothing to do: the run has its {plural(experiment.steps, 'step')}."


def _compute(advance: Advance, blocks: Blocks) -> Ended | RollbackTarget | Halted:
    """Computes the blocks of a loop, and returns what it returns."""
    try:
        block = next(blocks)
        while True:
            block = blocks.send(advance(*block))
    except StopIteration as end:
        return end.value


def _refuse_misfits(program: Program, workdir: Path, step: int) -> None:
    """Raises UserError if a program cannot continue a checkpoint of another config."""
    lines = misfits(workdir, step, to_save(program.abstract_state()))
    if lines:
        raise UserError(
            f"The run in {workdir} cannot continue with this config: its checkpoint of step {step}"
            " does not fit.\n" + indented(lines[:3]) + "Start in another --workdir;"
            " experiment.warm_start can take over its parameters."
        )


def _refuse_changes_of_a_finished_run(config: configs.Config, steps: int, workdir: Path) -> None:
    """Raises UserError if the run has ended: the config in its folder is that of its steps."""
    file = workdir / "config.yaml"
    try:
        summary = read_summary(workdir)
    except OSError:
        return  # opening the folder raises this error again, with advice
    ended = summary is not None and summary.end in ("done", "diverged")
    if not ended or not file.exists():
        return
    lines = config_changes(file, config.root)
    # Other writers are allowed: a logger that is added receives the rows so far.
    if changes := [x for x in lines if not is_allowed(path_of(x), ["writers"])]:
        raise UserError(
            f"The run in {workdir} has made all of its {steps:,} steps, so that"
            " this config would change none of its results. The differences, old -> new:\n"
            f"{indented(changes)}Ask for more steps, or choose another --workdir."
        )


def _record_metrics(experiment: Experiment, checkpoints: Checkpoints, folder: Path) -> set[int]:
    """Returns the steps of the checkpoints that were evaluated."""
    prefix = PREFIXES[whole_splits(experiment.splits)[0]]
    kept, evaluated = set(checkpoints.steps()), set()
    for row in writers.iterate_metrics(folder, prefix):
        if row["step"] in kept:
            evaluated.add(row["step"])
            if experiment.best_row in row:
                checkpoints.record_metric(row["step"], float(row[experiment.best_row]))
    return evaluated


def _fresh_state(
    program: Program, warm_start: WarmStart | Continuation | None, checkpoints: Checkpoints
) -> State:
    """Computes the first state; `warm_start` has the parameters of another run for it."""
    if warm_start is None:
        if not program.experiment.warm_start:
            return program.init()
        raise CheckpointError(
            f"There is no checkpoint in {checkpoints.directory} that the run can go back "
            "to. It began with a warm start, so that its first state cannot be made again: "
            "start it in another --workdir."
        )
    state = warm_start.first_state(program)
    # Save it at once: the other run may be changed or removed before the next checkpoint.
    checkpoints.save(program.experiment.first_step, to_save(state))
    checkpoints.wait()
    return state
