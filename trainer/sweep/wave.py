"""The folder of a wave, in which its trials are computed, and from which they are moved at the end.

    waves/NAME.json           which trials it has
    waves/NAME/               laid out as the folder of a run, with one lock and one record
        checkpoints/          of all trials together
        trials/ARM/NUMBER/SEED/metrics.jsonl ...
        progress.json         for `sweep status`

A trial that ended has a summary.json, and so has one that came to the cut to which the wave is
computed. Its folder is moved to that of the sweep when all trials of the wave have ended.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trainer import checkpoint
from trainer import config as configs
from trainer.config import Config, ConfigError, Source, Tree, file_text, full_text, replace
from trainer.config.yaml_writer import scalar_text
from trainer.engine import every
from trainer.engine.contracts import Batch, ComponentError
from trainer.engine.datasets import whole_splits
from trainer.engine.examples import Examples
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program, load_located
from trainer.engine.step import State
from trainer.engine.vmapped import Vmapped
from trainer.messages import DONE, FAILED, STOPPED, plural
from trainer.sweep.folder import MOST_ERRORS, SweepFolder, WaveClaim, identity_of
from trainer.sweep.halving import waiting_folder
from trainer.sweep.per_example_file import MOST_EXAMPLES, PER_EXAMPLE_FILE, encode_examples
from trainer.sweep.plan import Trial
from trainer.sweep.programs import is_number
from trainer.train.rows import Results
from trainer.train.run import Run
from trainer.train.runtime import use_openblas_threads
from trainer.train.signals import StopSignals
from trainer.train.trained import restore_of, to_save
from trainer.train.warm_start import recorded_start
from trainer.train.watchdog import SlowLines
from trainer.workdir import Provenance, Workdir, check_files, make_fingerprint
from trainer.workdir.code import commits
from trainer.workdir.fingerprint import environment
from trainer.workdir.folder import NAMES, now
from trainer.writers import Reporter, files, is_console
from trainer.writers.json_files import damaged
from trainer.writers.lines import lines_of, sync_rows
from trainer.writers.run_record import FORMAT, read_record
from trainer.writers.summary import SUMMARY_FILE, Summary, read_outcome, read_summary

# A wave is split after so many attempts without progress: _KILLS that had begun to compute, or
# _STARTS in all; it is also split after MOST_ERRORS errors.
_KILLS, _STARTS = 3, 10
# The same for a trial that is alone in its wave, which then has failed. It is more, because a trial
# should hardly ever be blamed for kills from outside, such as by a scheduler.
_KILLS_OF_ONE = 6
_ADVICE = "remove the folder of the wave, and its trials are computed again."
_BETWEEN_REPORTS = 2.0  # seconds
# What the record of a trial leaves out of that of its wave: it has paths of the machine.
_OF_THE_MACHINE = ("command", "config_files")

# Printable ASCII that YAML does not quote, and that no config has.
_MARK = "lockstep-value-{}-of-a-trial"
_WORD = re.compile(r"[\w./%+-]+", re.ASCII)
_MARKED = re.compile(r"lockstep-value-(\d+)-of-a-trial")

_FILES: dict[str, Callable[[Config, Sequence[str]], str]] = {
    "config.yaml": lambda config, _: file_text(config.root),
    "config_full.yaml": full_text,
}


class ConfigFiles:
    """Makes the config.yaml and config_full.yaml of trials, which differ in few values."""

    # Writing such a file anew takes 1 to 4 ms. If the values of a trial are plain numbers and
    # words, they are put into a template instead, which the trials of an arm share.

    def __init__(self, vocabulary: Sequence[str] = ()):
        self._vocabulary = vocabulary
        # By arm and paths: the arm's config, and name -> a text with marks in place of the values.
        self._templates: dict[tuple[str, ...], tuple[Config, dict[str, str]]] = {}

    def texts(self, trial: Trial) -> dict[str, str]:
        """Returns the content of a trial's files by their names."""
        values = {**trial.values, "seed": trial.seed}
        if not all(map(_is_plain, values.values())):
            return {name: text(trial.config, self._vocabulary) for name, text in _FILES.items()}
        key = (trial.arm, *values)
        base, template = self._templates.get(key, (None, {}))
        if base is not trial.base:  # it has none yet, or was read again after an extension
            marks = {path: _MARK.format(index) for index, path in enumerate(values)}
            marked = replace(trial.base, marks, Source("a trial"))
            template = {name: text(marked, self._vocabulary) for name, text in _FILES.items()}
            self._templates[key] = trial.base, template
        plain = [scalar_text(value) for value in values.values()]
        return {
            name: _MARKED.sub(lambda mark: plain[int(mark[1])], text)
            for name, text in template.items()
        }


def _is_plain(value: Tree) -> bool:
    """Returns whether a value is written in the same way wherever it stands in a config."""
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    return value is None or isinstance(value, bool | int | float)


@dataclass(frozen=True)
class Setting:
    """What the waves of a worker have in common."""

    folder: SweepFolder
    vocabulary: Sequence[str]
    signals: StopSignals
    log: Callable[[str], None]
    # adds the user's code that this process imported to the ledger, and returns it: file -> hash
    note_code: Callable[[], Mapping[str, str]]
    allow_changed: Sequence[str]  # what of a wave may differ when it is resumed: "code" or nothing
    slow_lines: SlowLines
    reporter: Reporter
    config_files: ConfigFiles


@dataclass
class Prepared:
    """A compiled program, and the values of its inputs in each arm."""

    program: Program
    plan: str
    data_fingerprint: str
    traits: Mapping[str, str]  # name -> hash, of its data and its step, for the ledger
    vocabulary: Sequence[str]
    values: dict[str, Mapping[str, float]]
    evaluated: bool = False  # whether the ledger has the metrics of its first state, if any
    vmapped: Vmapped | None = None
    difference: float = 0.0

    def of_trial(self, trial: Trial) -> Program:
        """Returns the compiled program with the values and seeds of a trial."""
        if trial.arm not in self.values:
            # Another arm may have other values where its space has none.
            self.values[trial.arm] = load_located(trial.config, self.vocabulary).inputs.values
        own: dict[str, Any] = {path: x for path, x in trial.values.items() if is_number(x)}
        values = {path: float(own.get(path, x)) for path, x in self.values[trial.arm].items()}
        data_seed: Any = trial.config.root.kwargs.get("data_seed")
        program = self.program.with_values(values, trial.seed, data_seed)
        start: Any = trial.config.root.kwargs.get("warm_start")
        return program if start is None else program.starting_with(start)


class Wave:
    """A wave that this process computes."""

    # With --locks=heartbeat it takes the folder from the process that has its lock (`take_over`):
    # who has the wave is decided by other means. Raises RunChanged for other code or settings;
    # DamagedFile for a damaged folder.

    def __init__(self, setting: Setting, claim: WaveClaim, prepared: Prepared):
        check_folder(claim)
        self.setting, self.claim, self.prepared = setting, claim, prepared
        self.path = claim.path
        self.take_over = setting.folder.presence.mode == "heartbeat"
        self._folder = setting.folder
        first = claim.trials[0].config
        others = itertools.islice(self._folder.path.glob("trials/*/*/*/run.json"), 1)
        threads = use_openblas_threads(claim.path, *(record.parent for record in others))
        # Once for all trials: it asks git and reads what is installed, which would take most of the
        # time of a short trial.
        self._common = make_fingerprint(
            data=prepared.data_fingerprint,
            batch_size=prepared.program.experiment.data.batch_size,
            code=setting.note_code(),
            openblas_threads=threads,
        )
        found = environment(self._common)
        with self._folder.locked_ledger() as ledger:
            ledger.add_environment(found)
        self.workdir = Workdir(
            claim.path,
            first.root,
            Provenance(
                self._fingerprint(first) | {"code": self._comparable(self._common["code"])},
                commits=commits(setting.vocabulary),
                files=[dataclasses.asdict(file) for file in first.files],
            ),
            {"plan.txt": prepared.plan},
            allow_changed=setting.allow_changed,
            log=setting.log,
            take_over=self.take_over,
        )
        self._reported = 0.0

    def _comparable(self, found: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the present code of the files that the wave was begun with."""
        # The process that began it may have imported other modules in the waves before.
        record = read_record(self.path / "run.json")
        before = {} if record is None else record["fingerprint"].get("code", {})
        return {name: found.get(name, before[name]) for name in before} or found

    def _fingerprint(self, config: Config) -> dict[str, Any]:
        seed = config.root.kwargs.get("seed", 0)
        data_seed = config.root.kwargs.get("data_seed")
        return self._common | {
            "config": configs.digest(config.root),
            "seed": seed,
            "data_seed": seed if data_seed is None else data_seed,
        }

    # Trials.

    def staged(self, trial: Trial) -> Path:
        """Returns the folder of a trial while the wave is computed."""
        return self.path / trial.folder

    def unfinished(self) -> list[Trial]:
        """Returns the trials without an outcome, in order."""
        return [
            trial
            for trial in self.claim.trials
            # A worker that was killed may have moved some of them already.
            if self._outcome(trial) is None and not self._folder.has_moved(trial, self.claim.until)
        ]

    def _outcome(self, trial: Trial) -> Summary | None:
        """Returns how a trial ended, also at the cut to which the wave computes it."""
        summary = read_summary(self.staged(trial))
        cut = summary is not None and summary.end == "stopped" and summary.step == self.claim.until
        return summary if cut else read_outcome(self.staged(trial))

    def take_up(self, trial: Trial) -> Path:
        """Begins a trial with its files from the cut at which it waited."""
        # Returns the folder there, which has the state. What a wave wrote that was killed before
        # its first checkpoint is dropped. Raises FileNotFoundError if there is no such folder.
        waited, staged = self._waited(trial), self.staged(trial)
        shutil.rmtree(staged, ignore_errors=True)
        kept = self._folder.plan.checkpoints == "best"  # of which a better one may not come
        own = (SUMMARY_FILE, "run.json", *(() if kept else ("checkpoints",)))
        shutil.copytree(waited, staged, ignore=shutil.ignore_patterns(*own))
        return waited

    def give_up(self, trial: Trial) -> None:
        """Removes the files of a trial from the cut at which it waited: it begins anew."""
        shutil.rmtree(self.staged(trial), ignore_errors=True)
        shutil.rmtree(self._waited(trial), ignore_errors=True)

    def _waited(self, trial: Trial) -> Path:
        return waiting_folder(self._folder.path, trial, self.claim.start)

    def write_outcome(self, trial: Trial, outcome: Summary) -> None:
        """Writes the outcome of a trial that ended before the others, whose writers are closed."""
        # Its rows are on the disk first.
        staged = self.staged(trial)
        files.make_folder(staged)
        sync_rows(staged)
        self.workdir.check_fence()
        files.replace_file(staged / SUMMARY_FILE, outcome.text().encode())

    def finish(self, outcomes: Mapping[Trial, Summary]) -> None:
        """Moves the trials that ended to the folder of the sweep, and removes the wave."""
        # Trials without an outcome are claimed again. `outcomes` are those of the trials that ended
        # since the last call of `write_outcome`.
        self.workdir.check_fence()
        self._common["code"] = self.setting.note_code()  # with what was imported during the wave
        self.workdir.record(exit="done", ended=now())
        for trial in self.claim.trials:
            if trial in outcomes or self._outcome(trial) is not None:
                self._complete(trial)
        files.sync_file_system(self.path)
        # Summaries come last: each says that all else of its folder is on the disk.
        for trial, outcome in outcomes.items():
            (self.staged(trial) / SUMMARY_FILE).write_text(outcome.text())
        files.sync_file_system(self.path)
        self.workdir.check_fence()
        for trial in self.claim.trials:
            if self._outcome(trial) is not None:
                self._move(trial)
        self._folder.record(self.claim)
        files.sync_file_system(self._folder.path)  # before the wave is removed
        self.discard()

    def _complete(self, trial: Trial) -> None:
        """Writes the configs and the record of a trial, so that its folder is that of a run."""
        staged = self.staged(trial)
        staged.mkdir(parents=True, exist_ok=True)
        if len(self.workdir.lineage) > 1:
            files.remove_temporaries(staged)  # of a process that was killed
        if self.claim.alone:  # without what the folder of a run has besides that of a trial
            if self._folder.plan.checkpoints == "none":
                shutil.rmtree(staged / "checkpoints", ignore_errors=True)
            for name in ("lock", "epoch"):
                (staged / name).unlink(missing_ok=True)
        for name, text in self.setting.config_files.texts(trial).items():
            (staged / name).write_text(text, encoding="utf-8")
        # First what the record has of its waves before the cut at which it waited.
        before = read_record(self._waited(trial) / "run.json") if self.claim.start else None
        lineage = [] if before is None else list(before["lineage"])
        lineage += [
            {key: entry[key] for key in entry if key not in _OF_THE_MACHINE}
            | {"wave": self.path.name, "trials": len(self.claim.trials)}
            for entry in self.workdir.lineage
        ]
        with contextlib.suppress(OSError):  # how many processes want each core
            lineage[-1]["load"] = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
        content = {
            "format": FORMAT,
            "fingerprint": self._fingerprint(trial.config),
            "lineage": lineage,
            "sweep": {"trial": trial.folder, "plan": self._folder.plan.digest},
        }
        (staged / "run.json").write_text(json.dumps(content, indent=1) + "\n")

    def _move(self, trial: Trial) -> None:
        target, outcome = self._folder.path / trial.folder, self._outcome(trial)
        if outcome is not None and outcome.end == "stopped":  # at a cut
            target = waiting_folder(self._folder.path, trial, outcome.step)
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.chmod(self.staged(trial), 0o700)
            if not target.exists():
                os.rename(self.staged(trial), target)

    def discard(self) -> None:
        """Removes the wave; trials that were not moved are claimed again, and begin anew."""
        self.workdir.check_fence()
        self.workdir.close("done")
        self._folder.remove(self.claim)

    def hand_over(self, kind: str, **values: object) -> None:
        """Ends the work of this process on the wave, which another one resumes."""
        # `kind`, "stopped", "failed" or "crashed", and `values`, as JSON has them, are for the
        # record of a wave that is not finished.
        if self.workdir.lock.held:
            self.workdir.close(kind, **values)

    # Kills.

    def newest_checkpoint(self) -> int | None:
        """Returns the step of the newest checkpoint; None if there is none."""
        path = self.workdir.checkpoints
        if self.claim.alone:  # the checkpoints are in the folder of its run
            path = self.staged(self.claim.trials[0]) / "checkpoints"
        return checkpoint.Checkpoints(path, read_only=True).latest()

    def why_given_up(self) -> str:
        """Returns why the wave is not computed again; "" if it is computed."""
        # The reason is the last error of attempts without progress, or a sentence about kills.
        newest = self.newest_checkpoint()
        without: list[dict[str, Any]] = []  # attempts, the last one first
        for entry in reversed(self.workdir.lineage[:-1]):
            # A process that ended before it recorded its step made no progress either.
            same = not entry.get("computing") or entry.get("restored") == newest
            if entry["exit"] not in ("killed", "crashed") or not same:
                break
            without.append(entry)
        errors = [entry["error"] for entry in without if entry.get("error")]
        begun = sum(bool(entry.get("computing")) for entry in without)
        kills = _KILLS if len(self.claim.trials) > 1 else _KILLS_OF_ONE
        if len(errors) >= MOST_ERRORS or begun >= kills or len(without) >= _STARTS:
            return errors[0] if errors else "It killed its worker again and again."
        return ""

    def code_changed(self) -> bool:
        """Returns whether the wave was begun with other code of the user."""
        lines = [line for entry in self.workdir.lineage for line in entry["changed"]]
        return any(line.startswith("code: ") for line in lines)

    # Progress.

    def report(self, last: bool = False, **progress: float) -> None:
        """Writes progress.json, which `sweep status` reads, every two seconds and at the end."""
        now = time.monotonic()
        if now - self._reported < _BETWEEN_REPORTS and not last:
            return
        self._reported = now
        temporary = files.temporary_beside(self.path / "progress.json")
        with contextlib.suppress(OSError):  # nothing depends on it
            temporary.write_text(json.dumps(progress | {"epoch": self.workdir.lock.epoch}))
            os.replace(temporary, self.path / "progress.json")


def run_alone(wave: Wave) -> int:
    """Computes the one trial of a wave by `Run`, in the trial's folder; returns an exit code."""
    # The code is DONE if the trial has a result, STOPPED if it is saved, and FAILED if the disk
    # cannot be written. Raises DamagedFile if every checkpoint was damaged: the trial then begins
    # anew.
    (trial,) = wave.claim.trials
    setting, program = wave.setting, wave.prepared.of_trial(trial)
    staged, experiment = wave.staged(trial), program.experiment
    object.__setattr__(experiment, "writers", tuple(named_writers(trial.config)))
    if (newest := wave.newest_checkpoint()) is not None:
        check_rows(staged, newest - 1, experiment)  # the evaluation after it may be repeated
        if wrong := checkpoint.misfits(staged, newest, to_save(program.abstract_state())):
            raise checkpoint.UnlikeCheckpoint(
                f"The checkpoint of step {newest} does not fit: {wrong[0]}"
            )
    wave.workdir.record(restored=newest, computing=True)  # the first block comes next
    run = Run(
        trial.config,
        program,
        setting.signals,
        setting.log,
        setting.vocabulary,
        compiled=True,
        slow_lines=setting.slow_lines,
        identity=identity_of(trial, setting.folder.path),
    )
    # The run writes no summary.json, because a run that failed is tried again, and a trial with a
    # summary is not. It allows changed code, because the wave has compared the code.
    code = run.start(staged, allow_changed=["code"], summarize=False, take_over=wave.take_over)
    if start := recorded_start(staged):  # the trial gets the record of the wave
        wave.workdir.record(**start)
    if code == FAILED:
        try:
            checkpoint.check_not_lost(staged / "checkpoints")
        except checkpoint.CheckpointError as error:
            why = "every checkpoint is damaged"
            raise damaged(staged / "checkpoints", why, "remove it.") from error
    if code == STOPPED:
        return STOPPED
    if run.ended is None or (code == FAILED and run.ended.end != "diverged"):
        return FAILED
    results = Results().read(staged)
    if code == DONE and setting.folder.plan.keeps_examples(trial):
        state = restore_of(program, staged, experiment.steps)
        fence, log = wave.workdir.check_fence, setting.log
        keep_examples(program, state, staged, fence, lambda line: log(f"{trial.folder}: {line}"))
    # The outcome is written before the checkpoints are removed: a run without both begins anew.
    wave.write_outcome(trial, results.summary(run.ended, experiment))
    wave.finish({})
    return DONE


def keep_examples(
    program: Program,
    state: State,
    folder: Path,
    fence: Callable[[], None],
    log: Callable[[str], None],
    watch: Callable[[str], None] = lambda _: None,
) -> None:
    """Writes per_example.npz of a run that ended; nothing without a test split."""
    # A mistake in this pass over the test split, such as of a metric that cannot be computed so, is
    # logged, and the file then says that it has nothing; UserError is raised if a file of the data
    # set was changed. `state` is not donated. `fence` is called before the file is written, `watch`
    # before each batch.
    if "test" not in whole_splits(program.experiment.splits):
        return

    def watched(batch: Batch) -> Batch:
        watch("the evaluation of single test examples")
        return batch

    try:
        batches = map(watched, program.evaluation.batches("test"))
        found = program.evaluation.run_examples(state, batches, MOST_EXAMPLES)
    except (ComponentError, MemoryError, jax.errors.JaxRuntimeError) as error:
        log(f"The results on single test examples are not kept. {error}")
        found = Examples({}, {}, "", False, ("loss", *sorted(program.experiment.metrics)))
    files.replace_file(folder / PER_EXAMPLE_FILE, encode_examples(found), fence)


def named_writers(config: Config) -> list[str]:
    """Returns the writers that a trial's config names; the terminal shows the sweep instead."""
    # Defaults do not count, so that a sweep does not write thousands of files for TensorBoard.
    return [name for name in (config.root.kwargs.get("writers") or ()) if not is_console(name)]


def check_folder(claim: WaveClaim) -> None:
    """Checks the files of a wave, except for its checkpoints and its rows."""
    # The folder may not exist yet. Raises DamagedFile if a file is not as a worker leaves it;
    # UserError if a config cannot be read.
    path = claim.path
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise damaged(path, "it is not a folder", _ADVICE)
    staged = [path / trial.folder for trial in claim.trials]
    for folder in (path, *staged):
        check_files(folder)
        for name in NAMES:
            if (folder / name).is_symlink():
                raise damaged(folder / name, "it is a symbolic link", _ADVICE)
    for folder in (path, *(staged if claim.alone else ())):  # those with the layout of a run
        _check_config(folder, claim.trials[0].config)


def _check_config(folder: Path, config: Config) -> None:
    file = folder / "config.yaml"
    if any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "trials")):
        for each in (file, folder / "run.json"):
            if not each.exists():
                raise damaged(each, "it is missing", _ADVICE)
    if not file.exists():
        return
    try:
        found = configs.load([file]).root
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise damaged(file, str(error), _ADVICE) from error
    if configs.diff(configs.computed(found), configs.computed(config.root)):
        raise damaged(file, "it is not the config of the first trial", _ADVICE)


def check_rows(folder: Path, last: int, experiment: Experiment) -> None:
    """Raises DamagedFile if metrics.jsonl of a trial lacks a row of a logged or evaluated step."""
    # `folder` is that of the trial in its wave, `last` the last step of which there must be a row.
    file, wanted = folder / "metrics.jsonl", set[int]()
    for interval in (experiment.log_every, experiment.eval_every):
        wanted.update(every.due_steps(interval, experiment.first_step, last))
    lines = lines_of(file) if file.exists() else ()
    lost = wanted - {row["step"] for _, row in lines if row is not None}
    if lost:
        why = f"it lacks {plural(len(lost), 'row')}, such as that of step {min(lost):,}"
        raise damaged(file, why, _ADVICE)
