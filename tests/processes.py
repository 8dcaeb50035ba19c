"""Runs of several processes, each with its output in a file."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests import runs


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def explicit(count: int) -> list[dict[str, str]]:
    """Returns the variables of jax for each of so many processes on this machine."""
    address = f"127.0.0.1:{free_port()}"
    every = [{"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}] * count
    return [each | {"JAX_PROCESS_ID": str(index)} for index, each in enumerate(every)]


class Several:
    """Several processes of one run.

    Args:
        folder: for the logs.
        make: returns the command of a process.
        variables: of each process, by which they find each other.
        environment: of all.
    """

    def __init__(
        self,
        folder: Path,
        make: Callable[[int], list[str]],
        variables: list[dict[str, str]],
        **environment: str,
    ):
        self.logs = [folder / f"log{index}" for index in range(len(variables))]
        self.all = []
        for index, log in enumerate(self.logs):
            env = runs.environment(PYTHONUNBUFFERED="1", **environment, **variables[index])
            with open(log, "w") as output:
                self.all.append(
                    subprocess.Popen(
                        make(index),
                        env=env,
                        cwd=runs.ROOT,
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        text=True,
                        start_new_session=True,
                    )
                )

    def said(self, index: int) -> str:
        return self.logs[index].read_text(errors="replace")

    def order(self, index: int, order: str) -> None:
        stdin = self.all[index].stdin
        assert stdin is not None
        stdin.write(order + "\n")
        stdin.flush()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + runs.LONG
        while not happened():
            running = all(process.poll() is None for process in self.all)
            assert running and time.monotonic() < until, self._everything()
            time.sleep(0.02)

    def codes(self, *indices: int) -> list[int]:
        """Waits for the ends of some processes, by default all; returns their exit codes."""
        try:
            return [self.all[index].wait(runs.LONG) for index in indices or range(len(self.all))]
        except subprocess.TimeoutExpired:
            raise AssertionError(self._everything()) from None

    def _everything(self) -> list[str]:
        return [self.said(index) for index in range(len(self.all))]

    def kill(self) -> None:
        for process in self.all:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            if process.stdin:
                process.stdin.close()
