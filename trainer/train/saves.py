"""Saves states of a loop, none of them ahead of what its files say."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import jax

from trainer.engine.step import State
from trainer.messages import UserError
from trainer.train.multihost import broadcast_from_host0
from trainer.train.nonfinite import NonFiniteLog
from trainer.train.restoring import to_save
from trainer.train.rollback import RollbackLog
from trainer.train.services import Consensus, StateKeeper
from trainer.train.watchdog import Watchdog
from trainer.writers import MultiWriter


class Saves:
    """Saves a state once all that was written before it is on disk.

    Args:
        checkpoints: saves the state.
        writer: has the metrics up to a state.
        nonfinite_log: has the steps that are not finite.
        rollback_log: has the rollbacks.
        consensus: is told how long a save held up the steps.
        watchdog: is told of each save.
        stopped: returns a context in which the time of the steps is not measured.
        log: takes a line for the user.

    Attributes:
        behind: why no state can be saved now; None if one can.
    """

    def __init__(
        self,
        checkpoints: StateKeeper,
        writer: MultiWriter,
        nonfinite_log: NonFiniteLog,
        rollback_log: RollbackLog,
        consensus: Consensus,
        watchdog: Watchdog,
        stopped: Callable[[], AbstractContextManager],
        log: Callable[[str], None],
    ):
        self.behind: str | None = None
        self._checkpoints, self._writer = checkpoints, writer
        self._nonfinite_log, self._rollback_log = nonfinite_log, rollback_log
        self._consensus, self._watchdog = consensus, watchdog
        self._stopped, self._log = stopped, log

    def save(self, state: State, step: int, metric: float | None) -> None:
        """Saves a state, unless something before it cannot be written.

        Args:
            state: the state after a step.
            step: that step.
            metric: the metric that ranks its checkpoint, if it was evaluated.
        """
        self._watchdog.other(f"the save of step {step}")
        start = time.perf_counter()
        with self._stopped():
            if self._all_written():
                self._checkpoints.save(step, to_save(state), metric=metric)
        self._consensus.saved(time.perf_counter() - start)

    def save_last(self, state: State, step: int, metric: float | None = None) -> None:
        """Saves a state after which the run ends, unless its checkpoint is there, and waits.

        Args:
            state: the state after a step.
            step: that step.
            metric: the metric that ranks its checkpoint, if it was evaluated.
        """
        self._checkpoints.wait()
        if self._checkpoints.latest() != step:
            self.save(state, step, metric)
            self._checkpoints.wait()

    @contextlib.contextmanager
    def before_error(
        self, state: State, step: int, metric: float | None, is_finite: Callable[[State], bool]
    ) -> Iterator[None]:
        """Saves a state if the data set raises UserError, such as for a file that was changed.

        Several processes save together, and the error may be in one of them: they save nothing.

        Args:
            state: the state after a step.
            step: that step.
            metric: the metric that ranks its checkpoint, if it was evaluated.
            is_finite: returns whether all steps so far, and the parameters of a state, are finite.
        """
        try:
            yield
        except UserError:
            if jax.process_count() == 1 and is_finite(state):
                self.save_last(state, step, metric)
            raise

    def _all_written(self) -> bool:
        """Writes what must be on disk before a state; returns whether that worked.

        The first of several failures is logged.
        """
        self._writer.flush()
        self._nonfinite_log.flush()
        before = self.behind
        self.behind = self._rollback_log.flush() or self._writer.behind
        if self.behind and not before:
            self._log("Until then no state is saved.")
        return broadcast_from_host0(self.behind is None)  # only process 0 has the files
