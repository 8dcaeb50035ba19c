"""Keeps the steps that were dispatched and not yet checked for values that are not finite."""

import collections
from typing import NamedTuple

import jax
import numpy as np

from trainer.engine.program import Program
from trainer.engine.step import State


class Metrics(NamedTuple):
    """The metrics of a step, still on the device.

    Attributes:
        step: counted from 1.
        values: name -> scalar, as `step.train_step` returns them.
        params_finite: whether the parameters after the step are finite; None if they were not
            checked with the step.
    """

    step: int
    values: dict[str, jax.Array]
    params_finite: jax.Array | None = None

    def fetch(self) -> dict[str, float]:
        """Waits for the step, and returns its metrics as floats."""
        # In one call, which starts all transfers before it waits for the first.
        values = jax.device_get({k: x for k, x in self.values.items() if k != "finite"})
        return {name: float(x) for name, x in values.items()}


class PendingSteps:
    """A queue of dispatched steps, each to be checked once the device has computed it.

    Under on_nonfinite="halt" a step checks its loss and its gradients. The parameters are checked
    only at log steps, evaluations and checkpoints: a parameter that is not finite makes nearly
    every later loss not finite as well, and reading all of them at every step costs 5% of a small
    model's step. Under the other two policies the step itself checks everything, because it must
    undo its own update.

    Args:
        program: the compiled experiment.
        step: of the first state, whose parameters are finite.

    Attributes:
        params_finite_at: the last step after which the parameters were found finite.
    """

    def __init__(self, program: Program, step: int):
        experiment = program.experiment
        self.params_finite_at = step
        self._program = program
        self._halts = experiment.on_nonfinite == "halt"
        self._every = (experiment.log_every, experiment.eval_every, experiment.save_every)
        self._last = experiment.steps
        self._steps: collections.deque[Metrics] = collections.deque()
        self._newest: Metrics | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, values: dict[str, jax.Array], state: State) -> Metrics:
        """Adds a dispatched step, and returns its metrics.

        Args:
            step: counted from 1.
            values: the step's metrics.
            state: the state after it.
        """
        # The steps after which a row of metrics, an evaluation or a checkpoint needs the check.
        due = step == self._last or any(step % every == 0 for every in self._every)
        checked = self._program.params_finite(state) if self._halts and due else None
        self._newest = Metrics(step, values, checked)
        self._steps.append(self._newest)
        return self._newest

    def add_check(self, state: State) -> None:
        """Checks the parameters after the newest step, unless they are being checked already.

        Args:
            state: the state after it.
        """
        if self._halts and self._newest is not None and self._newest.params_finite is None:
            self._newest = self._newest._replace(params_finite=self._program.params_finite(state))
            self._steps.append(self._newest)

    def oldest(self) -> int:
        """Returns the oldest step that was not checked."""
        return self._steps[0].step

    def check_oldest(self) -> tuple[Metrics, bool]:
        """Waits for the oldest step and removes it from the queue.

        Returns:
            The metrics of the step, and whether everything that was checked is finite.
        """
        metrics = self._steps.popleft()
        # Waits until the device has computed the step.
        finite = np.asarray(metrics.values["finite"]).item()
        if finite and metrics.params_finite is not None:
            finite = np.asarray(metrics.params_finite).item()
        if finite and (metrics.params_finite is not None or not self._halts):
            self.params_finite_at = metrics.step
        return metrics, finite

    def clear(self) -> None:
        """Removes every step."""
        self._steps.clear()
