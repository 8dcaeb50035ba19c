"""Several processes that are one run: who writes, and when all of them stop or save.

Each process holds its part of the devices and of every batch. Process 0 alone writes to the run's
folder, but for the pieces of checkpoints that each one holds.
"""

import contextlib
import os
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax._src.clusters import ClusterEnv

from trainer.cadence import Cadence
from trainer.config import ConfigError
from trainer.meeting import meet
from trainer.peers import Peers
from trainer.signals import StopSignals

Made = TypeVar("Made")

_LEAVING = 600  # seconds that a process which has ended waits for the others to end
_RUNTIME = 600  # seconds until jax itself takes a process for gone: `peers` is to be first
_NEWS = 3.0  # seconds in which another process's end is heard of, after jax reports an error
_BETWEEN_MEETINGS = 2.0  # seconds; a meeting takes milliseconds


@contextlib.contextmanager
def joined(join_timeout: float, peer_timeout: float) -> Iterator[Callable[[int], None]]:
    """Joins the other processes of the run, before jax looks for devices, and ends with them.

    On a cluster that jax knows (Slurm, Open MPI, TPU pods) everything is found by itself; elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say it. An error ends this process
    at once, and the others with it: left alone, each would wait for the other.

    Args:
        join_timeout: seconds within which all processes must have been started.
        peer_timeout: seconds after which a process that gives no sign of life is taken for gone.

    Yields:
        What must be called with the exit code before this process ends in the ordinary way.

    Raises:
        ConfigError: the others cannot be found, or did not come.
    """
    peers = _join(join_timeout, peer_timeout)
    try:
        yield peers.leave
    except ConfigError as error:
        peers.leave(2, str(error))
        raise
    except BaseException as error:
        if _is_of_the_runtime(error) and (news := peers.news(_NEWS)):
            peers.end(1, news)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        peers.fail("".join(traceback.format_exception_only(error)).strip())


def _is_of_the_runtime(error: BaseException) -> bool:
    """Tells what a computation with another process may end in, once that process is gone.

    While a program is dispatched jax raises a ValueError, which begins with XLA's status code.
    """
    status = re.match("[A-Z_]+: ", str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or status is not None


def _join(join_timeout: float, peer_timeout: float) -> Peers:
    address, count, index = _found(join_timeout)
    peers = meet(address, count, index, wait=join_timeout, silence=peer_timeout)
    # It would take SIGTERM for itself, and the run would never hear of it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            initialization_timeout=int(join_timeout) + 1,
            heartbeat_timeout_seconds=_RUNTIME,
            shutdown_timeout_seconds=_LEAVING,
        )
    except (ValueError, RuntimeError) as error:
        sentence = f"jax could not join the processes: {str(error).rstrip('. ')}."
        peers.leave(2, sentence)
        raise ConfigError(sentence) from error
    return peers


def _found(join_timeout: float) -> tuple[str, int, int]:
    """Returns the coordinator's address, the number of processes, and that of this one."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, count, index = (os.environ.get(name) for name in names)
    unset = [name for name in names if not os.environ.get(name)]
    if 0 < len(unset) < len(names):
        raise ConfigError(
            f"--distributed takes all of {', '.join(names)} or none of them, and "
            f"{' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set."
        )
    if address and count and index:
        for name, text in ((names[1], count), (names[2], index)):
            if not (text.isascii() and text.isdecimal()):
                raise ConfigError(f"{name} is {text!r}, and must be a whole number.")
        return address, int(count), int(index)
    found: tuple[Any, ...] = (None, None, None)
    try:
        # What jax.distributed.initialize calls: its result must be known before, to try the port.
        found = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(join_timeout)
        )
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ConfigError(
            f"--distributed could not ask the scheduler for the processes of the run: {error!r}. "
            f"Set {', '.join(names)}."
        ) from error
    if None in found[:3]:
        raise ConfigError(
            "--distributed found no scheduler that jax knows. Start it under one, or set "
            f"{', '.join(names)}."
        )
    return found[:3]


def all_or_none(make: Callable[[], Made]) -> Made:
    """Makes in each process what a mistake may prevent; a ConfigError in one ends all of them."""
    if not jax.distributed.is_initialized():  # asked so, no device is looked for
        return make()
    made, refused = None, None
    try:
        made = make()
    except ConfigError as error:
        refused = error
    if _gather([refused is None]).min() == 0:
        raise refused or ConfigError("Another process of the run was refused, and says why.")
    return cast(Made, made)


def require_same(given: Mapping[str, str]) -> None:
    """Refuses processes that were not started by the same command.

    Args:
        given: what must be the same in each of them, by what to call it.

    Raises:
        ConfigError: in every process, where something is not.
    """
    sums = _gather([zlib.crc32(text.encode()) & 0x7FFFFFFF for text in given.values()])
    for column, name in zip(sums.T, given, strict=True):
        if len(set(column.tolist())) > 1:
            own = f" This one has {given[name]}." if len(given[name]) < 200 else ""
            raise ConfigError(
                f"The processes of this run do not have the same {name}. Start all of them with "
                f"the same files and options.{own}"
            )


def first_process_first(open_folder: Callable[[], Any], path: Path) -> Any:
    """Opens a run's folder in process 0, and gives the others something that writes nothing.

    Args:
        open_folder: opens it; may raise ConfigError, which ends all processes.
        path: of the folder.

    Returns:
        What `open_folder` returned, or a stand-in with the same methods.
    """
    if jax.process_index() > 0:
        return all_or_none(lambda: _Elsewhere(path))
    return all_or_none(open_folder)


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
        self.lost_rows: list[str] = []

    def check_fence(self) -> None: ...

    def write(self, name: str, text: str) -> None: ...

    def sync_metrics(self) -> None: ...

    def restored(self, step: int | None, rows: Mapping[str, int] | None = None) -> None: ...

    def rows(self) -> list[dict[str, int]]:
        return []

    def lose_rows(self, told: str, count: int = 0) -> None: ...

    def close(self, kind: str) -> None: ...


class _Pace:
    """Counts from one meeting to the next."""

    def __init__(self):
        self.begin(1)

    def begin(self, steps: int) -> None:
        self.steps = self._to_come = steps
        self._since = time.monotonic()

    def is_over(self) -> bool:
        self._to_come -= 1
        return self._to_come <= 0

    def milliseconds(self) -> int:
        return min(int(1000 * (time.monotonic() - self._since)), 10**9)


class Wishes:
    """What the processes of a run want together: to stop, to save.

    One process alone wants what it wants at once. Several agree at meetings, since each must make
    the same steps as the others and save the same states. No clock says when to meet, for no two
    clocks agree: at a meeting they agree after how many steps to meet again, from how long the
    slowest of them took for the last ones.

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
        self._paces = {"step": _Pace(), "batch": _Pace()}

    def meet(self, after: str = "step") -> None:
        """Agrees with the other processes when it is time to.

        Each of them calls it after every step, and after every "batch" of an evaluation.
        """
        pace = self._paces[after]
        if self._alone or not pace.is_over():
            return
        received = self._signals.received
        names = [signal.name for signal in self._signals.SIGNALS]
        number = names.index(received) + 1 if received else 0
        mine = [number, int(self._cadence.due()), pace.milliseconds()]
        stop, save, slowest = _gather(mine).max(axis=0)
        self._stop = names[stop - 1] if stop else self._stop
        self._save = bool(save)
        pace.begin(steps_to_next_meeting(pace.steps, int(slowest) / 1000))

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


def steps_to_next_meeting(steps: int, seconds: float) -> int:
    """Returns after how many steps to meet again, when the last `steps` took so many seconds.

    That is about two seconds of steps: at most twice as many as before, and at least one.
    """
    return max(1, min(2 * steps, int(steps * _BETWEEN_MEETINGS / max(seconds, 1e-3))))


def _gather(values: list[Any]) -> np.ndarray:
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.asarray(values, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)
