"""Disturbs sweeps that two hosts compute, in every way at once, and demands the usual results.

    python -m tests.chaos_hosts [--sweeps=2] [--seed=0] [--folder=DIR]

The hosts share a small disk and do not see each other's locks; the clock of one is an hour ahead of
that of the other. Each has a worker, with --locks=heartbeat, that is killed and stopped (SIGSTOP)
at random moments, at times for so long that it is taken for dead, and started again. Now and then
the disk is full. Meanwhile `sweep extend` and `report` run on either host, are killed at random
moments or at one of their file operations, or have an operation fail. Only root can mount the small
disk; for others it is never full.
"""

import collections
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import chaos_sweep, hosts, runs
from tests.chaos_sweep import Life, Party, forked
from tests.chaos_worker import COMMANDS, WIDTH, announce, work
from trainer.sweep import presence, worker
from trainer.sweep.plan_file import read_plan

HURRY = 10.0  # how much faster than usual a silent process counts as dead
HOSTS = {"one": 0.0, "two": 3600.0}  # and by how many seconds their clocks are ahead
KILLS = 25  # of the workers of a sweep
SIZE = "96m"
FAULTS = ("kill", "kill", "error", "later")  # of `sweep extend` and `report`
DISTURBED = 4  # extensions that a fault always meets, unless one is done before
SWEEP = chaos_sweep.SWEEP.replace(chaos_sweep.HALVED, "")  # a halved one cannot be extended
WIDER = SWEEP.replace("values: [1e-3, 3e-3", "values: [1e-9, 1e-3, 3e-3", 1).replace(
    "final: {seeds: 2}", "final: {seeds: 3}"
)


def aside(sweep: Path, name: str) -> Path:
    """Returns a place for what is no part of a sweep, on a disk that is never full."""
    return sweep.parent.parent / f"{sweep.name}-{name}"


def on(host: str, locks: Path) -> None:
    """Makes this process one of a host."""
    hosts.become(host, HOSTS[host], locks, HURRY)
    # Otherwise no worker looks at one that is stopped often enough to take it for dead.
    worker._PAUSE /= HURRY
    sys.path.insert(0, str(runs.LAB))


class Command:
    """`sweep extend` or `report`, in a process of its own, with a fault.

    Args:
        sweep: the folder of the sweep.
        kind: "extend" or "report".
        draw: the fault and the host.
        faults: of which one is drawn: "kill" or "error" at an operation, "later" (a kill at a
            random moment), or "" for none.
        host: not drawn if it is given.
    """

    def __init__(
        self,
        sweep: Path,
        kind: str,
        draw: random.Random,
        faults: Sequence[str] = ("",),
        host: str = "",
    ):
        self.kind = kind
        self.host = host or draw.choice(list(HOSTS))
        self.fault = draw.choice(faults)
        at = draw.randrange(COMMANDS[kind])
        self.log = aside(sweep, f"{kind}.log")
        phases = self.log.with_suffix(".phase")
        phases.write_text("start".ljust(WIDTH))
        arguments = {
            "extend": ["sweep", "extend", str(sweep)],
            "report": ["report", str(sweep), "--formats=markdown,csv,html"],
        }[kind]
        if kind == "extend":
            arguments += ["--locks=heartbeat", "--vocabulary=unruly"]
            arguments.append(f"--config={sweep.parent.parent / 'wider.yaml'}")

        def action() -> int:
            from trainer.__main__ import main

            on(self.host, aside(sweep, "locks"))
            fuse = kind if self.fault in ("kill", "error") else ""
            announce(phases, fuse, at, self.fault)
            return main(arguments)

        self._kill_at = time.monotonic() + draw.uniform(0.5, 8)
        self.log.write_text("")
        self.pid = forked(action, self.log)

    def poll(self) -> int | None:
        """Returns the exit code once the process has ended."""
        if self.fault == "later" and time.monotonic() > self._kill_at:
            self._kill_at = math.inf
            os.kill(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code


class TwoHosts(Party):
    """Disturbs the workers of two hosts until a sweep is complete."""

    patience = 900.0

    def __init__(
        self, folder: Path, draw: random.Random, counts: collections.Counter[str], disk: Path | None
    ):
        self._locks = aside(folder, "locks")
        self._disk = disk
        self._full_until, self._full_at = 0.0, time.monotonic() + draw.uniform(2, 6)
        self._failed_since: set[int] = set()  # the workers since whose start the disk was full
        self._stopped: dict[int, float] = {}  # process -> when it goes on
        self._stop_at = time.monotonic() + draw.uniform(1, 3)
        self.extended = self._calm = False
        self._commands: list[Command] = []
        self._extensions = 0  # that were tried
        super().__init__(folder, len(HOSTS), draw, KILLS, counts)

    def _life(self, number: int, arguments: list[str], fresh: bool) -> Life:
        place = aside(self.folder, str(number))
        host = list(HOSTS)[number]

        def action(phases: Path) -> int:
            on(host, self._locks)
            return work(self.folder, phases, *arguments, "--locks=heartbeat")

        if self._disk is None or not (self._disk / "filler").exists():
            self._failed_since.discard(number)
        return Life(place, action)

    def _reap(self) -> None:
        for number, life in enumerate(self._lives):
            if life.code is not None or not life.poll():
                continue
            self._watch()
            if life.code == 0:
                continue
            if life.code == -signal.SIGKILL:
                self.counts[life.phase()] += 1
                self._kills -= 1
            elif number in self._failed_since and life.code in (1, 2):
                self.counts["a full disk"] += 1
                time.sleep(0.3)
            else:
                raise AssertionError(f"A worker ended with {life.code}: {self.said()}")
            life.close()
            self._stopped.pop(life.pid, None)
            self._lives[number] = self._start(number)

    def _disturb(self) -> None:
        now, draw = time.monotonic(), self._draw
        for pid in [pid for pid, until in self._stopped.items() if now > until]:
            os.kill(pid, signal.SIGCONT)
            del self._stopped[pid]
        if self._calm:
            return
        if now > self._stop_at:
            self._stop_at = now + draw.uniform(1, 6)
            alive = [x for x in self._lives if x.code is None and x.pid not in self._stopped]
            if alive:
                pid = draw.choice(alive).pid
                os.kill(pid, signal.SIGSTOP)
                # At times longer than the other host waits for it.
                self._stopped[pid] = now + draw.uniform(0.1, 2 * presence.SILENT / HURRY)
                self.counts["stopped"] += 1
        if self._disk is not None:
            self._fill(now)
        self._command()
        super()._disturb()

    def _fill(self, now: float) -> None:
        assert self._disk is not None
        filler = self._disk / "filler"
        if filler.exists() and now > self._full_until:
            filler.unlink()
        elif now > self._full_at:
            self._full_at = now + self._draw.uniform(6, 15)
            self._full_until = now + self._draw.uniform(0.3, 2.5)
            free = shutil.disk_usage(self._disk).free - self._draw.choice((0, 4096, 65536))
            with contextlib.suppress(OSError), open(filler, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(4096, free))
            self._failed_since = set(range(len(self._lives)))
            self.counts["filled"] += 1

    def _command(self) -> None:
        """Keeps an extension, until it is done, and a report running."""
        for command in list(self._commands):
            if (code := command.poll()) is not None:
                self._commands.remove(command)
                self._check(command, code)
        kinds = {command.kind for command in self._commands}
        self.extended = self.extended or read_plan(self.folder).revision > 1
        if not self.extended and "extend" not in kinds:
            self._extensions += 1
            faults = FAULTS if self._extensions <= DISTURBED else [*FAULTS, ""]
            self._commands.append(Command(self.folder, "extend", self._draw, faults))
        if "report" not in kinds:
            self._commands.append(Command(self.folder, "report", self._draw, [*FAULTS, ""]))

    def _check(self, command: Command, code: int) -> None:
        self.counts[f"{command.kind}, {command.fault or 'no fault'}: {code}"] += 1
        text = command.log.read_text()
        if code not in (0, 1, 2, -signal.SIGKILL) or "Traceback" in text:
            raise AssertionError(f"{command.kind} ended with {code}: {text}")
        if command.kind == "report" and code == 0 and (missing := missing_files(self.folder)):
            raise AssertionError(f"report ended with 0 without {missing}: {text}")

    def finish(self) -> None:
        """Lets what is running come to its end, and the rest be computed."""
        for command in self._commands:
            self._check(command, command.wait())
        if self._disk is not None:
            (self._disk / "filler").unlink(missing_ok=True)
        if not self.extended:
            code = Command(self.folder, "extend", self._draw).wait()
            assert code == 0 or read_plan(self.folder).revision > 1
        self._kills, self._calm = 0, True
        self._lives = [self._start(number) for number in range(len(HOSTS))]
        self.run()
        # As those tell that were stopped, and went on; others were killed before they could.
        logs = [life.log.read_text() for life in self._lives]
        self.counts["taken over"] += sum(text.count("was taken over by") for text in logs)


def missing_files(sweep: Path) -> list[str]:
    """Returns the files that a sweep's report lists and does not have."""
    listed = json.loads((sweep / "report" / ".report.json").read_text())["files"]
    return [f"report/{name}" for name in listed if not (sweep / "report" / name).exists()]


def _report(sweep: Path, draw: random.Random) -> list[str]:
    """Writes the last report; returns what is wrong with it."""
    command = Command(sweep, "report", draw, host="two")
    wrong = [] if command.wait() == 0 else [command.log.read_text()]
    wrong += missing_files(sweep)
    wrong += [path.name for path in sweep.glob(".report.two.*")]
    return wrong


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mounts a small disk, if that is permitted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
    if not mounted:
        print("No small disk can be mounted: the disk is never full.")
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def chaos(folder: Path, sweeps: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """Disturbs sweeps, and compares each with the undisturbed one; returns what is wrong."""
    chaos_sweep.preload()
    planned = chaos_sweep.planned(folder, SWEEP)
    (folder / "wider.yaml").write_text(WIDER)
    reference = folder / "plain" / "reference"
    shutil.copytree(planned, reference)
    extend = Command(reference, "extend", random.Random(0))
    assert extend.wait() == 0, extend.log.read_text()
    Party(reference, 2, random.Random(seed), 0, collections.Counter()).run()
    draw, counts = random.Random(seed), collections.Counter[str]()
    wrong: list[str] = []
    with small_disk(folder / "disk") as disk:
        for number in range(sweeps):
            sweep = folder / "disk" / f"sweep{number}"
            shutil.copytree(planned, sweep)
            party = TwoHosts(sweep, draw, counts, disk)
            party.run()
            party.finish()
            found = chaos_sweep.compared_apart(sweep, reference, plan=False)
            found |= {"replaced": sorted(party.replaced), "report": _report(sweep, draw)}
            bad = {kind: len(names) for kind, names in found.items() if names}
            print(f"{sweep.name}: {bad or 'the same'}", flush=True)
            wrong += [f"{kind}: {sweep.name}/{x}" for kind, names in found.items() for x in names]
            if not bad:
                shutil.rmtree(sweep)
    return counts, wrong


def main() -> None:
    with chaos_sweep.command(__doc__, sweeps=2, seed=0) as (folder, numbers):
        counts, wrong = chaos(folder, *numbers)
    for what, count in sorted(counts.items()):
        print(f"{count:5d}  {what}")
    print(*wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
