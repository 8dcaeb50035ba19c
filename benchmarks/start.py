"""Measures the time from process start to the first finished step, and the peak memory.

    python -m benchmarks.start [--rounds=5]

`python -m trainer` with configs/muon_vit.gin and benchmarks/by_hand.py run alternately, first
without compiled programs on disk, then with a warm compilation cache on both sides. At last every
run has a learning rate that none had before, beside a process that only imports what a run imports;
and a finished run is started again, which has nothing to do, beside the same process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.interleave import interleave, report

OURS = ["trainer", "--config=configs/muon_vit.gin", "--set", "steps=40"]
THEIRS = ["benchmarks.by_hand", "--steps=40"]


class Process:
    """Runs a module repeatedly, each time in a new process.

    Attributes:
        first_step: for each run, the seconds until it reported its first step, or printed what it
            `waits_for`.
        peak: for each run, its largest resident memory in MiB.
    """

    def __init__(
        self,
        command: list[str],
        cache: str,
        workdir: Path | None = None,
        new_rate: bool = False,
        waits_for: str = "First step",
    ):
        self.command = [sys.executable, "-m", *command]
        self.environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        self.workdir = workdir
        self.new_rate = new_rate
        self.waits_for = waits_for
        self.first_step: list[float] = []
        self.peak: list[float] = []

    def __call__(self) -> None:
        """Runs the command once and records its first step and its peak memory."""
        command = list(self.command)
        if self.workdir is not None:
            if self.waits_for == "First step":
                shutil.rmtree(self.workdir, ignore_errors=True)
            command.append(f"--workdir={self.workdir}")
        if self.new_rate:
            # A rate that no earlier run had: floats are inputs of the program, which is in the
            # cache.
            rate = 0.02 + 1e-4 * len(self.first_step)
            command.append(
                f"--set=optimizer.groups.matrices.optimizer.learning_rate.peak_value={rate}"
            )
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(self.waits_for):
                self.first_step.append(time.perf_counter() - start)
        # resource.getrusage would give the largest of all children so far.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}.")
        self.peak.append(usage.ru_maxrss / 1024)  # KiB on Linux


def main() -> None:
    """Times both programs up to their first step, with and without a cache, and prints ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, caches in (("no cache", ("", "")), ("warm cache", ("ours", "theirs"))):
            where = [str(Path(folder) / cache) if cache else "" for cache in caches]
            ours = Process(OURS, where[0], Path(folder) / "run")
            theirs = Process(THEIRS, where[1])
            for process in (ours, theirs):  # fills the caches, of the disk too
                process()
                process.first_step.clear()
                process.peak.clear()
            interleave([ours, theirs], arguments.rounds)
            report(f"first step, {name}", ours.first_step, theirs.first_step, 1.3, "s")
            report(f"peak memory, {name}", ours.peak, theirs.peak, 1.2, "MiB")
        ours = Process(OURS, str(Path(folder) / "ours"), Path(folder) / "run", new_rate=True)
        imports = Process(["benchmarks.imports"], "")
        interleave([ours, imports], arguments.rounds)
        name = "first step, another learning rate, warm cache"
        report(name, ours.first_step, imports.first_step, 1.6, "s", "imports alone")
        Process(OURS, str(Path(folder) / "ours"), Path(folder) / "run")()
        ours = Process(
            OURS, str(Path(folder) / "ours"), Path(folder) / "run", waits_for="Nothing to do"
        )
        interleave([ours, imports], arguments.rounds)
        name = "a finished run, started again"
        seconds = imports.first_step[-arguments.rounds :]
        report(name, ours.first_step, seconds, 1.1, "s", "imports alone")


if __name__ == "__main__":
    main()
