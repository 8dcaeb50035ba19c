"""The waves of a sweep that are not finished, as a process sees them that computes none."""

import contextlib
import datetime
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATIENCE, _PAUSE = 1.0, 0.05  # seconds to wait for workers that claim waves, and between two looks


@dataclass(frozen=True)
class WaveStatus:
    """A wave that is not finished.

    Attributes:
        name: the name of the wave.
        trials: the folders of its trials.
        program: the index of its program in the plan.
        held: whether a worker has it.
        step: the last step that was reported; 0 before the first.
        running: number of trials that have not ended.
        rate: steps per second of each of them; None if the worker has not reported it yet.
        worker: host and process id of the last worker; "" if none has begun to compute.
    """

    name: str
    trials: tuple[str, ...]
    program: int
    held: bool
    step: int
    running: int
    rate: float | None
    worker: str


def read_waves(folder: Path, files: Sequence[Path]) -> Iterator[WaveStatus]:
    """Yields the waves that are not finished.

    Args:
        folder: the folder of the sweep.
        files: those of the waves, from `SweepFolder.waves`.
    """
    held = _held(folder / "lock", files)
    for file in files:
        try:
            content = json.loads(file.read_text())
            trials, program = tuple(content["trials"]), int(content["program"])
        except (OSError, ValueError, KeyError, TypeError):  # finished meanwhile
            continue
        yield _wave(file, trials, program, file in held)


def _wave(file: Path, trials: tuple[str, ...], program: int, held: bool) -> WaveStatus:
    folder = file.with_suffix("")
    holder, progress = read_json(folder / "lock"), read_json(folder / "progress.json")
    if "pid" not in holder:  # nobody has the folder; who had it last?
        lineage = read_json(folder / "run.json").get("lineage") or [{}]
        holder = {} if held else lineage[-1]
    # Otherwise an earlier worker wrote it.
    own = held and progress.get("at", 0.0) >= _time(holder.get("since"))
    return WaveStatus(
        name=file.stem,
        trials=trials,
        program=program,
        held=held,
        step=int(progress.get("step", 0)),
        running=int(progress.get("trials", 0)) if own else len(trials),
        rate=float(progress["rate"]) if own and progress.get("rate") else None,
        worker=f"{holder.get('host')}, process {holder['pid']}" if "pid" in holder else "",
    )


def _held(lock: Path, files: Sequence[Path]) -> set[Path]:
    """Returns the files of waves whose locks are held.

    A worker takes them only while it holds the lock of the sweep. That lock is shared here
    meanwhile, because a look at the lock of a wave takes it for a moment.
    """
    if not files:
        return set()
    with contextlib.ExitStack() as stack:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        until = time.monotonic() + _PATIENCE
        while not _share(descriptor):
            if time.monotonic() > until:
                return set(files)  # its holder is a worker
            time.sleep(_PAUSE)
        return {file for file in files if not _is_free(file)}


def _is_free(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _share(descriptor)
    finally:
        os.close(descriptor)


def _share(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if the file is missing or damaged.

    Args:
        file: the file.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _time(text: str | None) -> float:
    """Returns an ISO time in seconds since the epoch; infinity if there is none."""
    try:
        return datetime.datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return math.inf
