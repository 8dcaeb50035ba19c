"""The folder of a sweep: which trials have a result, and which wave a worker computes next.

Workers share nothing but this folder. A trial is in one of three places: in the plan only; in a
wave, `waves/NAME.json`, which lists its trials and whose lock a worker holds; or finished, as a
folder below `trials/` or `final/`, where it appears by a rename. Where the worse trials are stopped
early, it may also wait below `waiting/`, for the others of its search; see `halving`.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

from trainer.config import hparams
from trainer.messages import UserError
from trainer.sweep.code_changes import note_code
from trainer.sweep.final import FINAL_FILE, choose_winners, final_trials, read_choices
from trainer.sweep.halving import Halving, waiting_folder
from trainer.sweep.ledger import CUTS_FILE, POINTS_FILE, LedgerWriter, trial_event
from trainer.sweep.plan import Trial, seed_of_search
from trainer.sweep.plan_file import read_plan
from trainer.sweep.points import choose_points
from trainer.sweep.presence import Presence
from trainer.writers import RunIdentity, identity_of_trial
from trainer.writers.base import Log, to_stderr
from trainer.writers.files import paths_below, remove_temporaries, replace_file, sync
from trainer.writers.json_files import DamagedFile, damaged, read_json
from trainer.writers.summary import SUMMARY_FILE, read_outcome

_ADVICE = "its trials are computed again by the next worker."


class WaveContent(TypedDict):
    """The content of waves/NAME.json: which trials a wave has, and which program computes them."""

    alone: bool  # whether the one trial is computed as a run of its own
    program: int  # index in the plan
    trials: list[str]  # folders, in order
    start: NotRequired[int]  # the cut at which they waited before; absent for the first step
    until: NotRequired[int]  # the cut to which they are computed; absent for the last step


def wave_name(content: WaveContent) -> str:
    """Returns the name of a wave, which is a hash, so that a changed file is noticed."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def read_wave(file: Path) -> WaveContent:
    """Reads waves/NAME.json; raises FileNotFoundError, or DamagedFile if it is damaged."""
    content = read_json(file, WaveContent, _ADVICE)
    if wave_name(content) != file.stem:
        raise damaged(file, "its content is not that of a wave of this name", _ADVICE)
    return content


@dataclass(frozen=True)
class WaveClaim:
    """A wave that this process alone computes, until `close`."""

    trials: tuple[Trial, ...]  # in order
    alone: bool  # whether its one trial is computed as a run of its own
    file: Path  # waves/NAME.json, whose lock this process holds
    path: Path  # waves/NAME, the folder of the wave; the name is a hash of its trials
    start: int  # the step from which on its trials are computed, at which they waited; 0 at first
    until: int | None  # the cut to which they are computed; None for the last step
    program: int  # the index of its program in the plan
    lock: BinaryIO  # the same file as `file`, open and locked
    presence: Presence  # tells other processes that this one has the wave

    def close(self) -> None:
        """Releases the lock, if this process still has it."""
        self.lock.close()
        with contextlib.suppress(OSError):
            self.presence.announce(None)


# How wide a wave may be, and which trials cannot be computed in their waves.

MOST_ERRORS = 3  # errors of a trial's own code before it counts as failed

# A wave's folder and files take time, of which each of 16 trials has a small share; only short
# trials gain from wider waves.
_USEFUL_OPERATIONS = 2**38  # FLOPs of a wave: about a minute on two cores
_USEFUL, _MOST = 16, 64  # trials


class _Content(TypedDict):
    widths: NotRequired[dict[str, int]]
    alone: NotRequired[list[str]]
    faults: NotRequired[dict[str, int]]


def useful_width(operations: int) -> int:
    """Returns the number of trials, with so many FLOPs each, beyond which a wave gains nothing."""
    return min(_MOST, max(_USEFUL, _USEFUL_OPERATIONS // max(1, operations)))


def wave_width(trials: int, *most: int) -> int:
    """Returns the width of waves if trials are divided into as few as possible, of equal widths.

    `most` are upper bounds of the width, at least one.

    Example:
        >>> wave_width(32, 64, 23)
        16
    """
    waves = math.ceil(trials / max(1, min(most)))
    return math.ceil(trials / waves)


class Limits:
    """Trials that cannot be computed in their waves, as was learned, in waves/limits.json."""

    # `exclusive` keeps other workers from the file.

    def __init__(self, path: Path, exclusive: Callable[[], AbstractContextManager[None]]):
        self.path, self._exclusive = path, exclusive

    def read(self) -> dict[str, Any]:
        """Returns the limits; empty ones if the file is missing or damaged."""
        # "widths" is index of a program, as text -> the most trials of a wave; "alone" are the
        # folders of trials that are computed as runs of their own; "faults" is folder of a trial ->
        # number of errors.
        empty: dict[str, Any] = {"widths": {}, "alone": [], "faults": {}}
        # The limits of a lost file are learned again.
        with contextlib.suppress(FileNotFoundError, DamagedFile):
            return empty | read_json(self.path, _Content, "remove it.")
        return empty

    def halve_width(self, program: int, width: int) -> None:
        """Makes later waves of a program at most half as wide as one that cannot be computed."""
        # The width of that one is at least 2.
        with self._changing() as limits:
            limits["widths"][str(program)] = width // 2

    def compute_alone(self, folder: str) -> None:
        """Lets a trial be computed as a run of its own, after a rollback in its wave."""
        with self._changing() as limits:
            limits["alone"].append(folder)

    def has_failed(self, folder: str) -> bool:
        """Counts an error of a trial; returns whether it has failed for good."""
        with self._changing() as limits:
            count = limits["faults"][folder] = limits["faults"].get(folder, 0) + 1
        return count >= MOST_ERRORS

    def forget_faults(self, folders: Collection[str]) -> None:
        """Forgets the errors of trials that are to be computed again."""
        with self._changing() as limits:
            for folder in folders:
                limits["faults"].pop(folder, None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Yields the limits, and writes what the caller makes of them."""
        with self._exclusive():
            limits = self.read()
            yield limits
            if self.path.is_dir():
                remove_set_aside(set_aside(self.path))
            replace_file(self.path, json.dumps(limits).encode())


class SweepFolder:
    """The folder of a sweep; raises UserError if it has no plan, or it is damaged."""

    # `presence` keeps others from the waves of this process; None for a process that claims none.
    # `plan` is the one that is stored; `claim` and `refresh` read it again after an extension.

    def __init__(self, path: Path, presence: Presence | None = None, log: Log = to_stderr):
        self.path = path
        self.presence = presence or Presence(path)
        self._log = log
        self._ledger = LedgerWriter(path)
        self._waves = path / "waves"
        self.limits = Limits(self._waves / "limits.json", self.presence.exclusive)
        self._read_plan()

    def _read_plan(self) -> None:
        self._plan_version = _stat_plan(self.path)
        self.plan = read_plan(self.path)
        self.halving = Halving(self.path, self.plan, self._ledger)
        self._program_of = {
            name: index
            for index, program in enumerate(self.plan.programs)
            for name in (*program.trials, *(program.moved or ()))
        }
        self._tuning = {trial.folder: trial for trial in self.plan.trials}
        self._pending = {name for name, trial in self._tuning.items() if trial.pending}
        self._final: dict[str, Trial] | None = None

    def refresh(self) -> bool:
        """Reads the plan again if it was extended, or points chosen; returns whether it was."""
        if _stat_plan(self.path) == self._plan_version:
            return False
        self._read_plan()
        return True

    # What there is.

    def finished(self) -> set[str]:
        """Returns the trials that have a result, by their folders."""
        known = self.trials()
        levels = {name.partition("/")[0]: name.count("/") for name in known}
        found = (paths_below(self.path, top, count) for top, count in levels.items())
        return known.keys() & chain.from_iterable(found)

    def final_trials(self) -> dict[str, Trial] | None:
        """Returns the final trials by their folders; None before the winners are known."""
        if self._final is None and (found := final_trials(self.path, self.plan)) is not None:
            self._final = {trial.folder: trial for trial in found}
        return self._final

    def trials(self) -> dict[str, Trial]:
        """Returns all trials that are known now, by their folders."""
        return self._tuning | (self.final_trials() or {})

    def is_complete(self) -> bool:
        """Returns whether every trial has a result, those on final seeds included."""
        chosen = self.final_trials() is not None or not self.plan.final_seeds
        return chosen and self.finished() == set(self.trials())

    def program_of(self, trial: Trial) -> int:
        """Returns the index in the plan of a trial's program."""
        name = trial.name
        if trial.final:  # it differs from its winner in the seed only
            seed = seed_of_search(self.plan.seeds[0], self.plan.offsets[trial.search])
            name = f"{trial.arm}/{trial.point}/{seed}"
        return self._program_of[name if name in self._program_of else trial.arm]

    def waves(self) -> list[Path]:
        """Returns the files of the waves that are not finished."""
        files = [self.path / name for name in paths_below(self.path, "waves", 1)]
        return sorted(x for x in files if x.suffix == ".json" and x != self.limits.path)

    def note_code(self, found: Mapping[str, str], allowed: Sequence[str]) -> list[str]:
        """Adds new code, file -> hash, to the ledger; returns the files that were changed."""
        # Raises CodeChanged if a file differs from before, unless `allowed` has "code".
        with self.presence.exclusive():
            self.refresh()
            self._ledger.add_plan(self.plan.revision, self.plan.digest)
            return note_code(self.path, self._ledger, found, allowed)

    @contextlib.contextmanager
    def locked_ledger(self) -> Iterator[LedgerWriter]:
        """Keeps others from the sweep while its ledger is used."""
        with self.presence.exclusive():
            yield self._ledger

    # Claims.

    def claim(self, workers: int, fits: Callable[[int], int]) -> WaveClaim | None:
        """Takes a wave that nobody computes: one that a killed worker left, or a new one."""
        # `workers` is how many workers share the trials, at least. `fits` takes the index of a
        # program, and returns how many of its trials fit into memory side by side. Returns None if
        # all trials are finished or in the waves of other workers.
        # Raises UserError if the winners cannot be chosen, because a result is damaged, or if the
        # file system has no locks, or does not show them to all machines.
        self._waves.mkdir(mode=0o700, exist_ok=True)
        self.presence.find_living()
        with self.presence.exclusive():
            self.refresh()
            self._ledger.add_plan(self.plan.revision, self.plan.digest)
            clean(self._waves)
            taken: set[str] = set()
            for file, content in self._unfinished():
                taken |= set(content["trials"])
                if (claim := self._hold(file, content)) is not None:
                    return claim
            cuts = self.halving.cut()
            if self.plan.cuts:
                self.halving.clean(taken)
            starts = self.halving.starts(cuts)
            if self._pending and choose_points(self.path, self.plan, self._ledger, self.finished()):
                self._read_plan()
            self._choose_winners()
            taken |= self.finished() | {name for name, at in starts.items() if at is None}
            taken |= self._pending
            return self._new_wave(taken, starts, workers, fits)

    def tidy(self) -> None:
        """Removes what killed workers have left of a sweep that is complete, as far as possible."""
        with contextlib.suppress(OSError, UserError), self.presence.exclusive():
            self.presence.tidy()
            self._ledger.add_plan(self.plan.revision, self.plan.digest)
            clean(self._waves)
            self.halving.cut()  # writes cuts.json again, if it was removed
            self.halving.clean(())
            for file, content in self._unfinished():
                claim = self._hold(file, content)
                if claim is not None:  # the sweep was extended meanwhile
                    claim.close()

    def _unfinished(self) -> Iterator[tuple[Path, WaveContent]]:
        """Yields the waves that are not finished, and removes those whose files are damaged."""
        for file in self.waves():
            try:
                yield file, read_wave(file)
            except (DamagedFile, FileNotFoundError) as error:
                with contextlib.ExitStack() as stack:
                    with contextlib.suppress(OSError):  # what cannot be opened is not locked
                        number = stack.enter_context(_opened(file)).fileno()
                        if not self.presence.take(file.stem, number):
                            continue  # a worker computes it nevertheless
                    self._log(str(error))
                    remove_set_aside(set_aside(file))

    def _choose_winners(self) -> None:
        """Writes final.json once every trial of the search has a result."""
        chosen = self.final_trials() is not None or not self.plan.final_seeds
        if chosen or not set(self._tuning) <= self.finished():
            return
        outcomes = {name: read_outcome(self.path / name) for name in self._tuning}
        if lost := [name for name, outcome in outcomes.items() if outcome is None]:
            raise UserError(
                f"The winners cannot be chosen: {self.path / lost[0] / SUMMARY_FILE} is missing"
                f" or damaged{f', and {len(lost) - 1} more' if len(lost) > 1 else ''}."
                " Restore it, or remove the folder, and the trial is computed again."
            )
        choose_winners(self.path, self.plan, outcomes, partial(self._ledger.add_file, FINAL_FILE))

    def _new_wave(
        self,
        taken: Collection[str],
        starts: Mapping[str, int | None],
        workers: int,
        fits: Callable[[int], int],
    ) -> WaveClaim | None:
        trials = self.trials()
        if not (left := [trial for name, trial in trials.items() if name not in taken]):
            return None
        # Take the arm with the largest share of trials left, so that all arms advance together.
        # Runs of new winners stand apart, and an arm whose winner is as before has none there.
        phase = [trial for trial in trials.values() if trial.final == left[0].final]
        left = [trial for trial in left if trial.final == left[0].final]
        planned, rest = (Counter(trial.arm for trial in of) for of in (phase, left))
        arm = max(rest, key=lambda name: rest[name] / planned[name])
        first = next(trial for trial in left if trial.arm == arm)
        program, limits = self.program_of(first), self.limits.read()
        start = starts.get(first.folder)
        if first.folder in limits["alone"]:
            return self._write_wave([first], program, alone=True)
        # The arms with trials that may be in one wave: all of a branch begin alike.
        arms, branch = self.plan.arms, self.plan.branch
        alike = [x for x in arms if x == arm or (branch and arms[x].cuts == arms[arm].cuts)]
        same = [
            trial
            for trial in left
            if trial.arm in alike
            and self.program_of(trial) == program
            and starts.get(trial.folder) == start
            and trial.folder not in limits["alone"]
        ]
        stored = self.plan.programs[program]
        bounds = [
            useful_width(stored.flops * stored.updates),
            math.ceil((self.halving.going_on(start) if start else len(phase)) / workers),
            fits(program),
        ]
        if self.plan.vmap is not None:
            bounds = [self.plan.vmap]
        most = limits["widths"].get(str(program), len(same))
        width = wave_width(len(same), most, *bounds)
        return self._write_wave(same[:width], program, start=start)

    def _write_wave(
        self, trials: Sequence[Trial], program: int, alone: bool = False, start: int | None = None
    ) -> WaveClaim:
        content = WaveContent(alone=alone, program=program, trials=[t.folder for t in trials])
        until = self.halving.until(trials[0], start or 0)
        if start is not None:
            content["start"] = start
        if until is not None:
            content["until"] = until
        file = self._waves / f"{wave_name(content)}.json"
        replace_file(file, json.dumps(content).encode())
        claim = self._hold(file, content)
        assert claim is not None, "the sweep is locked, so that nobody else holds a new wave"
        return claim

    def _hold(self, file: Path, content: WaveContent) -> WaveClaim | None:
        """Locks a wave; returns None if another process has it, or nothing of it is left to do."""
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(_opened(file))
            # Without a link, the file was removed meanwhile, by a worker that finished the wave.
            taken = self.presence.take(file.stem, stream.fileno())
            if not (taken and os.fstat(stream.fileno()).st_nlink > 0):
                return None
            known = self.trials()
            # If all have results, a worker was killed before it removed the wave. Trials that are
            # not known are final runs of a winner from before the sweep was extended.
            names, until = content["trials"], content.get("until")
            gone = not set(names) <= set(known)
            if gone or all(self.has_moved(known[name], until) for name in names):
                self._ledger.add_trials(self._events(names))
                remove_set_aside(set_aside(file))
                return None
            self.presence.announce(file.stem)
            stack.pop_all()
        return WaveClaim(
            trials=tuple(known[name] for name in content["trials"]),
            alone=content["alone"],
            file=file,
            path=file.with_suffix(""),
            start=content.get("start", 0),
            until=content.get("until"),
            program=content["program"],
            lock=stream,
            presence=self.presence,
        )

    def has_moved(self, trial: Trial, until: int | None) -> bool:
        """Returns whether a trial left its wave: it has ended, or waits at the cut `until`."""
        # The wave computes it to that cut; None for the last step.
        if (self.path / trial.folder).exists():
            return True
        return until is not None and waiting_folder(self.path, trial, until).exists()

    def record(self, claim: WaveClaim) -> None:
        """Adds the trials of a wave that have results, and were moved, to the ledger."""
        # If a worker is killed before this, the next one finds its wave and adds them.
        events = list(self._events([trial.folder for trial in claim.trials]))
        with self.locked_ledger() as ledger:
            ledger.add_trials(events)

    def _events(self, trials: Sequence[str]) -> Iterator[dict[str, Any]]:
        for name in trials:
            if (self.path / name).exists():
                yield trial_event(self.path / name, name)

    def forget_failed(self) -> list[str]:
        """Removes results of runs that failed, to compute them again; returns their folders."""
        # If trials of the search are among them, the winners are chosen again, and their runs in
        # these searches are removed, too. The ledger keeps that they were computed before. Raises
        # UserError if the winners cannot be chosen again.
        if found := [name for name in self.trials() if _has_failed(self.path / name)]:
            self._waves.mkdir(mode=0o700, exist_ok=True)
            self.limits.forget_faults(found)
        with self.presence.exclusive():
            self._ledger.add_plan(self.plan.revision, self.plan.digest)
            still = [name for name in found if _has_failed(self.path / name)]
            winners = _chosen_among(still, self)
            again = list(dict.fromkeys((*still, *winners)))
            self._ledger.add_trials(self._events(again))
            if winners:
                (self.path / FINAL_FILE).unlink()
                self._final = None
            removed = [set_aside_result(self.path / name, self._waves) for name in again]
        for each in removed:
            remove_set_aside(each)
        return again

    def remove(self, claim: WaveClaim) -> None:
        """Removes a wave whose trials are finished or are to be claimed again."""
        # Its workdir must be closed.
        with self.presence.exclusive():  # other workers read the files of waves
            removed = set_aside(claim.file)
            claim.close()
        remove_set_aside(removed)


def _has_failed(trial: Path) -> bool:
    outcome = read_outcome(trial)
    return outcome is not None and outcome.end == "failed"


def _chosen_among(failed: Sequence[str], sweep: SweepFolder) -> list[str]:
    """Returns the runs of winners that were chosen from searches with failed trials."""
    # Raises UserError if they cannot be chosen again: they are still computed, or the sweep was
    # extended after they were chosen, and then their results were judged.
    finals, plan = sweep.final_trials() or {}, sweep.plan
    searched = {trial.folder: trial for trial in plan.trials}
    lost = {(t.arm, t.search) for name in failed if (t := searched.get(name))}
    arms, why = [plan.arms[arm] for arm, _ in lost], ""
    anew = "Compute the sweep anew in another folder."
    if any(arm.cuts for arm in arms) and (sweep.path / CUTS_FILE).exists():
        why = f"at the cuts others went on in their place. {anew}"
    elif any(arm.asks for arm in arms) and (sweep.path / POINTS_FILE).exists():
        why = f"later points were chosen without them. {anew}"
    elif not lost or not finals:
        return []
    elif not sweep.is_complete():
        why = (
            "the winners that were chosen without them have not ended. Let `python -m trainer"
            f" sweep work {sweep.path}` end first, without --failed."
        )
    elif len(read_choices(sweep.path, plan)) > 1:
        why = (
            "the sweep was extended after winners had been chosen without them: these cannot"
            f" be chosen again. {anew}"
        )
    if why:
        raise UserError(
            f"Trials of the search failed, such as {failed[0]}, and {why} Nothing was changed."
        )
    if plan.ladder is not None:
        for arm in plan.arms.keys() - plan.searched:  # those that take what was found below
            of = plan.ladder.sources(arm)
            lost |= {(arm, search) for source, search in lost if source in of}
    return [name for name, trial in finals.items() if (trial.arm, trial.search) in lost]


def identity_of(trial: Trial, sweep: Path) -> Callable[[], RunIdentity]:
    """Returns a function that returns what loggers call a trial; it may use a file."""
    return lambda: identity_of_trial(sweep, trial.folder, trial.arm, hparams(trial.config.root))


def _stat_plan(sweep: Path) -> tuple[int, ...]:
    """Returns what changes when the plan is extended, or points are chosen."""
    stats: list[int] = []
    for name in ("plan.json", POINTS_FILE):
        with contextlib.suppress(OSError):  # `read_plan` reports it, if it is an error
            now = os.stat(sweep / name)
            stats += [now.st_ino, now.st_mtime_ns]
    return tuple(stats)


def _opened(file: Path) -> BinaryIO:
    return open(os.open(file, os.O_RDWR | os.O_CLOEXEC), "r+b", buffering=0)


# The folders of waves are removed so that a process that is killed meanwhile does no harm.

_REMOVED = ".removed-"


def set_aside(file: Path) -> Path:
    """Removes waves/NAME.json, whatever it is, and renames the folder; needs the sweep's lock."""
    # Returns a folder for `remove_set_aside`, which may be called after the lock is released,
    # because it may take long. If this process is killed meanwhile, what is left is not mistaken
    # for a wave.
    removed = Path(tempfile.mkdtemp(prefix=_REMOVED, dir=file.parent))
    with contextlib.suppress(FileNotFoundError):
        os.rename(file.with_suffix(""), removed / file.stem)
    if file.is_dir() and not file.is_symlink():
        os.rename(file, removed / file.name)
    file.unlink(missing_ok=True)
    sync(file.parent)
    return removed


def set_aside_result(folder: Path, waves: Path) -> Path:
    """Takes the folder of a trial out of the sweep, which must be locked; as `set_aside` does."""
    removed = Path(tempfile.mkdtemp(prefix=_REMOVED, dir=waves))
    os.rename(folder, removed / folder.name)
    sync(folder.parent)
    return removed


def remove_set_aside(folder: Path) -> None:
    """Removes what `set_aside` returned, as far as possible."""
    with contextlib.suppress(OSError):  # `ignore_errors` does not ignore all of them
        shutil.rmtree(folder, ignore_errors=True)


def clean(waves: Path) -> None:
    """Removes what workers that were killed have left in waves/; the sweep must be locked."""
    remove_temporaries(waves)
    for removed in waves.glob(f"{_REMOVED}*"):
        remove_set_aside(removed)  # perhaps at the same time as a worker that is alive
