"""What the loop needs of its caller, a run or a wave of trials, and how it ends."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from trainer.engine.block import Block, Computed
from trainer.engine.contracts import Batch
from trainer.engine.step import State
from trainer.messages import FAILED
from trainer.train.rollback import RollbackTarget


class Consensus(Protocol):
    """Decides when to stop and to save, as `StopSaveConsensus` of a run and `WaveConsensus`."""

    @property
    def stop(self) -> str | None: ...  # noqa: D102
    def sync(self, after: str = "block") -> None: ...  # noqa: D102
    def save_now(self) -> bool: ...  # noqa: D102
    def record_save(self, delay: float) -> None: ...  # noqa: D102


class StateKeeper(Protocol):
    """Keeps states; see `checkpoint.Checkpoints`."""

    @property
    def error(self) -> str | None: ...  # noqa: D102
    def latest(self) -> int | None: ...  # noqa: D102
    def save(self, step: int, state: Any, *, metric: float | None = None) -> bool: ...  # noqa: D102
    def record_metric(self, step: int, metric: float) -> None: ...  # noqa: D102
    def wait(self) -> None: ...  # noqa: D102
    def prune(self) -> None: ...  # noqa: D102


class Ended(NamedTuple):
    """How a run ended."""

    end: str  # "done", "diverged", "failed" or "stopped"; see `writers.summary.Summary`
    code: int  # 0 done, 75 stopped after a saved checkpoint, 1 for all else
    step: int  # the last step
    why: str = ""  # a sentence about a run that is not done


class Halted(NamedTuple):
    """A step was not finite, and the run must end."""

    why: str  # the error message
    step: int
    replays: bool = False  # whether a replay of the step, from a checkpoint before it, tells more

    def ended(self) -> Ended:
        """Returns how the run ends, if it does not continue elsewhere."""
        return Ended("diverged", FAILED, self.step, self.why)


Observer = Callable[[int, Sequence[Batch], State], None]
"""Called after a block with its last step, its batches and the state after it."""

Blocks = Generator[Block, Computed, Ended | RollbackTarget | Halted]
"""Yields the blocks to compute, and is sent what was computed."""
