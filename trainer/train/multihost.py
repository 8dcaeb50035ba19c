"""A run of several processes: how they join, raise errors together, stop and save, and who writes.

Each process has its own devices and its shard of every batch. Only process 0 writes to the run's
folder, except that every process writes its shards of the checkpoints. `AutosavePolicy` decides
when to save besides every `save_every` steps.
"""

import contextlib
import dataclasses
import os
import re
import socket
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
from jax._src.clusters import ClusterEnv

from trainer.checkpoint.reading import all_agree, all_gather_ints
from trainer.messages import FAILED, MISTAKE, UserError, plural
from trainer.train.peers import connect
from trainer.train.signals import StopSignals
from trainer.writers.json_files import DamagedFile
from trainer.writers.run_record import read_record

Made = TypeVar("Made")
Number = TypeVar("Number", bool, int)

_SHUTDOWN = 600  # seconds that a process that has finished waits for the others to finish
_JAX_HEARTBEAT = 600  # seconds until jax counts a process as gone; `peers` must notice it first
_VISIBLE = 60.0  # seconds; NFS shows a new file after half a minute or, mostly, at once
_NEWS = 3.0  # seconds to wait, after an error of jax, for a message that another process ended


@contextlib.contextmanager
def joined_processes(join_timeout: float, peer_timeout: float) -> Iterator[Callable[[int], None]]:
    """Joins the other processes of the run, before jax looks for devices, and ends with them."""
    # Where jax does not know the cluster, JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    # JAX_PROCESS_ID must be set. An error ends all processes, which would wait for each other
    # forever. Timeouts are in seconds. Yields a function to call with the exit code before a normal
    # end; raises UserError if joining fails.
    address, count, index, devices = _processes_of_the_run(join_timeout)
    peers = connect(address, count, index, wait=join_timeout, silence=peer_timeout)
    # jax's preemption service would handle SIGTERM, and the run would never receive it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            devices,
            cluster_detection_method="deactivate",  # `_processes_of_the_run` has asked already
            # Hardly ever reached: `connect` has found all processes already.
            initialization_timeout=int(join_timeout) + 1,
            heartbeat_timeout_seconds=_JAX_HEARTBEAT,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    except (ValueError, RuntimeError) as error:
        sentence = f"jax could not join the processes: {str(error).rstrip('. ')}."
        peers.leave(MISTAKE, sentence)
        raise UserError(sentence) from error
    try:
        _check_devices()
        yield peers.leave
    except UserError as error:
        peers.leave(MISTAKE, str(error))
        raise
    except BaseException as error:
        # It may follow from the loss of another process if it is a JaxRuntimeError or, raised while
        # a program is dispatched, a ValueError whose text begins with XLA's status code.
        of_jax = isinstance(error, jax.errors.JaxRuntimeError) or re.match("[A-Z_]+: ", str(error))
        if of_jax and (news := peers.wait_for_end(_NEWS)):
            peers.end(FAILED, news)
        traceback.print_exc()
        # The process ends by os._exit(), which flushes nothing.
        sys.stdout.flush()
        sys.stderr.flush()
        peers.fail("".join(traceback.format_exception_only(error)).strip())


_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SET = f"{_NAMES[0]} (HOST:PORT of process 0), {_NAMES[1]} and {_NAMES[2]}"
# A variable that a scheduler sets -> why jax did not detect it, and what to do.
_NOT_DETECTED = {
    "SLURM_JOB_ID": "--distributed found no step of a Slurm job: this process was started by the "
    "batch script itself, which runs on one node. Start the command by srun in it.",
    "OMPI_COMM_WORLD_SIZE": "--distributed runs under Open MPI 5 or later, which jax "
    f"{jax.__version__} does not detect. Start the command by srun or by mpirun of Open MPI 4.",
    "KUBERNETES_SERVICE_HOST": "--distributed runs in a pod of Kubernetes, where jax finds the "
    "processes by the package kubernetes, which is not installed. Install it.",
}


def _processes_of_the_run(join_timeout: float) -> tuple[str, int, int, Sequence[int] | None]:
    """Finds the other processes by the environment, or by the scheduler that jax detects."""
    # Returns HOST:PORT, where process 0 listens; how many processes there are; the index of this
    # one, from 0; and the local indices of the GPUs that jax lets it see, None for all.
    address, *numbers = (os.environ.get(name) or None for name in _NAMES)
    unset = [name for name, x in zip(_NAMES, (address, *numbers), strict=True) if x is None]
    if unset and any(numbers):
        raise UserError(
            f"--distributed takes all of {', '.join(_NAMES)} or none of them, or under a scheduler "
            f"the first alone, and {' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} "
            "not set."
        )
    for name, text in zip(_NAMES[1:], numbers, strict=True):
        if text is not None and not (text.isascii() and text.isdecimal()):
            raise UserError(f"{name} is {text!r}, and must be a whole number.")
    count, index = (None if text is None else int(text) for text in numbers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is said below
            found: Any = ClusterEnv.auto_detect_unset_distributed_params(
                address, count, index, None, None, int(join_timeout)
            )
    # The client of Kubernetes raises errors of its own.
    except Exception as error:
        if address and count is not None and index is not None:
            return address, count, index, None  # only the devices were asked for
        text = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            "--distributed could not ask the scheduler for the processes of the run: "
            f"{type(error).__name__}: {text}. Set {_SET}."
        ) from error
    if None in found[:3]:
        absent = f"--distributed found no scheduler that jax {jax.__version__} knows."
        why = [why for name, why in _NOT_DETECTED.items() if name in os.environ]
        why.append(f"{absent} Start the command under one.")
        raise UserError(f"{why[0]} Or set {_SET}.")
    # Inside a job of Slurm, mpirun of Open MPI 5 starts daemons by srun, and the processes that
    # these start have the variables of the daemon.
    size, rank = (os.environ.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK"))
    detected = (str(found[1]), str(found[2]))
    if unset and size is not None and rank is not None and (size, rank) != detected:
        raise UserError(
            f"mpirun says that this process is number {rank} of {size}, and jax {jax.__version__} "
            f"detects number {found[2]} of {found[1]}. Start the command by srun alone, or set"
            f" {_SET}."
        )
    return found


def _check_devices() -> None:
    """Raises UserError in every process if one has more devices than another, or other ones."""
    every = dict[int, list[str]]()
    for device in jax.devices():
        every.setdefault(device.process_index, []).append(device.platform)
    for index, kinds in every.items():
        if kinds != every[0]:
            texts = [plural(len(each), f"{each[0]} device") for each in (every[0], kinds)]
            raise UserError(
                f"Process 0 has {texts[0]}, and process {index} has {texts[1]}: all processes of a "
                "run must have equally many of one kind. Give them the same, or name those that "
                "each uses in JAX_LOCAL_DEVICE_IDS, such as 0,1."
            )


def raise_on_all(make: Callable[[], Made]) -> Made:
    """Runs `make` in every process; raises UserError in all of them if it raises in one."""
    # The error is that of this process, or refers to the output of another process.
    if not jax.distributed.is_initialized():  # jax.process_count() would look for devices
        return make()
    made, refused = None, None
    try:
        made = make()
    except UserError as error:
        refused = error
    if not all_agree(refused is None):
        raise refused or UserError("Another process of this run raised an error; see its output.")
    return cast(Made, made)


def require_same(given: Mapping[str, str]) -> None:
    """Raises UserError in every process if a text in `given` differs between two processes."""
    # 31 bits: the processes exchange int32.
    sums = all_gather_ints([zlib.crc32(text.encode()) & 0x7FFFFFFF for text in given.values()])
    for column, name in zip(sums.T, given, strict=True):
        if len(set(column.tolist())) > 1:
            own = f" This one has {given[name]}." if len(given[name]) < 200 else ""
            raise UserError(
                f"The processes of this run do not have the same {name}. Start all of them with "
                f"the same files and options.{own}"
            )


def check_seen(file: Path) -> None:
    """Raises UserError in every process if one does not see a file of process 0 as it is there."""
    # Network file systems may show a new file to other machines late, so that this waits for it.
    if jax.process_count() == 1:
        return

    def digest() -> int:
        with contextlib.suppress(OSError):
            return zlib.crc32(file.read_bytes()) & 0x7FFFFFFF
        return -1

    expected, until = broadcast_from_host0(digest()), time.monotonic() + _VISIBLE

    def look() -> None:
        while digest() != expected:
            if time.monotonic() > until:
                raise UserError(
                    f"Process {jax.process_index()} (on {socket.gethostname()}) does not see the "
                    f"{file.name} that process 0 has written into the workdir {file.parent}. All "
                    "processes of a run need one folder: name one by --workdir that all of their "
                    "machines share."
                )
            time.sleep(0.1)

    raise_on_all(look)


def broadcast_from_host0(value: Number) -> Number:
    """Returns the number or boolean of process 0; all processes must call it."""
    return type(value)(all_gather_ints([value])[0, 0])


class NullWorkdir:
    """Replaces Workdir in the processes that do not write to the run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.run_file = path / "run.json"
        self.lost_rows: list[str] = []

    def _leave_to_process_0(self, *given: object, **values: object) -> None:
        """Does nothing; process 0 writes the same file, or records it in run.json."""

    check_fence = write = record = sync_metrics = close = _leave_to_process_0


_BETWEEN_SYNCS = 2.0  # seconds; a synchronization takes milliseconds


@dataclasses.dataclass
class _SyncInterval:
    """The blocks of steps, or batches, from one synchronization to the next."""

    calls: int = 1  # how many of them
    remaining: int = 1
    start: float = dataclasses.field(default_factory=time.monotonic)


_FIRST_PAUSE = 10.0  # seconds of stepping before the first autosave
_SHORTEST_PAUSE = 1.0  # seconds between two autosaves after a kill
_COST_RATIO = 20.0  # a pause is at least this many times as long as a save delays the steps


class AutosavePolicy:
    """Decides when to save besides every `save_every` steps: after 10 s, then 20 s, 40 s, ..."""

    # A kill costs at most about half of the time that a process ran. After a kill, the first save
    # follows the first block, so that a run that is killed again and again still advances. Saves
    # take at most a twentieth of the time. They do not change what is computed.

    def __init__(self, after_kill: bool = False, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pause = 0.0 if after_kill else _FIRST_PAUSE
        self._since: float | None = None

    def due(self) -> bool:
        """Returns whether to save now; cheap enough to be called after every block."""
        now = self._clock()
        if self._since is None:  # the first block compiles, which does not count
            self._since = now
        return now - self._since >= self._pause

    def record_save(self, delay: float) -> None:
        """Records a save of any kind, which delayed the steps by `delay` seconds."""
        # A save by `save_every` before the pause is over does not double the pause.
        if self._since is not None and self.due():
            self._pause = max(2 * self._pause, _SHORTEST_PAUSE)
        self._pause = max(self._pause, _COST_RATIO * delay)
        self._since = self._clock()


def was_killed(run_file: Path) -> bool:
    """Returns whether the process before this one was killed; False if run.json is unreadable."""
    # This process must be recorded there already.
    try:
        lineage = (read_record(run_file) or {"lineage": []})["lineage"]
    except (OSError, DamagedFile):
        return False
    return len(lineage) > 1 and lineage[-2].get("exit") == "killed"


class StopSaveConsensus:
    """Decides, for all processes of a run together, when to stop and when to save."""

    # Several processes synchronize every few blocks, because all must compute the same steps and
    # save the same states. That is counted in blocks and not read from a clock, because no two
    # clocks agree: the time of the slowest process sets the number until the next one.

    def __init__(self, signals: StopSignals, autosave: AutosavePolicy):
        self._signals, self._autosave = signals, autosave
        self._alone = jax.process_count() == 1
        self._stop: str | None = None
        self._save = False
        self._intervals = {"block": _SyncInterval(), "batch": _SyncInterval()}

    def sync(self, after: str = "block") -> None:
        """Agrees with the other processes on stopping and saving, if the interval is over."""
        # Every process calls it after every block of steps ("block"), and after every batch of an
        # evaluation ("batch").
        interval = self._intervals[after]
        interval.remaining -= 1
        if self._alone or interval.remaining > 0:
            return
        received = self._signals.received
        names = [signal.name for signal in self._signals.SIGNALS]
        # The processes exchange int32; the number of no signal is 0.
        number = names.index(received) + 1 if received else 0
        milliseconds = min(int(1000 * (time.monotonic() - interval.start)), 10**9)
        mine = [number, int(self._autosave.due()), milliseconds]
        # [processes, 3]: the wish of one process counts for all, and the time of the slowest one.
        stop, save, slowest = all_gather_ints(mine).max(axis=0)
        self._stop = names[stop - 1] if stop else self._stop
        self._save = bool(save)
        calls = calls_to_next_sync(interval.calls, int(slowest) / 1000)
        self._intervals[after] = _SyncInterval(calls, calls)

    @property
    def stop(self) -> str | None:
        """The name of the signal that asked the run to stop, or None."""
        return self._signals.received if self._alone else self._stop

    def save_now(self) -> bool:
        """Returns whether to save after this block although `save_every` does not ask for it."""
        return self._autosave.due() if self._alone else self._save

    def record_save(self, delay: float) -> None:
        """Records a save, which delayed the steps by `delay` seconds."""
        self._save = False
        self._autosave.record_save(delay)


def calls_to_next_sync(calls: int, seconds: float) -> int:
    """Returns after how many blocks of steps, or batches, the processes synchronize next."""
    # The last interval had `calls` of them and took `seconds` in the slowest process. The next one
    # has at most twice as many, and lasts about two seconds.
    return max(1, min(2 * calls, int(calls * _BETWEEN_SYNCS / max(seconds, 1e-3))))
