"""Cuts the power of a run at many moments, and restarts it from what the disk may then hold.

    python -m tests.power_loss [--draws=2] [--every=1] [--finished=10] [--seed=0]

One small run is recorded that saves often, is stopped and resumed, and goes back from a step that
is not finite. After every few of its file operations several states of the disk are drawn that a
loss of power at that moment may leave (see crash_states), and the trainer is started again in each:
it must restore the newest checkpoint or the one before it, with every row of metrics up to it.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests import crash_states, runs
from tests.crash_states import EVERYTHING, OUTCOMES, Operation, Recorder, Tree, crash_state

CONFIG = """
experiment.data = @unruly.poisoned()
unruly.poisoned.at = (8, 9)
experiment.on_nonfinite = 'rollback'
experiment.steps = 12
experiment.log_every = 1
experiment.eval_every = 4
experiment.save_every = 2
experiment.keep_latest = 1
"""


class Recorded(NamedTuple):
    """A run that was recorded: the operations on its disk, the folders' inodes, the root's."""

    config: Path
    log: list[Operation]
    folders: frozenset[int]
    root: int


def record(folder: Path) -> Recorded:
    """Trains in two sittings, in this process, and records it."""
    disk = folder / "disk"
    disk.mkdir()
    config = runs.write_config(folder, CONFIG)
    with Recorder(disk) as recorder:
        assert runs.train(config, disk / "run", "--until=5") == 75
        assert runs.train(config, disk / "run") == 0
    return Recorded(config, recorder.log, frozenset(recorder.folders), recorder.root)


class Promise(NamedTuple):
    """What a restart must come to after a crash.

    Attributes:
        steps: of the checkpoints that it may go on from; 0 for a fresh start.
        rows: of metrics.jsonl, as the run had written them.
    """

    steps: set[int]
    rows: list[dict[str, Any]]


class Restarts:
    """Starts the recorded run again in states of the disk.

    Args:
        recorded: the run.
        folder: where the states are put, one after the other.
    """

    def __init__(self, recorded: Recorded, folder: Path):
        from trainer import config as configs
        from trainer.engine.program import load_located
        from trainer.train.run import Run
        from trainer.train.signals import StopSignals

        self.recorded = recorded
        self.counts: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._said: list[str] = []
        self._known: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        read = configs.load([recorded.config.parent / "base.gin", recorded.config])
        program = load_located(read, ["unruly"])
        self._run = Run(read, program, StopSignals(), self._said.append, ["unruly"])

    def promises(self) -> list[Promise]:
        """Returns, for each prefix of the log, what must survive a crash after it."""
        promises, newest, live, left, turns = [], [0], set(), set(), b""
        for end in range(len(self.recorded.log) + 1):
            run = self._tree(end, EVERYTHING, random.Random(0)).get("run", {})
            now = {int(name) for name in run.get("checkpoints", {}) if name.isdigit()}
            if turns != run.get("rollbacks.json", b""):
                # The run goes back behind its newest checkpoint, which is of no use any more.
                turns = run["rollbacks.json"]
                left = {step for step in now if step > json.loads(turns)[-1]["step"]}
                newest.append(max(now - left, default=0))
            left &= now
            newest += sorted(now - live - left)
            live = now
            rows = _rows(run.get("metrics.jsonl", b""))
            promises.append(Promise({*newest[-2:], *(live - left)}, rows))
        return promises

    def check(self, end: int, outcome: str, draw: random.Random, promise: Promise) -> None:
        """Starts again after a crash that follows the first `end` operations.

        Raises:
            AssertionError: the restart did not come to what was promised.
        """
        tree = self._tree(end, outcome, draw)
        digest = _digest(tree)
        self.counts["states"] += 1
        if digest not in self._known:
            self.counts["different states"] += 1
            step = self._restart(tree)
            rows = _rows((self._folder / "state" / "run" / "metrics.jsonl").read_bytes())
            self._known[digest] = step, rows
        step, rows = self._known[digest]
        self.counts["restarts from a checkpoint" if step else "restarts from step 0"] += 1
        assert step in promise.steps, (step, promise.steps)
        lost = [row for row in promise.rows if row["step"] <= step and row not in rows]
        assert not lost, (lost, rows)

    def finish(self) -> None:
        """Trains on to the end from the last restart, and compares with the recorded run.

        Raises:
            AssertionError: the bits or the metrics differ.
        """
        from trainer import checkpoint

        whole, workdir = self._folder / "disk" / "run", self._folder / "state" / "run"
        assert runs.train(self.recorded.config, workdir) == 0
        assert checkpoint.diff_checkpoints(whole, 12, 12, other=workdir) == []
        assert runs.lines(workdir) == runs.lines(whole)
        self.counts["runs finished with the bits of the undisturbed one"] += 1

    def _tree(self, end: int, outcome: str, draw: random.Random) -> Any:
        recorded = self.recorded
        return crash_state(recorded.log[:end], recorded.folders, recorded.root, outcome, draw)

    def _restart(self, tree: Tree) -> int:
        """Starts the run in a state of the disk; returns the step that it went on from."""
        place = self._folder / "state"
        shutil.rmtree(place, ignore_errors=True)
        crash_states.write_tree(tree, place)
        self._said.clear()
        code = self._run.start(place / "run", until=1)
        said = "\n".join(self._said)
        assert code == 75 or code == 0, said
        assert "damaged" not in said, said
        if "Nothing to do: the run has its 12 steps." in said:
            return 12  # a run that has ended answers from its files, and restores nothing
        found = re.search(r"Restored step (\d+)\.", said)
        return int(found[1]) if found else 0


def _rows(content: bytes) -> list[dict[str, Any]]:
    """Returns the whole lines of a metrics.jsonl, without speeds."""
    rows = [json.loads(line) for line in content.split(b"\n")[:-1] if line.strip(b"\0")]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


def _digest(tree: Tree) -> str:
    def lines(tree: Tree, path: str) -> Iterator[str]:
        for name, content in sorted(tree.items()):
            if isinstance(content, bytes):
                yield f"{path}/{name} {hashlib.sha256(content).hexdigest()}"
            else:
                yield f"{path}/{name}/"
                yield from lines(content, f"{path}/{name}")

    return hashlib.sha256("\n".join(lines(tree, "")).encode()).hexdigest()


def power_loss(
    folder: Path, *, draws: int, seed: int, every: int, finished: int
) -> collections.Counter[str]:
    """Records a run, and restarts it after losses of power.

    Args:
        folder: where everything goes; the run is recorded in "disk", and restarted in "state".
        draws: how many states to draw for one moment and one of the outcomes with random choices.
        seed: of the choices.
        every: a loss of power comes after each operation (1), or after each of so many.
        finished: how many of the restarted runs are trained to their end.

    Returns:
        How many there were of what.

    Raises:
        AssertionError: a restart lost more than it may; says how to draw the state again.
    """
    recorded = record(folder)
    restarts = Restarts(recorded, folder)
    promises = restarts.promises()
    draw = random.Random(seed)
    moments = range(draw.randrange(every), len(recorded.log) + 1, every)
    to_finish = set(draw.sample(moments, finished))
    for end in moments:
        for outcome in OUTCOMES:
            for _ in range(draws if "random" in outcome else 1):
                state = draw.getrandbits(32)
                try:
                    restarts.check(end, outcome, random.Random(state), promises[end])
                except AssertionError as error:
                    raise AssertionError(
                        f"after {end} of {len(recorded.log)} operations, {outcome!r}, "
                        f"drawn by {state}: {error}"
                    ) from error
        if end in to_finish:
            restarts.finish()
    restarts.counts["operations"] = len(recorded.log)
    return restarts.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2, help="of each random outcome")
    parser.add_argument("--every", type=int, default=1, help="operations between losses")
    parser.add_argument("--finished", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(runs.LAB))
    with tempfile.TemporaryDirectory(prefix="lockstep-power-loss-") as folder:
        counts = power_loss(Path(folder), **vars(arguments))
    for name, count in sorted(counts.items()):
        print(f"{count:7,}  {name}")


if __name__ == "__main__":
    main()
