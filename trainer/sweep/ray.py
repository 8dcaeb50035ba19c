"""Starts the workers of a sweep with Ray: one task for each worker, on any node of the cluster.

A task starts the worker as a process of its own, in which there is nothing of Ray, and returns its
exit code. This process submits a task again whose node or process dies, or whose worker has saved
and stopped. Only this module imports ray. It relies on this, which was observed with Ray 2.60:

- `ray.cancel` calls the task's handler of SIGINT, and `ray.get` then returns what the task does. A
  task that has not started raises TaskCancelledError instead.
- A process of Ray kills its children when it exits, such as when the driver has died, unless
  RAY_kill_child_processes_on_worker_exit is 0. The worker then finds the end of its standard
  input, saves and stops.
- A node that ends with SIGTERM ends its tasks with SIGTERM.
- `ray.init` tries for minutes to reach an address at which nothing answers.
- It replaces the handler of SIGTERM: in Python, if it is called in the main thread, and always in
  C++ by one that calls the handler before, and aborts the process three seconds later.
"""

import collections
import contextlib
import importlib.util
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, Source, files
from trainer.config.wording import known_names, shorten
from trainer.messages import FAILED, MISTAKE, STOPPED, UserError, plural, refuse_os_errors
from trainer.sweep import local
from trainer.train.signals import StopSignals

_LOOK = 0.5  # seconds between two looks at signals
_ANSWER, _CONNECT = 10.0, 120.0  # seconds for a port to answer, and for Ray to take this process
_LAST = 5  # lines of a worker that are shown when it has failed
_KNOWN = ("address", "num_cpus", "num_gpus", "memory", "resources.NAME", "env.NAME")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class RaySettings:
    """What the user asks of Ray for each worker."""

    # HOST:PORT; "auto" for that of RAY_ADDRESS, or else the one of which this machine is a node
    address: str = "auto"
    # of a task of Ray, such as {"num_gpus": 1, "resources": {"fast": 1}}; memory is in bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    # variables that the workers have besides those of the node
    environment: Mapping[str, str] = field(default_factory=dict)


def read_ray_settings(file: str | None, settings: Sequence[str] = ()) -> RaySettings:
    """Reads the settings of a file and of the command line, which override the file.

    The file is YAML with a mapping, such as `{num_gpus: 1, memory: 8G}`, and `settings` have the
    form KEY=VALUE. The keys are `address`, `num_cpus`, `num_gpus`, `memory`, `resources.NAME` for a
    resource that the cluster's owner has named, and `env.NAME` for a variable of the environment.
    Raises ConfigError if the file cannot be read, or a setting is not one.

    Example:
        >>> read_ray_settings(None, ["num_gpus=0.5", "memory=8G", "resources.fast=1"]).options
        {'num_gpus': 0.5, 'memory': 8589934592, 'resources': {'fast': 1}}
    """
    given = files.read_settings("--ray", file, settings, _name, ("num_gpus", "1"))
    address, options, resources, environment = "auto", {}, {}, {}
    for key, setting in given.items():
        first, _, name = key.partition(".")
        text, source = setting.text(key), setting.source
        if first == "env":
            environment[name] = text
        elif first == "resources":
            resources[name] = _amount(key, text, source)
        elif key == "memory":
            options[key] = _bytes(text, source)
        elif key == "address":
            address = _address(text, source)
        else:
            options[key] = _amount(key, text, source)
    if resources:
        options["resources"] = resources
    return RaySettings(address, options, environment)


def _name(key: str, source: Source) -> str:
    first, dot, name = key.partition(".")
    if first in ("resources", "env") and not name:
        example = "resources.fast=1" if first == "resources" else "env.JAX_PLATFORMS=cpu"
        raise ConfigError(f"{first} needs a name after a dot, such as {example}.", source)
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    if first == "resources" and name in own:
        raise ConfigError(f"{key} is Ray's own resource: write {own[name]}.", source)
    if first not in ("resources", "env") and key not in _KNOWN:
        hint = known_names(key, _KNOWN, "The settings are")
        raise ConfigError(f"{key!r} is not a setting of --launcher=ray. {hint}", source)
    return key


def _amount(key: str, text: str, source: Source) -> int | float:
    """Returns a number of Ray: a whole one, or a fraction below 1 in steps of 0.0001."""
    number = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) else -1.0
    if number < 0 or (number > 1 and number % 1) or round(number, 4) != number:
        raise ConfigError(
            f"{key} must be a whole number, or a fraction below 1 with at most four digits such as"
            f" 0.5, got {text!r}.",
            source,
        )
    return int(number) if number % 1 == 0 else number


def _bytes(text: str, source: Source) -> int:
    found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(i?B)?", text)
    if not found or int(found[1]) == 0:
        raise ConfigError(
            f"memory must be a number of bytes, or one with a unit such as 8G, got {text!r}.",
            source,
        )
    return int(found[1]) * _UNITS[found[2]]


def _address(text: str, source: Source) -> str:
    found = re.fullmatch(r"(?:[^\s:/]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})", text)
    if text != "auto" and not (found and 0 < int(found[1]) < 65536):
        raise ConfigError(
            f"The address of a cluster is HOST:PORT, such as 10.0.0.1:6379, or auto, got {text!r}."
            " The command must run on a node of the cluster: `ray job submit` starts it there.",
            source,
        )
    return text


def run_tasks(
    words: Sequence[str],
    folder: Path,
    count: int,
    settings: RaySettings,
    signals: StopSignals,
    log: Callable[[str], None],
) -> int:
    """Runs workers of a sweep in tasks of Ray until all have ended; returns an exit code."""
    # The code is as that of `local.run_workers`. `words` follow python in the command of a worker.
    # All nodes must see `folder`, which exists. A worker that has saved and stopped by itself, or
    # whose node has died, is started again. Raises UserError without such a cluster.
    if (ray := _connect(settings, signals)) is None:
        return STOPPED
    try:
        launch = _Launch(ray, words, folder, settings, log)
        log(launch.describe(count))
        return launch.run(count, signals)
    finally:
        ray.shutdown()


def check_installed() -> None:
    """Raises UserError if there is no Ray."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "--launcher=ray needs the package ray, which is not installed. Install the extra with"
            " `pip install 'lockstep-jax[ray]'`, on all nodes of the cluster; or leave out"
            " --launcher=ray, which starts the workers on this machine."
        )


_ADVICE = (
    "The command runs on a node of a cluster that was started with `ray start`, whose address"
    " `--ray address=HOST:PORT` gives; without --launcher=ray, the workers run on this machine."
)


def _connect(settings: RaySettings, signals: StopSignals) -> Any:
    """Returns the module ray, connected to the cluster; None after a signal."""
    check_installed()
    ray: Any = importlib.import_module("ray")
    where = settings.address
    if where == "auto" and (given := os.environ.get("RAY_ADDRESS")):
        where = _address(given, Source(f"RAY_ADDRESS={given}"))
    if where != "auto":
        host, _, port = where.rpartition(":")
        with refuse_os_errors(f"No Ray answers at {where}", _ADVICE):
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()
    name = "The Ray of this machine" if where == "auto" else f"Ray at {where}"
    failed: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address=where, log_to_driver=False, logging_level="CRITICAL")
        except BaseException as error:
            failed.append(error)

    # In a thread, because it may try for many minutes, and would replace the handler of SIGTERM.
    thread = threading.Thread(target=init, name="ray.init", daemon=True)
    thread.start()
    end = time.monotonic() + _CONNECT
    while thread.is_alive() and time.monotonic() < end and not signals.received:
        thread.join(_LOOK)
    for number in StopSignals.SIGNALS:
        signal.signal(number, signal.getsignal(number))  # instead of Ray's in C++
    signal.alarm(0)  # of which that has set one, if it was called
    if signals.received:
        return None
    if thread.is_alive():
        raise UserError(f"{name} did not answer within {_CONNECT:.0f} s. {_ADVICE}")
    if failed:
        raise UserError(f"{name} cannot be used: {_reason(failed[0]).rstrip('.')}. {_ADVICE}")
    return ray


class _Launch:
    """The workers of one command, each of which is a task at any time until it has ended."""

    def __init__(
        self,
        ray: Any,
        words: Sequence[str],
        folder: Path,
        settings: RaySettings,
        log: Callable[[str], None],
    ):
        self._ray, self._settings, self._log = ray, settings, log
        self._logs = folder / "ray"
        # New for each command: a node that does not see this folder has no such file either.
        self._name = secrets.token_hex(4)
        # Variables of the environment that the workers have besides those of the node.
        variables = dict(settings.environment)
        if 0 < (share := settings.options.get("num_gpus", 0)) < 1:
            # jax takes three quarters of the memory of a GPU when it starts.
            variables.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 * share:.3f}")
        self._arguments = list(words), os.getcwd(), os.environ.get("PYTHONPATH"), variables
        self._task = ray.remote(_work).options(
            max_retries=0,  # this process starts it again, and says so
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
            **settings.options,
        )
        self._restarts: dict[int, local.Restarts] = {}

    def describe(self, count: int) -> str:
        """Returns what is started, and whether the cluster has room for it now."""
        asked = {"num_cpus": 1, **self._settings.options}
        named = asked.pop("resources", {})
        wanted = ", ".join(f"{key}={value}" for key, value in {**asked, **named}.items())
        text = (
            f"{plural(count, 'worker')} with {wanted} each, by Ray. Logs:"
            f" {self._logs}/{self._name}_*.log."
        )
        own = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        most = _room(nodes, {**{own[key]: value for key, value in asked.items()}, **named})
        if most < count:
            now = f"{most:,} of them" if most else "none of them"
            text += f" The cluster has room for {now} now; the others wait for more."
        if "num_gpus" not in asked and any("GPU" in resources for resources in nodes):
            text += " There are GPUs: without num_gpus, each worker sees all of its node."
        return text

    def run(self, count: int, signals: StopSignals) -> int:
        """Runs the workers until all have ended; returns an exit code."""
        with refuse_os_errors(f"{self._logs} cannot be written"):
            self._logs.mkdir(exist_ok=True)
            for number in range(1, count + 1):
                self._file(number).touch()
        tasks = {self._submit(number): number for number in range(1, count + 1)}
        codes: list[int] = []
        stopped = False
        while tasks:
            ended, _ = self._ray.wait(list(tasks), timeout=_LOOK)
            if signals.received and not stopped:
                stopped = True
                for task in tasks:
                    self._ray.cancel(task, force=False)
            for task in ended:
                number = tasks.pop(task)
                if (code := self._code(task, number, stopped)) is None:
                    tasks[self._submit(number)] = number
                else:
                    codes.append(code)
        return local.common_code(codes)

    def _file(self, number: int) -> Path:
        return self._logs / f"{self._name}_{number}.log"

    def _submit(self, number: int) -> Any:
        self._restarts.setdefault(number, local.Restarts()).begin()
        return self._task.remote(*self._arguments, str(self._file(number)))

    def _code(self, task: Any, number: int, stopped: bool) -> int | None:
        """Returns the exit code of a worker whose task has ended; None to start it again."""
        errors = self._ray.exceptions
        died = errors.NodeDiedError, errors.WorkerCrashedError, errors.OutOfMemoryError
        name = f"worker {number}"
        try:
            code, host, said = self._ray.get(task)
        except errors.TaskCancelledError:  # before it has started
            return STOPPED
        except died as error:
            if stopped:
                return STOPPED
            what = "node" if isinstance(error, errors.NodeDiedError) else "task"
            return self._again(number, f"The {what} of {name} has died", FAILED)
        except errors.RayError as error:
            self._log(f"{name} cannot be run: {_reason(error).rstrip('.')}.")
            return FAILED
        if code == STOPPED and not stopped:
            return self._again(number, f"{name} on {host} has saved and stopped", STOPPED)
        if code in (FAILED, MISTAKE):
            for line in said:
                self._log(f"{name} on {host}: {line}")
            self._log(f"{name} on {host} ended with exit code {code}. Log: {self._file(number)}.")
        return code

    def _again(self, number: int, what: str, code: int) -> int | None:
        """Returns None if a worker may be started again, or else an exit code; says which."""
        if self._restarts[number].are_allowed():
            self._log(f"{what}; it is started again.")
            return None
        most = local.Restarts.MOST
        self._log(f"{what}, {most} times soon after its start; it is not started again.")
        return code


def _room(nodes: Sequence[Mapping[str, float]], wanted: Mapping[str, float]) -> int:
    """Returns for how many workers nodes have room by their resources, if nothing else runs."""
    amounts = {key: amount for key, amount in wanted.items() if amount}
    if not amounts:
        return sys.maxsize
    return sum(
        min(int(node.get(key, 0) / amount + 1e-9) for key, amount in amounts.items())
        for node in nodes
    )


def _reason(error: BaseException) -> str:
    """Returns what Ray says, or the error in a task, in a line without its traceback."""
    error = getattr(error, "cause", None) or error
    text = str(error).strip()
    if missing := re.search(r"^ModuleNotFoundError: .*", text, re.MULTILINE):
        return f"{missing[0]}. Every node needs this version of Lockstep, installed for its Ray"
    first, *_ = text.splitlines() or [""]
    return f"{type(error).__name__}: {shorten(first, 300)}"


def _work(
    words: Sequence[str], here: str, path: str | None, variables: Mapping[str, str], file: str
) -> tuple[int, str, list[str]]:
    """Runs a worker on this node, and starts it again if a signal kills it; a task's function."""
    # Returns the exit code of the worker, the host, and the last lines. It runs in the folder
    # `here`; `path` is the PYTHONPATH, and `file` its log, which exists if this node sees the
    # folder of the sweep.
    host, folder = socket.gethostname(), os.path.dirname(os.path.dirname(file))
    said: collections.deque[str] = collections.deque(maxlen=_LAST)
    if not os.path.isfile(file):
        why = (
            f"error: {host} does not see the folder {folder} of the machine on which the sweep was"
            " started. All nodes must share it, at the same path."
        )
        return MISTAKE, host, [why]
    if not os.path.isdir(here):
        why = (
            f"error: {here}, in which the sweep was started, is not a folder on {host}: start it in"
            " one that all nodes see."
        )
        return MISTAKE, host, [why]

    def log(line: str) -> None:
        said.append(line)
        with contextlib.suppress(OSError), open(file, "a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")

    environment = {**variables, **({} if path is None else {"PYTHONPATH": path})}
    command = [sys.executable, *words, "--watched"]
    with StopSignals() as signals:
        log(f"Started on {host}.")
        code = local.run_workers(command, 1, signals, log, environment, here)
    return code, host, [*said]
