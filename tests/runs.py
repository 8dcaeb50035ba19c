"""Runs of the trainer's own command line, in this process or in one of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from optim.paths import flatten as leaves
from trainer.__main__ import main
from trainer.train.signals import StopSignals

__all__ = ["leaves"]

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "tests" / "lab"

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
models.mlp.num_classes = 3
optax.adamw.learning_rate = @schedules.warmup_cosine()
schedules.warmup_cosine.peak_value = 0.01
schedules.warmup_cosine.warmup_steps = '10%'
"""


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


def findings(module: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Runs a module of tests/ that needs simulated devices, in a process of its own.

    Returns:
        The lines of JSON that it printed, and the process.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=environment(JAX_COMPILATION_CACHE_DIR=""),  # each program is compiled once
        capture_output=True,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{LAB}"} | more


def process(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Starts the trainer in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
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
        assert noted.wait(60)
    finally:
        StopSignals._record = note


def lines(workdir: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl line by line, as it is, without the speeds."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
