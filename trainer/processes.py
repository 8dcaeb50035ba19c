"""Several processes that are one run: who writes, and when all of them stop or save.

Each process holds its part of the devices and of every batch. Process 0 alone writes to the run's
folder, but for the pieces of checkpoints that each one holds.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.cadence import Cadence
from trainer.config import ConfigError
from trainer.signals import StopSignals


def join() -> None:
    """Joins the other processes of the run, before jax looks for devices.

    On a cluster that jax knows (Slurm, Open MPI, TPU pods) everything is found by itself; elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say it.

    Raises:
        ConfigError: the others cannot be found, or did not come.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, count, index = (os.environ.get(name) for name in names)
    try:
        if address is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(address, int(count or ""), int(index or ""))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--distributed could not join the other processes: {error}. Start it under a "
            f"scheduler that jax knows, or set {', '.join(names)}."
        ) from error


def first_process_first(open_folder: Callable[[], Any], path: Path) -> Any:
    """Opens a run's folder in process 0, and gives the others something that writes nothing.

    Args:
        open_folder: opens it; may raise ConfigError, which ends all processes.
        path: of the folder.

    Returns:
        What `open_folder` returned, or a stand-in with the same methods.
    """
    if jax.process_count() == 1:
        return open_folder()
    folder, refused = None, None
    if jax.process_index() == 0:
        try:
            folder = open_folder()
        except ConfigError as error:
            refused = error
    if _gather([refused is None]).min() == 0:
        raise refused or ConfigError(f"Process 0 could not open the workdir {path}.")
    return folder or _Elsewhere(path)


def as_first_says(value: bool) -> bool:
    """Returns the value of process 0, in every process."""
    return value if jax.process_count() == 1 else bool(_gather([value])[0, 0])


class _Elsewhere:
    """Stands for the run's folder in a process that does not write to it."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.run_file = path / "run.json"

    def check_fence(self) -> None: ...

    def write(self, name: str, text: str) -> None: ...

    def restored(self, step: int | None) -> None: ...

    def close(self, kind: str) -> None: ...


class Wishes:
    """What the processes of a run want together: to stop, to save.

    One process alone wants what it wants at once. Several agree at meetings, since each must make
    the same steps as the others and save the same states.

    Args:
        signals: says when this process is to stop.
        cadence: says when to save besides every `save_every` steps.
    """

    def __init__(self, signals: StopSignals, cadence: Cadence):
        self._signals = signals
        self._cadence = cadence
        self._alone = jax.process_count() == 1
        self._stop: str | None = None
        self._save = False

    def meet(self) -> None:
        """Agrees with the other processes; every one must call it at the same step."""
        if self._alone:
            return
        received = self._signals.received
        names = [signal.name for signal in self._signals.SIGNALS]
        mine = names.index(received) + 1 if received else 0
        stop, save = _gather([mine, int(self._cadence.due())]).max(axis=0)
        self._stop = names[stop - 1] if stop else self._stop
        self._save = bool(save)

    @property
    def stop(self) -> str | None:
        """The name of the signal that asked to stop, or None."""
        return self._signals.received if self._alone else self._stop

    def save_now(self) -> bool:
        """Tells, after a step, whether to save although `save_every` does not ask for it."""
        return self._cadence.due() if self._alone else self._save

    def saved(self, held_up: float) -> None:
        """Notes a save, and for how many seconds it held the steps up."""
        self._save = False
        self._cadence.saved(held_up)


def _gather(values: list[Any]) -> np.ndarray:
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.asarray(values, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)
