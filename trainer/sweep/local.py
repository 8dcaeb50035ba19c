"""Starts the workers of a sweep on this machine, and starts those again that die."""

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.messages import DONE, FAILED, MISTAKE, STOPPED
from trainer.train.signals import StopSignals

_LOOK = 0.1  # seconds between two looks at the processes


class Restarts:
    """Counts how many times in a row a worker ended soon after its start."""

    # After MOST times it is not started again.

    MOST = 30
    _SOON = 20.0  # seconds
    _count = 0

    def begin(self) -> None:
        """Notes that the worker is started."""
        self._began = time.monotonic()

    def are_allowed(self) -> bool:
        """Counts an end of the worker; returns whether it may be started again."""
        soon = time.monotonic() - self._began < self._SOON
        self._count = self._count + 1 if soon else 1
        return self._count < self.MOST


def run_workers(
    command: Sequence[str],
    count: int,
    signals: StopSignals,
    log: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    here: str | None = None,
) -> int:
    """Runs workers of a sweep until all have ended; returns an exit code."""
    # The code is DONE if every worker ended with it; MISTAKE for a user's mistake; STOPPED if one
    # was stopped; otherwise FAILED. A worker that the system kills is started again. `environment`
    # is added to the variables of this process; `here` None is the current folder.
    names = [""] if count == 1 else [f"worker {number}" for number in range(1, count + 1)]
    workers = [
        _Worker(command, name, {**_share_of_gpus(index, count), **(environment or {})}, here, log)
        for index, name in enumerate(names)
    ]
    stopped = False
    while any([worker.goes_on(stopped) for worker in workers]):
        time.sleep(_LOOK)
        if signals.received and not stopped:
            stopped = True
            for worker in workers:
                worker.stop()
    codes = [worker.code for worker in workers]
    if stopped:  # by SIGTERM before it could handle signals: there was nothing to save
        codes = [STOPPED if code == -signal.SIGTERM else code for code in codes]
    return common_code(codes)


def common_code(codes: Collection[int | None]) -> int:
    """Returns the exit code of a command whose workers have ended with these."""
    for code in (MISTAKE, STOPPED):
        if code in codes:
            return code
    return DONE if set(codes) == {DONE} else FAILED


@dataclass
class _Worker:
    """A process that computes trials."""

    command: Sequence[str]
    name: str  # precedes what it writes; "" for the only one
    environment: Mapping[str, str]  # is added to the variables of this process
    here: str | None  # its folder; None for the current one
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._restarts, self._given_up = Restarts(), False
        self._start()

    def _start(self) -> None:
        # The exit code of the last process: negative for a signal, None while it runs.
        self.code: int | None = None
        self._restarts.begin()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,  # the worker stops at its end; see `stop_with_the_caller`
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.environment},
            cwd=self.here,
            text=True,
            errors="replace",
            # Ctrl-C reaches this process only, which stops workers: a second signal would end them.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        prefix = f"{self.name}: " if self.name else ""
        with process.stderr as lines:
            for line in lines:
                self.log(f"{prefix}{line.rstrip()}")

    def is_alive(self) -> bool:
        """Returns whether the process has not ended, and notes its exit code if it has."""
        if self.code is None and (code := self._process.poll()) is not None:
            self._reader.join(1.0)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self.code = code
        return self.code is None

    def stop(self) -> None:
        """Asks the process to save and to end."""
        if self.is_alive():
            self._process.send_signal(signal.SIGTERM)

    def goes_on(self, stopped: bool) -> bool:
        """Returns whether the process has not ended; starts it again if a signal killed it."""
        # It is not started again if it was `stopped`, or killed again and again.
        if self.is_alive():
            return True
        if (self.code or 0) >= 0 or stopped or self._given_up:
            return False
        what, name = self.name or "The worker", signal.Signals(-(self.code or 0)).name
        if not self._restarts.are_allowed():
            self._given_up = True
            self.log(
                f"{what} was killed ({name}) {Restarts.MOST} times, and is not started again. The"
                " same command goes on from there."
            )
            return False
        self.log(f"{what} was killed ({name}) and is started again.")
        self._start()
        return True


def _share_of_gpus(index: int, workers: int) -> Mapping[str, str]:
    """Returns settings that give a worker a GPU of its own, or a part of the memory of one."""
    if workers == 1:
        return {}
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        names = (each.name.removeprefix("nvidia") for each in Path("/dev").glob("nvidia[0-9]*"))
        gpus = sorted(names, key=int)
    else:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    if not gpus:
        return {}
    settings = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]}
    if workers > len(gpus):
        # jax takes three quarters of the memory of a GPU when it starts.
        share, name = 0.9 / math.ceil(workers / len(gpus)), "XLA_PYTHON_CLIENT_MEM_FRACTION"
        settings[name] = os.environ.get(name, f"{share:.2f}")
    return settings
