"""Computes a trial as a run of its own, because it went back to an earlier state in its wave."""

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint import (
    CheckpointError,
    UnlikeCheckpoint,
    check_not_lost,
    misfits,
)
from trainer.engine.program import Program
from trainer.messages import DONE, FAILED, STOPPED
from trainer.sweep.outcome import outcome_of
from trainer.sweep.per_example import keep_examples
from trainer.sweep.turn import asked_writers
from trainer.sweep.wave import Wave
from trainer.sweep.wave_check import check_rows
from trainer.train.restoring import restore_of, to_save
from trainer.train.results import Results
from trainer.train.rollback import MOST_ROLLBACKS, read_rollbacks
from trainer.train.run import Run
from trainer.train.services import Ended
from trainer.train.signals import StopSignals
from trainer.train.warm_start import count_warm_starts
from trainer.train.watchdog import SlowLines
from trainer.writers import RunIdentity
from trainer.writers.json_files import damaged


def run_alone(
    wave: Wave,
    program: Program,
    signals: StopSignals,
    log: Callable[[str], None],
    vocabulary: Sequence[str],
    slow_lines: SlowLines,
    identity: Callable[[], RunIdentity],
    per_example: bool = False,
) -> int:
    """Computes the one trial of a wave by `Run`, in the trial's folder.

    Args:
        wave: the wave.
        program: the compiled program, with the trial's values and seeds.
        signals: reports when to stop.
        log: takes a line for the user.
        vocabulary: further packages whose public functions the config may name.
        slow_lines: limits the lines about slow steps.
        identity: returns what loggers call the trial.
        per_example: whether to keep the results on single test examples.

    Returns:
        DONE: the trial has a result. STOPPED: saved. FAILED: the disk cannot be written.
    """
    (trial,) = wave.claim.trials
    staged = wave.staged(trial)
    experiment = program.experiment
    object.__setattr__(experiment, "writers", tuple(asked_writers(trial.config)))
    newest = wave.newest()
    if newest is not None:
        check_rows(staged, newest - 1, experiment)  # the evaluation after it may be repeated
        if wrong := misfits(staged, newest, to_save(program.abstract_state())):
            raise UnlikeCheckpoint(f"The checkpoint of step {newest} does not fit: {wrong[0]}")
    wave.begins(newest)
    run = Run(
        trial.config,
        program,
        signals,
        log,
        vocabulary,
        compiled=True,
        slow_lines=slow_lines,
        identity=identity,
    )
    # Not its summary.json: a run that failed is tried again, and a trial with a result is not.
    # The wave has compared the code with that of the process that began it.
    allowed = ["code"]
    code = run.start(staged, allow_changed=allowed, summarize=False, take_over=wave.take_over)
    if warm_starts := count_warm_starts(staged):  # the record of the trial is that of the wave
        wave.workdir.record(warm_starts=warm_starts)
    if code == FAILED:
        _check_not_lost(staged / "checkpoints")
    if code == STOPPED:
        return STOPPED
    results = Results().read(staged)
    counters = read_rollbacks(staged)
    rollbacks = max((each.rollbacks for each in counters.values()), default=0)
    if code == DONE:
        end = Ended("done", DONE, experiment.steps)
    elif rollbacks == MOST_ROLLBACKS:
        end = Ended("diverged", FAILED, results.step, f"It went back {rollbacks} times.")
    else:
        return FAILED
    if code == DONE and per_example:
        state = restore_of(program, staged, experiment.steps)
        fence = wave.workdir.check_fence
        keep_examples(program, state, staged, fence, lambda line: log(f"{trial.folder}: {line}"))
    # Before its checkpoints are removed, because a run without them begins anew.
    wave.keep(trial, outcome_of(results.summary(end, experiment)))
    wave.finish({})
    return DONE


def _check_not_lost(folder: Path) -> None:
    """Raises DamagedFile if every checkpoint was damaged: the trial then begins anew."""
    try:
        check_not_lost(folder)
    except CheckpointError as error:
        raise damaged(folder, "every checkpoint is damaged", "remove it.") from error
