"""A referee: keeps or discards changes to a config, at a known rate of false keeps.

    JUDGE/
      referee.yaml       the rules: the fields of `Referee`
      secret             from which the seeds are drawn that decide
      ledger.jsonl       what was tried, on which seeds, and what came of it
      baselines/0000.yaml  the config to beat, and after each keep the next one
      code/              copies of the user's packages, by their hashes; see `referee_code`
      noise/             a sweep: the first baseline, before any try
      tries/0001/        config.yaml, and two sweeps: screen/, on known seeds, and pairs/
      finish/            a sweep: the first baseline and the last, on fresh seeds

If code differs between the runs of pairs, those of the baseline are a sweep of their own, beside:
pairs_baseline/ and finish_baseline/.

A try is a file that is laid over the baseline. First a few pairs of runs on known seeds show
whether it is worth more. Then its seeds are drawn, when the hash of its config is in the ledger:
both configs train on each, until the e-value of the pairs decides (`report.statistics.keeps`).
`referee_tries` does all this; `Judge` reads what is in the folder.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config import Builder, Config, load
from trainer.config.nodes import with_calls
from trainer.config.vocabulary import REFEREE
from trainer.messages import UserError, joined
from trainer.report.results import Result
from trainer.report.statistics.decide import needed_range
from trainer.report.statistics.estimates import Estimate, direction, mean_interval, spread
from trainer.report.statistics.keeps import Levels, pairs_needed
from trainer.studies.referee_runs import Runner
from trainer.sweep.definition import Goal
from trainer.sweep.ledger import LEDGER_FILE, Ledger, read_ledger, sha256
from trainer.writers.files import read_regular
from trainer.writers.lines import PREFIXES

RULES_FILE = "referee.yaml"
BASELINE, TRY = "baseline", "try"
FIRST = "baselines/0000.yaml"
EVENTS: Mapping[str, Mapping[str, type]] = {
    "start": {"rules": str, "baseline": str, "code": str, "secret": str, "sweeps": dict},
    "try": {
        "number": int,
        "config": str,
        "code": str,
        "baseline": int,
        "note": str,
        "changes": list,
    },
    "seeds": {"number": int, "seeds": list},
    "end": {"number": int, "verdict": str, "stage": str, "why": str, "sweeps": dict},
    "finish": {"seeds": list},
    "finished": {"sweeps": dict},
}
FIXED = ("steps", "eval_every")  # of what an entry of a challenge may change, a try may not


@dataclass(frozen=True, kw_only=True)
class Referee:
    """The rules of a referee; each field is an argument of the root of its file.

    Attributes:
        baseline: the config of a run, or several files of which later ones override earlier ones;
            relative to the file that names them.
        goal: the metric, on the validation split, and `relevant`, by how much a typical run with
            a change must be better for the change to be kept.
        pairs: how many pairs of runs a try may have at most, each with the change and without.
        most_tries: how many tries may be decided by pairs; those that the screen discards do not
            count. More tries need more pairs for each.
        error: the expected share of keeps that are false, at most.
        screen: how many pairs on known seeds a try must first win by `relevant` in the mean; 0 for
            none. What it discards is cheap, and what it lets through is decided by other runs.
        noise: how many runs of the baseline tell how far runs differ, before the first try.
        free: paths of the baseline that tries may change besides the optimizer, such as
            "model.zero_init". The data, the loss and the metrics are compared between tries, and
            are best left alone.
        most_flops: how many times the floating-point operations of a run of the first baseline one
            with changes may take.
        title: what is optimized.

    Raises:
        ValueError: the goal lacks `relevant` or is about the test split, or a number is too small.
    """

    baseline: str | Sequence[str]
    goal: Goal
    pairs: int
    most_tries: int
    error: float = 0.1
    screen: int = 4
    noise: int = 8
    free: Sequence[str] = ()
    most_flops: float = 1.25
    title: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.goal, Goal) or self.goal.relevant is None:
            raise ValueError(
                "goal needs relevant, the smallest improvement that matters, such as {metric:"
                " loss, relevant: 0.01}: without it, many tiny keeps would hide false ones."
            )
        if self.goal.select_on != "validation":
            raise ValueError(
                "goal has select_on: test, but a referee decides on the validation split: test data"
                " are seen once, by `referee finish`. Give the data set a validation split."
            )
        if not 0 < self.error < 1:
            raise ValueError(f"error is {self.error:g}, but it is a share between 0 and 1.")
        if not 0 <= self.screen <= self.noise or self.noise < 4:
            raise ValueError(
                f"noise is {self.noise} and screen {self.screen}: at least 4 runs tell the noise,"
                " and the screen takes the first of them."
            )
        for name in ("pairs", "most_tries"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        if wrong := {"seed", "eval_splits", *FIXED} & {*self.free}:
            raise ValueError(f"free has {joined(sorted(wrong))}, which the referee sets.")


class TryPairs(NamedTuple):
    """The pairs of a try, in the order in which its seeds were drawn."""

    seeds: tuple[int, ...]
    gains: tuple[float, ...]  # by how much the run with the change is better; -inf if it diverged
    failed: str = ""  # a run with the change that failed; "" if none did


@dataclass(frozen=True)
class Try:
    """A try, as the ledger has it."""

    number: int  # from 1
    config: str  # the hash of its config
    code: str  # that of the copy of the user's code, "" if there is none
    baseline: int  # the number of the baseline that it was laid over
    note: str
    changes: tuple[str, ...]  # such as "optimizer.learning_rate: 0.001 -> 0.02"
    line: str  # the hash of its line in the ledger, with which its seeds are drawn
    levels: Levels
    seeds: tuple[int, ...] = ()  # those that decide, as far as they are drawn
    verdict: str = ""  # "keep", "discard", "undecided"; "" while it is judged
    stage: str = ""  # what decided: "plan", "screen" or "pairs"
    why: str = ""  # as a sentence


class Gain(NamedTuple):
    """How much better the last baseline is than the first in a metric, on fresh seeds."""

    row: str  # the name of the metric in metrics.jsonl
    improvement: Estimate  # the mean over pairs
    first: float  # the mean of the first baseline
    last: float  # that of the last one


@dataclass(frozen=True)
class Judge:
    """Reads the folder of a referee."""

    folder: Path
    runner: Runner
    rules: Referee

    @property
    def now(self) -> "Judge":
        """The same referee, with what happened since this one was read."""
        return replace(self)

    @cached_property
    def ledger(self) -> Ledger:
        """What happened; raises UserError if it was changed."""
        ledger = read_ledger(self.folder, EVENTS)
        if ledger.damage:
            raise UserError(f"{self.folder / LEDGER_FILE}: {ledger.damage}. Restore the file.")
        (started,) = ledger.of("start")[:1] or [None]
        found = sha256(read_regular(self.folder / RULES_FILE))
        if started is None or started.content["rules"] != found:
            raise UserError(
                f"{self.folder / RULES_FILE} was changed since the referee was started, and the"
                " tries before were judged by the old rules: restore it, or start another referee."
            )
        return ledger

    @cached_property
    def tries(self) -> list[Try]:
        """The tries, in their order; the last one may not have ended."""
        found: list[Try] = []
        for entry in self.ledger.entries:
            content = entry.content
            if entry.event == "try":
                names = ("number", "config", "code", "baseline", "note")
                given = {name: content[name] for name in names}
                levels = self._levels(found)
                changes, line = tuple(content["changes"]), content["hash"]
                found.append(Try(**given, changes=changes, line=line, levels=levels))
            elif entry.event == "seeds":
                found[-1] = replace(found[-1], seeds=(*found[-1].seeds, *content["seeds"]))
            elif entry.event == "end":
                given = {x: content[x] for x in ("verdict", "stage", "why")}
                found[-1] = replace(found[-1], **given)
        return found

    def _levels(self, tries: Sequence[Try]) -> Levels:
        keeps = sum(each.verdict == "keep" for each in tries)
        return Levels.of(self.rules.error, self.rules.most_tries, keeps)

    @property
    def next_levels(self) -> Levels:
        """The levels of the next try."""
        return self._levels(self.tries)

    @property
    def keeps(self) -> list[Try]:
        """The tries that were kept."""
        return [each for each in self.tries if each.verdict == "keep"]

    @property
    def decided(self) -> int:
        """How many tries were decided by pairs, of at most `most_tries`."""
        return sum(bool(each.seeds) for each in self.tries)

    def baseline(self, number: int) -> Path:
        """Returns the file of a baseline; raises UserError if it was changed."""
        file = self.folder / f"baselines/{number:04}.yaml"
        kept = self.keeps[number - 1].config if number else None
        wanted = kept or self.ledger.of("start")[0].content["baseline"]
        if sha256(read_regular(file)) != wanted:
            raise UserError(f"{file} was changed: restore it, or start another referee.")
        return file

    def place(self, each: Try) -> Path:
        """Returns the folder of a try."""
        return self.folder / f"tries/{each.number:04}"

    def config(self, each: Try) -> Path:
        """Returns the config of a try; raises UserError if it was changed."""
        file = self.place(each) / "config.yaml"
        if sha256(read_regular(file)) != each.config:
            raise UserError(f"{file} was changed after its hash was written: restore it.")
        return file

    def code(self, number: int) -> str:
        """Returns the hash of the user's code with which a baseline runs; "" if there is none."""
        start = self.ledger.of("start")[0].content["code"]
        return self.keeps[number - 1].code if number else start

    def sweeps(self, folder: Path, number: int, code: str) -> dict[Path, tuple[list[str], str]]:
        """Returns folder -> arms and code of the sweeps that compare a baseline with a change."""
        # A process computes with one state of the code.
        first = self.code(number) or code
        if first == code:
            return {folder: ([BASELINE, TRY], code)}
        return {folder: ([TRY], code), _beside(folder): ([BASELINE], first)}

    def both(self, folder: Path) -> tuple[dict[int, Result], dict[int, Result]]:
        """Returns seed -> run that has ended, of the baseline and of the change."""
        runs: dict[str, dict[int, Result]] = {BASELINE: {}, TRY: {}}
        for each in (folder, _beside(folder)):
            if (each / "plan.json").exists():
                runs |= self.runner.runs(each)
        return runs[BASELINE], runs[TRY]

    def pairs(self, each: Try) -> TryPairs:
        """Returns the pairs of a try up to the first one that has not ended."""
        # Not all that have ended: which runs end first may depend on how they go. A run of the
        # baseline that failed has to be computed again.
        first, second = self.both(self.place(each) / "pairs")
        ended = {x for x in first.keys() & second.keys() if first[x].end != "failed"}
        seeds = (*itertools.takewhile(ended.__contains__, each.seeds),)
        gains = tuple(self.runner.gain(first[x], second[x]) for x in seeds)
        failed = (run.name for run in second.values() if run.end == "failed")
        return TryPairs(seeds, gains, next(failed, ""))

    def verdict_of(self, each: Try) -> tuple[str, int, int]:
        """Computes the verdict of a try from its runs again, with its wins and losses."""
        pairs = self.pairs(each)
        verdict, wins, losses = each.levels.judge(self.won(gain) for gain in pairs.gains)
        return "discard" if pairs.failed else verdict, wins, losses

    def won(self, gain: float) -> bool:
        """Returns whether a pair with this improvement is won."""
        assert self.rules.goal.relevant is not None  # `Referee` requires it
        return gain > self.rules.goal.relevant

    def gains(self) -> list[Gain]:
        """Returns the gain of all keeps together on each split; nothing before `finish`."""
        if not (finished := self.ledger.of("finish")):
            return []
        both, found = self.both(self.folder / "finish"), list[Gain]()
        seeds = [x for x in finished[0].content["seeds"] if all(x in runs for runs in both)]
        for split in PREFIXES:
            row = replace(self.rules.goal, select_on=split).row
            values = [[runs[x].value(row) for x in seeds] for runs in both]
            if seeds and None not in (*values[0], *values[1]):
                first, last = np.asarray(values, np.float64)
                improvement = mean_interval(direction(self.rules.goal.better) * (first - last))
                found.append(Gain(row, improvement, float(first.mean()), float(last.mean())))
        return found


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}_{BASELINE}")


class Noise(NamedTuple):
    """How far runs of the first baseline differ, and how many pairs that takes."""

    deviation: float  # of the difference of two runs of different seeds
    runs: int
    needed: int | None  # pairs for an improvement of twice `relevant`; None if over 1,000

    @property
    def sentence(self) -> str:
        """Says how many pairs an improvement takes."""
        start = (
            f"Two of {self.runs} runs of the baseline differ by {self.deviation:.3g} (standard"
            " deviation). A change that is better by twice `relevant` is kept with a probability"
        )
        if self.needed is None:
            return f"{start} of .8 after more than 1,000 pairs."
        low, high = needed_range(self.needed, self.runs - 1)
        return (
            f"{start} of .8 after {self.needed} pairs; so few runs say that no better than {low} to"
            f" {high}."
        )


def noise_of(judge: Judge) -> Noise:
    """Returns the noise of the runs of the first baseline; raises UserError if one did not end."""
    rules, folder = judge.rules, judge.folder / "noise"
    runs = judge.runner.runs(folder)[BASELINE].values()
    values = [run.value(rules.goal.row) for run in runs]
    if wrong := [run for run, value in zip(runs, values, strict=True) if value is None]:
        raise UserError(
            f"{wrong[0].name} in {folder} {wrong[0].end}, but every run of the baseline must end"
            " with a finite metric before changes can be compared with it."
        )
    # Equal seeds make the difference of a pair smaller, if anything.
    deviation = math.sqrt(2) * spread(np.asarray(values, np.float64))
    effect = rules.goal.relevant / deviation if deviation and rules.goal.relevant else math.inf
    first = Levels.of(rules.error, rules.most_tries, 0)
    return Noise(deviation, len(values), pairs_needed(first, effect))


def read_judge(folder: Path, runner: Runner) -> Judge:
    """Returns the referee in a folder; `goal` of the runner is replaced by that of its rules."""
    file = folder / RULES_FILE
    if not (folder / LEDGER_FILE).is_file() or not file.is_file():
        raise UserError(
            f"{folder} is not the folder of a referee: start one with python -m trainer referee"
            " start --config=FILE --workdir=FOLDER."
        )
    rules = build_rules(load([file], language=REFEREE))
    return Judge(folder.absolute(), replace(runner, goal=rules.goal), rules)


def build_rules(config: Config) -> Referee:
    """Builds the rules from a config of the language `REFEREE`; raises ConfigError."""
    builder = Builder(with_calls(config, REFEREE.nodes))
    builder.check()
    return builder.build("")
