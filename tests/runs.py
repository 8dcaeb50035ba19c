"""Runs of the trainer's own command line, in this process or in one of their own."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optim.paths import flatten as leaves
from tests import compiled_programs
from trainer.__main__ import main
from trainer.train.signals import StopSignals

__all__ = ["leaves"]

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "tests" / "lab"
# The shipped configs. Those of configs/new/ are for packages that the command new writes.
CONFIGS = sorted(
    file
    for file in (ROOT / "configs").rglob("*.*")
    if file.suffix in (".gin", ".yaml") and ROOT / "configs" / "new" not in file.parents
)

# Seconds for what ends by itself, on however busy a machine: past them, it hangs.
LONG = 1500
# Settings with which the shipped configs are read here of which no loss is known: the mesh of one
# needs more devices.
ELSEWHERE = {"gpt_1b.gin": ["mesh=null"], "epfl_124m.yaml": []}

CONFIG = """
experiment:
  model        = @models.mlp()
  data         = @unruly.points()
  loss         = @losses.softmax_cross_entropy()
  metrics      = {'accuracy': @metrics.accuracy()}
  optimizer    = @optax.adamw()
  steps        = 20
  log_every    = 3
  eval_every   = 5
  save_every   = 4
  keep_latest  = 3
  ema_decay    = 0.9
  writers      = []
models.mlp.width = 8
models.mlp.depth = 1
models.mlp.num_classes = 3
optax.adamw.learning_rate = @schedules.warmup_cosine()
schedules.warmup_cosine.peak_value = 0.01
schedules.warmup_cosine.warmup_steps = '10%'
"""

# The config of a run, in YAML, that the tests of sweeps vary.
SWEPT = """
model: !models.mlp {width: 8, depth: 1, num_classes: 3}
data: !unruly.points
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
optimizer: !optax.adamw {learning_rate: 1e-2}
steps: 12
log_every: 3
eval_every: 5
save_every: 4
writers: []
"""


def replaced(name: str, value: str, text: str = SWEPT) -> str:
    """Replaces a line of a config."""
    kept = [line for line in text.splitlines() if not line.startswith(f"{name}:")]
    return "\n".join([*kept, f"{name}: {value}"])


def write_config(folder: Path, more: str = "") -> Path:
    """Writes the config of these tests, and the Gin statements that override it."""
    (folder / "base.gin").write_text(CONFIG)
    path = folder / "run.gin"
    path.write_text(more)
    return path


def files(config: Path) -> list[str]:
    given = [config.parent / "base.gin", config]
    return [f"--gin_file={path}" for path in given if path.read_text()]


def options(config: Path, workdir: Path, *more: str) -> list[str]:
    return [*files(config), "--vocabulary=unruly", f"--workdir={workdir}", *more]


def train(config: Path, workdir: Path, *more: str) -> int:
    """Trains in this process."""
    return main(options(config, workdir, *more))


def said(capsys: Any, config: Path, workdir: Path, *more: str, code: int = 0) -> str:
    """Trains in this process, to an exit code; returns what stands on standard error."""
    assert train(config, workdir, *more) == code
    return capsys.readouterr().err


def stopped(folder: Path, step: int) -> Path:
    """Trains until a step; returns the workdir, beside the config."""
    assert train(write_config(folder), folder / "run", f"--until={step}") == 75
    return folder / "run"


def sweep(*words: str) -> int:
    """Plans and computes a sweep in this process, where the command starts others."""
    planned = main(["sweep", *words, "--plan_only"])
    (workdir,) = [word.partition("=")[2] for word in words if word.startswith("--workdir=")]
    vocabulary = [word for word in words if word.startswith("--vocabulary=")]
    return planned or main(["sweep", "work", workdir, *vocabulary])


def swept(folder: Path, base: str, text: str, *words: str) -> Path:
    """Writes base.yaml and sweep.yaml, and computes this sweep; returns its folder."""
    (folder / "base.yaml").write_text(base)
    (folder / "sweep.yaml").write_text(text)
    workdir = folder / "sweep"
    assert sweep(f"--config={folder / 'sweep.yaml'}", f"--workdir={workdir}", *words) == 0
    return workdir


def printed(capsys: Any, *words: object, code: int = 0) -> str:
    """Runs a command that ends with an exit code in this process; returns what it printed."""
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    return capsys.readouterr().out


def refused(capsys: Any, *words: object) -> str:
    """Runs a command that is a mistake; returns what it printed on standard error."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err


def start_two(
    options: Sequence[str], folder: Path, mistake: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    """Starts two processes of one run, which write log0 and log1 in a folder.

    Args:
        options: of the command.
        folder: for the logs.
        mistake: further options of the second process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    every = []
    for index in range(2):
        env = environment(
            JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index)
        )
        command = [sys.executable, "-m", "trainer", "--distributed", *(mistake if index else ())]
        with open(folder / f"log{index}", "a") as log:
            started = subprocess.Popen([*command, *options], env=env, stdout=log, stderr=log)
        every.append(started)
    return every


def ends(processes: Iterable[subprocess.Popen[bytes]]) -> list[int]:
    """Returns the exit codes of processes, which are killed if one does not end."""
    try:
        return [process.wait(LONG) for process in processes]
    finally:
        for process in processes:
            process.kill()


def wait_for(condition: Callable[[], object]) -> None:
    """Waits until a condition holds, and fails if that takes too long."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Signals:
    """Reports a signal after so many questions, by default none."""

    SIGNALS = StopSignals.SIGNALS

    def __init__(self, after: float = math.inf):
        self.left = after

    @property
    def received(self) -> str | None:
        self.left -= 1
        return "SIGTERM" if self.left < 0 else None


def kind(config: Path) -> tuple[str, str]:
    """Returns the language of a shipped config, and the folder that says what it shows."""
    return config.suffix, config.parent.name


def mesh_name(axes: Mapping[str, int]) -> str:
    """Returns "data 2 x fsdp 4", the name of a mesh in cases and tests."""
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def asked(request: Any, *names: str) -> set[tuple[Any, ...]]:
    """Returns the values that arguments have in the tests of a file, of those that run now.

    Args:
        request: pytest's, of a fixture of the file.
        names: of the arguments.
    """
    tests = [item for item in request.session.items if item.path == request.node.path]
    params = [item.callspec.params for item in tests if hasattr(item, "callspec")]
    return {tuple(each[name] for name in names) for each in params if each.keys() >= {*names}}


def is_asked(word: str) -> bool:
    """Returns whether a script that `findings` runs was given a word; all, if it was given none."""
    return word in sys.argv[1:] or len(sys.argv) == 1


def findings(key: str, module: str, *words: str) -> dict[str, dict[str, Any]]:
    """Runs a module of tests/ that needs simulated devices, in a process of its own.

    Returns:
        The lines of JSON that it printed, by the value that each has for a key.
    """
    # A thread for each of eight devices, also on two cores: they wait for each other in a program
    # that exchanges data, and XLA aborts if one of them does not begin for long.
    lines = map(json.loads, python("-m", module, *words, NPROC="16").splitlines())
    return {line.pop(key): line for line in lines}


def on_four_devices(code: str) -> Any:
    """Runs code with four simulated devices, in a process; returns the JSON that it printed."""
    return json.loads(python("-c", code, XLA_FLAGS=compiled_programs.xla_flags(4)))


def python(*words: str, cwd: Path = ROOT, **variables: str) -> str:
    """Runs Python in a process that ends without an error; returns what it printed.

    Args:
        *words: of the command, such as "-c" and code.
        cwd: the current folder.
        **variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{LAB}"} | more


def process(
    *arguments: str, module: str = "trainer", stderr: int = subprocess.STDOUT, **more: Any
) -> subprocess.Popen[str]:
    """Starts the trainer, or another module, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=environment(),
        **more,
    )


def stop(number: int = signal.SIGTERM) -> None:
    """Sends this process a stop signal, and returns when the thread that reads them has it."""
    noted, note = threading.Event(), StopSignals._record

    def noting(self: StopSignals, number: int) -> None:
        note(self, number)
        noted.set()

    StopSignals._record = noting
    try:
        signal.raise_signal(number)
        assert noted.wait(LONG)
    finally:
        StopSignals._record = note


def lines(workdir: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl line by line, as it is, without the speeds."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [computed(row) for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files in a folder and below, by their paths in it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def computed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row or a summary.json without what was measured of the machine."""
    return {name: value for name, value in content.items() if not name.startswith("perf/")}
