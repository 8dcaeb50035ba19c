"""Opens a run's folder, restores its state or creates a new one, and calls the loop.

`Run.start` is the whole of a run: it prepares the folder, `find_start` finds the state to start
from, and `SharedByAttempts` are the files and threads that serve all attempts of the loop.
"""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import config as configs
from trainer import writers
from trainer.checkpoint import CheckpointError, Checkpoints, check_not_lost
from trainer.config import Config, wording
from trainer.engine.contracts import ComponentError
from trainer.engine.experiment import Experiment
from trainer.engine.mesh import data_shard
from trainer.engine.plan import Plan, located_fingerprint, make_plan, with_place
from trainer.engine.plan_text import render, steps_text
from trainer.engine.program import Program
from trainer.engine.splits import split_sizes
from trainer.engine.step import State
from trainer.messages import DONE, FAILED, MISTAKE, STOPPED, UserError, plural
from trainer.train import multihost, runtime
from trainer.train.autosave import AutosavePolicy, was_killed
from trainer.train.clipping import ClippedSteps
from trainer.train.continuation import Continuation, begin_with
from trainer.train.hooks import Hooks
from trainer.train.loop import Loop
from trainer.train.loop_interface import Blocks, Ended, Halted, Observer
from trainer.train.multihost import StopSaveConsensus
from trainer.train.nonfinite import NonFiniteLog, fault_at_end
from trainer.train.profile import Advance, Profile
from trainer.train.restoring import check_fits, restore, to_save
from trainer.train.rollback import RollbackLog, RollbackTarget
from trainer.train.rows import MetricsError, Rows
from trainer.train.signals import StopSignals
from trainer.train.stuck_parameters import StuckParameters
from trainer.train.trained import tokenizer_text
from trainer.train.warm_start import WarmStart
from trainer.train.watchdog import SlowLines, Watchdog
from trainer.workdir import Workdir, WorkdirTakenOver, check_name, code, common, fingerprint
from trainer.workdir.changes import config_changes, indented, is_allowed, path_of
from trainer.workdir.record import is_untouched
from trainer.writers import RunIdentity, identity_of_run
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import SUMMARY_FILE, read_summary

# Errors whose text is a sentence for the user.
_EXPLAINED = (UserError, CheckpointError, MetricsError, WorkdirTakenOver)


class SharedByAttempts(NamedTuple):
    """What all attempts of a run share: its folder, and what reads and writes it."""

    # A run makes another attempt after a rollback.

    folder: Workdir
    checkpoints: Checkpoints
    consensus: StopSaveConsensus
    nonfinite_log: NonFiniteLog  # the steps that were not finite
    rollback_log: RollbackLog
    clipped: ClippedSteps  # counts the steps whose gradients were clipped
    rows: Rows
    stuck: StuckParameters  # the parameters that rounding keeps from moving
    experiment: Experiment
    log: Callable[[str], None]

    def summarize(self, ended: Ended) -> None:
        """Writes summary.json; only logs that the disk cannot be written."""
        text = self.rows.results.summary(ended, self.experiment).text()
        try:
            self.folder.write(SUMMARY_FILE, text)
        except WorkdirTakenOver:  # another process continues the run
            pass
        except OSError as error:
            self.log(f"{SUMMARY_FILE} could not be written: {error}")

    def summarize_error(self, error: Exception) -> None:
        """Writes summary.json for a run that an exception ended."""
        code = MISTAKE if isinstance(error, UserError) else FAILED
        explained = isinstance(error, _EXPLAINED)
        why = " ".join(str(error).split()) if explained else wording.cause(error)
        self.summarize(Ended("failed", code, self.rows.results.step, why))


def make_shared(
    folder: Workdir,
    program: Program,
    signals: StopSignals,
    log: Callable[[str], None],
    identity: Callable[[], RunIdentity],
) -> SharedByAttempts:
    """Makes what a run needs in its folder, which is open."""
    # `identity` returns what loggers call the run.
    experiment = program.experiment
    return SharedByAttempts(
        folder=folder,
        checkpoints=Checkpoints(
            folder.checkpoints,
            keep_latest=experiment.keep_latest,
            keep_best=0 if experiment.best_metric is None else 1,
            best_mode=experiment.best_mode,
            # Keep the first state after a warm start, which cannot be computed again.
            keep_always=[] if experiment.warm_start is None else [experiment.first_step],
            log=log,
            fence=folder.check_fence,
            before_commit=folder.sync_metrics,
        ),
        consensus=StopSaveConsensus(
            signals, AutosavePolicy(after_kill=was_killed(folder.run_file))
        ),
        nonfinite_log=NonFiniteLog(folder.path, folder.write, experiment, log),
        rollback_log=RollbackLog(folder.path, folder.write, log),
        clipped=ClippedSteps(program, folder.path, folder.write, log),
        rows=Rows(folder, experiment, log, identity),
        stuck=StuckParameters(program, log),
        experiment=experiment,
        log=log,
    )


class Run:
    """A program in a workdir."""

    # `slow_lines` limits the lines about slow steps; None for one a minute. `identity` returns what
    # loggers call the run; None names it after its folder. After `start`, `ended` says how the run
    # ended; it is None if it had ended before, or an error ended it.

    def __init__(
        self,
        config: Config,
        program: Program,
        signals: StopSignals,
        log: Callable[[str], None],
        vocabulary: Sequence[str] = (),
        compiled: bool = False,
        slow_lines: SlowLines | None = None,
        identity: Callable[[], RunIdentity] | None = None,
    ):
        self.config = config
        self.program = program
        self.experiment = program.experiment
        self.signals = signals
        self.log = log
        self.vocabulary = vocabulary
        self._warm_start: WarmStart | Continuation | None = None
        self._profile: Profile | None = None
        self._compiled = compiled
        self._slow_lines = slow_lines or SlowLines()
        self._identity = identity
        self.ended: Ended | None = None

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
        self._profile = profile
        # Several processes stop together, at their first synchronization.
        if self.signals.received and jax.process_count() == 1:
            self.log(f"Stopped by {self.signals.received} before the run began.")
            return STOPPED
        self._threads = runtime.use_openblas_threads(Path(workdir))
        plain = summarize and not (allow_changed or take_over or observe or profile)
        if plain and self._is_finished(Path(workdir)):
            self.log(_nothing_to_do(self.experiment))
            return DONE
        place = Path(workdir).absolute()  # the plan reads data, which may change the current folder
        multihost.raise_on_all(lambda: self.plan)
        multihost.raise_on_all(lambda: self._look_into(place, bool(allow_changed), until))
        if jax.process_count() > 1:
            multihost.require_same(common(multihost.raise_on_all(lambda: self._fingerprint)))
        folder = multihost.open_on_host0(lambda: self._open(place, allow_changed, take_over), place)
        kinds = {DONE: "done", FAILED: "failed", STOPPED: "stopped"}
        end = FAILED  # for exceptions that are not caught here
        try:
            multihost.check_seen(folder.run_file)
            self.log(f"{workdir}: {self._describe()}")
            if self._warm_start is not None:
                self.log(self._warm_start.describe())
            for warning in self.plan.warnings:
                self.log(f"warning: {warning}")
            end = self._run_in(folder, until, observe, began, summarize)
        except (CheckpointError, WorkdirTakenOver, MetricsError) as error:
            self.log(f"error: {error}")
        finally:
            if profile is not None:
                profile.close()
            folder.close(kinds[end])
        return end

    def _is_finished(self, workdir: Path) -> bool:
        """Returns whether the run has ended in the folder, and nothing of it was changed since."""
        # A logger may lack the end of the run.
        if jax.process_count() > 1 or set(self.experiment.writers) & set(writers.LOGGERS):
            return False
        steps = self.experiment.steps
        return is_untouched(workdir, self.config.root, lambda: self._fingerprint, steps)

    def _look_into(self, workdir: Path, changed: bool, until: int | None) -> None:
        """Raises UserError for a folder that this run cannot use, before the folder is changed."""
        check_name(workdir)
        try:
            newest = Checkpoints(workdir / "checkpoints").latest()
            if newest is not None:
                check_fits(self.program, workdir, newest, may_differ=changed)
        except CheckpointError as error:
            raise UserError(str(error)) from error
        if newest is not None and newest > self.experiment.steps:
            raise UserError(
                f"The run in {workdir} has made {newest:,} steps, and this config asks for "
                f"{self.experiment.steps:,}. Ask for more, or choose another --workdir."
            )
        if changed and newest == self.experiment.steps:
            self._refuse_changes_of_a_finished_run(workdir)
        if self._profile is not None:
            end = min(self.experiment.steps, until or self.experiment.steps)
            done = self.experiment.first_step if newest is None else newest
            self._profile.choose_steps(done, end)
        # Before the folder is created, so that a mistake in the rules of the warm start leaves
        # nothing behind.
        if self.experiment.warm_start and newest is None:
            self._warm_start = begin_with(self.program, self.config, self.vocabulary)

    def _refuse_changes_of_a_finished_run(self, workdir: Path) -> None:
        """Raises UserError if the run has ended: the config in its folder is that of its steps."""
        file = workdir / "config.yaml"
        try:
            summary = read_summary(workdir)
        except OSError:
            return  # opening the folder raises this error again, with advice
        ended = summary is not None and summary.end in ("done", "diverged")
        if not ended or not file.exists():
            return
        lines = config_changes(file, self.config.root)
        # Other writers are allowed: a logger that is added receives the rows so far.
        if changes := [x for x in lines if not is_allowed(path_of(x), ["writers"])]:
            raise UserError(
                f"The run in {workdir} has made all of its {self.experiment.steps:,} steps, so that"
                " this config would change none of its results. The differences, old -> new:\n"
                f"{indented(changes)}Ask for more steps, or choose another --workdir."
            )

    def _open(self, workdir: Path, allow_changed: Sequence[str], take_over: bool) -> Workdir:
        data = self.experiment.data
        return Workdir(
            workdir,
            self.config.root,
            plan=render(self.plan),
            full=configs.full_text(self.config, self.vocabulary),
            tokenizer=tokenizer_text(data),
            files=[dataclasses.asdict(file) for file in self.config.files],
            fingerprint=self._fingerprint,
            commits=code.commits(self.vocabulary),
            step_program=self._step_program(),
            allow_changed=allow_changed,
            take_over=take_over,
            log=self.log,
        )

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint(
            config=configs.digest(self.config.root),
            data=located_fingerprint(self.program, self.config),
            seed=self.experiment.seed,
            data_seed=self.experiment.seed_of_data,
            batch_size=self.experiment.data.batch_size,
            code=code.hashes(self.vocabulary),
            openblas_threads=self._threads,
            data_shards=data_shard(self.program.mesh).size,
        )

    def _step_program(self) -> str | None:
        """Returns the digest of the program of a step; None without code of the user."""
        if not self.vocabulary:
            return None
        text = self.program.trace(self.program.abstract_state()).lower().as_text()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _describe(self) -> str:
        plan = self.plan
        groups = ", ".join(f"{name} {count:,}" for name, (count, _) in plan.groups.items())
        return f"{steps_text(plan)} on {plan.devices}; parameters: {groups}"

    def _run_in(
        self,
        folder: Workdir,
        until: int | None,
        observe: Observer | None,
        began: float | None,
        summarize: bool,
    ) -> int:
        """Runs in an open folder, and writes summary.json at the end."""

        def of_folder() -> RunIdentity:
            return identity_of_run(folder.path, configs.hparams(self.config.root))

        identity = self._identity or of_folder
        shared = make_shared(folder, self.program, self.signals, self.log, identity)
        try:
            self.ended = ended = self._attempts(shared, until, observe, began)
        except Exception as error:
            # The errors of components, such as a batch that does not fit, get a line of the config.
            named = with_place(error, self.config) if isinstance(error, ComponentError) else error
            if summarize:
                shared.summarize_error(named)
            if named is error:
                raise
            raise named from error
        if summarize:
            shared.summarize(ended)
        return ended.code

    def _attempts(
        self,
        shared: SharedByAttempts,
        until: int | None,
        observe: Observer | None,
        began: float | None,
    ) -> Ended:
        """Runs from the newest state, again from an earlier one after every rollback."""
        checkpoints, rollback_log = shared.checkpoints, shared.rollback_log
        check_not_lost(shared.folder.checkpoints)  # before metrics are dropped
        if self._warm_start is not None:
            begun = self._warm_start
            shared.folder.record(warm_starts=begun.number, began_from=[begun.source])
        first = True
        with checkpoints:
            while True:
                outcome = self._attempt(shared, until, observe, began, first)
                if isinstance(outcome, Ended):
                    return outcome
                if isinstance(outcome, Halted):
                    self.log(f"error: {outcome.why} {outcome.advice}".rstrip())
                    return outcome.ended()
                rollback_log.add(outcome)
                # Only now that the rollback is recorded: if this process is killed here, the next
                # one finds the record, and discards the checkpoints itself.
                checkpoints.discard_after(rollback_log.newest)
                first, began = False, None

    def _attempt(
        self,
        shared: SharedByAttempts,
        until: int | None,
        observe: Observer | None,
        began: float | None,
        first: bool,
    ) -> Ended | RollbackTarget | Halted:
        """Runs from the newest checkpoint to the end, or to a step that is not finite."""
        checkpoints, rows, folder = shared.checkpoints, shared.rows, shared.folder
        state, restored, unevaluated = find_start(
            self.program,
            folder.path,
            checkpoints,
            shared.rollback_log,
            self._warm_start,
            self.log,
        )
        with contextlib.closing(rows.open(restored)) as writer:
            # Only once: a rollback may also lead back to the first state.
            if restored is None and first:
                writer.write_texts(0, {"plan": f"```\n{render(self.plan)}```"})
                writer.write_hparams(configs.hparams(self.config.root))
            if restored == self.experiment.steps and not unevaluated:
                checkpoints.prune()
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
            watchdog = Watchdog(self.experiment.watchdog, self.log, self._slow_lines)
            loop = Loop(
                self.program,
                checkpoints,
                writer,
                shared.consensus,
                watchdog,
                self.log,
                nonfinite_log=shared.nonfinite_log,
                hooks=Hooks(self.program, folder.path, self.log, folder.check_fence),
                rollback_log=shared.rollback_log,
                clipped=shared.clipped,
                until=until,
                observe=shared.stuck.observer_before(observe),
                vocabulary=self.vocabulary,
                seconds=rows.results.seconds_at(int(state.step)),
                noise_scale=rows.results.noise_scale,
            )
            shared.stuck.begin(int(state.step), state)
            advance = self.program.advance
            if self._profile is not None and jax.process_index() == 0:
                done, profile = int(state.step), folder.path / "profile"
                advance = self._profile.profiled(self.program, done, profile, watchdog.begin_other)
            with watchdog:
                outcome = _compute(advance, loop.run(state, began, unevaluated=unevaluated))
            if not isinstance(outcome, RollbackTarget):
                ended = outcome if isinstance(outcome, Ended) else outcome.ended()
                writer.finish(rows.results.summary(ended, self.experiment))
            if isinstance(outcome, Ended):
                writer.flush()  # puts back rows that another program removed from metrics.jsonl
                return rows.end(outcome)
            return outcome

    def _compile(self, state: State) -> None:
        stopped = self.signals.received and jax.process_count() == 1
        if stopped or self._compiled:
            return
        self._compiled = True
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


class Start(NamedTuple):
    """Where a run starts."""

    state: State  # on the devices
    restored: int | None  # the step of the checkpoint that it was read from; None if it was created
    unevaluated: bool  # whether the evaluation of the restored state was interrupted


def find_start(
    program: Program,
    folder: Path,
    checkpoints: Checkpoints,
    rollback_log: RollbackLog,
    warm_start: WarmStart | Continuation | None,
    log: Callable[[str], None],
) -> Start:
    """Restores the newest checkpoint, or creates the state before the first step."""
    # Checkpoints that are no longer on the run's path, according to `rollback_log`, are discarded.
    # The metrics of checkpoints that were evaluated after they were saved are read as well.
    # `warm_start` has the parameters of another run for a new state; None initializes them. Raises
    # CheckpointError if no checkpoint can be read, and the first state cannot be made again.
    evaluated = _record_metrics(program.experiment, folder, checkpoints)
    while checkpoints.latest() is not None:
        state = restore(program, checkpoints)
        if rollback_log.is_on_path(state):
            step = int(state.step)
            log(f"Restored step {step:,}.")
            return Start(state, step, _is_unevaluated(program.experiment, evaluated, step))
        # The previous process was killed during a rollback.
        checkpoints.discard_after(rollback_log.newest)
    return Start(_fresh_state(program, checkpoints, warm_start), None, False)


def _record_metrics(experiment: Experiment, folder: Path, checkpoints: Checkpoints) -> set[int]:
    """Returns the steps of the checkpoints that were evaluated."""
    prefix = PREFIXES[next(iter(split_sizes(experiment.data)))]
    kept, evaluated = set(checkpoints.steps()), set()
    for row in writers.iterate_metrics(folder, prefix):
        if row["step"] in kept:
            evaluated.add(row["step"])
            if experiment.best_row in row:
                checkpoints.record_metric(row["step"], float(row[experiment.best_row]))
    return evaluated


def _is_unevaluated(experiment: Experiment, evaluated: set[int], step: int) -> bool:
    if step <= experiment.first_step or not experiment.evaluates(step):
        return False
    return multihost.broadcast_from_host0(step not in evaluated)


def _fresh_state(
    program: Program, checkpoints: Checkpoints, warm_start: WarmStart | Continuation | None
) -> State:
    if program.experiment.warm_start and warm_start is None:
        raise CheckpointError(
            f"There is no checkpoint in {checkpoints.directory} that the run can go back to. "
            "It began with a warm start, so that its first state cannot be made again: start "
            "it in another --workdir."
        )
    if warm_start is None:
        return program.init()
    state = warm_start.first_state(program)
    # Save it at once: the other run may be changed or removed before the next checkpoint.
    checkpoints.save(program.experiment.first_step, to_save(state))
    checkpoints.wait()
    return state
