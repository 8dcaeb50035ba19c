"""The waves of a sweep that are not finished, as a process sees them that computes none."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.sweep.locks import is_locked, share
from trainer.sweep.presence import announced
from trainer.writers import holders

_PATIENCE, _PAUSE = 1.0, 0.05  # seconds to wait for workers that claim waves, and between two looks
_OLD = 30.0  # seconds; a wave whose progress is older, or from the future, is looked at twice


@dataclass(frozen=True)
class WaveStatus:
    """A wave that is not finished.

    Attributes:
        name: the name of the wave.
        trials: the folders of its trials.
        program: the index of its program in the plan.
        held: whether a worker has it.
        moving: whether that worker is not stopped.
        step: the last step that was reported; 0 before the first.
        running: number of trials that have not ended.
        rate: steps per second of each of them; None if the worker has not reported it yet.
        worker: host and process id of the last worker; "" if none has begun to compute.
    """

    name: str
    trials: tuple[str, ...]
    program: int
    held: bool
    moving: bool
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
    workers = {record["wave"]: record for record in announced(folder) if record.get("wave")}
    standing = _standing(folder, workers)
    for file in files:
        try:
            content = json.loads(file.read_text())
            trials, program = tuple(content["trials"]), int(content["program"])
        except (OSError, ValueError, KeyError, TypeError):  # finished meanwhile
            continue
        record = workers.get(file.stem, {})
        # This machine may not see its lock.
        has_it = file in held or bool(record)
        moving = has_it and file.stem not in standing
        yield _wave(file, trials, program, has_it, moving)


def _standing(folder: Path, workers: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the waves whose workers are stopped, or have died where this machine cannot know."""
    found, old = set(), {}
    for wave, record in workers.items():
        if holders.is_here(record):
            if holders.is_stopped(record):
                found.add(wave)
            continue
        with contextlib.suppress(OSError):
            age = time.time() - (folder / "waves" / wave / "progress.json").stat().st_mtime
            if abs(age) > _OLD:  # or the clocks of the machines differ
                old[wave] = record["count"]
    if old:
        time.sleep(1.5 * holders.BEAT)
        now = {record.get("wave"): record["count"] for record in announced(folder)}
        found |= {wave for wave, count in old.items() if now.get(wave) == count}
    return found


def _wave(
    file: Path, trials: tuple[str, ...], program: int, held: bool, moving: bool
) -> WaveStatus:
    folder = file.with_suffix("")
    holder, progress = read_json(folder / "lock"), read_json(folder / "progress.json")
    if "pid" not in holder:  # nobody has the folder; who had it last?
        lineage = read_json(folder / "run.json").get("lineage") or [{}]
        holder = {} if held else lineage[-1]
    # Otherwise an earlier worker wrote it.
    own = held and "epoch" in progress and progress["epoch"] == _epoch(folder)
    return WaveStatus(
        name=file.stem,
        trials=trials,
        program=program,
        held=held,
        moving=moving,
        step=int(progress.get("step", 0)),
        running=int(progress.get("trials", 0)) if own else len(trials),
        rate=float(progress["rate"]) if own and moving and progress.get("rate") else None,
        worker=f"{holder.get('host')}, process {holder['pid']}" if "pid" in holder else "",
    )


def _held(lock: Path, files: Sequence[Path]) -> set[Path]:
    """Returns the files of waves whose locks are held.

    A worker takes them only while it holds the lock of the sweep. That lock is shared here
    meanwhile, because a look at the lock of a wave takes it for a moment.
    """
    if not (files and lock.exists()):  # --locks=heartbeat makes none
        return set()
    with contextlib.ExitStack() as stack:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        until = time.monotonic() + _PATIENCE
        while not share(descriptor):
            if time.monotonic() > until:
                return set(files)  # its holder is a worker
            time.sleep(_PAUSE)
        return {file for file in files if is_locked(file)}


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


def _epoch(folder: Path) -> int | None:
    """Returns the number of the holder of a wave's folder; None if there is none."""
    try:
        return int((folder / "epoch").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
