"""Kills a training run at random moments, over and over, and demands the undisturbed run's bits.

    python -m tests.chaos [--kills=100] [--stops=30] [--seed=0]

Every life is the trainer's own command line. To spare the imports it is forked from a process that
has made them; every tenth is a fresh interpreter, so that moments within the imports come up too.
Half of the moments are drawn over the length of a life; the other half lie shortly after a phase
has begun that is drawn first: compile, first step, evaluation, saving, restoring, final save.
"""

import collections
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.chaos_sweep import command, forked
from tests.chaos_worker import slowly
from tests.runs import lines

os.environ.setdefault("JAX_PLATFORMS", "cpu")

PHASES = ("start", "restore", "compile", "step", "evaluate", "first save", "save", "final save")
CONFIG = """
experiment:
  model        = @models.mlp()
  data         = @data.digits()
  loss         = @losses.softmax_cross_entropy()
  metrics      = {'accuracy': @metrics.accuracy()}
  optimizer    = @optax.adamw()
  steps        = 60
  log_every    = 3
  eval_every   = 10
  save_every   = 7
  best_metric  = 'accuracy'
  ema_decay    = 0.9
  writers      = []
models.mlp.width = 16
data.digits.batch_size = 100
data.digits.crop = 1
optax.adamw.learning_rate = 1e-3
"""
STEPS = 60


class Life(NamedTuple):
    """How one process of a run ended."""

    code: int  # negative for a signal, as subprocess has it
    phase: str  # what it was doing when it was disturbed; "" where it was not
    sent: int  # the signal that it was sent, or 0


# In the child: phases are told through a file, one name a line.


def _announce(where: Path) -> None:
    from trainer import checkpoint
    from trainer.engine import evaluation, program
    from trainer.train import loop, run

    file = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def told(owner: type, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def outer(self, *args, **kwargs):
            now = phase
            if phase == "save":
                first = "save" if self.steps() else "first save"
                now = "final save" if args[0] == STEPS else first
            os.write(file, f"{now}\n".encode())
            result = inner(self, *args, **kwargs)
            if phase not in ("save", "step"):  # those go on behind
                os.write(file, b"step\n")
            return result

        setattr(owner, name, outer)

    told(program.Program, "compile", "compile")
    told(evaluation.Evaluation, "run_split", "evaluate")
    told(checkpoint.Checkpoints, "save", "save")
    told(checkpoint.Checkpoints, "restore", "restore")
    told(loop.Loop, "_read_after", "step")  # before the first block
    assert run.Loop is loop.Loop


def _child(config: Path, workdir: Path, phases: Path) -> int:
    from trainer.__main__ import main

    _announce(phases)
    slowly(60)
    sys.argv[1:] = [f"--gin_file={config}", f"--workdir={workdir}"]
    return main()  # as the command does, whose process ends then


# In the parent.


class Chaos:
    """Starts lives of a run and ends them.

    Args:
        folder: where everything goes.
        seed: of the moments.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.draw = random.Random(seed)
        self.config = folder / "chaos.gin"
        self.config.write_text(CONFIG)
        self.counts: collections.Counter[str] = collections.Counter()
        self.length = 5.0  # of a life, in seconds; measured by the first one
        self.lives = 0

    def undisturbed(self, workdir: Path) -> None:
        start = time.monotonic()
        life = self.live(workdir, 0, fresh=False)
        assert life.code == 0, (life, self.said(workdir))
        self.length = time.monotonic() - start

    def live(self, workdir: Path, number: int, fresh: bool) -> Life:
        """Runs one process, sends it a signal at a random moment, and waits for its end."""
        phases = workdir.with_suffix(".phases")
        phases.write_text("start\n")
        pid = self._start(workdir, phases, fresh)
        phase = ""
        if number:
            phase = self._disturb(pid, number, phases, workdir)
        _, status = os.waitpid(pid, 0)
        self.lives += 1
        return Life(os.waitstatus_to_exitcode(status), phase, number if phase else 0)

    def _start(self, workdir: Path, phases: Path, fresh: bool) -> int:
        if fresh:
            names = [str(self.config), str(workdir), str(phases)]
            with open(workdir.with_suffix(".log"), "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos", "--child", *names], stdout=log, stderr=log
                )
            process.returncode = 0  # it is waited for by number
            return process.pid

        def action() -> int:
            try:
                return _child(self.config, workdir, phases)
            except KeyboardInterrupt:  # before `main`: a fresh interpreter ends by the signal
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
                raise

        return forked(action, workdir.with_suffix(".log"))

    def _disturb(self, pid: int, number: int, phases: Path, workdir: Path) -> str:
        newest = _newest(workdir)
        never = {"first save" if newest else "restore", "evaluate" if newest > 50 else ""}
        possible = [phase for phase in PHASES if phase not in never]
        target = self.draw.choice((*possible, *[None] * len(possible)))
        length = self.length * (1 - 0.5 * newest / STEPS)
        until = time.monotonic() + self.draw.uniform(0.1, 0.9) * length
        while not _ended(pid):
            now = phases.read_text().split("\n")[-2]
            if target is None and time.monotonic() >= until:
                break
            if target is not None and now == target:
                time.sleep(self.draw.choice((0, 0.001, 0.01, 0.05, 0.2)) * self.draw.random())
                break
            time.sleep(0.0005)
        if _ended(pid):
            return ""
        phase = phases.read_text().split("\n")[-2]
        os.kill(pid, number)
        return phase

    def said(self, workdir: Path) -> str:
        return workdir.with_suffix(".log").read_text()[-3000:]

    def run(self, workdir: Path, signals: list[int]) -> None:
        """Disturbs a run, with the signals drawn from the list, until it comes to its end."""
        best = 0
        for _ in range(200):
            number = signals.pop() if signals else 0
            life = self.live(workdir, number, fresh=self.lives % 10 == 9)
            if number and not life.sent:
                signals.insert(0, number)  # it had ended before
            newest = _newest(workdir)
            assert newest >= best, f"{workdir}: step {best} was finished, {newest} is the newest"
            best = newest
            allowed = {0} | {-life.sent if life.sent == signal.SIGKILL else 75}
            if life.sent and life.phase == "start":
                allowed.add(-life.sent)  # before the process could say what it wants
            assert life.code in allowed, (life, self.said(workdir))
            if life.sent:
                self.counts[f"{signal.Signals(life.sent).name} in {life.phase}"] += 1
            if life.code == 0:
                return
        raise AssertionError(f"{workdir} makes no progress: {self.said(workdir)}")


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _newest(workdir: Path) -> int:
    names = [p.name for p in workdir.glob("checkpoints/*") if p.name.isdigit()]
    return max(map(int, names), default=0)


def _same(one: Path, two: Path) -> list[str]:
    """Compares in a process of its own: this one must stay without a jax backend, to fork."""
    found, log = two.with_suffix(".diff"), two.with_suffix(".log")

    def action() -> int:
        from trainer.checkpoint import diff_checkpoints

        found.write_text("\n".join(diff_checkpoints(one, STEPS, STEPS, other=two)))
        return 0

    _, status = os.waitpid(forked(action, log), 0)
    assert status == 0, log.read_text()
    return found.read_text().splitlines()


def chaos(folder: Path, kills: int, stops: int, seed: int) -> collections.Counter[str]:
    """Disturbs runs until all signals were sent, and compares each run with the undisturbed one."""
    import trainer.train.run  # noqa: F401  for all lives at once

    party = Chaos(folder, seed)
    reference = folder / "reference"
    party.undisturbed(reference)
    signals = [signal.SIGKILL] * kills
    signals += [(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[i % 3] for i in range(stops)]
    party.draw.shuffle(signals)
    runs = 0
    while signals:
        workdir = folder / f"run{runs}"
        party.run(workdir, signals)
        runs += 1
        assert _same(reference, workdir) == [], f"{workdir} has other bits"
        # Each logged step must stand there once.
        for ours, theirs in itertools.zip_longest(lines(workdir), lines(reference)):
            assert ours == theirs, f"{workdir} has other metrics: {ours}, and not {theirs}"
        shutil.rmtree(workdir)
        print(f"run {runs}: the same bits; {len(signals)} signals to come", flush=True)
    party.counts["runs"] = runs
    return party.counts


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.exit(_child(*map(Path, sys.argv[2:])))
    with command(__doc__, kills=100, stops=30, seed=0) as (folder, (kills, stops, seed)):
        counts = chaos(folder, kills, stops, seed)
    for name, count in sorted(counts.items()):
        print(f"{count:5d}  {name}")
    total = sum(count for name, count in counts.items() if name.startswith("SIG"))
    print(f"{total} signals in {counts['runs']} runs: every run has the undisturbed bits.")
    missed = [phase for phase in PHASES if not counts[f"SIGKILL in {phase}"]]
    if missed and kills >= 100:
        sys.exit(f"No SIGKILL came in {', '.join(missed)}: choose another --seed.")


if __name__ == "__main__":
    main()
