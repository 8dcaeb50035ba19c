"""Claims that others can check: a file with the verdict of a sweep and the hashes of its evidence.

Whoever has the file and the folder of the sweep computes the verdict again from the rows, and draws
segments of runs, or whole runs, which are computed again and compared bit by bit. So it is with a
referee and all of its sweeps. Start with `write_claim` and `verify_claim`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import trainer
from trainer import config as configs
from trainer.config.wording import listing
from trainer.engine.program import load_located
from trainer.messages import UserError, refuse_os_errors
from trainer.report.conditions import fingerprint_rows
from trainer.studies.claim_segments import (
    FEWEST,
    Recomputed,
    Segment,
    Tolerance,
    kept_by,
    process_conditions,
    recompute,
    segments_of,
)
from trainer.studies.claim_subject import (
    Subject,
    SweepOfClaim,
    is_referee,
    read_subject,
    wrong_of_referee,
)
from trainer.sweep.code_changes import versions_in
from trainer.sweep.final import final_trials
from trainer.sweep.ledger import Ledger, began_late, files_in
from trainer.sweep.per_example_file import PER_EXAMPLE_FILE
from trainer.sweep.plan import SEGMENTS, kept_steps
from trainer.sweep.plan_file import check_vocabulary
from trainer.sweep.status import SweepReader
from trainer.sweep.wave import ConfigFiles
from trainer.train.pending import CLIPPED_FILE
from trainer.workdir import code
from trainer.writers.files import read_regular, replace_file
from trainer.writers.json_files import as_json, check_json, read_json

FORMAT = 1
_ADVICE = "write it again with python -m trainer claim write, or restore it from a copy."
_ROUNDING = 0.05  # relative, such as two of 360 examples that an untrained model classifies
# What of a run a check reads, besides the states that it keeps.
_NEEDED = ("config.yaml", "metrics.jsonl", "run.json", "summary.json", CLIPPED_FILE)
_NEEDED += (PER_EXAMPLE_FILE,)


@dataclass(frozen=True)
class Claim:
    """What a claim says; its file has these names."""

    format: int  # 1
    sweep: str  # the name of the folder
    verdict: list[str]  # the sentences of the report
    # the digest of the plan, which has configs, spaces, seeds, goal and rules; of a referee, the
    # SHA-256 of its rules
    plan: str
    ledger: str  # the last hash of the ledger, which has those of all files of the runs
    runs: list[str]  # their folders
    code: dict[str, list[str]]  # name in the user's code -> the hashes that it had, in order
    data: list[str]  # the fingerprints of the data sets
    # versions, devices and settings with which the runs were computed; "differs" for one that
    # differs between them
    environment: dict[str, str]
    lockstep: str  # the version that wrote the claim
    drawn_by: str  # how a check draws what it computes again


_DRAWN_BY = (
    "the last segments of all compared runs, and of the trials that won; and of the other segments"
    " of the compared runs, or of all runs if there are no segments, those with the smallest"
    " SHA-256 of the texts: SHA-256 of this file, a public number that did not exist when it was"
    " written, and the name of the segment, such as 'final/a/7 from step 51 to 100', or of the run;"
    " each followed by a line break"
)


def write_claim(folder: Path, file: Path) -> Claim:
    """Writes a claim about a finished sweep, or referee; another claim that is there stays."""
    # Raises UserError if it is there, if the sweep has not ended, has no ledger or files that
    # disagree, or computes several trials at once, whose bits are not those of a run alone. A claim
    # about code is written where its packages are not imported: their versions are in the ledger.
    if not is_referee(folder):
        _refuse_unfinished(SweepReader(folder))
    subject = read_subject(folder)
    for part in subject.parts:
        if part.evidence.faults:
            first = part.evidence.faults[0]
            raise UserError(
                f"Files of the sweep in {part.folder} disagree: {first.file}: {first.why}. `python"
                f" -m trainer sweep check {part.folder}` names all."
            )
        if not part.evidence.ledger.head:
            raise UserError(
                f"The sweep in {part.folder} has no ledger.jsonl, so that nothing shows its age."
            )
    if subject.judge is not None and not subject.judge.ledger.of("finished"):
        raise UserError(
            f"The referee in {folder} is not finished, and its secret must stay one: finish it"
            f" first, with python -m trainer referee finish {folder}."
        )
    for why in wrong_of_referee(subject):
        raise UserError(f"The files of the referee in {folder} disagree. {why}")
    claim = _claim_of(folder, subject)
    text = (json.dumps(as_json(claim), indent=1) + "\n").encode()
    with refuse_os_errors(f"{file} cannot be written"):
        if file.exists() and read_regular(file) != text:
            raise UserError(
                f"{file} exists and is another claim, which may have been published: name a new"
                " file with --output=FILE, or remove it."
            )
        replace_file(file, text)
    return claim


def _refuse_unfinished(reader: SweepReader) -> None:
    """Raises UserError if a sweep has not ended, or no claim can be about it."""
    if not reader.read().complete:
        raise UserError(
            f"The sweep in {reader.path} has not ended, and a claim is about all of its runs:"
            " compute the rest first."
        )
    if reader.plan.vmap is not None:
        raise UserError(
            f"The sweep in {reader.path} computed {reader.plan.vmap} trials at once by vmap, whose"
            " bits are not those of the runs alone: there is nothing to compare with."
        )


def read_claim(file: Path) -> Claim:
    """Reads a claim; raises UserError if there is none, or it is damaged."""
    try:
        content = read_json(file, dict[str, Any], _ADVICE)
    except FileNotFoundError as error:
        raise UserError(f"There is no file {file}: name the file of a claim.") from error
    if content.get("format") != FORMAT:
        raise UserError(f"{file} is not a claim of format {FORMAT}: {_ADVICE}")
    claim = check_json(content, Claim, file, _ADVICE)
    if strange := [x for x in content if x not in Claim.__dataclass_fields__]:
        raise UserError(
            f"{file} has {listing(strange)}, which no claim of format {FORMAT} has, so that nothing"
            f" checks it: remove it, or {_ADVICE}"
        )
    return claim


def _claim_of(folder: Path, subject: Subject) -> Claim:
    """Returns the claim that the files of a sweep or referee support."""
    runs, versions = subject.runs, dict[str, list[str]]()
    for part in subject.parts:
        for file, hashes in versions_in(part.evidence.ledger).items():
            versions[file] = [*dict.fromkeys([*versions.get(file, ()), *hashes])]
    return Claim(
        format=FORMAT,
        sweep=folder.absolute().name,
        verdict=subject.verdict,
        plan=subject.plan,
        ledger=subject.ledger,
        runs=sorted(runs),
        code=versions,
        data=sorted({str(run.fingerprint.get("data", "")) for run in runs.values()}),
        environment=dict(fingerprint_rows([x for x in runs.values() if x.fingerprint])),
        lockstep=trainer.__version__,
        drawn_by=_DRAWN_BY,
    )


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    refuted: tuple[str, ...]  # sentences on what of the claim is not so; empty if nothing was found
    runs: int  # how many runs the claim is about
    segments: int | None = None  # of how many segments some were drawn; None if whole runs were
    # the segments, or runs, that were computed again: the last ones, and what was drawn
    recomputed: tuple[Recomputed, ...] = ()
    # the differences between the two environments, of the kinds of segments that were measured
    tolerances: tuple[Tolerance, ...] = ()
    # the entries of the environment that differ between the runs, by the claim
    mixed: tuple[str, ...] = ()
    lockstep: str = ""  # the version that wrote the claim, by the claim alone; "" if it is this one
    # how many last segments were computed again, those of all compared runs and winners
    last: int = 0
    claim: str = ""  # the SHA-256 of the claim, by which segments were drawn
    public: str = ""  # the public number, by which they were drawn as well
    caveats: tuple[str, ...] = ()  # sentences on what the ledger does not show
    underived: tuple[str, ...] = ()  # and on what of the plan was not derived from its files
    # what of the user's code no run of the claim had as it is here
    other_code: tuple[str, ...] = ()
    sweeps: int | None = None  # how many a referee has; None for a sweep

    @property
    def forged(self) -> bool:
        """Whether something differs that was computed under the same conditions."""
        return any(not each.same and not each.differing for each in self.recomputed)

    @property
    def verified(self) -> bool:
        """Whether nothing was refuted, the code is the same, and so are all bits."""
        return not (self.refuted or self.other_code) and all(x.same for x in self.recomputed)

    @property
    def alike(self) -> bool:
        """Whether all that was drawn is as near as the two environments are."""
        if self.refuted or self.forged or self.other_code or not self.tolerances:
            return False
        measured = all(not x.beyond(each) for x in self.tolerances for each in x.measured)
        return measured and all(each.same or self._is_near(each) for each in self.recomputed)

    def _is_near(self, segment: Recomputed) -> bool:
        found = self.tolerance_of(segment)
        return found is not None and not segment.other_program and not found.beyond(segment)

    def tolerance_of(self, segment: Recomputed) -> Tolerance | None:
        """Returns the tolerance that was measured on segments of the same kind, if one was."""
        return next((x for x in self.tolerances if x.begins_run == segment.begins_run), None)


class Wanted(NamedTuple):
    """How much a check computes again."""

    segments: int | None = 3  # how many are drawn; None for whole runs
    runs: int = 3  # how many whole runs; not read if there are segments
    measured: int = 7  # on how many more the differences of another environment are measured


def verify_claim(
    file: Path,
    folder: Path,
    public: str,
    wanted: Wanted,
    vocabulary: Sequence[str] = (),
    log: Callable[[str], None] = lambda line: None,
) -> Checked:
    """Checks a claim with the folder of its sweep, and computes some of its runs again."""
    # Raises UserError if a file is missing or damaged, the plan names other packages, or a segment
    # cannot be computed here. `public` is a number, as text, that nobody knew when the claim was
    # written.
    # If all files agree, the last segment of each compared run and winning trial is computed again,
    # because verdict and winners rest on the values there, and some that are drawn from the others.
    # If the sweep kept no states, whole runs are drawn from all.
    # Segments of another environment may have other bits here; how far they may differ is measured
    # on more of the same kind. Whatever environment a run names, it is held against those of all
    # runs: a forger may name another one for what was forged.
    claim, subject = read_claim(file), read_subject(folder, vocabulary)
    parts, runs = subject.parts, subject.runs
    for part in parts:
        check_vocabulary(part.folder, part.plan, vocabulary)
    if refuted := _refutations(claim, _claim_of(folder, subject), subject, vocabulary):
        return Checked(refuted, len(claim.runs))
    by_segments = wanted.segments is not None and any(part.plan.segments for part in parts)
    last, others, rest = _divided(subject, by_segments)
    content = file.read_bytes()
    order = [others[name] for name in drawn(others, content, public)]
    count = wanted.runs if wanted.segments is None else wanted.segments
    picked, left = order[:count], {x.name: x for x in (*order[count:], *rest)}
    kept = {
        part.prefix + trial.folder
        for part in parts
        for trial in final_trials(part.folder, part.plan) or ()  # none without final seeds
        if part.plan.keeps_examples(trial)
    }
    check = _Check(vocabulary, log, wanted.measured, kept)
    found = [check.compute(each) for each in (*last, *picked)]
    more = [left[name] for name in drawn(left, content, public)]
    kinds = (check.measure(found, len(last), more, kind) for kind in (True, False))
    return Checked(
        refuted=(),
        runs=len(runs),
        segments=len(others) if by_segments else None,
        recomputed=tuple(found),
        tolerances=tuple(each for each in kinds if each is not None),
        mixed=tuple(key for key, value in claim.environment.items() if value == "differs"),
        lockstep=claim.lockstep if claim.lockstep != trainer.__version__ else "",
        last=len(last),
        claim=hashlib.sha256(content).hexdigest(),
        public=public,
        caveats=tuple(dict.fromkeys(x for part in parts for x in _caveats(part.evidence.ledger))),
        underived=tuple(dict.fromkeys(x for part in parts for x in part.evidence.underived)),
        # All programs have imported it by now, or import copies that the referee has.
        other_code=() if subject.judge else _other_code(claim, vocabulary),
        sweeps=len(parts) if subject.judge else None,
    )


def _refutations(
    claim: Claim, made: Claim, subject: Subject, vocabulary: Sequence[str]
) -> tuple[str, ...]:
    """Returns what of a claim is not so, by files; of several kinds, the first that is found."""
    for why in (  # generators: what is further down costs more
        _refuted(claim, made, subject.parts),
        *map(_unfounded, subject.parts),
        wrong_of_referee(subject),
        # No run of a referee counts as collapsed.
        *(() if subject.judge else (_unlike_at_first(x, vocabulary) for x in subject.parts)),
    ):
        if refuted := tuple(why):
            return refuted
    return ()


def _other_code(claim: Claim, vocabulary: Sequence[str]) -> tuple[str, ...]:
    """Returns the files, functions and classes that no run of a claim had as they are here."""
    here, last = code.hashes(vocabulary), {name: each[-1] for name, each in claim.code.items()}
    names = (x for x in code.differing_files(last, here) if x in here and x in last)
    return tuple(x for x in names if here[x] not in claim.code[x])


def _divided(
    subject: Subject, by_segments: bool
) -> tuple[list[Segment], dict[str, Segment], list[Segment]]:
    """Returns the segments that are always computed, those that are drawn from, and the rest."""
    # Whole runs are drawn from all.
    if not by_segments:
        runs = [(run, part.code) for part in subject.parts for run in part.runs.values()]
        every = [each for run, code in runs for each in segments_of(run, (), code)]
        return [], {each.name: each for each in every}, []
    last, others, rest = list[Segment](), dict[str, Segment](), list[Segment]()
    for name, run in subject.runs.items():
        *before, end = segments_of(run, kept_by(run))
        decisive = name in subject.compared | subject.winners
        (last if decisive else rest).append(end)
        if name in subject.compared:
            others |= {each.name: each for each in before}
        else:
            rest += before
    return last, others, rest


@dataclass
class _Check:
    """Computes segments again; `vocabulary` and `log` are as for `verify_claim`."""

    vocabulary: Sequence[str]
    log: Callable[[str], None]
    count: int  # on how many segments of a kind differences of another environment are measured
    examples: Set[str]  # the runs that keep their results on single test examples
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # of the last process

    def compute(self, segment: Segment) -> Recomputed:
        """Computes a segment again."""
        self.log(f"Computing {segment.name} again.")
        examples = segment.run.name in self.examples
        found, self.fingerprint = recompute(segment, self.vocabulary, examples)
        return found

    def measure(
        self, found: Sequence[Recomputed], last: int, others: Sequence[Segment], begins_run: bool
    ) -> Tolerance | None:
        """Measures the differences of the two environments on segments of a kind."""
        # They are the first of the kind in `others`. Of those that were `found`, the first `last`
        # were not drawn. Returns None if nothing of the kind is to be compared with them, or there
        # are too few.
        judged = [each for each in found if each.begins_run == begins_run]
        of_kind = [each for each in others if (each.start == 0) == begins_run]
        drawn_ones = sum(each.begins_run == begins_run for each in found[last:])
        # Whatever environment they name, but not those with other code or data.
        nexts = [
            x for x in of_kind[: self.count] if not process_conditions(x.run, self.fingerprint)[1]
        ]
        apart = any(not (x.same or x.other_program) and x.differing for x in judged)
        if not apart or len(nexts) < FEWEST:
            return None
        self.log(f"Measuring on {len(nexts)} more how far apart results are here.")
        measured = tuple(self.compute(each) for each in nexts)
        return Tolerance(measured, begins_run, drawn_ones, drawn_ones + len(of_kind))


def _refuted(claim: Claim, made: Claim, parts: Sequence[SweepOfClaim]) -> Iterator[str]:
    """Yields what of a claim the files of a folder, which support `made`, do not support."""
    faults = [f"{x.prefix}{fault.file}: {fault.why}." for x in parts for fault in x.evidence.faults]
    yield from faults
    if faults:
        return
    if made.plan != claim.plan:
        yield "The plan of the folder is not that of the claim: it is another or extended sweep."
        return
    if made.ledger != claim.ledger:
        yield "The ledger of the folder does not end as that of the claim: results came or went."
    if made.verdict != claim.verdict:
        other = next((x for x in made.verdict if x not in claim.verdict), "nothing")
        versions = ""
        if made.lockstep != claim.lockstep:
            versions = f" (by Lockstep {made.lockstep}, and the claim is by {claim.lockstep})"
        yield f"The verdict by the rows{versions} is not that of the claim. It is: {other}"
    if sorted(made.runs) != sorted(claim.runs):
        yield "The folder has other runs than the claim."
    if made.drawn_by != claim.drawn_by:
        yield "The claim describes another way to draw what is computed again than the one used."
    for name in ("sweep", "code", "data", "environment"):
        ours, theirs = getattr(made, name), getattr(claim, name)
        if isinstance(ours, dict) and ours != theirs:
            key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
            name, ours, theirs = f"{name} {key}", ours.get(key), theirs.get(key)
        if ours != theirs:
            advice = f" Rename the folder: it was called {theirs}." if name == "sweep" else ""
            yield f"The claim has the {name} {theirs!r}, and the folder {ours!r}.{advice}"


def _unfounded(part: SweepOfClaim) -> Iterator[str]:
    """Yields what a check would read of the runs that plan or ledger do not determine."""
    plan, start = part.plan, part.prefix
    files = ConfigFiles(plan.vocabulary)
    ended = part.evidence.ledger.of("trial")
    listed = {start + x.content["trial"]: x.content["files"] for x in ended}
    planned = (*plan.trials, *(final_trials(part.folder, plan) or ()))
    trials = {start + x.folder: x for x in planned}
    for name, run in part.runs.items():
        needed = [x for x in files_in(run.folder) if x in _NEEDED or x.startswith(f"{SEGMENTS}/")]
        if missing := [file for file in needed if file not in listed.get(name, {})]:
            yield f"{name}/{missing[0]}: ledger.jsonl has no hash of it."
        steps = kept_steps(run.steps, plan.segments, run.first_step)
        if strange := set(kept_by(run)).difference(steps):
            yield f"{name}/{SEGMENTS}/{min(strange)}: by the plan, this run keeps no such state."
        file, wanted = run.folder / "config.yaml", files.texts(trials[name])["config.yaml"]
        if read_regular(file) != wanted.encode():  # another version may have written it otherwise
            if unlike := configs.diff(configs.load([file]).root, trials[name].config.root):
                yield f"{name}/config.yaml: it is not the config of the plan: {unlike[0]}."


def _unlike_at_first(part: SweepOfClaim, words: Sequence[str]) -> Iterator[str]:
    """Yields which metrics before the first step the ledger has otherwise than configs here."""
    # They decide which runs collapsed. Other environments differ by rounding only. Ledgers of
    # earlier versions have none.
    plan, ledger = part.plan, part.evidence.ledger
    programs = {plan.example_of(shared).folder: shared for shared in plan.programs}
    noted = [
        (x.content["trial"], x.content["arms"], x.content["values"]) for x in ledger.of("initial")
    ]
    known = {arm for _, arms, _ in noted for arm in arms}
    for trial, shared in programs.items() if _notes_initial(ledger) else ():
        warm = shared.first_step or "warm_start" in plan.example_of(shared).config.root.kwargs
        if left := sorted(shared.arms - known):
            noted += [] if warm else [(trial, left, {})]
            known |= set(left)
    for trial, arms, values in noted:
        shared = programs.get(trial)
        if shared is None or not {*arms} <= {*shared.arms}:
            yield (
                f"ledger.jsonl has metrics before the first step of {listing(arms)} by {trial},"
                " which does not begin as they do."
            )
            continue
        program = load_located(plan.example_of(shared).config, words)
        here = program.evaluation.run_splits(program.init())
        lacks = {name: x for name, x in here.items() if math.isfinite(x) and name not in values}
        for name, value in {**values, **dict.fromkeys(lacks)}.items():
            found = here.get(name, math.nan)
            if value is None or not math.isclose(value, found, rel_tol=_ROUNDING):
                has = f"lacks {name}" if value is None else f"has {name} {value:.4g}"
                yield (
                    f"ledger.jsonl {has} before the first step of {listing(arms)}, and the config"
                    f" and code give {found:.4g} here."
                )
                break


def _caveats(ledger: Ledger) -> Iterator[str]:
    """Yields what a ledger does not show, and those of other sweeps do."""
    if late := began_late(ledger):
        yield late
    if not _notes_initial(ledger):
        yield (
            "ledger.jsonl has no metrics before the first steps, as those of earlier versions have"
            " none: nothing shows which runs collapsed."
        )


def _notes_initial(ledger: Ledger) -> bool:
    """Returns whether a ledger is of a version that notes metrics before the first step."""
    return any(entry.event in ("initial", "environment") for entry in ledger.entries)


def drawn(names: Iterable[str], claim: bytes, public: str) -> list[str]:
    """Orders segments by hashes; nobody can choose the first without the public number."""
    head = hashlib.sha256(claim).hexdigest()
    return sorted(
        names, key=lambda x: hashlib.sha256(f"{head}\n{public}\n{x}\n".encode()).hexdigest()
    )
