"""Stops the worse trials of a search early: which ones wait at a cut, and which of them go on.

A trial that has come to a cut waits in `waiting/STEP/ARM/NUMBER/SEED` with its state and its rows.
When all trials of an arm's search have come so far, or have ended, they are ordered by the goal at
that step, cuts.json names those that go on, and the others are moved to `trials/` as "pruned". The
order depends on rows only, and not on which worker computed what when. Start with `Halving`.
"""

import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.messages import plural
from trainer.sweep.definition import Goal
from trainer.sweep.final import ArmSearch, is_same_value, mean, read_list
from trainer.sweep.ledger import CUTS_FILE, LedgerWriter, trial_event
from trainer.sweep.plan import Plan, SharedProgram, Trial
from trainer.writers import iterate_metrics
from trainer.writers.files import paths_below, remove_temporaries, replace_file, sync_file_system
from trainer.writers.json_files import DamagedFile, damaged
from trainer.writers.summary import SUMMARY_FILE, read_summary

_WAITING = "waiting"
_ADVICE = "it names the trials that go on. Remove it, and they are chosen again from the rows."


@dataclass(frozen=True)
class Cut:
    """The order of the points of a search at a cut; cuts.json has a list of them."""

    arm: str
    search: int
    step: int
    order: tuple[int, ...]  # the numbers of the points that had come so far, the best one first
    # the goal of each of them, in that order: the mean over its seeds; None if it has no finite
    # value on some seed
    values: tuple[float | None, ...]
    kept: int  # how many go on: the first ones

    @property
    def going_on(self) -> tuple[int, ...]:
        """The numbers of the points that go on, the best one first."""
        return self.order[: self.kept]


Cuttings = Mapping[ArmSearch, Sequence[Cut]]  # the cuts of each search, in the order of their steps


def planned_steps(plan: Plan, arm: str, programs: Sequence[SharedProgram]) -> int:
    """Returns the steps that the trials of an arm need together, if none of them diverges."""
    # `programs` are those of the arm; if trials are cut, all have the same number of steps.
    if (cuts := plan.arms[arm].cuts) is None:
        return sum(each.updates * each.counts[arm] for each in programs)
    first, points = programs[0], plan.counts[arm]
    steps = cuts.total(points, first.steps) - points * (first.first_step or 0)
    return len(plan.seeds) * len(plan.offsets) * steps


def program_steps(plan: Plan, program: SharedProgram) -> int:
    """Returns the steps that trials of a program need together, if none of them diverges."""
    # Where the trials of an arm are cut and have several programs, it is not known before of which
    # program those are that go on: each has its share of the trials.
    total = 0.0
    for arm, count in program.counts.items():
        steps = program.updates * count
        if plan.arms[arm].cuts is not None:
            own = [each for each in plan.programs if arm in each.arms]
            steps = planned_steps(plan, arm, own) * count / len(plan.of_arm(arm))
        total += steps
    return round(total)


def waiting_folder(folder: Path, trial: Trial, step: int) -> Path:
    """Returns where a trial waits at a cut, in the folder of a sweep."""
    return folder / _WAITING / str(step) / trial.name


def is_waiting(folder: Path, name: str) -> bool:
    """Returns whether a trial waits at a cut; `name` is its folder in that of the sweep."""
    trial = name.partition("/")[2]
    return any((folder / at / trial).exists() for at in paths_below(folder, _WAITING, 1))


def value_at(trial: Path, step: int, goal: Goal) -> float | None:
    """Returns the goal of a trial after a step, from its rows; None if it has no finite value."""
    found = None
    with contextlib.suppress(FileNotFoundError):
        for row in iterate_metrics(trial, about=goal.row):
            if row["step"] == step:
                found = row.get(goal.row, found)
    return found if found is not None and math.isfinite(found) else None


def cut_of(plan: Plan, key: ArmSearch, step: int, candidates: Mapping[int, Sequence[Path]]) -> Cut:
    """Returns the order of points at a cut."""
    # `candidates` is number of a point -> the folders of its trials, one for each seed, which have
    # come so far or have ended.
    sign = 1 if plan.goal.better == "min" else -1
    means = {
        number: mean([value_at(trial, step, plan.goal) for trial in trials])
        for number, trials in candidates.items()
    }
    places = {n: (math.inf if x is None else sign * x, n) for n, x in means.items()}
    order = tuple(sorted(means, key=places.__getitem__))
    values = tuple(means[number] for number in order)
    most = plan.cuts[key[0]].going_on(plan.counts[key[0]], step)
    return Cut(*key, step, order, values, min(most, len(values) - values.count(None)))


def read_cuts(folder: Path, plan: Plan) -> dict[ArmSearch, list[Cut]]:
    """Reads the cuts of each search that were made so far, in order; raises DamagedFile."""
    # It raises if cuts.json is damaged, or is not that of the plan.
    file, found = folder / CUTS_FILE, dict[ArmSearch, list[Cut]]()
    for each in read_list(file, list[Cut], _ADVICE) if plan.cuts else ():
        of_search = found.setdefault((each.arm, each.search), [])
        cuts = plan.cuts.get(each.arm)
        wanted = None if cuts is None else cuts.after(of_search[-1].step if of_search else 0)
        known = of_search[-1].going_on if of_search else range(plan.counts.get(each.arm, 0))
        same = sorted(each.order) == sorted(known) and len(each.values) == len(each.order)
        if each.step != wanted or not 0 <= each.search < len(plan.offsets):
            why = f"its cut of {each.arm} at step {each.step} is not one of the plan"
            raise damaged(file, why, _ADVICE)
        if not same:
            before = f"went on at step {of_search[-1].step}" if of_search else "the search has"
            why = f"its cut of {each.arm} at step {each.step} is not of the points that {before}"
            raise damaged(file, why, _ADVICE)
        of_search.append(each)
    return found


def _check_rows(place: Path, step: int, goal: Goal) -> None:
    """Raises DamagedFile if the rows of a trial that waits at a step are not its results there."""
    summary = read_summary(place)
    if summary is None or (summary.end, summary.step) != ("stopped", step):
        return  # it has ended; a missing summary is found where the trial is moved
    known = summary.metrics.get(goal.row, math.nan)
    if not is_same_value(value_at(place, step, goal), known if math.isfinite(known) else None):
        why = f"its {goal.row} at step {step} is not that of {SUMMARY_FILE}"
        advice = f"remove {place}, and the trial is computed again."
        raise damaged(place / "metrics.jsonl", why, advice)


class Halving:
    """The trials of a sweep that are stopped early; its lock is needed for changes."""

    # The ledger gets the content of cuts.json before it is written, and the trials that are pruned
    # before they are moved.

    def __init__(self, folder: Path, plan: Plan, ledger: LedgerWriter):
        self._folder, self._plan, self._ledger = folder, plan, ledger
        cuts = plan.cuts
        self._trials = {trial.name: trial for trial in plan.trials if trial.arm in cuts}
        self._points = {key: points for key, points in plan.points.items() if key[0] in cuts}

    def waiting(self) -> dict[str, int]:
        """Returns folder of a trial -> the cut at which it waits, of those that have not ended."""
        found: dict[str, int] = {}
        for name in paths_below(self._folder, _WAITING, 4) if self._trials else ():
            _, step, point = name.split("/", 2)
            if (trial := self._trials.get(point)) and step.isdecimal():
                found[trial.folder] = max(int(step), found.get(trial.folder, 0))
        return {name: at for name, at in found.items() if not (self._folder / name).exists()}

    def wrong_waiting(self) -> Iterator[tuple[str, str]]:
        """Yields the files of waiting trials that differ from their results, and how."""
        for name, step in self.waiting().items():
            place = self._folder / _WAITING / str(step) / name.partition("/")[2]
            try:
                _check_rows(place, step, self._plan.goal)
            except DamagedFile as error:
                yield (place.relative_to(self._folder) / "metrics.jsonl").as_posix(), error.fault

    def wrong_cuts(self) -> Iterator[str]:
        """Yields what in cuts.json differs from the rows of the trials, as parts of sentences."""
        # Raises DamagedFile as `read_cuts` does.
        cuts, waiting = read_cuts(self._folder, self._plan), self.waiting()
        for cut in itertools.chain.from_iterable(cuts.values()):
            key = cut.arm, cut.search
            if (found := self._arrived(key, cut.order, cut.step, waiting)) is None:
                continue
            again = cut_of(self._plan, key, cut.step, found)
            same = (again.order, again.kept) == (cut.order, cut.kept)
            if not (same and all(map(is_same_value, again.values, cut.values))):
                where = f"{cut.arm} in search {cut.search} at step {cut.step}"
                yield f"its order of {where} is not that of the rows"

    def _arrived(
        self, key: ArmSearch, numbers: Iterable[int], step: int, waiting: Mapping[str, int]
    ) -> dict[int, list[Path]] | None:
        """Returns point -> the folders of its trials, all of them at a step or ended; or None."""
        # Points of a search, by their numbers. None if a trial has not come so far, or was removed
        # to be computed again.
        found: dict[int, list[Path]] = {number: [] for number in numbers}
        for number, places in found.items():
            for trial in self._points[key][number]:
                at, place = waiting.get(trial.folder), self._folder / trial.folder
                if not (place.exists() if at is None else at >= step):
                    return None
                places.append(place if at is None else waiting_folder(self._folder, trial, at))
        return found

    def until(self, trial: Trial, start: int) -> int | None:
        """Returns the step to which a trial is computed from another one; None for the last."""
        cuts = None if trial.final else self._plan.cuts.get(trial.arm)
        return None if cuts is None else cuts.after(start)

    def starts(self, cuts: Cuttings) -> dict[str, int | None]:
        """Returns folder of a waiting trial -> from which step it goes on; None if it waits on."""
        decided = {(*key, cut.step) for key, of_search in cuts.items() for cut in of_search}
        searches = {t.folder: (t.arm, t.search) for t in self._trials.values()}
        return {
            name: step if (*searches[name], step) in decided else None
            for name, step in self.waiting().items()
        }

    def going_on(self, step: int) -> int:
        """Returns how many trials of all arms go on from a cut, at most."""
        runs = len(self._plan.seeds) * len(self._plan.offsets)
        cut = {arm: cuts for arm, cuts in self._plan.cuts.items() if step in cuts.steps}
        return runs * sum(cuts.going_on(self._plan.counts[arm], step) for arm, cuts in cut.items())

    def cut(self) -> dict[ArmSearch, list[Cut]]:
        """Makes the cuts to which all trials of a search have come; returns all cuts."""
        # The trials that do not go on are moved to their places.
        if not self._points:
            return {}
        waiting, cuts = self.waiting(), read_cuts(self._folder, self._plan)
        made = [cut for key in self._points for cut in self._new(key, cuts.get(key, []), waiting)]
        if made:
            for cut in made:
                cuts.setdefault((cut.arm, cut.search), []).append(cut)
            self._ledger.write_choices(CUTS_FILE, itertools.chain.from_iterable(cuts.values()))
        if pruned := self._end_others(waiting, cuts):
            self._ledger.add_trials(trial_event(place, name) for name, place in pruned.items())
            for name, place in pruned.items():
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.rename(place, self._folder / name)
            sync_file_system(self._folder)
        return cuts

    def _new(
        self, key: ArmSearch, known: Sequence[Cut], waiting: Mapping[str, int]
    ) -> Iterator[Cut]:
        """Yields the cuts of a search that can be made now, besides those that are known."""
        last = known[-1] if known else None
        cuts = self._plan.cuts[key[0]]
        while (step := cuts.after(last.step if last else 0)) is not None:
            numbers = last.going_on if last else self._points[key]
            found = self._arrived(key, numbers, step, waiting)
            if not found:  # a trial is missing, or all have diverged
                return
            for place in itertools.chain.from_iterable(found.values()):
                _check_rows(place, step, self._plan.goal)
            last = cut_of(self._plan, key, step, found)
            yield last

    def _end_others(self, waiting: Mapping[str, int], cuts: Cuttings) -> dict[str, Path]:
        """Ends the trials that do not go on; returns their folders, and where they wait."""
        found = {}
        for trial in self._trials.values():
            step = waiting.get(trial.folder)
            of_search = cuts.get((trial.arm, trial.search), ())
            cut = next((each for each in of_search if each.step == step), None)
            if cut is None or step is None or trial.number in cut.going_on:
                continue
            place = waiting_folder(self._folder, trial, step)
            if (summary := read_summary(place)) is None:
                why = "it is missing or damaged"
                advice = f"remove {place}, and the trial is computed again."
                raise damaged(place / SUMMARY_FILE, why, advice)
            of = plural(len(cut.order), "point")
            why = f"It was cut at step {step:,}, where {cut.kept:,} of {of} of its search went on."
            pruned = replace(summary, end="pruned", why=why)
            replace_file(place / SUMMARY_FILE, pruned.text().encode())
            if self._plan.checkpoints == "none":
                shutil.rmtree(place / "checkpoints", ignore_errors=True)
            remove_temporaries(place)  # of a process that was killed
            found[trial.folder] = place
        return found

    def clean(self, taken: Collection[str]) -> None:
        """Removes what trials have left at cuts that they have passed, as far as possible."""
        # `taken` are the trials in waves, which may still read it.
        waiting = self.waiting()
        for name in list(paths_below(self._folder, _WAITING, 4)):
            _, step, point = name.split("/", 2)
            trial = self._trials.get(point)
            passed = trial and step.isdecimal() and waiting.get(trial.folder) != int(step)
            if trial and passed and trial.folder not in taken:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        for levels in (3, 2, 1, 0):
            for name in list(paths_below(self._folder, _WAITING, levels)):
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(self._folder / name)
