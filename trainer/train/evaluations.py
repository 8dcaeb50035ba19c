"""Evaluates during a run, until it is done or the run is to stop."""

from collections.abc import Iterator, Mapping
from functools import partial

from trainer.engine.contracts import Batch
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.train.loop_interface import Consensus
from trainer.train.watchdog import Watchdog
from trainer.writers import MultiWriter


class _Stopped(Exception):
    """Raised between two batches if the run is to stop."""


class Evaluations:
    """The evaluations of a run; the watchdog watches each of their batches."""

    # `results` are those of the last complete evaluation, by their names in metrics.jsonl.

    def __init__(
        self,
        program: Program,
        writer: MultiWriter,
        consensus: Consensus,
        watchdog: Watchdog,
    ):
        self.results: dict[str, float] = {}
        self._program = program
        self._writer = writer
        self._consensus = consensus
        self._watchdog = watchdog

    def run(self, state: State, step: int, progress: Mapping[str, float]) -> bool:
        """Evaluates the state after a step on every split; returns False if the run is to stop."""
        # Writes the results with `progress`, but nothing if the run is to stop.
        try:
            self.results = self._program.evaluation.run_splits(
                state, partial(self._until_stopped, step)
            )
        except _Stopped:
            return False
        self._writer.write_scalars(step, self.results | dict(progress))
        return True

    def best(self) -> float | None:
        """Returns the result that ranks checkpoints; None if the experiment has no best_metric."""
        return self.results.get(self._program.experiment.best_row or "")

    def describe(self) -> str:
        """Returns the results as text: "eval/loss 0.03566, eval/accuracy 0.9806"."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.results.items())

    def _until_stopped(self, step: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._watchdog.begin_other(f"the evaluation at step {step}")
            # A signal must not wait for the end of a long evaluation.
            self._consensus.sync("batch")
            if self._consensus.stop:
                raise _Stopped
            yield batch
