"""Kills a referee in the middle of a try at random moments, and demands the undisturbed verdict.

    python -m tests.chaos_referee [--kills=40] [--seed=0]

Each try is begun in a copy of one folder, so that it draws the same seeds, and is killed a few
times: the command alone, or with its workers. The same command then has to end with the same lines
in the ledger and the same results of every run, each computed once.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import runs
from tests.chaos_sweep import command
from tests.studies.test_referee import BASE, GOOD, RULES
from tests.sweep_results import compare
from trainer.studies.referee import EVENTS
from trainer.sweep.ledger import read_ledger

LIVES = 4  # the last one of each try is not killed
SWEEPS = ("screen", "pairs")


def referee(*words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "trainer", "referee", *words]
    quiet = subprocess.DEVNULL
    environment = runs.environment(JAX_PLATFORMS="cpu")
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)


def below(pid: int) -> Iterator[int]:
    """Yields the processes that a process has started, and those that these have."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from below(int(child))
            yield int(child)


def disturb(folder: Path, rng: random.Random, seconds: float) -> int:
    """Tries a change, and kills it; returns the exit code of the last life."""
    for life in range(LIVES):
        process = referee("try", str(folder), "--set", GOOD)
        if life == LIVES - 1:
            return process.wait(runs.LONG)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(rng.uniform(0, seconds))
        workers = [*below(process.pid)] if rng.random() < 0.5 else []
        for pid in (process.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    raise AssertionError


def lines(judge: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a ledger, without the hashes of files that have times, and their own."""
    for entry in read_ledger(judge, EVENTS).entries:
        ends = entry.content.get("sweeps", {})
        for name, end in ends.items():
            assert end in [x.content["hash"] for x in read_ledger(judge / name).entries]
        # All before has the same hashes, as each copy began with the same lines.
        own = {} if entry.event == "end" else {"hash": entry.content["hash"]}
        told = {key: entry.content[key] for key in EVENTS[entry.event] if key != "sweeps"}
        yield {**told, **own, "sweeps": sorted(ends)}


def differences(ours: Path, theirs: Path) -> list[str]:
    """Returns what is not as in the undisturbed folder."""
    found = []
    for name in ("baselines/0001.yaml", "tries/0001/config.yaml"):
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            found.append(f"{name} differs")
    if list(lines(ours)) != list(lines(theirs)):
        found.append("ledger.jsonl differs")
    for name in SWEEPS:
        sweeps = ours / "tries/0001" / name, theirs / "tries/0001" / name
        wrong = compare(*sweeps, steps=12, plan=False)
        found += [f"{name}: {kind}: {each}" for kind, names in wrong.items() for each in names]
    return found


def main() -> None:
    with command(__doc__, kills=40, seed=0) as (folder, (kills, seed)):
        rng = random.Random(seed)
        (folder / "base.yaml").write_text(BASE)
        (folder / "referee.yaml").write_text(RULES)
        begun, reference = folder / "begun", folder / "reference"
        start = referee("start", f"--config={folder / 'referee.yaml'}", f"--workdir={begun}")
        assert start.wait(runs.LONG) == 0
        shutil.copytree(begun, reference)
        at = time.monotonic()
        assert referee("try", str(reference), "--set", GOOD).wait(runs.LONG) == 0
        seconds = time.monotonic() - at
        for number in range(-(-kills // (LIVES - 1))):
            ours = Path(shutil.copytree(begun, folder / f"{number:03}"))
            code = disturb(ours, rng, seconds)
            wrong = [f"exit code {code}"] if code else differences(ours, reference)
            print(f"try {number}: {'; '.join(wrong) or 'as undisturbed'}", flush=True)
            if wrong:
                sys.exit(1)
            shutil.rmtree(ours)


if __name__ == "__main__":
    main()
