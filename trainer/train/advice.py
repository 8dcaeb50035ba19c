"""Builds the advice and the command of the error about a step that is not finite."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.engine.program import Program
from trainer.train.batch_faults import find_fault
from trainer.train.nonfinite import ADVICE


def advise(program: Program, batch_index: int) -> str:
    """Returns sentences that name the cause of a bad step, if it is in the batch, and a remedy.

    Args:
        program: the experiment.
        batch_index: of the step's batch in the data stream, from 0.
    """
    experiment = program.experiment
    batch = next(experiment.batches(batch_index))
    fault = find_fault(program, batch)
    skip = "" if experiment.on_nonfinite == "rollback" else ", or set on_nonfinite='skip'"
    if fault is not None:
        return f"{fault}. Correct the data or the model{skip}."
    return f"{ADVICE[:-1]}{skip}."


def replay_command(folder: Path, step: int, vocabulary: Sequence[str]) -> str:
    """Returns the shell command that replays a step.

    Args:
        folder: of the run.
        step: counted from 1.
        vocabulary: the user's packages that the run's config needs.
    """
    command = ["python", "-m", "trainer"]
    argv = sys.orig_argv
    if "trainer" in argv and argv[argv.index("trainer") - 1] == "-m":  # repeat it
        command = argv[: argv.index("trainer") + 1]
    packages = [f"--vocabulary={package}" for package in vocabulary]
    return shlex.join([*command, "replay", str(folder), f"--step={step}", *packages])
