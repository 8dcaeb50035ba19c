"""Writes the hashes of batches and states, to find the first leaf in which two runs differ."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import writers
from trainer.checkpoint import digests
from trainer.engine.contracts import Batch
from trainer.engine.data_fingerprint import digest_batch
from trainer.engine.step import State

FILE = "trace.jsonl"


class Trace:
    """Writes the hashes of batches and states to WORKDIR/trace.jsonl, a line for each step.

    Every line has the hash of the step's batch, and the last line of a block those of every leaf of
    the state as well.

    If there are several processes, process 0 writes, with the hash of its shard of the batch.

    Args:
        workdir: the run's folder. A resumed run first drops the lines of later steps.
    """

    def __init__(self, workdir: str | Path):
        self._path = Path(workdir).absolute() / FILE
        self._first = jax.process_index() == 0
        self._begun = False

    def __call__(self, step: int, batches: Sequence[Batch], state: State) -> None:
        """Writes the lines of a block.

        Args:
            step: its last step, counted from 1.
            batches: of its steps, on the host.
            state: the state after it.
        """
        before = step - len(batches)
        if self._first and not self._begun:
            writers.truncate_after(self._path, before)
            self._begun = True
        # The key of the last step: `train_step` folds in the number of finished steps after it.
        key = jax.random.fold_in(jax.random.key(state.run_state["seed"]), state.step)
        rows: list[dict[str, Any]] = [
            {"step": before + number, "batch": digest_batch(batch)}
            for number, batch in enumerate(batches, 1)
        ]
        rows[-1]["leaves"] = digests(state) | {"rng": digests(key)[""]}
        if self._first:
            with open(self._path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def read_trace(workdir: str | Path) -> dict[int, dict[str, Any]]:
    """Reads the trace of a run.

    Args:
        workdir: the run's folder, with a trace.jsonl.

    Returns:
        Step -> {"batch": hash, "leaves": {path: hash}}; the leaves at the ends of blocks only.

    Raises:
        OSError: there is no trace.jsonl.
    """
    lines = (Path(workdir) / FILE).read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row for row in rows}


class Difference(NamedTuple):
    """The first difference of two runs.

    Attributes:
        step: the step, from 1.
        name: the path of a leaf, "batch", or a metric.
    """

    step: int
    name: str


def first_difference(
    one: Mapping[int, Mapping[str, Any]], two: Mapping[int, Mapping[str, Any]]
) -> Difference | None:
    """Compares two traces; the leaves at the steps at which both traces have them.

    Args:
        one: the trace of a run, from `read_trace`.
        two: the trace of the other run.

    Returns:
        The earliest difference, that of a batch before those of leaves; None if the traces are
        equal.
    """
    for step in sorted({*one, *two}):
        if step not in one or step not in two:
            return Difference(step, "only one run has this step")
        if one[step]["batch"] != two[step]["batch"]:
            return Difference(step, "batch")
        if "leaves" not in one[step] or "leaves" not in two[step]:
            continue  # inside of a block
        a, b = one[step]["leaves"], two[step]["leaves"]
        for name in dict.fromkeys([*a, *b]):
            if a.get(name) != b.get(name):
                return Difference(step, name)
    return None


class KillAfterCheckpoint:
    """Kills its own process by SIGKILL at a block after a checkpoint has been committed.

    Args:
        workdir: the run's folder.
        step: the step of the checkpoint.
        latest: the step at which to wait for the checkpoint if it is not committed yet.
    """

    def __init__(self, workdir: str | Path, step: int, latest: int):
        self._committed = Path(workdir).absolute() / "checkpoints" / str(step)
        self._step = step
        self._latest = latest

    def __call__(self, step: int, batches: Sequence[Batch], state: State) -> None:
        """Kills the process if the checkpoint is committed.

        Args:
            step: the last step of a block, counted from 1.
            batches: not used.
            state: not used.
        """
        if step <= self._step:
            return
        give_up = time.monotonic() + 60
        # A small model may make all of its steps before the save is committed.
        while step >= self._latest and not self._committed.is_dir():
            if time.monotonic() > give_up:
                return
            time.sleep(0.01)
        if self._committed.is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
