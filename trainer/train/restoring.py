"""Decides what of a state a checkpoint saves, and restores a state from a checkpoint.

The hyperparameters are not saved: they are those of the config, so that a run that continues with a
changed learning rate uses it.
"""

from pathlib import Path

import jax

from trainer.checkpoint import Checkpoints, misfits
from trainer.engine.mesh import replicated
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import UserError


def to_save(state: State) -> State:
    """Returns what a checkpoint saves of a state, also an abstract one: all but hyperparameters."""
    return state._replace(hyperparams=())


def restore(program: Program, checkpoints: Checkpoints, step: int | None = None) -> State:
    """Reads the checkpoint of a step, or the newest intact one, onto the program's devices."""
    # The state has the program's hyperparameters. Raises CheckpointError if there is no such
    # checkpoint, it is damaged, or its leaves are not those of the program.
    return with_hyperparams(program, checkpoints.restore(to_save(program.abstract_state()), step))


def restore_of(program: Program, folder: Path, step: int) -> State:
    """Reads a checkpoint of the run in a folder, which is not changed; see `restore`."""
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        return restore(program, checkpoints, step)


def with_hyperparams(program: Program, saved: State) -> State:
    """Adds the hyperparameters of a program to a state without them, on the program's devices."""
    packed = jax.device_put(program.inputs.pack(), replicated(program.mesh))
    return saved._replace(hyperparams=packed)


def check_fits(program: Program, workdir: Path, step: int, *, may_differ: bool) -> None:
    """Raises UserError if this program or version cannot continue a checkpoint."""
    # `may_differ` tells that the config may not be the run's, so that each leaf is compared.
    wrong = misfits(workdir, step, to_save(program.abstract_state()))
    # `hyper` was a field of the state before the floats of the optimizer were inputs.
    if any(line.startswith("hyper/") for line in wrong):
        raise UserError(
            f"The run in {workdir} was begun by an earlier version of Lockstep, and this version "
            "cannot read its checkpoints. Finish it with that version, or start again in another "
            "--workdir."
        )
    if wrong and may_differ:
        raise UserError(
            f"The run in {workdir} cannot continue with this config: its checkpoint of step "
            f"{step} does not fit.\n  " + "\n  ".join(wrong[:3]) + "\n"
            "Start in another --workdir; experiment.warm_start can take over its parameters."
        )
