"""A challenge: a folder with rules and entries, whose verdicts are computed from their runs.

    CHALLENGE/
      challenge.yaml          the rules: the fields of `Challenge`
      entries/NAME/
        entry.yaml            who made it, and when: the fields of `EntryText`
        sweep/                the folder of a sweep with one arm, its seeds and the challenge's goal

Start with `read_challenge` and `check_entry`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.config import Builder, Config, load
from trainer.config.full import complete
from trainer.config.nodes import plain, with_calls
from trainer.config.tree import Source, leaves
from trainer.config.units import Units
from trainer.config.vocabulary import CHALLENGE
from trainer.config.yaml_reader import read
from trainer.engine import every
from trainer.engine.program import load_located
from trainer.messages import UserError, joined, plural
from trainer.report.panels.targets import NotJudgedError, judge, means
from trainer.report.results import Workload
from trainer.report.sweep_results import read_sweep_results
from trainer.studies.shadow import differing
from trainer.sweep.confounders import WITHOUT_EFFECT
from trainer.sweep.definition import Goal
from trainer.sweep.plan import Plan, PlannedArm
from trainer.sweep.plan_file import check_vocabulary, read_plan
from trainer.sweep.target_rule import EARLIEST, Exchange, Reached, TargetRule, sigma_bound
from trainer.writers.files import read_regular

CHALLENGE_FILE, ENTRY_FILE = "challenge.yaml", "entry.yaml"
# What every entry may change: the optimizer and the length of the run, and what changes neither the
# data nor the model nor what is evaluated. The steps that are evaluated are compared by the rows.
FREE = ("optimizer", "steps", "ema_decay", "eval_every", "train_metrics", *WITHOUT_EFFECT)


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """The rules of a challenge; each field is an argument of the root of challenge.yaml.

    Attributes:
        baseline: the config of a run, or several files of which later ones override earlier ones;
            relative to the file that names them. Entries have its data, batch size, model, loss and
            precision.
        goal: the metric, the target, and the rule by which it is reached, as in a sweep.
        eval_every: after which steps entries are evaluated, as in a run; percentages are those of
            the steps of the entry. None for that of the baseline, which needs the rule
            "earliest_lasting_step": a finer grid is more chances to pass early by the other one.
        seeds: how many runs an entry plans. Runs that are added later count by an e-value.
        title: what the challenge is called.
        free: paths of the baseline that entries may change besides the optimizer and the number of
            steps, such as "model.zero_init".
        exchange: what fewer steps cost, for comparisons of entries; None for no comparisons.

    Raises:
        ValueError: the goal has no rule, or one that needs eval_every.
    """

    baseline: str | Sequence[str]
    goal: Goal
    eval_every: int | str | Mapping[Any, int | str] | None = None
    seeds: int = 8
    title: str = ""
    free: Sequence[str] = ()
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.goal, Goal) or self.goal.target_rule is None:
            raise ValueError(
                "goal needs a rule by which the target is reached, such as {metric: loss, target:"
                " 3.28, sigma: 0.0013}."
            )
        if self.goal.rule == EARLIEST and self.eval_every is None:
            raise ValueError(
                "With the rule earliest_step, each evaluation is a chance to pass: write"
                " eval_every, which fixes the evaluated steps, or take earliest_lasting_step."
            )
        if self.seeds < 1:
            raise ValueError(f"seeds is {self.seeds}, but an entry plans at least 1 run.")


@dataclass(frozen=True)
class Rules:
    """A challenge that was read, from its folder."""

    folder: Path
    challenge: Challenge  # what its file says
    baseline: Config
    rule: TargetRule  # that of the goal

    @property
    def title(self) -> str:
        """What the challenge is called; the name of its folder if the file does not say."""
        return self.challenge.title or self.folder.name

    @cached_property
    def passes(self) -> int:
        """How often a step of the baseline applies the model; it is built and traced once."""
        return passes_of(self.baseline)

    @property
    def entries(self) -> list[Path]:
        """The folders of the entries, by name."""
        return sorted(file.parent for file in self.folder.glob(f"entries/*/{ENTRY_FILE}"))

    def doubting(self, name: str) -> list[Path]:
        """The folders of the entries that doubt one."""
        return [x for x in self.entries if read_entry_text(x).doubts == name]

    def grid(self, steps: int) -> list[int]:
        """The steps after which a run of so many steps is evaluated; raises UserError."""
        convert, given = Units(total_steps=steps).steps, self.challenge.eval_every
        given = complete(self.baseline)[0].kwargs["eval_every"] if given is None else given
        if isinstance(given, Mapping):
            found = {convert(first): convert(interval) for first, interval in given.items()}
        else:
            found = convert(given)
        if (fault := every.wrong(found)) is not None:
            raise UserError(f"The eval_every of {self.folder / CHALLENGE_FILE} {fault}.")
        return sorted({*every.due_steps(found, 0, steps), steps})


@dataclass(frozen=True, kw_only=True)
class EntryText:
    """What entry.yaml says."""

    title: str  # what was done, in a line
    by: str = ""  # who made it
    date: str = ""  # of the runs, such as "2026-06-19"
    # the entry by somebody else that this one runs again, with other seeds; "" for none
    doubts: str = ""


@dataclass(frozen=True)
class Entry:
    """The verdict of an entry."""

    name: str  # of its folder
    text: EntryText
    offences: tuple[str, ...]  # what is against the rules, as whole sentences; empty if nothing is
    # after how many steps its runs have reached the target; None if they cannot be judged
    reached: Reached | None
    changes: tuple[str, ...]  # the paths of the baseline that it changes
    # packages of its own whose functions its config names, and whose code is not checked
    packages: tuple[str, ...]
    # evaluated step -> the mean of its runs; empty if they cannot be judged
    means: Mapping[int, float]

    @property
    def steps(self) -> int | None:
        """The steps to the target, if it keeps the rules and has reached it; None otherwise."""
        return None if self.offences or self.reached is None else self.reached.step


def read_challenge(folder: Path) -> Rules:
    """Reads challenge.yaml and its baseline; raises UserError if one is missing or wrong."""
    file = folder / CHALLENGE_FILE
    if not file.is_file():
        raise UserError(
            f"{folder} is not the folder of a challenge, because it has no {CHALLENGE_FILE}."
        )
    config = with_calls(load([file], language=CHALLENGE), CHALLENGE.nodes)
    builder = Builder(config)
    builder.check()
    challenge = builder.build("")
    names = [challenge.baseline] if isinstance(challenge.baseline, str) else challenge.baseline
    baseline = load([folder / name for name in names])
    check_free(config, challenge.free, baseline)
    rules = Rules(folder.absolute(), challenge, baseline, challenge.goal.target_rule)
    rules.grid(1000)  # raises for an interval that is none
    return rules


def check_entry(rules: Rules, folder: Path, vocabulary: Sequence[str] = ()) -> Entry:
    """Computes the verdict of an entry, CHALLENGE/entries/NAME, from its runs."""
    # It compares the files of the sweep with its ledger, the plan's config with the baseline,
    # default arguments included, and the rows with the target. It does not compute the runs again.
    # `vocabulary` are packages of the entry's own, whose functions its config names. Raises
    # UserError if the folder is not that of an entry, or a file of it cannot be read.
    text = read_entry_text(folder)
    plan = read_plan(folder / "sweep")
    check_vocabulary(folder / "sweep", plan, vocabulary)
    workload = read_sweep_results(folder / "sweep")
    changes, offences = _against_rules(rules, plan.arms, vocabulary)
    offences += _against_goal(rules, plan.revisions)
    offences += _against_seeds(rules, text, workload)
    if text.doubts:
        offences += _against_doubted(rules, text, plan, vocabulary)
    found, values = None, dict[int, float]()
    if len(workload.arms) == 1 and not offences:
        try:
            found = judge(workload, workload.arms[0])
            values = means(workload, workload.arms[0])
            offences += _against_grid(rules, list(values), workload.finals[0].steps)
        except NotJudgedError as error:
            offences.append(str(error))
    if not offences:
        (arm,) = plan.arms.values()
        ours, theirs = passes_of(arm.config, vocabulary), rules.passes
        if ours > theirs:
            offences.append(
                f"A step of it applies the model {ours} times, and one of the baseline"
                f" {'once' if theirs == 1 else f'{theirs} times'}."
            )
    packages = tuple(plan.vocabulary)
    return Entry(folder.name, text, tuple(offences), found, tuple(changes), packages, values)


def read_entry_text(folder: Path) -> EntryText:
    """Reads the entry.yaml of an entry; raises UserError if it is missing or wrong."""
    file = folder / ENTRY_FILE
    known = [field.name for field in dataclasses.fields(EntryText)]
    try:
        node = read(read_regular(file).decode(), Source(str(file), 1))
    except FileNotFoundError as error:
        raise UserError(
            f"{file.parent} is not an entry, because it has no {ENTRY_FILE}: write it with a title,"
            " such as title: Muon with a tuned learning rate."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    content = None if node is None else plain(node)
    if not isinstance(content, dict) or not content.get("title"):
        raise UserError(f"{file} needs a title: title: Muon with a tuned learning rate.")
    for key in content:
        if key not in known:
            raise UserError(f"{file} has {key!r}. There are {joined(known)}.")
    return EntryText(**{key: str(value) for key, value in content.items()})


def check_free(
    config: Config, free: Sequence[str], baseline: Config, vocabulary: Sequence[str] = ()
) -> None:
    """Raises UserError for a path of rules' `free` that their baseline does not have."""
    known = {path for path, _ in leaves(complete(baseline, vocabulary)[0])}
    for path in free:
        if not any(is_under(each, [path]) for each in known):  # it is perhaps misspelt
            source = config.argument_source("free")
            raise UserError(f"{source}: free has {path!r}, which the baseline does not have.")


def is_under(path: str, roots: Sequence[str]) -> bool:
    """Returns whether a path is one of some paths, or below one of them."""
    return any(path == root or path.startswith((f"{root}.", f"{root}[")) for root in roots)


def _against_rules(
    rules: Rules, arms: Mapping[str, PlannedArm], vocabulary: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Compares the configs of the arms with the baseline; returns changed paths and offences."""
    if len(arms) != 1:
        return [], [f"An entry has one arm, and its sweep has {len(arms)}: {joined([*arms])}."]
    (arm,) = arms.values()
    if arm.space:
        return [], [
            f"An entry is one configuration, and its sweep searches {joined([*arm.space])}."
        ]
    found = differing({"baseline": rules.baseline, "entry": arm.config}, vocabulary)
    free = [*FREE, *rules.challenge.free]
    changes = [path for path in found if is_under(path, free)]
    offences = [
        f"It changes {path} from {values['baseline']} to {values['entry']}, which the challenge"
        " does not allow."
        for path, values in found.items()
        if path not in changes
    ]
    return changes, offences


def _against_doubted(
    rules: Rules, text: EntryText, plan: Plan, vocabulary: Sequence[str]
) -> Iterator[str]:
    """Compares an entry with the one that it doubts: somebody else runs it again on other seeds."""
    if (folder := rules.folder / "entries" / text.doubts) not in rules.entries:
        yield f"It doubts {text.doubts}, which is no entry."
        return
    older, by = read_plan(folder / "sweep"), read_entry_text(folder).by
    if text.by.strip().casefold() in ("", by.strip().casefold()):
        yield f"It doubts {text.doubts}, and its by must name somebody else than {by!r}."
    if common := sorted({*plan.seeds} & {*older.seeds}):
        yield (
            f"It doubts {text.doubts}, and must have other seeds: both have"
            f" {joined([*map(str, common)], 4)}. List seeds that follow each other."
        )
    arms = {"it": [*plan.arms.values()][0], "old": [*older.arms.values()][0]}
    unlike = differing({name: arm.config for name, arm in arms.items()}, vocabulary)
    if unlike := [path for path in unlike if not is_under(path, WITHOUT_EFFECT)]:
        yield f"It doubts {text.doubts}, and its config has another {joined(unlike, 4)}."


def _against_grid(rules: Rules, evaluated: Sequence[int], steps: int) -> Iterator[str]:
    """Compares the evaluated steps with those that the challenge fixes, up to a divergence."""
    wanted = [step for step in rules.grid(steps) if step <= evaluated[-1]]
    if evaluated != wanted:
        yield (
            f"It was evaluated after steps {joined([*map(str, evaluated)], 4)}, and by the"
            f" eval_every of the challenge these are {joined([*map(str, wanted)], 4)}."
        )


def _against_goal(rules: Rules, revisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compares the goal of the sweep with that of the challenge."""
    found: list[str] = []
    goal, ours = rules.challenge.goal, dict(revisions[0]["goal"])
    for name in ("metric", "mode", "select_on", "target", "rule", "sigma"):
        value = goal.better if name == "mode" else getattr(goal, name)
        if ours.get(name) != value:
            found.append(
                f"The goal of its sweep has {name} {ours.get(name)}, and that of the challenge has"
                f" {value}."
            )
    if any(revision["goal"] != ours for revision in revisions) and not found:
        found.append("The goal of its sweep was changed when results were known.")
    return found


def _against_seeds(rules: Rules, text: EntryText, workload: Workload) -> Iterator[str]:
    """Compares the seeds with those counted from the baseline's, or of a doubt from its first."""
    seeds = sorted(run.seed for run in workload.finals)
    first = seeds[0] if text.doubts and seeds else rules.baseline.root.kwargs.get("seed", 0)
    wanted = list(range(first, first + max(1, len(seeds))))
    asked, planned = rules.challenge.seeds, workload.revisions[0].units
    if planned != asked:
        yield (
            f"Its sweep planned {plural(planned, 'run')}, and the challenge asks for {asked}: write"
            f" seeds: {asked}. Runs that are added later count by an e-value."
        )
    if seeds != wanted:
        yield (
            f"Its seeds are {joined([*map(str, seeds)], 8)}, and must be counted from {first},"
            f" {'the first of them' if text.doubts else 'the seed of the baseline'}."
        )


def sigma_of(folder: Path) -> str:
    """Says which sigma a rule may have, from the runs of a sweep with one configuration."""
    # The runs count for no entry. Raises UserError if there are several configurations, too few
    # runs, or one that diverged.
    workload = read_sweep_results(folder)
    if len(workload.arms) != 1 or len({run.number for run in workload.finals}) != 1:
        raise UserError(f"sigma is that of one configuration, and {folder} has several.")
    row = workload.goal.selected
    values = workload.values_of(workload.arms[0], row)
    try:
        bound = sigma_bound(values)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error
    return (
        f"sigma: {bound:.3g}, the upper 90% bound from the last {row} of {len(values)} runs, whose"
        f" standard deviation is {float(np.std(values, ddof=1)):.3g}."
    )


def passes_of(config: Config, vocabulary: Sequence[str] = ()) -> int:
    """Returns how often the model is applied while a step is traced, as a lower bound."""
    # An optimizer that asks for the loss or the gradient at other parameters, such as a line search
    # or SAM, applies it again. A loop that applies it counts once each time its body is traced.
    program = load_located(config, vocabulary, declared=True)
    state = program.abstract_state()
    counting = _Counting(program.experiment.model)
    object.__setattr__(program.experiment, "model", counting)  # a frozen dataclass
    jax.eval_shape(program.traced_step, state, program.feed.abstract_batch())
    return counting.count


class _Counting:
    """A model that counts how often it is applied in training."""

    def __init__(self, model: Any):
        self._model, self.count = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the model."""
        self.count += bool(kwargs.get("train"))
        return self._model.apply(*args, **kwargs)
