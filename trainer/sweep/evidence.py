"""Checks that the results of a sweep are those that were computed.

The files are compared with the ledger, the summary of each trial with its rows, cuts.json with the
rows at the cuts, points.json with the results of earlier points, and final.json with the seeds of
the plan and the ranking of the trials. Start with `examine`.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.wording import listing
from trainer.messages import UserError, plural
from trainer.sweep import final
from trainer.sweep.code_changes import (
    DATA,
    change_sentences,
    changes_in,
    fingerprint_of,
    versions_in,
)
from trainer.sweep.extension import derive
from trainer.sweep.folder import read_wave
from trainer.sweep.halving import Halving, is_waiting
from trainer.sweep.ledger import (
    CHECKPOINTS,
    CHOICES,
    CUTS_FILE,
    LEDGER_FILE,
    POINTS_FILE,
    Ledger,
    LedgerWriter,
    began_late,
    file_digest,
    files_in,
    read_ledger,
    refuse_unreadable,
    results_in,
)
from trainer.sweep.per_example_file import PER_EXAMPLE_FILE, unlike_examples
from trainer.sweep.plan import SEGMENTS, Plan, Trial
from trainer.sweep.plan_file import read_plan
from trainer.sweep.points import not_chosen_again, wrong_points
from trainer.workdir.fingerprint import environment
from trainer.writers import iterate_metrics
from trainer.writers.json_files import DamagedFile, as_json
from trainer.writers.summary import SUMMARY_FILE, Summary, read_outcome

_LOOKS = 3  # checks at most, while workers append to the ledger
_NAMED = 5  # the most trials that a sentence lists


@dataclass(frozen=True)
class Fault:
    """A file that disagrees with others."""

    file: str  # its path in the folder of the sweep, or that of a trial's folder
    why: str  # what is wrong, as a part of a sentence


@dataclass(frozen=True)
class Evidence:
    """What a check of a sweep found."""

    faults: tuple[Fault, ...]
    results: int  # how many trials have a result
    files: int  # how many files were compared with the ledger
    absent: int  # how many files of states the ledger has that are not here
    ledger: Ledger
    underived: tuple[str, ...]  # sentences on what of the plan was not derived from its files
    # the trials that were computed again after their results had been removed -> whether these
    # results were failures
    again: Mapping[str, bool]
    # arm -> its metrics before the first step, by their names in rows
    initial: Mapping[str, Mapping[str, float]]


def examine(
    folder: Path, outcomes: Mapping[str, Summary] | None = None, thorough: bool = True
) -> Evidence:
    """Checks the results of a sweep, also while it is computed; UserError if it cannot be read."""
    # `outcomes` is folder of a trial -> its outcome; None to read them. `thorough` reads the rows
    # also of trials whose files the ledger has.
    with refuse_unreadable(folder):
        for _ in range(_LOOKS):
            before = _size(folder)
            found = _Examination(folder, outcomes, thorough).evidence()
            if not found.faults or _size(folder) == before:
                break
    return found


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / LEDGER_FILE).stat().st_size
    return 0


class _Examination:
    """One check of all files of a sweep."""

    def __init__(self, folder: Path, outcomes: Mapping[str, Summary] | None, thorough: bool):
        self._folder, self._thorough = folder, thorough
        self._faults: list[Fault] = []
        self._absent = 0
        self._plan: Plan | None = None
        try:
            self._plan = read_plan(folder)
        except UserError as error:
            if not (folder / "plan.json").exists():
                raise
            self._fault("plan.json", f"it cannot be used: {str(error).rstrip('.')}")
        # Waves are read before the ledger, which has the trials of those that end meanwhile.
        self._waved = set[str]()
        for file in folder.glob("waves/*.json"):
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                self._waved |= set(read_wave(file)["trials"])
        self._results = sorted(results_in(folder))
        self._outcomes = outcomes or {}
        self._ledger = read_ledger(folder)

    def evidence(self) -> Evidence:
        """Returns what the check found."""
        files, recorded = 0, set[str]()
        ledger = self._ledger
        if ledger.exists and self._check_ledger(ledger):
            recorded, files = self._check_files(ledger)
            if self._thorough:
                self._check_conditions(ledger)
        if self._thorough:
            self._check_links()
        for name in self._results:
            if self._thorough or name not in recorded:
                self._check_rows(name)
        underived = list[str]()
        if self._plan is not None:
            wrong, underived = derive(self._folder, self._plan, ledger)
            underived += not_chosen_again(self._folder, self._plan)
            self._check_choices("plan.json", wrong)
            halving = Halving(self._folder, self._plan, LedgerWriter(self._folder))
            for name, why in halving.wrong_waiting():
                self._fault(name, why)
            of_plan = self._folder, self._plan, self._outcome
            self._check_choices(CUTS_FILE, halving.wrong_cuts())
            self._check_choices(POINTS_FILE, wrong_points(*of_plan, again=self._thorough))
            self._check_choices(final.FINAL_FILE, final.wrong_choices(*of_plan))
            self._check_ends(self._plan)
        return Evidence(
            faults=tuple(self._faults),
            results=len(self._results),
            files=files - self._absent,
            absent=self._absent,
            ledger=ledger,
            underived=tuple(underived),
            again=_computed_again(ledger),
            initial={
                arm: line.content["values"]
                for line in reversed(ledger.of("initial"))  # the first one about an arm counts
                for arm in line.content["arms"]
            },
        )

    def _fault(self, file: str, why: str) -> None:
        self._faults.append(Fault(file, why))

    # The ledger.

    def _check_ledger(self, ledger: Ledger) -> bool:
        """Checks the lines of the ledger; returns whether it is that of this sweep."""
        if ledger.damage:
            self._fault(LEDGER_FILE, ledger.damage)
        if ledger.torn:
            self._fault(LEDGER_FILE, "its last line is cut off, as by a worker that was killed")
        seen: set[str] = set()
        for entry in ledger.of("trial"):
            if (name := entry.content["trial"]) in seen and not entry.content.get("again"):
                self._fault(LEDGER_FILE, f"line {entry.line} has {name} for a second time")
            seen.add(name)
        if self._plan is None:
            return True
        revisions = [revision["digest"] for revision in self._plan.revisions]
        known = 0
        for entry in ledger.of("plan"):
            known, digest = entry.content["revision"], entry.content["digest"]
            if digest not in revisions[known - 1 : known]:
                self._fault(
                    LEDGER_FILE,
                    f"line {entry.line} has a revision {known} of the plan that is not the one of"
                    " plan.json: one of the two was changed, or is of another sweep",
                )
                return False
        if known != len(revisions) and not ledger.damage:
            self._fault(LEDGER_FILE, f"it has no line about revision {len(revisions)} of the plan")
        self._check_known(self._plan, ledger)
        return True

    def _check_known(self, plan: Plan, ledger: Ledger) -> None:
        """Checks what revisions of the plan say was known against the order of the ledger."""
        for number, revision in enumerate(plan.revisions, 1):
            found, said = ledger.known_at(number), revision.get("known")
            if found is None or said is None:
                continue
            planned = {trial.name for trial in final.trials_until(plan, number - 1)}
            unsaid = len((found.finished & planned).difference(said["finished"]))
            why = f"revision {number} does not say that {{}} before it, and ledger.jsonl does"
            if found.final and not said["final"]:
                self._fault("plan.json", why.format("winners were chosen"))
            elif unsaid:
                self._fault("plan.json", why.format(f"{plural(unsaid, 'more trial')} ended"))

    def _check_files(self, ledger: Ledger) -> tuple[set[str], int]:
        """Compares files with the ledger; returns the trials that it has, and how many files."""
        trials = {each.content["trial"]: each.content["files"] for each in ledger.of("trial")}
        files: dict[str, str] = {}
        for event in ("plan", *CHOICES.values()):  # others are not about files here
            for entry in ledger.of(event):
                files |= entry.content["files"]
        wanted = {f"{name}/{file}": x for name, of in trials.items() for file, x in of.items()}
        gone = {name for name in trials if not (self._folder / name).exists()}
        for name in sorted(gone):
            # If it waits, its worker was killed before it moved the trial.
            if not is_waiting(self._folder, name):
                self._fault(name, "it is missing, and ledger.jsonl has its files")
        for name, digest in (wanted | files).items():
            if name.rpartition("/")[0] not in gone:
                self._check_digest(name, digest)
        for name, listed in trials.items() if self._thorough else ():
            # A checkpoint that the line lacks, such as one of another trial. The lines of earlier
            # versions have none.
            if any(x.startswith(CHECKPOINTS) for x in listed) and (self._folder / name).is_dir():
                found = {x for x in files_in(self._folder / name) if x.startswith(CHECKPOINTS)}
                for file in sorted(found - listed.keys()):
                    self._fault(f"{name}/{file}", "ledger.jsonl does not have it")
        if not ledger.damage:
            left = [name for name in self._results if name not in trials]
            left += [x for x in CHOICES if x not in files and (self._folder / x).exists()]
            for name in left:
                if name not in self._waved:
                    self._fault(name, "ledger.jsonl has no line about it")
        return set(trials), len(wanted) + len(files)

    def _check_links(self) -> None:
        """Names links among the results, whose files may be anywhere on this machine."""
        for top in sorted({name.partition("/")[0] for name in self._results}):
            below = os.walk(self._folder / top)
            places = (Path(place, x) for place, folders, files in below for x in (*folders, *files))
            for each in (self._folder / top, *places):
                if each.is_symlink():
                    name = each.relative_to(self._folder).as_posix()
                    self._fault(name, "it is a link, and not a file of the sweep")

    def _check_conditions(self, ledger: Ledger) -> None:
        """Checks that the ledger has code and environment of each trial."""
        # Only after its first such line. Ledgers of earlier versions have none about environments.
        versions, begun, trials = versions_in(ledger), set[str](), dict[str, set[str]]()
        known = [each.content["environment"] for each in ledger.of("environment")]
        data = {x for name, all_ in versions.items() if name.startswith(DATA) for x in all_}
        for entry in ledger.entries:
            begun.add(entry.event)
            if entry.event == "code" and any(x.startswith(DATA) for x in entry.content["code"]):
                begun.add(DATA)
            if entry.event == "trial":
                trials[entry.content["trial"]] = set(begun)
        for name, begun in trials.items():
            found = fingerprint_of(self._folder / name)
            code = found.get("code", {}).items() if "code" in begun else ()
            lacks = [f"code, {x} {hash}" for x, hash in code if hash not in versions.get(x, ())]
            if DATA in begun and (mine := found.get("data")) and mine not in data:
                lacks.append(f"data, {mine}")
            ours = environment(found)
            if ours and "environment" in begun and ours not in known:
                new = [f"{k} {x}" for k, x in ours.items() if all(e.get(k) != x for e in known)]
                lacks += [f"environment, {x}" for x in new or ["which has the values of several"]]
            if lacks:
                self._fault(f"{name}/run.json", f"ledger.jsonl lacks its {lacks[0]}")

    def _check_digest(self, name: str, digest: str) -> None:
        try:
            found = file_digest(self._folder / name)
        except FileNotFoundError:
            for kind in ("checkpoints", SEGMENTS):
                before, state, after = name.rpartition(f"/{kind}/")
                step = self._folder / before / kind / after.partition("/")[0]
                if state and not step.exists():  # somebody needed the space, or published the rows
                    self._absent += 1
                    return None
            return self._fault(name, "it is missing, and ledger.jsonl has it")
        except OSError as error:
            return self._fault(name, f"it cannot be read: {error.strerror}")
        if found != digest:
            self._fault(name, "it was changed after its line in ledger.jsonl")

    # Results against each other.

    def _outcome(self, name: str) -> Summary | None:
        return self._outcomes.get(name) or read_outcome(self._folder / name)

    def _check_rows(self, name: str) -> None:
        """Checks the summary of a trial against its rows."""
        if (outcome := self._outcome(name)) is None:
            self._fault(f"{name}/{SUMMARY_FILE}", "it is missing or damaged")
            return
        if wrong := list(unlike_rows(self._folder / name, outcome)):
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            why = f"its {wrong[0]} is not that of the rows of metrics.jsonl{more}"
            self._fault(f"{name}/{SUMMARY_FILE}", why)

    def _check_ends(self, plan: Plan) -> None:
        """Checks how runs ended, and the results of final ones on single test examples."""
        arms: dict[tuple[str, str], dict[str, Mapping[str, float]]] = {}  # with one data set each
        finals: Sequence[Trial] = ()
        with contextlib.suppress(DamagedFile):  # of final.json, of which another check says so
            finals = final.final_trials(self._folder, plan) or ()
        for trial in (*plan.trials, *finals) if self._thorough else ():
            if (outcome := self._outcome(trial.folder)) is None:
                continue
            if outcome.end == "done" and plan.keeps_examples(trial):
                data = repr(trial.config.root.kwargs.get("data"))
                arms.setdefault((trial.arm, data), {})[trial.folder] = outcome.metrics
            if self._has_gone_on(trial, outcome):
                why = f"its end is {outcome.end!r}, and its rows have finite losses of all steps"
                self._fault(f"{trial.folder}/{SUMMARY_FILE}", why)
        same = not list(changes_in(self._ledger))  # the user's code may have made other examples
        # Earlier versions, whose ledgers have no line on data, did not list what they left out.
        listed = any(name.startswith(DATA) for name in versions_in(self._ledger))
        for (arm, _), runs in arms.items():
            for name, why in unlike_examples(self._folder, arm, runs, same, listed):
                self._fault(f"{name}/{PER_EXAMPLE_FILE}", why)

    def _has_gone_on(self, trial: Trial, outcome: Summary) -> bool:
        """Returns whether rows contradict that a run diverged or was stopped early."""
        # They do if there is an evaluation after the last step, with finite losses.
        if outcome.end not in ("diverged", "pruned"):
            return False
        steps = trial.config.root.kwargs.get("steps")
        steps = steps if isinstance(steps, int) else outcome.steps
        rows = [row for row in iterate_metrics(self._folder / trial.folder) if row["step"] == steps]
        losses = [x for row in rows for key, x in row.items() if key.endswith("loss")]
        names = {key.partition("/")[0] for row in rows for key in row}
        return bool(names & {"eval", "validation"}) and all(map(math.isfinite, losses))

    def _check_choices(self, name: str, wrong: Iterable[str]) -> None:
        """Adds what is wrong with a file of what was chosen by the results."""
        try:
            for why in wrong:
                self._fault(name, why)
        except DamagedFile as error:
            self._fault(name, error.fault)


def unlike_rows(trial: Path, outcome: Summary) -> Iterator[str]:
    """Yields the names of values in which the summary of a run differs from its rows."""
    newest: dict[str, float] = {}
    finite: dict[str, list[float]] = {name: [] for name in outcome.best}
    for row in iterate_metrics(trial):
        newest |= row
        for name in finite.keys() & row.keys():
            if math.isfinite(row[name]):
                finite[name].append(row[name])
    for name, value in outcome.metrics.items():
        if not final.is_same_value(newest.get(name), value):
            yield name
    for name, value in as_json(outcome).items():
        if name.startswith("perf/") and value is not None:
            if not final.is_same_value(newest.get(name, 0.0), value):
                yield name
    of_mode = {"min": min, "max": max}
    for name, modes in outcome.best.items():
        for mode, best in modes.items():
            if not finite[name] or not final.is_same_value(of_mode[mode](finite[name]), best.value):
                yield f"best {name}"


def _computed_again(ledger: Ledger) -> dict[str, bool]:
    """Returns the trials that a ledger has again -> whether all results before were failures."""
    found: dict[str, bool] = {}
    ends: dict[str, set[str]] = {}
    for entry in ledger.of("trial"):
        if (name := entry.content["trial"]) in ends:
            found[name] = ends[name] == {"failed"}
        ends.setdefault(name, set()).add(str(entry.content.get("end")))
    return found


def sentences_about_repeats(again: Mapping[str, bool]) -> Iterator[str]:
    """Yields sentences about trials that were computed again; see `Evidence.again`."""
    if removed := [name for name, failed in again.items() if not failed]:
        yield (
            "Results that were known had been removed, and were computed again:"
            f" {listing(removed, _NAMED)}."
        )
    if failed := [name for name, each in again.items() if each]:
        yield f"Runs that had failed were computed again: {listing(failed, _NAMED)}."


def report_of(evidence: Evidence) -> list[str]:
    """Returns the lines that `sweep check` prints."""
    if evidence.faults:
        return [f"{fault.file}: {fault.why}." for fault in evidence.faults]
    results = f"{evidence.results:,} results"
    head, late = evidence.ledger.head, began_late(evidence.ledger)
    if not head:
        agree = f"The {results} agree with their rows and with final.json. {late}"
        return [agree, *evidence.underived]
    absent = [f"{plural(evidence.absent, 'file')} of states that it has are not here."]
    return [
        f"The {results} agree with each other, and {evidence.files:,} files with ledger.jsonl,"
        f" whose last hash is {head}.",
        *([late] if late else []),
        *evidence.underived,
        *(absent if evidence.absent else []),
        *sentences_about_repeats(evidence.again),
        *change_sentences(list(changes_in(evidence.ledger))),
    ]
