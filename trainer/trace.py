"""Writes the hashes of every step, so that the first leaf in which two runs differ can be named."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import writers
from trainer.checkpoint import digests
from trainer.nonfinite import digest_batch
from trainer.step import Batch, State

FILE = "trace.jsonl"


class Trace:
    """Writes a line a step to WORKDIR/trace.jsonl: the hash of the batch and of every leaf.

    Of several processes the first one writes, and the batch is its part of it.

    Args:
        workdir: the run's folder; a run that went on drops the lines of later steps first.
    """

    def __init__(self, workdir: str | Path):
        self._path = Path(workdir).absolute() / FILE
        self._first = jax.process_index() == 0
        self._begun = False

    def __call__(self, step: int, batch: Batch, state: State) -> None:
        """Takes a step's number, its batch on the host, and the state after it."""
        if self._first and not self._begun:
            writers.truncate_after(self._path, step - 1)
            self._begun = True
        key = jax.random.fold_in(jax.random.key(state.hyper["seed"]), state.step)
        row = {
            "step": step,
            "batch": digest_batch(batch),
            "leaves": digests(state) | {"rng": digests(key)[""]},
        }
        if self._first:
            self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_trace(workdir: str | Path) -> dict[int, dict[str, Any]]:
    """Reads a trace: step -> {"batch": hash, "leaves": {path: hash}}."""
    lines = (Path(workdir) / FILE).read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row for row in rows}


class Difference(NamedTuple):
    """The first thing in which two runs differ: `name` of a leaf, "batch", or a metric."""

    step: int
    name: str


def first_difference(
    one: Mapping[int, Mapping[str, Any]], two: Mapping[int, Mapping[str, Any]]
) -> Difference | None:
    """Compares two traces.

    Args:
        one: what `read_trace` read.
        two: the same of the other run.

    Returns:
        The earliest step that differs, with the batch before the leaves; None where all are equal.
    """
    for step in sorted({*one, *two}):
        if step not in one or step not in two:
            return Difference(step, "the step itself, which one run did not make")
        if one[step]["batch"] != two[step]["batch"]:
            return Difference(step, "batch")
        a, b = one[step]["leaves"], two[step]["leaves"]
        for name in dict.fromkeys([*a, *b]):
            if a.get(name) != b.get(name):
                return Difference(step, name)
    return None


class KillAfterCheckpoint:
    """Ends its own process by SIGKILL once a checkpoint is committed and later steps are made.

    Args:
        workdir: the run's folder.
        step: of the checkpoint.
        latest: the step at which to wait for the checkpoint, should it not be committed by then.
    """

    def __init__(self, workdir: str | Path, step: int, latest: int):
        self._committed = Path(workdir).absolute() / "checkpoints" / str(step)
        self._step = step
        self._latest = latest

    def __call__(self, step: int, batch: Batch, state: State) -> None:
        """Takes what an observer of the loop takes."""
        if step <= self._step:
            return
        give_up = time.monotonic() + 60
        while step >= self._latest and not self._committed.is_dir():
            if time.monotonic() > give_up:
                return
            time.sleep(0.01)
        if self._committed.is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
