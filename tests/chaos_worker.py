"""A worker of a sweep that tells its phase, for chaos_sweep.py, and may kill itself in one."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

from tests import runs

PHASES = (
    *("start", "claim", "cut", "winners", "prepare", "restore", "begin", "step", "save", "keep"),
    *("alone", "examples", "finish", "move", "ledger", "discard"),
)
# Phase -> about how many file operations it has.
COMMANDS = {"extend": 13, "report": 36}  # the same of other commands, see chaos_hosts.py
FUSES = {
    **{"claim": 4, "cut": 12, "winners": 2, "begin": 8, "step": 40, "save": 16, "keep": 5},
    **{"alone": 40, "examples": 4, "finish": 40, "move": 8, "ledger": 3, "discard": 20},
}
WIDTH = 16  # bytes of a phase in the file that tells it


def announce(where: Path, fuse: str, number: int, fault: str = "kill") -> None:
    """Tells the phase through a file; with a fuse, kills this process or lets a call fail in it."""
    from trainer.report import write
    from trainer.sweep import extension, folder, halving, wave, wave_runner, worker

    file = os.open(where, os.O_WRONLY | os.O_CREAT)
    phases = ["start"]
    left = number

    def told(owner, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            phases.append(phase)
            os.pwrite(file, phase.ljust(WIDTH).encode(), 0)
            try:
                return inner(*args, **kwargs)
            finally:
                phases.pop()
                os.pwrite(file, phases[-1].ljust(WIDTH).encode(), 0)

        setattr(owner, name, outer)

    def count(event: str, arguments: tuple) -> None:
        nonlocal left
        if fuse not in phases:
            return
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod")
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 0o103
        if changes or writes:
            left -= 1
            if fault == "error" and left == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if fault == "kill" and left < 0:
                os.pwrite(file, f"{fuse}*".ljust(WIDTH).encode(), 0)
                os.kill(os.getpid(), signal.SIGKILL)

    told(folder.SweepFolder, "claim", "claim")
    told(halving.Halving, "cut", "cut")
    told(folder, "choose_points", "points")
    told(folder, "choose_winners", "winners")
    told(worker.Worker, "_prepare", "prepare")
    told(wave_runner.WaveRunner, "_first_states", "restore")
    told(wave_runner.WaveRunner, "_begin", "begin")
    told(wave_runner.WaveRunner, "_advance", "step")
    told(wave_runner.WaveRunner, "_save", "save")
    told(worker, "run_alone", "alone")
    told(wave_runner, "keep_examples", "examples")
    told(wave, "keep_examples", "examples")
    told(wave.Wave, "write_outcome", "keep")
    told(wave.Wave, "finish", "finish")
    told(wave.Wave, "_move", "move")
    told(folder.SweepFolder, "record", "ledger")
    told(wave.Wave, "discard", "discard")
    told(extension, "write_extension", "extend")
    told(write, "write", "report")
    if fuse:
        sys.addaudithook(count)


def slowly(steps_per_second: float) -> None:
    """Makes steps take as long as those of a real model, so that moments fall between them."""
    from trainer.engine.program import Program

    inner = Program.advance

    def advance(self, state, batches):
        time.sleep(len(batches) / steps_per_second)
        return inner(self, state, batches)

    Program.advance = advance


def work(folder: Path, phases: Path, workers: str, fuse: str, number: str, *more: str) -> int:
    from trainer.__main__ import main

    sys.path.insert(0, str(runs.LAB))
    announce(phases, fuse, int(number))
    slowly(800)
    options = ["--vocabulary=unruly", f"--workers={workers}", *more]
    return main(["sweep", "work", str(folder), *options])


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
