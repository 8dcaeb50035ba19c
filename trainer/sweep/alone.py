"""Computes a trial as a run of its own, because it went back to an earlier state in its wave."""

import shutil
from collections.abc import Callable, Sequence

from trainer.engine.loading import load_located
from trainer.messages import DONE, FAILED, STOPPED
from trainer.sweep.folder import SweepFolder
from trainer.sweep.outcome import Outcome
from trainer.sweep.turn import asked_writers
from trainer.sweep.wave import Wave
from trainer.train.rollback import MOST_ROLLBACKS, read_rollbacks
from trainer.train.run import Run
from trainer.train.signals import StopSignals
from trainer.writers import read_metrics


def run_alone(
    wave: Wave,
    folder: SweepFolder,
    signals: StopSignals,
    log: Callable[[str], None],
    vocabulary: Sequence[str],
) -> int:
    """Computes the one trial of a wave by `Run`, in the trial's folder.

    Args:
        wave: the wave.
        folder: the folder of the sweep.
        signals: reports when to stop.
        log: takes a line for the user.
        vocabulary: further packages whose public functions the config may name.

    Returns:
        DONE: the trial has a result. STOPPED: saved. FAILED: the disk cannot be written.
    """
    (trial,) = wave.claim.trials
    if not wave.unfinished():  # it was killed while the trial was moved
        wave.finish({})
        return DONE
    staged = wave.staged(trial)
    program = load_located(trial.config, vocabulary)
    experiment = program.experiment
    object.__setattr__(experiment, "writers", tuple(asked_writers(trial.config)))
    wave.begins(None)
    run = Run(trial.config, program, signals, log, vocabulary)
    code = run.start(staged)
    if code == STOPPED:
        return STOPPED
    rows = read_metrics(staged)
    metrics = {name: x for row in rows for name, x in row.items() if name != "step"}
    counters = read_rollbacks(staged)
    rollbacks = max((each.rollbacks for each in counters.values()), default=0)
    step = rows[-1]["step"] if rows else 0
    if code == DONE:
        outcome = Outcome("done", experiment.steps, metrics)
    elif rollbacks == MOST_ROLLBACKS:
        outcome = Outcome("diverged", step, metrics, f"It went back {rollbacks} times.")
    else:
        return FAILED
    if folder.plan.checkpoints == "none":
        shutil.rmtree(staged / "checkpoints", ignore_errors=True)
    for name in ("lock", "epoch"):
        (staged / name).unlink(missing_ok=True)
    wave.finish({trial: outcome})
    return DONE
