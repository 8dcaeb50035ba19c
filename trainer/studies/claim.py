"""Claims that others can check: a file with the verdict of a sweep and the hashes of its evidence.

Whoever has the file and the folder of the sweep computes the verdict again from the rows, and draws
some runs, which are computed again and compared bit by bit. Start with `write_claim` and
`verify_claim`.
"""

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainer
from trainer.diagnose.compare import OF_CONFIG, Rows, compare_rows
from trainer.messages import DONE, FAILED, STOPPED, UserError, plural
from trainer.report.comparison import make_report, read_workloads
from trainer.report.conditions import fingerprint_rows
from trainer.report.results import Result
from trainer.sweep.evidence import Evidence, examine
from trainer.sweep.plan import Plan
from trainer.sweep.plan_file import check_vocabulary, read_plan
from trainer.sweep.status import SweepReader
from trainer.workdir.fingerprint import compare
from trainer.writers import read_metrics
from trainer.writers.files import replace_file
from trainer.writers.json_files import as_dataclass, as_json, check_json, read_json
from trainer.writers.run_record import read_record

FORMAT = 1
_ADVICE = "write it again with python -m trainer claim write, or restore it from a copy."
_EXITS = {"done": DONE, "pruned": STOPPED}  # of a run that is computed again, by its end
# Of these shares of the runs it is said with which probability a forgery would have been drawn.
_SHARES = ((10, "a tenth"), (3, "a third"))


@dataclass(frozen=True)
class Claim:
    """What a claim says; its file has these names.

    Attributes:
        format: 1.
        sweep: the name of the folder.
        verdict: the sentences of the report.
        plan: the digest of the plan, which has configs, spaces, seeds, goal and rules.
        ledger: the last hash of the ledger, which has those of all files of the runs.
        runs: the folders of the runs.
        code: file of the user's code -> the hashes that it had, in order.
        data: the fingerprints of the data sets.
        environment: versions, devices and settings with which the runs were computed; "differs"
            for one that differs between them.
        lockstep: the version that wrote the claim.
        drawn_by: how a check draws the runs that it computes again.
    """

    format: int
    sweep: str
    verdict: list[str]
    plan: str
    ledger: str
    runs: list[str]
    code: dict[str, list[str]]
    data: list[str]
    environment: dict[str, str]
    lockstep: str
    drawn_by: str


_DRAWN_BY = (
    "the runs with the smallest SHA-256 of the texts: SHA-256 of this file, a public number that"
    " did not exist when it was written, and the name of the run; each followed by a line break"
)


def write_claim(folder: Path, file: Path) -> Claim:
    """Writes a claim about a finished sweep.

    Args:
        folder: of the sweep.
        file: where the claim goes; replaced if it exists.

    Raises:
        UserError: the sweep has not ended, has no ledger or files that disagree, or computes
            several trials at once, so that their bits are not those of a run alone.
    """
    reader = SweepReader(folder)
    if not reader.read().complete:
        raise UserError(
            f"The sweep in {folder} has not ended, and a claim is about all of its runs: compute"
            " the rest first."
        )
    if reader.plan.vmap is not None:
        raise UserError(
            f"The sweep in {folder} computed {reader.plan.vmap} trials at once by vmap, whose bits"
            " are not those of the runs alone: there is nothing to compare with."
        )
    claim = _claim_of(folder, reader.plan, examine(folder))
    replace_file(file, (json.dumps(as_json(claim), indent=1) + "\n").encode())
    return claim


def read_claim(file: Path) -> Claim:
    """Reads a claim; raises UserError if there is none, or it is damaged."""
    try:
        content = read_json(file, dict[str, Any], _ADVICE)
    except FileNotFoundError as error:
        raise UserError(f"There is no file {file}: name the file of a claim.") from error
    if content.get("format") != FORMAT:
        raise UserError(f"{file} is not a claim of format {FORMAT}: {_ADVICE}")
    check_json(content, Claim, file, _ADVICE)
    return as_dataclass(content, Claim)


def _claim_of(folder: Path, plan: Plan, evidence: Evidence) -> Claim:
    """Returns the claim that the files of a sweep support."""
    if evidence.faults:
        first = evidence.faults[0]
        raise UserError(
            f"Files of the sweep in {folder} disagree: {first.file}: {first.why}. `python -m"
            f" trainer sweep check {folder}` names all."
        )
    if not evidence.head:
        raise UserError(
            f"The sweep in {folder} has no ledger.jsonl, so that nothing shows its age."
        )
    verdict, runs = _results(folder)
    return Claim(
        format=FORMAT,
        sweep=folder.absolute().name,
        verdict=verdict,
        plan=plan.digest,
        ledger=evidence.head,
        runs=sorted(runs),
        code={file: list(hashes) for file, hashes in evidence.code.items()},
        data=sorted({str(run.fingerprint.get("data", "")) for run in runs.values()}),
        environment=dict(fingerprint_rows([x for x in runs.values() if x.fingerprint])),
        lockstep=trainer.__version__,
        drawn_by=_DRAWN_BY,
    )


def _results(folder: Path) -> tuple[list[str], dict[str, Result]]:
    """Returns the verdict of a sweep, and its runs that have ended, by their folders."""
    workloads = read_workloads([str(folder)])
    verdict = list(make_report(workloads, folder / "report").verdict)
    every = (run for each in workloads for run in (*each.trials, *each.finals))
    return verdict, {run.name: run for run in every if run.end != "missing"}


@dataclass(frozen=True)
class Recomputed:
    """A run that was computed again.

    Attributes:
        name: its folder in that of the sweep.
        same: whether all rows are equal, bit for bit.
        differing: what the environment of the check has otherwise, as texts.
        largest: the largest relative difference of a value in the first row that differs;
            infinite if only one side has a row or a value.
    """

    name: str
    same: bool
    differing: tuple[str, ...] = ()
    largest: float = 0.0


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        refuted: sentences on what of the claim is not so; empty if nothing was found.
        runs: how many runs the claim is about.
        recomputed: the runs that were computed again.
    """

    refuted: tuple[str, ...]
    runs: int
    recomputed: tuple[Recomputed, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether nothing was refuted, and every drawn run has the same bits."""
        return not self.refuted and all(each.same for each in self.recomputed)


def verify_claim(
    file: Path,
    folder: Path,
    public: str,
    count: int = 3,
    vocabulary: Sequence[str] = (),
    log: Callable[[str], None] = lambda line: None,
) -> Checked:
    """Checks a claim with the folder of its sweep, and computes some of its runs again.

    The files of the folder are compared with the ledger, plan and ledger with the claim, and the
    verdict with the one that the rows give now. If all of that agrees, runs are drawn and computed
    again from their configs.

    Args:
        file: the claim.
        folder: of the sweep.
        public: a number, as text, that nobody knew when the claim was written.
        count: how many runs are computed again.
        vocabulary: packages whose code the configs may call.
        log: takes a line for each run that is computed.

    Raises:
        UserError: a file is missing or damaged, or the plan names other packages.
    """
    claim, plan = read_claim(file), read_plan(folder)
    check_vocabulary(folder, plan, vocabulary)
    verdict, runs = _results(folder)
    refuted = [*_refuted(claim, plan, examine(folder), verdict)]
    if not refuted and sorted(runs) != sorted(claim.runs):
        refuted.append("The folder has other runs than the claim.")
    if refuted:
        return Checked(tuple(refuted), len(claim.runs))
    found = []
    for name in drawn(claim.runs, file.read_bytes(), public, count):
        log(f"Computing {name} again.")
        found.append(_recompute(runs[name], vocabulary))
    return Checked((), len(claim.runs), tuple(found))


def _refuted(claim: Claim, plan: Plan, evidence: Evidence, now: list[str]) -> Iterator[str]:
    """Yields what of a claim the files of a folder do not support; `now` is their verdict."""
    for fault in evidence.faults:
        yield f"{fault.file}: {fault.why}."
    if evidence.faults:
        return
    if plan.digest != claim.plan:
        yield "The plan of the folder is not that of the claim: it is another or extended sweep."
        return
    if evidence.head != claim.ledger:
        yield "The ledger of the folder does not end as that of the claim: results came or went."
    if now != claim.verdict:
        other = next((x for x in now if x not in claim.verdict), "nothing")
        versions = ""
        if trainer.__version__ != claim.lockstep:
            versions = f" (by Lockstep {trainer.__version__}, and the claim is by {claim.lockstep})"
        yield f"The verdict by the rows{versions} is not that of the claim. It is: {other}"


def drawn(runs: Sequence[str], claim: bytes, public: str, count: int) -> list[str]:
    """Draws runs by hashes, so that nobody can choose them who does not know the public number.

    Args:
        runs: the names.
        claim: the content of the file of the claim.
        public: the public number.
        count: how many are drawn; all if there are fewer.
    """
    head = hashlib.sha256(claim).hexdigest()

    def key(name: str) -> str:
        return hashlib.sha256(f"{head}\n{public}\n{name}\n".encode()).hexdigest()

    return sorted(runs, key=key)[:count]


def _recompute(run: Result, vocabulary: Sequence[str]) -> Recomputed:
    """Computes a run again from its config, in a process of its own, and compares the rows."""
    from trainer.diagnose.verify import TrainerProcess

    command = [
        sys.executable,
        "-m",
        "trainer",
        f"--config={(run.folder / 'config.yaml').absolute()}",
    ]
    command += [f"--vocabulary={each}" for each in vocabulary]
    command += [f"--until={run.summary.step}"] if run.end == "pruned" else []
    with tempfile.TemporaryDirectory() as home:
        again = Path(home) / "run"
        with TrainerProcess(command, again) as process:
            # A run that diverged ends so again; any other error says nothing of the claim. One that
            # was pruned stops at the step of its cut.
            process.wait(_EXITS.get(run.end, FAILED))
        record = read_record(again / "run.json")
        changes = compare(run.fingerprint, {} if record is None else record["fingerprint"])
        same, largest = _difference(read_metrics(run.folder), read_metrics(again))
    differing = tuple(str(each) for each in changes if each.key not in OF_CONFIG)
    return Recomputed(run.name, same, differing, largest)


def _difference(theirs: Rows, ours: Rows) -> tuple[bool, float]:
    """Returns whether rows are equal bit for bit, and their largest relative difference.

    It is that of the first row that differs; infinite if only one side has a row or a value.
    """
    found = compare_rows(theirs, ours)
    if found.only_a or found.only_b:
        return False, math.inf
    if found.first is None:
        return True, 0.0
    one, other = (
        next(row for row in rows if row["step"] == found.first) for rows in (theirs, ours)
    )
    return False, max(_relative(one.get(name), other.get(name)) for name in found.names)


def _relative(a: float | None, b: float | None) -> float:
    """Returns the relative difference of two values; infinite if one is none or not finite."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0  # 0.0 and -0.0 differ in bits


def caught(runs: int, forged: int, count: int) -> float:
    """Returns the probability that a draw has at least one of some forged runs.

    It is 1 - C(runs - forged, count) / C(runs, count).

    Example:
        >>> round(caught(10, 1, 3), 12)
        0.3
    """
    return 1 - math.comb(runs - forged, count) / math.comb(runs, count)


def sentences(checked: Checked) -> Iterator[str]:
    """Yields what was checked, what was found, and what remains unknown."""
    if checked.refuted:
        yield from checked.refuted
        yield "Not verified: nothing was computed again."
        return
    yield (
        "The files agree with the ledger, plan and ledger with the claim, and the verdict is the"
        f" one that the rows of {plural(checked.runs, 'run')} give."
    )
    for each in checked.recomputed:
        again = f"{each.name} was computed again"
        size = f"differs by {each.largest:.2g} of a value at most where it first differs"
        if each.same:
            yield f"{again} and has the same bits."
        elif each.differing:
            yield (
                f"{again} and {size}. Here other conditions hold ({'; '.join(each.differing)}),"
                " under which other bits are no sign of a forgery: check it where it was computed."
            )
        else:
            yield (
                f"{again} under the same conditions and {size}: its files are not those of this"
                " config and code."
            )
    if checked.verified:
        yield _power(checked.runs, len(checked.recomputed))


def _power(runs: int, count: int) -> str:
    """Says which forgeries the draw would have missed."""
    found = []
    for part, words in _SHARES:
        forged = max(1, round(runs / part))
        found.append(f"{words} of the runs ({forged}), with {caught(runs, forged, count):.2f}")
    return (
        f"Verified, as far as {plural(count, 'run')} of {runs:,} can: had somebody forged"
        f" {' or '.join(found)} probability one of them would have been drawn."
    )
