"""What a claim is about: the runs of a sweep that has ended, or of a referee that is finished.

A referee is many sweeps. What its ledger says of them is checked here: that each had these results
when its try ended, that it compares the config of the try with its baseline, on seeds that follow
from the secret, and that the try changed no more than it may.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from trainer import config as configs
from trainer.messages import UserError, joined
from trainer.report.comparison import make_report, read_workloads
from trainer.report.results import Result
from trainer.report.sweep_results import read_sweep_results
from trainer.studies import referee_code, referee_tries, shadow
from trainer.studies.referee import BASELINE, RULES_FILE, TRY, Judge, read_judge
from trainer.studies.referee_page import check_verdicts, found_sentences
from trainer.studies.referee_runs import Runner
from trainer.sweep.definition import Goal
from trainer.sweep.evidence import Evidence, examine
from trainer.sweep.ledger import sha256
from trainer.sweep.plan import Plan
from trainer.sweep.plan_file import read_plan
from trainer.train.signals import StopSignals
from trainer.writers.files import read_regular


class SweepOfClaim(NamedTuple):
    """A sweep of those that a claim is about."""

    folder: Path
    plan: Plan
    evidence: Evidence
    runs: Mapping[str, Result]  # those that have ended, by their names in the claim
    prefix: str = ""  # of these names, before the folder of the run in that of the sweep
    code: Path | None = None  # from which its runs import packages; None for as here


@dataclass(frozen=True)
class Subject:
    """What a claim is about."""

    verdict: list[str]  # the sentences of its report
    plan: str  # the digest of the plan; the hash of the rules of a referee
    ledger: str  # the last hash of its ledger
    parts: Sequence[SweepOfClaim]
    compared: Set[str] = frozenset()  # the runs that are compared, of a sweep
    winners: Set[str] = frozenset()  # the trials by which a point won its search, of a sweep
    judge: Judge | None = field(default=None, repr=False)  # of a referee

    @property
    def runs(self) -> dict[str, Result]:
        """All runs that have ended, by their names in the claim."""
        return {name: run for part in self.parts for name, run in part.runs.items()}


def read_subject(folder: Path, vocabulary: Sequence[str] = ()) -> Subject:
    """Reads what a claim about a folder is about; UserError if it is neither, or cannot be read."""
    if is_referee(folder):
        signals = StopSignals()  # of workers, which a reader does not start
        judge = read_judge(folder, Runner(Goal(), vocabulary, 1, signals, lambda line: None))
        return _referee(judge)
    plan = read_plan(folder)
    workloads = read_workloads([str(folder)])
    every = [run for each in workloads for run in (*each.trials, *each.finals)]
    runs = {run.name: run for run in every if run.end != "missing"}
    evidence = examine(folder)
    return Subject(
        verdict=list(make_report(workloads, folder / "report").verdict),
        plan=plan.digest,
        ledger=evidence.ledger.head,
        parts=[SweepOfClaim(folder, plan, evidence, runs)],
        compared={run.name for each in workloads for run in each.finals},
        winners={
            run.name
            for each in workloads
            for run in each.trials
            if each.winners.get((run.arm, run.search)) == run.number
        },
    )


def is_referee(folder: Path) -> bool:
    """Returns whether a folder is that of a referee, and not of a sweep."""
    return (folder / RULES_FILE).exists()


def _referee(judge: Judge) -> Subject:
    parts, ends = [], _ends(judge)
    for name, code in _codes(judge).items():
        if name not in ends:
            continue
        folder, prefix = judge.folder / name, f"{name}/"
        every = [replace(x, name=prefix + x.name) for x in read_sweep_results(folder).trials]
        runs = {run.name: run for run in every if run.end != "missing"}
        copy = referee_code.copy_of(judge.folder, code)
        parts.append(SweepOfClaim(folder, read_plan(folder), examine(folder), runs, prefix, copy))
    rules = sha256(read_regular(judge.folder / RULES_FILE))
    return Subject(found_sentences(judge), rules, judge.ledger.head, parts, judge=judge)


def _codes(judge: Judge) -> dict[str, str]:
    """Returns the hash of the code of each sweep that a referee may have, by its path."""
    codes = {"noise": judge.code(0)}
    for each in judge.tries:
        place = judge.place(each)
        codes |= {_name(judge, place / "screen"): each.code}
        sweeps = judge.sweeps(place / "pairs", each.baseline, each.code)
        codes |= {_name(judge, folder): code for folder, (_, code) in sweeps.items()}
    sweeps = judge.sweeps(judge.folder / "finish", 0, judge.code(len(judge.keeps)))
    codes |= {_name(judge, folder): code for folder, (_, code) in sweeps.items()}
    return codes


def _name(judge: Judge, folder: Path) -> str:
    return folder.relative_to(judge.folder).as_posix()


def _ends(judge: Judge) -> dict[str, str]:
    """Returns the path of each sweep -> the last hash that its ledger had when it had ended."""
    found: dict[str, str] = {}
    for entry in judge.ledger.entries:
        found |= entry.content.get("sweeps", {})
    return found


def wrong_of_referee(subject: Subject) -> Iterator[str]:
    """Yields what the ledger of a referee says of its tries and is not so."""
    # It is a generator, because what is further down takes longer.
    judge = subject.judge
    if judge is None:
        return
    ends, parts = _ends(judge), {part.prefix.rstrip("/"): part for part in subject.parts}
    there = {x for x in _codes(judge) if (judge.folder / x / "plan.json").exists()}
    for name in sorted(ends.keys() ^ there):
        yield f"Either the sweep {name} is missing, or the line of ledger.jsonl with its end."
    for name, part in parts.items():
        if ends[name] not in [x.content["hash"] for x in part.evidence.ledger.entries]:
            yield f"{name}/ledger.jsonl lacks the line with which it ended, by that of the referee."
    try:
        check_verdicts(judge)
        for number in range(len(judge.keeps) + 1):
            judge.baseline(number)
    except UserError as error:
        yield str(error)
    if judge.decided > judge.rules.most_tries:
        yield f"It has decided {judge.decided} tries, and its rules allow {judge.rules.most_tries}."
    yield from _other_seeds(judge)
    for part in parts.values():
        yield from _other_configs(judge, part)
    yield from _not_allowed(judge)


def _other_seeds(judge: Judge) -> Iterator[str]:
    """Yields which seeds do not follow from the secret and the ledger."""
    secret = referee_tries.read_secret(judge)
    used = {*read_plan(judge.folder / "noise").seeds}
    lines: dict[int, str] = {}
    counts: dict[int, int] = {}
    for entry in judge.ledger.entries:
        content = entry.content
        if entry.event == "try":
            lines[content["number"]] = content["hash"]
        elif entry.event in ("seeds", "finish"):
            number = content.get("number", 0)
            line = lines.get(number, "") if number else f"finish {content['before']}"
            seeds, first = content["seeds"], counts.get(number, 0)
            if [*referee_tries.seeds_from(secret, line, len(seeds), first, used)] != seeds:
                yield f"line {entry.line} of ledger.jsonl has seeds that the secret does not give."
            counts[number] = first + len(seeds)


def _other_configs(judge: Judge, part: SweepOfClaim) -> Iterator[str]:
    """Yields which runs of a sweep have other configs, or seeds, than those of their try."""
    name = part.prefix.rstrip("/")
    if name == "noise":
        arms, seeds = {BASELINE: judge.baseline(0)}, part.plan.seeds
    elif name.startswith("finish"):
        arms = {BASELINE: judge.baseline(0), TRY: judge.baseline(len(judge.keeps))}
        seeds = judge.ledger.of("finish")[0].content["seeds"]
    else:
        each = judge.tries[int(name.split("/")[1]) - 1]
        arms = {BASELINE: judge.baseline(each.baseline), TRY: judge.config(each)}
        seeds = part.plan.seeds if name.endswith("screen") else each.seeds
    if {*part.plan.seeds} != {*seeds}:
        yield f"{name} has other seeds than those that were drawn for it."
    # Only `referee finish` evaluates more than the split that decides.
    splits = {} if name.startswith("finish") else {"eval_splits": [judge.rules.goal.select_on]}
    for trial in part.plan.trials:
        if trial.arm not in arms:
            yield f"{name} computes {trial.arm}, which is not part of a try."
            return
        wanted = configs.load([arms[trial.arm]]).root
        kwargs = {**wanted.kwargs, **splits, "seed": trial.seed}
        if unlike := configs.diff(configs.Call(wanted.name, kwargs), trial.config.root):
            yield f"{name} computes another config than the try has: {unlike[0]}."
            return


def _not_allowed(judge: Judge) -> Iterator[str]:
    """Yields which tries change what they must not, or otherwise than the ledger says."""
    for each in judge.tries:
        files = {BASELINE: judge.baseline(each.baseline), TRY: judge.config(each)}
        both = {arm: configs.load([file]) for arm, file in files.items()}
        try:
            try:
                found = referee_tries.changes_of(judge, each.baseline, both[TRY], each.code)
            except configs.ConfigError:
                # A function of a package is not there, or not any more.
                differing = shadow.differing(both, judge.runner.vocabulary, keep_unknown=True)
                referee_tries.refuse_arguments(judge, differing)
            else:
                if found != [*each.changes]:
                    yield f"Try {each.number} does not change {joined(each.changes)}."
        except UserError as error:
            yield f"Try {each.number}: {error}"
