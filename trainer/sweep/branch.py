"""A branch: a sweep whose trials all continue one state of a run.

The config of each trial says so itself, in its `warm_start`, so that it can be trained alone.
`trainer.sweep.continued_run` reads the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import Call
from trainer.sweep.confounders import with_arms


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A state of a run, which every trial of a sweep continues.

    Attributes:
        run: the folder of the run, whose config is the base unless the file names one; relative to
            the file that names it.
        at: the step of one of its checkpoints, after which the trials go on.
        follow: by how many gradients the new optimizer state of an arm is advanced before, those of
            the last steps of the run before `at`. An arm with the optimizer of the run continues
            its state, unless it says `set: {warm_start.optimizer: reset}`; the others begin with
            new states.
    """

    run: str
    at: int
    follow: int = 0

    def __post_init__(self) -> None:
        if self.at < 1:
            raise ValueError(f"at is {self.at}, but must be the step of a checkpoint, at least 1.")
        if self.follow < 0:
            raise ValueError(f"follow is {self.follow}, but is a number of gradients, at least 0.")


@dataclass(frozen=True)
class PlannedBranch:
    """What the plan of a sweep keeps of its branch; plan.json has it by these names."""

    run: str  # its folder, relative to the folder in which the sweep was planned
    at: int  # the step of the checkpoint
    sha256: str  # what `checkpoint.leaves_digest` returned for it

    def text(self, configs: Mapping[str, Call]) -> str:
        """Returns the branch as a line for the plan; `configs` are those of the arms."""
        return (
            f"branch: every run continues {self.run} from step {self.at:,} (checkpoint"
            f" {self.sha256[:16]}); optimizer states: {states_text(configs)}"
        )

    def condition(self, configs: Mapping[str, Call]) -> str:
        """Returns sentences for a verdict about what the runs have in common."""
        return (
            f"Every run continues one state, that after step {self.at:,} of {self.run}: the results"
            " are about continuations of this state, and not about training from the first step,"
            " and runs of different seeds differ only in what follows it. The states of the"
            f" optimizers there: {states_text(configs)}."
        )


def states_text(configs: Mapping[str, Call]) -> str:
    """Says with which state the optimizer of each arm begins: "that of the run (adamw)"."""
    starts = {name: describe_options(root.kwargs["warm_start"]) for name, root in configs.items()}
    return "; ".join(with_arms(starts))


def describe_options(options: Mapping[str, Any]) -> str:
    """Says with which state the optimizer of a run begins that continues another one.

    Example:
        >>> describe_options({"optimizer": "reset", "follow": 20})
        'new, then advanced by the last 20 gradients of the run'
    """
    if options.get("optimizer", "keep") == "keep":
        return "that of the run"
    count = options.get("follow", 0)
    if not count:
        return "new"
    last = "last gradient" if count == 1 else f"last {count:,} gradients"
    return f"new, then advanced by the {last} of the run"
