"""Reads the unfinished waves of a sweep, for a process that computes none."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from trainer.sweep.folder import WaveContent, read_wave
from trainer.sweep.presence import announced
from trainer.writers import locks
from trainer.writers.json_files import DamagedFile, read_json
from trainer.writers.locks import is_locked, lock_shared
from trainer.writers.run_record import read_record

T = TypeVar("T")

_TO_LOCK = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # otherwise a pipe would block
_PATIENCE, _PAUSE = 1.0, 0.05  # seconds to wait for workers that claim waves, and between two looks
_OLD = 30.0  # seconds; a wave whose progress is older, or from the future, is looked at twice


class _Holder(TypedDict):
    host: NotRequired[str]
    pid: NotRequired[int]


class _Progress(TypedDict, total=False):
    epoch: int
    step: int
    trials: int
    rate: float


@dataclass(frozen=True)
class WaveStatus:
    """A wave that is not finished."""

    name: str
    trials: tuple[str, ...]  # folders
    program: int  # index in the plan
    held: bool  # whether a worker has it
    moving: bool  # whether that worker seems to live and is not stopped
    step: int  # the last one that was reported; 0 before the first
    running: int  # number of trials that have not ended
    rate: float | None  # steps per second of each of them; None if not reported yet
    worker: str  # host and process id of the last worker; "" if none has begun to compute


def read_waves(
    folder: Path, files: Sequence[Path]
) -> tuple[tuple[WaveStatus, ...], tuple[str, ...]]:
    """Reads the files of `SweepFolder.waves`; returns sentences about damaged ones as well."""
    found, faults = {}, []
    for file in files:
        try:
            found[file] = read_wave(file)
        except FileNotFoundError:  # finished meanwhile
            continue
        except DamagedFile as error:
            faults.append(str(error))
    held = _held(folder / "lock", list(found))
    workers = {record["wave"]: record for record in announced(folder) if record.get("wave")}
    standing = _stopped_waves(folder, workers)
    waves = []
    for file, content in found.items():
        # This machine may not see the lock of a wave that is announced.
        has_it = file in held or file.stem in workers
        waves.append(_wave(file, content, has_it, has_it and file.stem not in standing))
    return tuple(waves), tuple(faults)


def _stopped_waves(folder: Path, workers: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the waves whose workers are stopped, or have died where this machine cannot know."""
    found, old = set(), {}
    for wave, record in workers.items():
        if locks.is_here(record):
            if locks.is_stopped(record):
                found.add(wave)
            continue
        with contextlib.suppress(OSError):
            age = time.time() - (folder / "waves" / wave / "progress.json").stat().st_mtime
            if abs(age) > _OLD:  # or the clocks of the machines differ
                old[wave] = record["count"]
    if old:
        time.sleep(1.5 * locks.BEAT)
        now = {record.get("wave"): record["count"] for record in announced(folder)}
        found |= {wave for wave, count in old.items() if now.get(wave) == count}
    return found


def _wave(file: Path, content: WaveContent, held: bool, moving: bool) -> WaveStatus:
    folder = file.with_suffix("")
    holder = _read(folder / "lock", _Holder) or _Holder()
    progress = _read(folder / "progress.json", _Progress) or _Progress()
    if "pid" not in holder:  # nobody has the folder; who had it last?
        holder = _Holder()
        with contextlib.suppress(DamagedFile):
            record = None if held else read_record(folder / "run.json")
            if record is not None and record["lineage"]:
                holder = record["lineage"][-1]
    # An earlier worker wrote progress with another epoch.
    own = held and "epoch" in progress and progress["epoch"] == _epoch(folder)
    return WaveStatus(
        name=file.stem,
        trials=tuple(content["trials"]),
        program=content["program"],
        held=held,
        moving=moving,
        step=progress.get("step", 0),
        running=progress.get("trials", 0) if own else len(content["trials"]),
        rate=(progress.get("rate") or None) if own and moving else None,
        worker=f"{holder.get('host')}, process {holder['pid']}" if "pid" in holder else "",
    )


def _read(file: Path, kind: type[T]) -> T | None:
    """Reads a file of a wave on which nothing depends; None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, DamagedFile):
        return read_json(file, kind, "the next worker replaces it.")
    return None


def _held(lock: Path, files: Sequence[Path]) -> set[Path]:
    """Returns the files of waves whose locks are held."""
    # A worker takes them only while it holds the lock of the sweep. That lock is shared here
    # meanwhile, because a look at the lock of a wave takes it for a moment.
    if not files:
        return set()
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(lock, _TO_LOCK)
        except FileNotFoundError:  # none has claimed a wave, or --locks=heartbeat, which has none
            return set()
        stack.callback(os.close, descriptor)
        until = time.monotonic() + _PATIENCE
        while not lock_shared(descriptor):
            if time.monotonic() > until:
                return set(files)  # a worker keeps the lock: all may be held
            time.sleep(_PAUSE)
        return {file for file in files if is_locked(file)}


def _epoch(folder: Path) -> int | None:
    """Returns the number of the holder of a wave's folder; None if there is none."""
    try:
        return int((folder / "epoch").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
