"""Says what to do about a step whose loss or gradient is not finite."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.batch_faults import find_fault
from trainer.nonfinite import ADVICE, Counters
from trainer.program import Program


def advise(program: Program, step: int, counters: Counters) -> str:
    """Returns sentences that name the fault, if the batch has it, and what helps.

    Args:
        program: the experiment.
        step: counted from 1.
        counters: how the run went back so far.
    """
    experiment = program.experiment
    batch = next(iter(experiment.data.train(step - 1 + counters.left_out, experiment.seed)))
    fault = find_fault(program, batch)
    skip = "" if experiment.on_nonfinite == "rollback" else ", or set on_nonfinite='skip'"
    if fault is not None:
        return f"{fault}. Correct the data or the model{skip}."
    return f"{ADVICE[:-1]}{skip}."


def replay_command(folder: Path, step: int, vocabulary: Sequence[str]) -> str:
    """Returns the command that makes a step again, to be pasted into a shell.

    Args:
        folder: of the run.
        step: counted from 1.
        vocabulary: packages of the user's, which the run's config needs.
    """
    begun = ["python", "-m", "trainer"]
    given = sys.orig_argv
    if "trainer" in given and given[given.index("trainer") - 1] == "-m":  # as this one was begun
        begun = given[: given.index("trainer") + 1]
    packages = [f"--vocabulary={package}" for package in vocabulary]
    return shlex.join([*begun, "replay", str(folder), f"--step={step}", *packages])
