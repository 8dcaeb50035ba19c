"""The sweeps of a referee: arms of one trial on a list of seeds, computed in worker processes."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trainer
from trainer.config import Call, dump
from trainer.messages import DONE, MISTAKE, STOPPED, UserError
from trainer.report.results import Result
from trainer.report.sweep_results import read_sweep_results
from trainer.sweep import local, plan_file
from trainer.sweep.code_changes import versions_in
from trainer.sweep.definition import Goal
from trainer.sweep.ledger import read_ledger
from trainer.train.signals import StopSignals
from trainer.writers.files import replace_file

Arms = Mapping[str, Path]  # name of an arm -> the file of its config


class Interrupted(RuntimeError):
    """The workers were stopped, and saved what they had; `code` is the exit code of the command."""

    def __init__(self, code: int):
        super().__init__("interrupted")
        self.code = code


class NotPlanned(UserError):
    """A sweep cannot be planned, such as for shapes that do not fit."""


@dataclass(frozen=True)
class Runner:
    """Plans and computes sweeps in processes of their own."""

    goal: Goal  # of the sweeps
    vocabulary: Sequence[str]  # further packages whose functions the configs name
    workers: int  # how many processes compute at once
    signals: StopSignals  # by which this process is asked to stop
    log: Callable[[str], None]  # is called with each line that a worker writes

    def compute(
        self, folder: Path, arms: Arms, seeds: Sequence[int], code: Path | None, tested: bool
    ) -> None:
        """Computes arms on seeds, but for runs that have a result by now."""
        # `seeds` are those that the sweep had, and new ones; the user's packages are imported from
        # the folder `code`, None for as here; `tested` runs are also evaluated on the test split.
        # Raises NotPlanned if an arm cannot be computed at all, and Interrupted if the workers were
        # stopped, or could not go on.
        self.plan(folder, arms, seeds, code, tested)
        if self._ended(folder):
            return
        words = plan_file.work_command(folder, self.vocabulary)
        command = [sys.executable, *words, f"--workers={self.workers}", "--watched"]
        environment = importing_from(code)
        ended = local.run_workers(command, self.workers, self.signals, self.log, environment)
        if ended != DONE and not self._ended(folder):
            raise Interrupted(ended)

    def _ended(self, folder: Path) -> bool:
        """Returns whether all runs of a sweep have ended."""
        return all(run.end != "missing" for run in read_sweep_results(folder).trials)

    def plan(
        self, folder: Path, arms: Arms, seeds: Sequence[int], code: Path | None, tested: bool
    ) -> None:
        """Plans a sweep, or extends the plan in its folder, unless it has these seeds."""
        begun = (folder / "plan.json").exists()
        if begun and set(plan_file.read_plan(folder).seeds) == set(seeds):
            return
        file = folder.with_suffix(".yaml")
        folder.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, self._text(file.parent, arms, seeds, tested).encode())
        words = ["extend", str(folder)] if begun else [f"--workdir={folder}", "--plan_only"]
        words += [f"--config={file}", *(f"--vocabulary={each}" for each in self.vocabulary)]
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "sweep", *words],
            env={**os.environ, **importing_from(code)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if self.signals.received:
            raise Interrupted(STOPPED)
        if done.returncode == MISTAKE:
            raise NotPlanned(done.stderr.strip().removeprefix("error: "))
        if done.returncode != DONE:
            self.log(done.stderr.rstrip())
            raise Interrupted(done.returncode)

    def _text(self, beside: Path, arms: Arms, seeds: Sequence[int], tested: bool) -> str:
        """Returns the file of a sweep; the paths of its configs are relative to its folder."""
        paths = {name: os.path.relpath(file, beside) for name, file in arms.items()}
        goal = {"metric": self.goal.metric, "mode": self.goal.better}
        content = {
            "base": next(iter(paths.values())),
            "arms": {name: Call("arm", {"files": [path]}) for name, path in paths.items()},
            "set": {} if tested else {"eval_splits": [self.goal.select_on]},
            "seeds": list(seeds),
            "final": None,
            "goal": Call("goal", {**goal, "relevant": self.goal.relevant}),
            # What an arm may change is a rule of the referee, which has compared the configs.
            "budgets": "unequal",
        }
        return dump(Call("sweep", content))

    def runs(self, folder: Path) -> dict[str, dict[int, Result]]:
        """Returns arm -> seed -> its run, of those that have ended."""
        workload = read_sweep_results(folder)
        if workload.faults:
            raise UserError(
                f"The files of {folder} were changed after they were written:"
                f" {'; '.join(workload.faults)}. Restore them."
            )
        found: dict[str, dict[int, Result]] = {arm: {} for arm in workload.arms}
        for run in workload.trials:
            if run.end != "missing":
                found[run.arm][run.seed] = run
        return found

    def gain(self, baseline: Result, other: Result) -> float:
        """Returns by how much a run is better than one of the same seed; -inf if it diverged."""
        row = self.goal.row
        ours, theirs = other.value(row), baseline.value(row)
        if ours is None:
            return -math.inf
        if theirs is None:
            return math.inf
        return theirs - ours if self.goal.better == "min" else ours - theirs


def importing_from(code: Path | None) -> dict[str, str]:
    """Returns environment variables with which a process imports packages from a folder first."""
    if code is None:
        return {}
    # `python -m` would search the current folder before, and this package may be in it.
    own = Path(trainer.__file__).parent.parent
    folders = [str(code), os.environ.get("PYTHONPATH", ""), str(own)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONSAFEPATH": "1"}


def flops_of_runs(folder: Path) -> int:
    """Returns the floating-point operations of a run, the largest of all arms, from a plan."""
    return max(each.flops * each.updates for each in plan_file.read_plan(folder).programs)


def code_of_runs(folder: Path) -> dict[str, str]:
    """Returns the hashes of the user's code with which a sweep was computed, by file."""
    return {name: hashes[-1] for name, hashes in versions_in(read_ledger(folder)).items()}


def ends_of_ledgers(judge: Path, sweeps: Iterable[Path]) -> dict[str, str]:
    """Returns the last hash of the ledger of each sweep that is there, by its path in a folder."""
    # It depends on all files of the runs that have ended.
    there = (each for each in sweeps if (each / "plan.json").exists())
    return {each.relative_to(judge).as_posix(): read_ledger(each).head for each in there}
