"""Kills the workers of sweeps at random moments, and demands the undisturbed sweep's results.

    python -m tests.chaos_sweep [--kills=200] [--workers=4] [--seed=0]

Every life is `sweep work DIR`, forked from a process that has made the imports; every tenth is a
fresh interpreter. Workers are killed, one or all at once, at moments drawn over time, shortly after
one of them has entered a phase that is drawn first, or, by themselves, just before the n-th file
operation of a phase. A worker that was killed is started again at once.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import runs
from tests.chaos_worker import FUSES, PHASES, WIDTH, work
from tests.sweep_results import compare, folders

os.environ.setdefault("JAX_PLATFORMS", "cpu")

STEPS = 300
BASE = f"""
model: !models.mlp {{width: 8, num_classes: 3}}
data: !unruly.points
loss: !losses.softmax_cross_entropy
metrics: {{accuracy: !metrics.accuracy }}
optimizer: !optax.adamw {{learning_rate: 1e-2}}
steps: {STEPS}
log_every: 10
eval_every: 40
save_every: 70
writers: []
"""
RATE = "optimizer.learning_rate: !space.values"
HALVED = f"""
  halved:
    space: {{{RATE} {{values: [1e-3, 3e-3, 6e-3, 1e-2, 2e-2, 1e30]}}}}
    method: !method.halving {{points: !method.grid , cuts: [40, 160], factor: 2}}
"""[1:]
# 38 trials of five programs: those of `high` diverge at once, those of `poisoned` late, and those
# of `back` go back to an earlier state, so that they are computed as runs of their own; most of
# `halved` are stopped at two cuts.
SWEEP = f"""
base: base.yaml
arms:
  adamw:
    space: {{{RATE} {{values: [1e-3, 3e-3, 1e-2, 2e-2, 1e30]}}}}
  muon:
    set:
      optimizer: !optim.optimizer
        groups:
          matrices: !optim.group
            match: .*kernel
            optimizer: !optim.muon {{learning_rate: 1e-2}}
          rest: !optim.group {{match: .*, optimizer: !optax.adamw {{learning_rate: 1e-2}}}}
    space:
      optimizer.groups.matrices.optimizer.learning_rate: !space.values
        values: [1e-3, 3e-3, 1e-2, 2e-2, 3e-2]
  skip:
    set: {{data: !unruly.poisoned {{at: [20, 230]}}, on_nonfinite: skip}}
    space: {{{RATE} {{values: [1e-3]}}}}
  poisoned:
    set: {{data: !unruly.poisoned {{at: [230]}}}}
    space: {{{RATE} {{values: [1e-3]}}}}
  back:
    set: {{data: !unruly.poisoned {{at: [130, 230]}}, on_nonfinite: rollback}}
    space: {{{RATE} {{values: [1e-3]}}}}
{HALVED}seeds: 2
budgets: unequal
goal: {{metric: loss, select_on: test}}
final: {{seeds: 2}}
checkpoints: final
"""
MOST = 70  # kills of a sweep


def forked(action: Callable[[], int], log: Path) -> int:
    """Calls a function in a new process, whose output goes to a file; returns the process's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


class Life:
    """A process that works on a sweep.

    Args:
        place: the file of its phase, without a suffix; its output is appended beside it.
        action: called in a new process with the file of its phase; or, for a fresh interpreter, the
            arguments of tests.chaos_worker, of which "PHASES" stands for that file.

    Attributes:
        fused: whether it may kill itself.
    """

    fused = False

    def __init__(self, place: Path, action: Callable[[Path], int] | list[str]):
        self.code: int | None = None
        self.log = place.with_suffix(".log")
        phases = place.with_suffix(".phase")
        phases.write_text("start".ljust(WIDTH))
        self._phases = os.open(phases, os.O_RDONLY)
        if isinstance(action, list):
            words = [str(phases) if word == "PHASES" else word for word in action]
            with open(self.log, "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos_worker", *words], stdout=log, stderr=log
                )
            process.returncode = 0  # it is waited for by number
            self.pid = process.pid
        else:
            self.pid = forked(lambda: action(phases), self.log)

    def phase(self) -> str:
        return os.pread(self._phases, WIDTH, 0).decode().strip()

    def poll(self) -> bool:
        """Returns whether the process has just ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return False
        self.code = os.waitstatus_to_exitcode(status)
        return True

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._phases)


class Party:
    """Kills the workers of one sweep until it is complete.

    Args:
        folder: of the sweep, with its plan.
        workers: how many.
        draw: the moments.
        kills: how many are left, at most.
        counts: phase -> number of kills so far, which it adds to.
    """

    patience = 240.0  # seconds

    def __init__(
        self,
        folder: Path,
        workers: int,
        draw: random.Random,
        kills: int,
        counts: collections.Counter[str],
    ):
        self.folder = folder
        self.counts = counts
        self._workers, self._draw, self._kills = workers, draw, kills
        self._results: dict[Path, tuple[int, int]] = {}
        self.replaced: set[str] = set()
        self._lives = [self._start(number) for number in range(workers)]
        self._aim()

    def _start(self, number: int) -> Life:
        fuse, at = "", 0
        if self._kills > 0 and self._draw.random() < 0.7:
            # Above all phases in which none was killed: few workers come to some of them.
            rare = [phase for phase in FUSES if not self.counts[phase] + self.counts[f"{phase}*"]]
            fuse = self._draw.choice([*FUSES, *3 * rare])
            at = self._draw.randrange(FUSES[fuse])
        arguments = [str(self._workers), fuse, str(at)]
        life = self._life(number, arguments, fresh=self._draw.random() < 0.1)
        life.fused = bool(fuse)
        return life

    def _life(self, number: int, arguments: list[str], fresh: bool) -> Life:
        place = self.folder.with_name(f"{self.folder.name}-{number}")
        if fresh:
            return Life(place, [str(self.folder), "PHASES", *arguments])
        return Life(place, lambda phases: work(self.folder, phases, *arguments))

    def _aim(self) -> None:
        """Draws the next moment: a time, or a phase if a worker comes to it before."""
        self._phase = self._draw.choice((*PHASES[1:], *[""] * len(PHASES)))
        self._until = time.monotonic() + self._draw.uniform(0.1, 1.5) * (3 if self._phase else 1)
        # A worker spends half of its time on its start, and more of it on a machine that is busy.
        self._anywhere = self._draw.random() < 0.3
        self._before = [life.phase() for life in self._lives]

    def run(self) -> None:
        """Disturbs the sweep until every worker has ended by itself."""
        end = time.monotonic() + self.patience
        try:
            while any(life.code != 0 for life in self._lives):
                if time.monotonic() > end:
                    raise AssertionError(f"{self.folder} does not come to its end: {self.said()}")
                self._reap()
                self._disturb()
                time.sleep(0.001)
        finally:
            for life in self._lives:
                life.close()

    def _reap(self) -> None:
        for number, life in enumerate(self._lives):
            if life.code is not None or not life.poll():
                continue
            self._watch()
            if life.code == -signal.SIGKILL:
                self.counts[life.phase()] += 1
                self._kills -= 1
                life.close()
                self._lives[number] = self._start(number)
            elif life.code:
                raise AssertionError(f"A worker ended with {life.code}: {self.said()}")

    def _disturb(self) -> None:
        if self._kills <= 0:
            return
        alive = [life for life in self._lives if life.code is None]
        victims = []
        if self._phase:
            now = [life.phase() for life in self._lives]
            pairs = zip(self._lives, self._before, now, strict=True)
            victims = [x for x, a, b in pairs if a != b == self._phase and x in alive]
            self._before = now
            if victims:
                time.sleep(self._draw.choice((0, 0.001, 0.01, 0.05, 0.2)) * self._draw.random())
        if not victims and time.monotonic() >= self._until:
            # One with a fuse would hardly ever come to the phase of the fuse.
            left = [life for life in alive if not life.fused]
            busy = [life for life in left if life.phase() not in ("start", "prepare")]
            victims = alive if self._anywhere else busy
        if victims:
            together = self._draw.random() < 0.1
            for life in alive if together else [self._draw.choice(victims)]:
                os.kill(life.pid, signal.SIGKILL)
            self._aim()

    def _watch(self) -> None:
        """Notes the results that there are, none of which may be replaced later."""
        for file in self.folder.glob("[tf]*/**/summary.json"):
            status = file.stat()
            now = status.st_ino, status.st_mtime_ns
            if self._results.setdefault(file, now) != now:
                self.replaced.add(str(file.relative_to(self.folder)))

    def said(self) -> str:
        return "\n".join(life.log.read_text()[-3000:] for life in self._lives)


def compared_apart(ours: Path, theirs: Path, plan: bool = True) -> dict[str, list[str]]:
    """Compares in a process of its own: this one must stay without a jax backend, to fork."""
    file = ours.with_suffix(".found")

    def action() -> int:
        file.write_text(json.dumps(compare(ours, theirs, STEPS, plan)))
        return 0

    pid = forked(action, ours.with_suffix(".log"))
    _, status = os.waitpid(pid, 0)
    assert status == 0, ours.with_suffix(".log").read_text()
    return json.loads(file.read_text())


def planned(folder: Path, text: str = SWEEP) -> Path:
    """Plans a sweep; returns its folder."""
    (folder / "base.yaml").write_text(BASE)
    (folder / "sweep.yaml").write_text(text)
    command = [sys.executable, "-m", "trainer", "sweep", f"--config={folder / 'sweep.yaml'}"]
    options = ["--vocabulary=unruly", f"--workdir={folder / 'planned'}", "--plan_only"]
    subprocess.run(
        [*command, *options], check=True, stdout=subprocess.DEVNULL, env=runs.environment()
    )
    return folder / "planned"


def preload() -> None:
    """Makes the imports of all processes that are forked."""
    import trainer.report.comparison
    import trainer.report.write
    import trainer.sweep.extension
    import trainer.sweep.plan
    import trainer.sweep.worker
    import trainer.train.run  # noqa: F401


def chaos(folder: Path, kills: int, workers: int, seed: int) -> tuple[collections.Counter, dict]:
    """Disturbs sweeps until there were enough kills, and compares each with the undisturbed one."""
    preload()
    plan, reference = planned(folder), folder / "reference"
    shutil.copytree(plan, reference)
    Party(reference, workers, random.Random(seed), 0, collections.Counter()).run()
    draw, counts = random.Random(seed), collections.Counter[str]()
    wrong: dict[str, list[str]] = {"lost": [], "doubled": [], "differing": [], "replaced": []}
    sweeps = 0
    while counts.total() < kills:
        sweep = folder / f"sweep{sweeps}"
        shutil.copytree(plan, sweep)
        before = counts.total()
        party = Party(sweep, workers, draw, min(MOST, kills - before), counts)
        party.run()
        found = compared_apart(sweep, reference) | {"replaced": sorted(party.replaced)}
        for kind, names in found.items():
            wrong[kind] += [f"{sweep.name}/{name}" for name in names]
        sweeps += 1
        bad = {kind: len(names) for kind, names in found.items() if names}
        print(f"{sweep.name}: {counts.total() - before} kills, {bad or 'the same'}", flush=True)
        if not bad:
            shutil.rmtree(sweep)
    print(f"{sweeps} sweeps of {len(folders(reference))} trials")
    return counts, wrong


@contextlib.contextmanager
def command(description: str | None, **defaults: int) -> Iterator[tuple[Path, list[int]]]:
    """Reads the command line; yields the folder, and the value of each option in turn.

    Args:
        description: of the command.
        defaults: option -> its default.
    """
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="keep everything there")
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as temporary:
        folder = given["folder"] or Path(temporary)
        folder.mkdir(exist_ok=True)
        yield folder, [given[name] for name in defaults]


def main() -> None:
    with command(__doc__, kills=200, workers=4, seed=0) as (folder, numbers):
        counts, wrong = chaos(folder, *numbers)
    for phase in PHASES:
        print(f"{counts[phase]:5d} {counts[phase + '*']:5d}*  {phase}")
    print(f"{counts.total()} kills (* by the worker itself, before a file operation of the phase)")
    for kind, names in wrong.items():
        print(f"{len(names):5d} {kind}", *names[:10], sep="\n      ")
    if any(wrong.values()):
        sys.exit(1)
    missed = [phase for phase in PHASES if not counts[phase] + counts[phase + "*"]]
    if missed:  # choosing the winners takes a few milliseconds
        print(f"No SIGKILL came in {', '.join(missed)}: choose another --seed to see one there.")


if __name__ == "__main__":
    main()
