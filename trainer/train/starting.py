"""Finds the state that a run starts from: a checkpoint, or the state before the first step."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer import writers
from trainer.checkpoint import CheckpointError, Checkpoints
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.engine.splits import split_sizes
from trainer.engine.step import State
from trainer.train import multihost
from trainer.train.restoring import restore, to_save
from trainer.train.rollback import RollbackLog
from trainer.train.warm_start import WarmStart
from trainer.writers.lines import PREFIXES


class Start(NamedTuple):
    """Where a run starts.

    Attributes:
        state: on the devices.
        restored: the step of the checkpoint that it was read from; None if it was created.
        unevaluated: whether the evaluation of the restored state was interrupted.
    """

    state: State
    restored: int | None
    unevaluated: bool


def find_start(
    program: Program,
    folder: Path,
    checkpoints: Checkpoints,
    rollback_log: RollbackLog,
    warm_start: WarmStart | None,
    log: Callable[[str], None],
) -> Start:
    """Restores the newest checkpoint, or creates the state before the first step.

    The metrics of checkpoints that were evaluated after they were saved are read as well.

    Args:
        program: the compiled experiment.
        folder: of the run.
        checkpoints: of the run.
        rollback_log: the rollbacks so far; checkpoints that are no longer on the run's path are
            discarded.
        warm_start: the parameters of another run for a new state; None initializes them.
        log: takes a line for the user.

    Raises:
        CheckpointError: no checkpoint can be read, and the first state cannot be made again.
    """
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
    if step == 0 or (step % experiment.eval_every and step != experiment.steps):
        return False
    return multihost.broadcast_from_host0(step not in evaluated)


def _fresh_state(program: Program, checkpoints: Checkpoints, warm_start: WarmStart | None) -> State:
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
    checkpoints.save(0, to_save(state))
    checkpoints.wait()
    return state
