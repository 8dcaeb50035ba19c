"""The folder of a sweep: which trials have a result, and which wave a worker computes next.

Workers share nothing but this folder. A trial is in one of three places: in the plan only; in a
wave, `waves/NAME.json`, which lists its trials and whose lock a worker holds; or finished, as a
folder below `trials/` or `final/`, where it appears by a rename.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.sweep.final import choose_winners, final_trials, read_final
from trainer.sweep.outcome import read_outcome
from trainer.sweep.plan import Trial
from trainer.sweep.plan_file import StoredPlan
from trainer.writers.durable import sync
from trainer.writers.files import replace_file

_MOST_FAULTS = 3  # errors of a trial's own code before it counts as failed


@dataclass(frozen=True)
class Claim:
    """A wave that this process alone computes, until `release`.

    Attributes:
        name: the name of the wave, from its trials.
        trials: its trials, in order.
        alone: whether its one trial is computed as a run of its own.
        file: waves/NAME.json, whose lock this process holds.
        path: waves/NAME, the folder of the wave.
        program: the index of its program in the plan.
    """

    name: str
    trials: tuple[Trial, ...]
    alone: bool
    file: Path
    path: Path
    program: int
    descriptor: int

    def release(self) -> None:
        """Releases the lock."""
        os.close(self.descriptor)


class SweepFolder:
    """The folder of a sweep.

    Args:
        path: the folder.
        plan: the plan that is stored in it.

    Attributes:
        path, plan: as given.
    """

    def __init__(self, path: Path, plan: StoredPlan):
        self.path = path
        self.plan = plan
        self._waves = path / "waves"
        self._limits = self._waves / "limits.json"
        self._program_of = {
            name: index for index, program in enumerate(plan.programs) for name in program.trials
        }
        self._tuning = {trial.folder: trial for trial in plan.trials}
        self._final: dict[str, Trial] | None = None

    # What there is.

    def finished(self) -> set[str]:
        """Returns the trials that have a result, by their folders."""
        found = set()
        for pattern, trials in (("trials/*/*/*", self._tuning), ("final/*/*", self.final())):
            names = (each.relative_to(self.path).as_posix() for each in self.path.glob(pattern))
            found |= {name for name in names if name in trials}
        return found

    def final(self) -> dict[str, Trial]:
        """Returns the final trials by their folders; none before the winners are known."""
        if self._final is None:
            content = read_final(self.path, self.plan.revision)
            if content is None:
                return {}
            self._final = {trial.folder: trial for trial in final_trials(self.plan, content)}
        return self._final

    def trials(self) -> dict[str, Trial]:
        """Returns all trials that are known now, by their folders."""
        return self._tuning | self.final()

    def is_complete(self) -> bool:
        """Returns whether every trial has a result, those on final seeds included."""
        done = self.finished()
        if self.plan.final_seeds and read_final(self.path, self.plan.revision) is None:
            return False
        return done == set(self.trials())

    def program_of(self, trial: Trial) -> int:
        """Returns the index in the plan of a trial's program."""
        return self._program_of[trial.name if not trial.final else self._tuning_name(trial)]

    def _tuning_name(self, trial: Trial) -> str:
        # A final trial differs from the winner in its seed only.
        return f"{trial.arm}/{trial.number:04d}/{self.plan.seeds[0]}"

    def waves(self) -> list[Path]:
        """Returns the files of the waves that are not finished."""
        files = self._waves.glob("*.json") if self._waves.is_dir() else ()
        return sorted(file for file in files if file != self._limits)

    # Claims.

    def claim(self, workers: int, fits: Callable[[int], int]) -> Claim | None:
        """Takes a wave that nobody computes: one that a killed worker left, or a new one.

        Args:
            workers: how many workers share the trials, at least.
            fits: index of a program -> how many of its trials fit into memory side by side.

        Returns:
            The wave; None if all trials are finished or in the waves of other workers.
        """
        self._waves.mkdir(mode=0o700, exist_ok=True)
        with self._exclusive():
            taken: set[str] = set()
            for file in self.waves():
                content = _read_wave(file)
                taken |= set(content["trials"])
                claim = self._hold(file, content)
                if claim is not None:
                    return claim
            self._choose_winners()
            return self._new_wave(taken | self.finished(), workers, fits)

    def _choose_winners(self) -> None:
        """Writes final.json once every trial of the search has a result."""
        known = read_final(self.path, self.plan.revision) is not None
        if known or not self.plan.final_seeds or not set(self._tuning) <= self.finished():
            return
        outcomes = {name: read_outcome(self.path / name) for name in self._tuning}
        choose_winners(self.path, self.plan, outcomes)

    def _new_wave(
        self, taken: Collection[str], workers: int, fits: Callable[[int], int]
    ) -> Claim | None:
        trials = self.trials()
        left = [trial for name, trial in trials.items() if name not in taken]
        if not left:
            return None
        # The arm of which the smallest share was begun, so that all arms advance together.
        phase = [trial for trial in trials.values() if trial.final == left[0].final]
        share = {
            arm: sum(trial.arm == arm for trial in left) / sum(trial.arm == arm for trial in phase)
            for arm in dict.fromkeys(trial.arm for trial in left)
        }
        arm = max(share, key=lambda name: share[name])
        first = next(trial for trial in left if trial.arm == arm)
        program, limits = self.program_of(first), self._read_limits()
        if first.folder in limits["alone"]:
            return self._write_wave([first], program, alone=True)
        same = [
            trial
            for trial in left
            if trial.arm == arm
            and trial.final == first.final
            and self.program_of(trial) == program
            and trial.folder not in limits["alone"]
        ]
        width = min(
            _useful_width(self.plan, program),
            fits(program),
            math.ceil(len(phase) / workers),
            limits["widths"].get(str(program), len(same)),
        )
        # Of equal widths: 32 trials in waves of at most 23 are two waves of 16.
        waves = math.ceil(len(same) / max(1, width))
        return self._write_wave(same[: math.ceil(len(same) / waves)], program)

    def _write_wave(self, trials: Sequence[Trial], program: int, alone: bool = False) -> Claim:
        content = {"alone": alone, "program": program, "trials": [t.folder for t in trials]}
        text = json.dumps(content)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = self._waves / f"{name}.json"
        replace_file(file, text.encode())
        claim = self._hold(file, content)
        assert claim is not None, "the sweep is locked, so that nobody else holds a new wave"
        return claim

    def _hold(self, file: Path, content: Mapping[str, Any]) -> Claim | None:
        """Locks a wave; returns None if another process has it."""
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        if not _lock(descriptor, wait=False):
            os.close(descriptor)
            return None
        known = self.trials()
        return Claim(
            name=file.stem,
            trials=tuple(known[name] for name in content["trials"]),
            alone=content["alone"],
            file=file,
            path=file.with_suffix(""),
            program=content["program"],
            descriptor=descriptor,
        )

    # What was learned about trials that cannot be computed in their waves.

    def split(self, claim: Claim) -> None:
        """Makes all later waves of a program at most half as wide as one that cannot be computed.

        Args:
            claim: the wave.
        """

        def halve(limits: dict[str, Any]) -> None:
            limits["widths"][str(claim.program)] = max(1, len(claim.trials) // 2)

        self._change_limits(halve)

    def leave_alone(self, trial: Trial) -> None:
        """Lets a trial be computed as a run of its own, after a rollback in its wave."""
        self._change_limits(lambda limits: limits["alone"].append(trial.folder))

    def has_failed(self, trial: Trial) -> bool:
        """Counts an error of a trial; returns whether it has failed for good."""
        count = 0

        def add(limits: dict[str, Any]) -> None:
            nonlocal count
            count = limits["faults"][trial.folder] = limits["faults"].get(trial.folder, 0) + 1

        self._change_limits(add)
        return count >= _MOST_FAULTS

    def _change_limits(self, change: Callable[[dict[str, Any]], None]) -> None:
        with self._exclusive():
            limits = self._read_limits()
            change(limits)
            replace_file(self._limits, json.dumps(limits).encode())

    def _read_limits(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"widths": {}, "alone": [], "faults": {}}
        with contextlib.suppress(FileNotFoundError):
            return empty | json.loads(self._limits.read_text())
        return empty

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keeps other workers from claims; held for milliseconds."""
        descriptor = os.open(self._waves / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def remove(self, claim: Claim) -> None:
        """Removes the file of a wave whose trials are finished or are to be claimed again."""
        claim.file.unlink(missing_ok=True)
        sync(self._waves)
        claim.release()


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Locks an open file; returns whether it could."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    # Otherwise its holder finished the wave, and removed the file, meanwhile.
    return wait or os.fstat(descriptor).st_nlink > 0


def _read_wave(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


# Operations of a wave: about a minute on two cores. A wave takes time of its own, for its folder
# and its files, which 16 trials share well; only short ones gain from more.
_USEFUL_OPERATIONS, _USEFUL, _MOST = 2**38, 16, 64


def _useful_width(plan: StoredPlan, program: int) -> int:
    """Returns beyond how many trials a wave gains nothing."""
    stored = plan.programs[program]
    operations = max(1, stored.flops * stored.steps)
    return min(_MOST, max(_USEFUL, _USEFUL_OPERATIONS // operations))
