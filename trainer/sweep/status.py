"""What a sweep has computed, read from its folder by any process; imports no jax."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.messages import UserError
from trainer.sweep.code_changes import CodeChange, changes_in
from trainer.sweep.final import Point, final_trials, rank
from trainer.sweep.folder import SweepFolder
from trainer.sweep.ledger import read_ledger
from trainer.sweep.outcome import Outcome, read_outcome
from trainer.sweep.plan import Trial, point_name
from trainer.sweep.running import WaveStatus, read_waves
from trainer.sweep.stored_plan import StoredPlan, StoredProgram


@dataclass(frozen=True)
class ArmStatus:
    """The runs of an arm, either those of the search or those on final seeds.

    Attributes:
        arm: the name of the arm.
        final: whether these are the final runs.
        runs: how many are planned.
        done, diverged, failed: how many ended so.
        running: how many a worker computes now.
        steps: number of steps of all runs.
        steps_done: those that need not be computed any more; a run that ended early counts with all
            of its steps.
        best: search -> the number of its best point, of those with all results; of final runs, the
            winner's. Searches without one are left out.
        value: the mean of the goal over the seeds of those points; None if a run has no value.
    """

    arm: str
    final: bool
    runs: int
    done: int
    running: int
    diverged: int
    failed: int
    steps: int
    steps_done: int
    best: Mapping[int, int]
    value: float | None

    @property
    def points(self) -> list[str]:
        """The names of the best points, of one for each search: "muon/0007"."""
        return [f"{self.arm}/{point_name(search, n)}" for search, n in self.best.items()]


@dataclass(frozen=True)
class Status:
    """What a sweep has computed.

    Attributes:
        arms: the search of each arm in the order of the plan, then the final runs of each.
        waves: the waves that are not finished.
        outcomes: folder of a trial -> its outcome, for those that ended.
        unreadable: folders of finished trials whose summary.json is missing or damaged.
        damaged: sentences about files of waves that are damaged.
        final: the final trials, none for an arm of which every point diverged; None before the
            winners are known.
        complete: whether all runs have ended, those on final seeds included.
        seconds: until the sweep is complete, with the workers and the speed of now; None if no
            worker has reported its speed.
    """

    arms: tuple[ArmStatus, ...]
    waves: tuple[WaveStatus, ...]
    outcomes: Mapping[str, Outcome]
    unreadable: tuple[str, ...]
    damaged: tuple[str, ...]
    final: tuple[Trial, ...] | None
    complete: bool
    seconds: float | None


class SweepReader:
    """Reads the folder of a sweep again and again; outcomes are read once.

    Args:
        path: the folder of the sweep.

    Raises:
        UserError: the folder is not that of a sweep, or its plan is damaged.

    Attributes:
        path: as given.
    """

    def __init__(self, path: Path):
        _check_folder(path)
        self.path = path
        self._outcomes: dict[str, Outcome] = {}
        self._folder = SweepFolder(path)
        self._forget()

    def _forget(self) -> None:
        """Drops what depends on the revision of the plan."""
        self._final: list[Trial] | None = None
        self._ranked: tuple[int, dict[Point, dict[int, float]]] = (-1, {})
        self._speeds: dict[int, float] = {}  # steps per second of a worker, by program

    @property
    def plan(self) -> StoredPlan:
        """The plan of the sweep, as of the last `read`."""
        return self._folder.plan

    def read(self) -> Status:
        """Returns what is in the folder now.

        Raises:
            UserError: plan.json or final.json is damaged, or the disk cannot be read.
        """
        with self._readable():
            return self._read()

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = error.filename or self.path
            raise UserError(f"{name} cannot be read: {error.strerror}.") from error

    def _read(self) -> Status:
        if self._folder.refresh():
            self._forget()
        # Waves first: their trials may be finished meanwhile, but not the other way round.
        waves, damaged = read_waves(self.path, self._folder.waves())
        if self._final is None:
            self._final = final_trials(self.path, self.plan)
        final = tuple(self._final or ())
        unreadable = tuple(self._look_for_outcomes((*self.plan.trials, *final)))
        # A worker that was killed may have left a wave of which no trial is to be computed.
        left = {t.folder for t in (*self.plan.trials, *final)} - {*self._outcomes, *unreadable}
        waves = tuple(wave for wave in waves if wave.held or not left.isdisjoint(wave.trials))
        staged = self._staged(waves)
        outcomes = staged | self._outcomes
        in_wave = {name: wave for wave in waves for name in wave.trials if name not in outcomes}
        ranked = self._rank()
        arms = [self._arm(name, self.plan.trials, in_wave, outcomes) for name in self.plan.arms]
        arms = [_with_best(arm, ranked) for arm in arms]
        for name in dict.fromkeys(trial.arm for trial in final):
            arms.append(self._arm(name, final, in_wave, outcomes))
        ended = {*self._outcomes, *unreadable}
        none_follow = self._final is not None or not self.plan.final_seeds
        return Status(
            arms=tuple(arms),
            waves=waves,
            outcomes=outcomes,
            unreadable=unreadable,
            damaged=damaged,
            final=None if self._final is None else final,
            complete=none_follow and all(t.folder in ended for t in (*self.plan.trials, *final)),
            seconds=self._seconds(waves, in_wave, {*outcomes, *unreadable}, final),
        )

    def code_changes(self) -> tuple[CodeChange, ...]:
        """Returns the changes of the user's code, from the ledger.

        Raises:
            UserError: the disk cannot be read.
        """
        with self._readable():
            return tuple(changes_in(read_ledger(self.path)))

    def program_of(self, trial: Trial) -> StoredProgram:
        """Returns the program of a trial."""
        return self.plan.programs[self._folder.program_of(trial)]

    def _look_for_outcomes(self, trials: Sequence[Trial]) -> Iterator[str]:
        """Reads the outcomes that are new; yields finished trials without a readable one."""
        root = str(self.path)
        for trial in trials:
            name = trial.folder
            if name in self._outcomes or not os.path.exists(f"{root}/{name}"):
                continue
            outcome = read_outcome(self.path / name)
            if outcome is None:
                yield name
            else:
                self._outcomes[name] = outcome

    def _staged(self, waves: Sequence[WaveStatus]) -> dict[str, Outcome]:
        """Returns the outcomes of trials that ended before the others of their waves."""
        found = {
            name: read_outcome(self.path / "waves" / wave.name / name)
            for wave in waves
            for name in wave.trials
            if name not in self._outcomes
        }
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    def _rank(self) -> dict[Point, dict[int, float]]:
        if self._ranked[0] != len(self._outcomes):
            self._ranked = len(self._outcomes), rank(self.plan, self._outcomes)
        return self._ranked[1]

    def _arm(
        self,
        arm: str,
        trials: Sequence[Trial],
        in_wave: Mapping[str, WaveStatus],
        outcomes: Mapping[str, Outcome],
    ) -> ArmStatus:
        of_arm = [trial for trial in trials if trial.arm == arm]
        ends = [outcomes[t.folder].end for t in of_arm if t.folder in outcomes]
        steps = steps_done = 0
        for trial in of_arm:
            of_trial, wave = self.program_of(trial).steps, in_wave.get(trial.folder)
            steps += of_trial
            if trial.folder in outcomes:
                steps_done += of_trial
            elif wave is not None:
                steps_done += min(wave.step, of_trial)
        held = {wave.name: wave for t in of_arm if (wave := in_wave.get(t.folder)) and wave.held}
        final = bool(of_arm[0].final)  # then all of them are
        values = [_value(outcomes.get(t.folder), self.plan) for t in of_arm] if final else []
        return ArmStatus(
            arm=arm,
            final=final,
            runs=len(of_arm),
            done=ends.count("done"),
            running=sum(wave.running for wave in held.values()),
            diverged=ends.count("diverged"),
            failed=ends.count("failed"),
            steps=steps,
            steps_done=steps_done,
            best={trial.search: trial.number for trial in of_arm} if final else {},
            value=mean(values),
        )

    def _seconds(
        self,
        waves: Sequence[WaveStatus],
        in_wave: Mapping[str, WaveStatus],
        ended: set[str],
        final: Sequence[Trial],
    ) -> float | None:
        """Estimates the time that is left, by FLOPs, because programs differ in their steps."""
        speed = 0.0  # FLOPs per second
        for wave in waves:
            if not wave.moving:
                continue
            if wave.rate is not None and wave.running:
                self._speeds[wave.program] = wave.rate * wave.running
            flops = max(1, self.plan.programs[wave.program].flops)
            speed += self._speeds.get(wave.program, 0.0) * flops
        if not speed:
            return None
        left = 0.0
        for trial in (*self.plan.trials, *final):
            if trial.folder not in ended:
                program, wave = self.program_of(trial), in_wave.get(trial.folder)
                step = 0 if wave is None else wave.step
                left += max(0, program.steps - step) * max(1, program.flops)
        if self._final is None and self.plan.final_seeds:
            left += self._flops_of_final()
        return left / speed

    def _flops_of_final(self) -> float:
        """Returns the FLOPs of the final runs, at most, before the winners are known."""
        most: dict[str, int] = {}
        for program in self.plan.programs:
            flops = program.steps * max(1, program.flops)
            for arm in {name.split("/")[0] for name in program.trials}:
                most[arm] = max(most.get(arm, 0), flops)
        return len(self.plan.final_seeds) * len(self.plan.offsets) * sum(most.values())


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a value is None or there is none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _value(outcome: Outcome | None, plan: StoredPlan) -> float | None:
    return None if outcome is None else outcome.value(plan.goal)


def _with_best(arm: ArmStatus, ranked: Mapping[Point, Mapping[int, float]]) -> ArmStatus:
    """Adds the best points of an arm."""
    best = {
        search: next(iter(points.items()))
        for (name, search), points in ranked.items()
        if name == arm.arm and points
    }
    best = {search: found for search, found in best.items() if math.isfinite(found[1])}
    numbers = {search: number for search, (number, _) in best.items()}
    return replace(arm, best=numbers, value=mean([value for _, value in best.values()]))


def _check_folder(path: Path) -> None:
    """Raises UserError for a folder without a plan; the message names one above that has it."""
    if (path / "plan.json").exists():
        return
    for above in path.absolute().parents:
        if (above / "plan.json").exists():
            raise UserError(f"{path} is in the folder of a sweep, which is {above}: name that one.")
    if not path.exists():
        raise UserError(
            f"There is no folder {path}: name the folder that was the --workdir of"
            " python -m trainer sweep."
        )
