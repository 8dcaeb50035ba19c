"""Runs a program: restore, step, write, evaluate, save. The order is written down once, here."""

import collections
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from trainer.checkpoint import Checkpoints
from trainer.program import Program
from trainer.signals import StopSignals
from trainer.step import State

DONE, FAILED, STOPPED = 0, 1, 75  # exit codes; 75 is EX_TEMPFAIL: start the same command again


class NonFinite(RuntimeError):
    """A loss or a gradient that is not finite, where the run is to halt."""


class Logged(NamedTuple):
    """The metrics of a step, still on the device, waiting to be written."""

    step: int
    metrics: dict[str, jax.Array]
    steps_per_second: float


class Loop:
    """Takes a run from where its newest checkpoint stands to its last step.

    Args:
        program: the compiled experiment.
        checkpoints: where the state is saved and found.
        writer: takes the metrics, with the methods of clu's `MetricWriter`.
        signals: says when to stop.
        log: takes a line for the user.
    """

    def __init__(
        self,
        program: Program,
        checkpoints: Checkpoints,
        writer: Any,
        signals: StopSignals,
        log: Callable[[str], None],
    ):
        self.program = program
        self.experiment = program.experiment
        self.checkpoints = checkpoints
        self.writer = writer
        self.signals = signals
        self.log = log
        self.results: dict[str, float] = {}
        self._waiting: Logged | None = None
        # Steps that the host may be ahead of the device: enough to keep it busy, and few, because
        # simulated devices on few cores deadlock in their collectives when many are in flight.
        simulated = program.mesh.size > 1 and program.mesh.devices.flat[0].platform == "cpu"
        self._ahead = 1 if simulated else 2

    def run(self, state: State, began: float | None = None) -> int:
        """Runs to the last step, or until a signal.

        Args:
            state: where to start from; its buffers are donated.
            began: the `time.perf_counter()` at which the process began, to tell how long the first
                step took to come.

        Returns:
            The exit code: 0 done, 75 stopped by a signal after a saved checkpoint, 1 where the
            last state could not be saved.

        Raises:
            NonFinite: a logged loss or gradient norm is not finite, and the experiment halts then.
        """
        start = int(state.step)
        step = start
        for step, state in self._steps(state, start):  # noqa: B020
            if began is not None and step == start + 1:
                jax.block_until_ready(state)
                self.log(f"First step after {time.perf_counter() - began:.1f} s.")
            last = step == self.experiment.steps
            metric = None
            if last or step % self.experiment.eval_every == 0:
                metric = self._evaluate(state, step)
            if last or step % self.experiment.save_every == 0 or self.signals.received:
                self._flush()
                self.checkpoints.save(step, state, metric=metric)
            if self.signals.received:
                break
        return self._finish(state, step)

    def _steps(self, state: State, step: int) -> Iterator[tuple[int, State]]:
        """Yields (finished steps, state) after every step."""
        experiment = self.experiment
        batches = experiment.data.train(step, experiment.seed)
        in_flight: collections.deque[jax.Array] = collections.deque()
        logged_at, logged_step = time.perf_counter(), step
        while step < experiment.steps:
            state, metrics = self.program.step(state, self.program.put(next(batches)))
            step += 1
            in_flight.append(metrics["train/loss"])
            if len(in_flight) > self._ahead:
                in_flight.popleft().block_until_ready()
            if step % experiment.log_every == 0 or step == experiment.steps:
                now = time.perf_counter()
                speed = (step - logged_step) / (now - logged_at)
                self._flush()
                self._waiting = Logged(step, metrics, speed)
                logged_at, logged_step = now, step
            yield step, state

    def _flush(self) -> None:
        """Writes the metrics that wait: by now the device has long computed them."""
        if self._waiting is None:
            return
        step, metrics, speed = self._waiting
        self._waiting = None
        values = {name: float(x) for name, x in jax.device_get(metrics).items()}
        examples = speed * self.experiment.data.batch_size
        self.writer.write_scalars(
            step,
            {**values, "perf/steps_per_second": speed, "perf/examples_per_second": examples},
        )
        bad = [name for name in ("train/loss", "grad_norm") if not math.isfinite(values[name])]
        if bad and self.experiment.on_nonfinite == "halt":
            raise NonFinite(
                f"{bad[0]} is {values[bad[0]]} at step {step}. The checkpoints before it are kept. "
                f"Lower the learning rate, clip the gradients (clip_norm), or set "
                f"on_nonfinite='skip'."
            )

    def _evaluate(self, state: State, step: int) -> float | None:
        """Evaluates, writes the results, and returns the one that "best" is judged by."""
        self._flush()
        self.results = self.program.evaluate(state, self.experiment.data.evaluate())
        self.writer.write_scalars(step, {f"eval/{k}": v for k, v in self.results.items()})
        best = self.experiment.best_metric
        return None if best is None else self.results[best]

    def _finish(self, state: State, step: int) -> int:
        self._flush()
        self.writer.flush()
        self.checkpoints.wait()
        if self.checkpoints.latest() != step:
            self.checkpoints.save(step, state)
            self.checkpoints.wait()
        if self.checkpoints.latest() != step:
            self.log(f"The state at step {step} could not be saved: {self.checkpoints.error}")
            return FAILED
        if step < self.experiment.steps:
            self.log(
                f"Stopped at step {step} by {self.signals.received}; saved. "
                "Start the same command again to go on."
            )
            return STOPPED
        results = ", ".join(f"{name} {value:.4g}" for name, value in self.results.items())
        self.log(f"Done: {step:,} steps. {results}")
        return DONE
