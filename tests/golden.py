"""Shows that the working tree computes what a commit computed: `python -m tests.golden COMMIT`.

For a change that only moves or renames code. With the code of the commit and with that of the
working tree it

- trains each config that the commit shipped for 20 steps, or plans it where its data are not on
  this machine, and compares the rows of metrics, the files of the folder, the arrays of the last
  checkpoint and the StableHLO of all programs, without names and places;
- lets the working tree go on with a run that the commit stopped at step 10;
- lets the working tree go on with a sweep that the commit stopped in a wave, and whose worker was
  killed in the next one, and compares its results, and the files of its report.

It takes a quarter of an hour on two idle cores, and exits with 1 if anything differs.

`python -m tests.golden --write` writes folders of the current version into golden.tar.xz, which
later versions read, continue and report in tests/house/test_golden.py; `--report` replaces the
report in it where its words were changed on purpose.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.runs import CONFIGS, ELSEWHERE, ROOT, lines
from trainer import data
from trainer.data.absent import DataAbsent
from trainer.report import FORMATS

STEPS = ["steps=20", "log_every=5", "eval_every=10", "save_every=10", "steps_per_call=1"]
# What a full-sized config would take too long for on two cores.
SMALLER = {"fashion_vit.gin": ["model.depth=2"], "muon_gpt.gin": ["model.depth=2"]}
# Their data are not on this machine: only their plans are compared, with these settings.
PLANNED = {
    **dict.fromkeys((f"fantastic_{size}.gin" for size in ("130m", "300m", "520m", "1200m")), []),
    "gpt2_124m.gin": [],
    **ELSEWHERE,
    "race_124m.gin": [],
    "vit_s16_i1k.gin": [],
}
ARCHIVE = ROOT / "tests" / "golden.tar.xz"
RUN = """\
model: !models.mlp {width: 16, depth: 2}
data: !data.digits {batch_size: 32, validation: 0.2}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
optimizer: !optim.optimizer
  clip_norm: 1.0
  groups:
    matrices: !optim.group
      match: blocks/.*/kernel
      optimizer: !optim.muon {learning_rate: 0.02}
    rest: !optim.group
      match: .*
      optimizer: !optax.adamw
        learning_rate: !schedules.warmup_cosine {peak_value: 3e-3, warmup_steps: 10%}
ema_decay: 0.9
steps: 20
log_every: 5
eval_every: 10
save_every: 5
best_metric: accuracy
best_mode: max
writers: []
"""
SWEEP = """\
base: run.yaml
set: {ema_decay: null, steps: 400, log_every: 50, eval_every: 200, save_every: 50}
arms:
  muon:
    space:
      optimizer.groups.matrices.optimizer.learning_rate: !space.log_uniform {low: 2e-3, high: 0.2}
  sgd:
    set: {optimizer: !optax.sgd {learning_rate: 0.1, momentum: 0.9}}
    space: {optimizer.learning_rate: !space.log_uniform {low: 1e-2, high: 1.0}}
trials: 3
method: !method.sobol {seed: 0}
goal: {metric: loss}
final: {seeds: 3}
"""
# Text that says when, where and by which commit something was computed.
_CLOCKED = re.compile(
    r"\d[\d.,]* (?:s|ms|min|h|MB|kB|GB)\b|perf/\S+|\b[0-9a-f]{12,64}\b|/\S+|\d\d:\d\d.*"
)


def is_prepared() -> bool:
    """Returns whether this machine has Fashion-MNIST; see `make fashion_mnist`."""
    try:
        data.fashion_mnist()
    except DataAbsent:
        return False
    return True


def command(tree: Path, words: Sequence[str], folder: Path, dump: Path | None = None) -> str:
    """Runs a command with the code of a tree, and returns what it printed.

    Args:
        tree: the root of the code.
        words: what follows `python -m trainer`.
        folder: the current folder.
        dump: where jax writes the programs that it lowers; None for nowhere.
    """
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=folder,
        env=environment(tree) | ({"JAX_DUMP_IR_TO": str(dump)} if dump else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 75):
        raise SystemExit(f"{tree}: {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def environment(tree: Path) -> dict[str, str]:
    """Returns the environment in which Python finds the code of a tree, and no other."""
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu"}


def programs(dump: Path) -> list[str]:
    """Returns a hash of each program that jax lowered, without names of functions and places.

    Args:
        dump: the folder to which jax wrote them.
    """
    found = []
    for file in dump.glob("*.mlir"):
        text = re.sub(r"loc\(.*?\)+|#loc.*\n", "", file.read_text())
        text = re.sub(r"@[\w.<>\"-]+", "@", text)
        found.append(hashlib.sha256(re.sub(r"[ \t]+", " ", text).encode()).hexdigest())
    return sorted(found)


class Comparison:
    """The code of a commit and that of the working tree, and what differed so far.

    Args:
        before: a tree with the code of the commit.
        place: a folder for all that is computed.
    """

    def __init__(self, before: Path, place: Path):
        self._trees = {"before": before, "after": ROOT}
        self._place = place
        self.differences: list[str] = []

    def same(self, what: str, before: object, after: object) -> None:
        """Notes whether two results are equal."""
        if before != after:
            self.differences.append(what)
            print(f"  differs: {what}\n    {str(before)[:300]}\n    {str(after)[:300]}", flush=True)

    def config(self, file: str) -> None:
        """Compares a shipped config: its plan, a run, and a run that the working tree resumes.

        Args:
            file: its path from the root.
        """
        print(file, flush=True)
        name = file.replace("/", "_")
        planned = PLANNED.get(Path(file).name)
        if "fashion" in file and not is_prepared():
            planned = []
        settings = [*STEPS, *SMALLER.get(Path(file).name, [])] if planned is None else planned
        sets = [f"--set={each}" for each in settings]
        words = [f"--config={self._trees['before'] / file}", *sets]
        texts, runs, dumps = {}, {}, {}
        for side, tree in self._trees.items():
            runs[side], dumps[side] = self._place / side / name, self._place / f"{side}_ir" / name
            dumps[side].mkdir(parents=True)
            explained = command(tree, ["explain", *words], self._place, dumps[side])
            texts[side] = _CLOCKED.sub("", explained)
            if planned is None:
                command(tree, [*words, f"--workdir={runs[side]}"], self._place, dumps[side])
        self.same(f"{file}: plan", *texts.values())
        self.same(f"{file}: programs", *map(programs, dumps.values()))
        if planned is not None:
            return
        self.same(f"{file}: rows", *map(lines, runs.values()))
        self.same(f"{file}: files", *map(_files, runs.values()))
        self.same_states(file, *runs.values())
        resumed = self._place / "resumed" / name
        stop = [*words, f"--workdir={resumed}", "--until=10"]
        command(self._trees["before"], stop, self._place)
        command(ROOT, [*words, f"--workdir={resumed}"], self._place)
        self.same(f"{file}: rows after it was resumed", lines(runs["before"]), lines(resumed))
        self.same_states(f"{file}, resumed", runs["before"], resumed)

    def same_states(self, what: str, a: Path, b: Path) -> None:
        """Notes whether the arrays of the last checkpoints of two runs are equal."""
        said = command(ROOT, ["checkpoint", "diff", str(a), str(b)], self._place)
        self.same(f"{what}: states", "", "" if "equal, bit for bit" in said else said)

    def sweep(self) -> None:
        """Compares a sweep that the commit began, was killed in, and either tree completed."""
        print("a sweep", flush=True)
        before, begun = self._trees["before"], self._place / "begun"
        write_configs(self._place)
        interrupt(before, begun, signal.SIGTERM, finished=0)
        interrupt(before, begun, signal.SIGKILL, finished=3)
        texts, results = {}, {}
        for side, tree in self._trees.items():
            folder = self._place / f"{side}_sweep" / "begun"  # the report has the folder's name
            shutil.copytree(begun, folder)
            command(tree, sweep_words(folder), self._place)
            results[side] = rows_of_sweep(folder)
            # Both reports are of one folder, whose seconds are the same.
            whole, report = self._place / "before_sweep" / "begun", self._place / "report"
            words = ["report", str(whole), f"--output={report}", f"--formats={','.join(FORMATS)}"]
            texts[side] = command(tree, words, self._place)
            texts[side] += command(tree, ["sweep", "status", str(whole)], self._place)
            report.rename(self._place / f"{side}_report")
        self.same("the results of the sweep", *results.values())
        self.same("what the report says", *texts.values())
        reports = [self._place / f"{side}_report" for side in self._trees]
        self.same("files of the report", *map(_files, reports))
        for file in sorted(reports[0].rglob("*")):
            name = file.relative_to(reports[0])
            if file.is_file() and file.suffix != ".pdf" and (reports[1] / name).exists():
                hashes = [hashlib.sha256((each / name).read_bytes()) for each in reports]
                self.same(f"report: {name}", *(each.hexdigest() for each in hashes))


def write_configs(folder: Path) -> None:
    """Writes the config of the run, and of the sweep over it, into a folder."""
    (folder / "run.yaml").write_text(RUN)
    (folder / "sweep.yaml").write_text(SWEEP)


def sweep_words(folder: Path) -> list[str]:
    """Returns the command that computes the sweep; sweep.yaml is in the current folder."""
    return ["sweep", "--config=sweep.yaml", f"--workdir={folder}"]


def interrupt(tree: Path, folder: Path, number: signal.Signals, finished: int) -> None:
    """Begins or continues the sweep, and ends it by a signal in a wave.

    Args:
        tree: the code that computes it.
        folder: of the sweep, beside its file.
        number: the signal. SIGTERM lets the wave save a checkpoint.
        finished: how many trials have ended before.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *sweep_words(folder)],
        cwd=folder.parent,
        env=environment(tree),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None:
        waves = folder.glob("waves/[0-9a-f]*/trials/*/*/*/metrics.jsonl")
        ended = len(list(folder.glob("trials/*/*/*/summary.json")))
        with contextlib.suppress(FileNotFoundError):  # a wave that ends meanwhile
            if ended >= finished and any(file.stat().st_size for file in waves):
                break
        time.sleep(0.003)
    if process.poll() is not None:
        raise SystemExit("The sweep ended before it could be interrupted.")
    (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
    process.wait()


def rows_of_sweep(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each run of a sweep, by its folder."""
    return {
        str(file.parent.relative_to(folder)): lines(file.parent)
        for part in ("trials", "final")
        for file in sorted((folder / part).rglob("metrics.jsonl"))
    }


def write() -> None:
    """Writes folders of the current version: finished, stopped and killed ones, and a report."""
    with tempfile.TemporaryDirectory(prefix="golden") as place:
        folder = Path(place) / "golden"
        folder.mkdir()
        write_configs(folder)
        train = ["--config=run.yaml", "--workdir"]
        command(ROOT, [*train, "run"], folder)
        command(ROOT, [*train, "stopped_run", "--until=10"], folder)
        command(ROOT, sweep_words(Path("sweep")), folder)
        interrupt(ROOT, folder / "stopped_sweep", signal.SIGTERM, finished=0)
        interrupt(ROOT, folder / "killed_sweep", signal.SIGKILL, finished=3)
        _report(folder)


def write_report() -> None:
    """Replaces the report in the archive by that of the current version."""
    with tempfile.TemporaryDirectory(prefix="golden") as place:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(place, filter="data")
        _report(Path(place) / "golden")


def _report(folder: Path) -> None:
    words = ["report", "sweep", "--formats=markdown", "--output=report"]
    (folder / "verdict.txt").write_text(command(ROOT, words, folder))
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        archive.add(folder, "golden")


def _files(folder: Path) -> list[str]:
    """Returns the names of the files in a folder, without those of one process or time."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    kept = [name for name in names if "checkpoints/" not in name and "lock" not in name]
    return sorted(re.sub(r"events\.out\..*", "events.out", name) for name in kept)


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Makes a temporary tree with the code of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> int:
    """Compares the working tree with a commit; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--write", action="store_true", help="write golden.tar.xz instead")
    parser.add_argument("--report", action="store_true", help="replace the report in it")
    parser.add_argument("commit", nargs="?", help="such as HEAD~3", default="HEAD")
    parser.add_argument("only", nargs="*", help="configs, or 'sweep'; all by default")
    arguments = parser.parse_args()
    if arguments.write or arguments.report:
        (write if arguments.write else write_report)()
        return 0
    with tree_of(arguments.commit) as before, tempfile.TemporaryDirectory() as place:
        shipped = (str(file.relative_to(ROOT)) for file in CONFIGS)
        files = sorted(file for file in shipped if (before / file).exists())
        comparison = Comparison(before, Path(place))
        for file in files:
            if not arguments.only or file in arguments.only:
                comparison.config(file)
        if not arguments.only or "sweep" in arguments.only:
            comparison.sweep()
    print(f"{len(comparison.differences)} differences")
    return 1 if comparison.differences else 0


if __name__ == "__main__":
    sys.exit(main())
