"""The results that a report compares: those of a sweep, or of single runs grouped by config."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.config import Call, Tree
from trainer.engine.examples import Examples
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.halving import Cut
from trainer.sweep.ladder import PlannedLadder
from trainer.sweep.methods import Cuts
from trainer.sweep.per_example_file import read_examples
from trainer.sweep.target_rule import TargetRule
from trainer.sweep.tuned import Linked
from trainer.writers import iterate_metrics
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import ENDS, Summary

SECONDS = "perf/seconds"


@dataclass(frozen=True)
class Curve:
    """A metric of a run at its evaluations."""

    steps: NDArray[np.float64]  # number of updates before each evaluation
    values: NDArray[np.float64]
    seconds: NDArray[np.float64]  # training time until then; NaN where it was not recorded


MISSING = Summary("missing", step=0)


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str  # its folder in that of the sweep, as "final/muon/10000"; or that of a single run
    folder: Path
    arm: str
    seed: int
    number: int | None  # of its point in the space of the arm; None for a single run
    summary: Summary = MISSING  # its summary.json; its `end` is "missing" if it has not ended
    steps: int = 0  # the last step that was planned
    first_step: int = 0  # that of the state it began with: 0, unless it continued another run
    flops: float | None = None  # floating-point operations of a step; None if they are not known
    values: Mapping[str, Tree] = field(default_factory=dict)  # path -> value, of the searched axes
    retries: int = 0  # how often it was started again after an interruption
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # what its bits depend on
    search: int = 0  # the number of its search, from 0
    side_by_side: int = 1  # how many trials shared its wave
    load: float | None = None  # the load average per core when it ended; None if unknown
    began: str = ""  # when its first process began, in UTC; "" if unknown
    code_changed: bool = False  # whether it was resumed with changed code of the user

    @property
    def end(self) -> str:
        """How it ended: "done", "diverged", "failed" or "pruned"; "missing" if it has not."""
        return self.summary.end

    @property
    def planned(self) -> int:
        """How many updates were planned."""
        return self.steps - self.first_step

    @property
    def updates(self) -> int:
        """How many updates it made."""
        return max(0, self.summary.step - self.first_step)

    def value(self, row: str) -> float | None:
        """Returns the last value of a metric, by its name in metrics.jsonl; None if it has none."""
        # It is None if the run has not ended, diverged, failed, or has no finite value. The names
        # that begin with perf/ are fields of `summary`.
        return self.summary.value(row)


@dataclass(frozen=True)
class Goal:
    """The metric by which runs are compared."""

    metric: str  # the name without a split: "loss"
    better: Literal["min", "max"]
    select_on: str  # the split of the selection of winners, of learning curves and of targets
    report_on: str  # the split on which arms are compared
    target: float | None = None  # a value of the metric; None if there is none
    relevant: float | None = None  # the smallest difference that matters; None if not known
    primary: str = ""  # the metric by which winners were selected, if it is another one
    # by which an arm has reached the target; None if the plan had none before its results
    rule: TargetRule | None = None

    @property
    def selected(self) -> str:
        """The name in metrics.jsonl of the metric on the split of the selection."""
        return PREFIXES[self.select_on] + self.metric

    @property
    def reported(self) -> str:
        """The name in metrics.jsonl of the metric on the split of the report."""
        return PREFIXES[self.report_on] + self.metric

    @property
    def sign(self) -> int:
        """1 if the smallest value is the best, or else -1."""
        return 1 if self.better == "min" else -1

    def gain(self, low: float, high: float) -> tuple[float, float]:
        """Returns the interval of an improvement, which is positive, from that of a difference."""
        return (-high, -low) if self.sign > 0 else (low, high)

    @property
    def words(self) -> str:
        """What is reported, such as "loss on the test split"."""
        return f"{self.metric} on the {self.report_on} split"


@dataclass(frozen=True)
class Space:
    """The search space of an arm."""

    method: str = ""  # how its points were chosen, such as "sobol, seed 0"
    # config path -> the space as text, such as "log_uniform 0.001 to 0.1"
    axes: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False  # whether points were chosen by the results of earlier ones


@dataclass(frozen=True)
class Revision:
    """One revision of the plan of a sweep."""

    number: int  # from 1
    digest: str  # the SHA-256 of the revision
    trials: Mapping[str, int]  # arm -> how many runs it added
    known: int | None  # how many runs were finished when it was made; None for the first
    winners_known: bool  # whether the winners were chosen by then
    # whether winners were chosen or compared runs (with new searches: trials of two arms) had ended
    compared_known: bool
    changes: tuple[str, ...] = ()  # other changes of the plan, such as "goal: ..."
    arms: tuple[str, ...] = ()
    units: int = 0  # how many units it has: searches, or final seeds if each arm is searched once
    new_winners: tuple[str, ...] = ()  # arms with another compared configuration than before
    # arm -> how many points it added to the searches of the arm; absent if none
    points: Mapping[str, int] = field(default_factory=dict)
    spaces: Mapping[str, Space] = field(default_factory=dict)  # arm -> that of those points


def planned_revision(revisions: Sequence[Revision]) -> Revision:
    """Returns the last revision before any compared run was known: all until it are one plan."""
    return [*itertools.takewhile(lambda each: not each.compared_known, revisions)][-1]


@dataclass(frozen=True)
class Workload:
    """What one sweep computed, or a set of single runs."""

    name: str  # for headings: the name of the sweep's folder
    path: Path | None  # None for single runs
    goal: Goal
    arms: tuple[str, ...]  # in the order of the file
    trials: tuple[Result, ...]  # the runs of the search; empty for single runs
    finals: tuple[Result, ...]  # what is compared: winners on fresh seeds, or single runs
    spaces: Mapping[str, Space]
    # arm and search -> the number of its best point; absent if it has none
    winners: Mapping[tuple[str, int], int]
    revisions: tuple[Revision, ...] = ()
    completed: int = 0  # the last revision of which all runs have ended; 0 if none has
    searches: int = 1  # how many independent searches each arm has
    # the searches, or the final seeds, in the order of the plan; empty for single runs
    units: tuple[int, ...] = ()
    looks: str = "planned"  # "planned" or "any", as the file has it
    skewed: bool = False  # whether the file says that differences may be skewed
    # final runs of earlier winners, which other points replaced when the sweep was extended
    replaced: tuple[Result, ...] = ()
    budgets: str = "equal"  # "equal", or "unequal" if the file allows it
    missing: tuple[str, ...] = ()  # sentences about what is not computed yet
    # files of the sweep or of the runs that disagree, each with what is wrong
    faults: tuple[str, ...] = ()
    # name in the user's code -> the hashes that it had, in order, as far as a ledger has them
    code: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # trials computed again after their results had been removed -> whether these were failures
    again: Mapping[str, bool] = field(default_factory=dict)
    # arm -> its metrics before the first step, by their names in rows, as far as they are known
    initial: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()  # further packages whose functions the configs name
    configs: Mapping[str, Call] = field(default_factory=dict)  # by arm, without values of trials
    # arm -> sentences of its plan about what is probably a mistake in its config
    warnings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # arm -> the paths that an entry of its space sets together, by revision; see `sweep.tuned`
    linked: Mapping[str, Sequence[Linked]] = field(default_factory=dict)
    # "seeds" or "final seeds" -> those that the file lists, where it does not count them
    listed_seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # kinds of differences between arms that the file named before any compared run was known
    differs: Sequence[str] = ()
    # sentences on what the ledger does not show, and what the file changed too late
    caveats: tuple[str, ...] = ()
    # why runs of sweeps that a user named are not judged, in a sentence; "" if they may be
    picked: str = ""
    # the arm with which the others, without one of its parts, are compared; "" for all pairs
    ablated: str = ""
    # arms of a whole ladder have the names of the plan, such as "muon@2x"; see `on_rungs`
    ladder: PlannedLadder | None = None
    rung: str = ""  # of a ladder, such as "2x", which follows the names of the arms in the plan
    families: int = 1  # among how many workloads of the sweep the error of a verdict is divided
    # arm -> the points of each search on lower rungs, for a rung that has the winners of these
    chosen_from: Mapping[str, int] = field(default_factory=dict)
    failed_below: tuple[Result, ...] = ()  # the trials of these searches that failed
    branch: PlannedBranch | None = None  # the state of a run that all runs continue
    # arm -> the steps at which its worse trials are stopped; without arms that are not cut
    cuts: Mapping[str, Cuts] = field(default_factory=dict)
    # arm and search -> the cuts that were made, in order
    orders: Mapping[tuple[str, int], Sequence[Cut]] = field(default_factory=dict)
    _curves: dict[str, Curve] = field(default_factory=dict, repr=False)
    _examples: dict[str, Examples | None] = field(default_factory=dict, repr=False)

    @property
    def unit(self) -> str:
        """What is compared in pairs: "search" or "seed"."""
        return "search" if self.searches > 1 else "seed"

    @property
    def unit_plural(self) -> str:
        """The word for several units: "searches" or "seeds"."""
        return "searches" if self.searches > 1 else "seeds"

    @property
    def cut_short(self) -> list[str]:
        """The arms of which a trial was stopped at a cut, or may be."""
        early = {run.arm for run in self.trials if run.end in ("pruned", MISSING.end)}
        return [arm for arm in self.cuts if arm in early]

    @property
    def asked(self) -> list[str]:
        """The arms whose points were chosen by the results of earlier ones."""
        return [arm for arm, space in self.spaces.items() if space.asked]

    def initial_of(self, arm: str, name: str) -> float | None:
        """Returns a metric of an arm before its first step, by its name in rows, if it is known."""
        return self.initial.get(arm, {}).get(name)

    def finals_of(self, arm: str) -> list[Result]:
        """Returns the compared runs of an arm that have ended, by seed."""
        found = [run for run in self.finals if run.arm == arm and run.end != "missing"]
        return sorted(found, key=lambda run: run.seed)

    def trials_of(self, arm: str) -> list[Result]:
        """Returns the runs of an arm's search."""
        return [run for run in self.trials if run.arm == arm]

    def units_of(self, arm: str) -> dict[int, float]:
        """Returns the value of each unit of an arm, in the order of the plan."""
        # A unit is a search, whose value is the mean over its final seeds, or a final seed. A unit
        # with a run that diverged has infinity as the worst value. A unit is left out until all its
        # runs have ended, and as long as one of them is failed, which is not a result.
        found: dict[int, list[float | None]] = {}
        for run in self.finals:
            if run.arm == arm:
                value = run.value(self.goal.reported)
                if value is None and run.end not in ("missing", "failed"):
                    value = self.goal.sign * math.inf
                found.setdefault(self.unit_of(run), []).append(value)
        order = self.units or sorted(found)
        return {
            unit: math.fsum(found[unit]) / len(found[unit])  # type: ignore[arg-type]
            for unit in order
            if unit in found and None not in found[unit]
        }

    def unit_of(self, run: Result) -> int:
        """Returns the unit of a compared run: its search, or its seed with one search an arm."""
        return run.search if self.searches > 1 else run.seed

    def values_of(self, arm: str, row: str) -> dict[int, float]:
        """Returns a metric of an arm's compared runs by seed; runs without it are left out."""
        values = {run.seed: run.value(row) for run in self.finals_of(arm)}
        return {seed: value for seed, value in values.items() if value is not None}

    def curve(self, run: Result) -> Curve:
        """Returns the selected metric at every evaluation of a run; each is read once."""
        if run.name not in self._curves:
            self._curves[run.name] = read_curve(run.folder, self.goal.selected)
        return self._curves[run.name]

    def examples(self, run: Result) -> Examples | None:
        """Returns the results of a run on single test examples, or None; each is read once."""
        if run.name not in self._examples:
            self._examples[run.name] = read_examples(run.folder)
        return self._examples[run.name]


def with_outcome(run: Result, summary: Summary, record: Mapping[str, Any]) -> Result:
    """Returns a run with the content of its summary.json and run.json; `record` may be empty."""
    lineage = record.get("lineage", ())
    last = lineage[-1] if lineage else {}
    return replace(
        run,
        summary=summary if summary.end in ENDS else replace(summary, end=MISSING.end),
        # A trial that waited at cuts was computed in several waves.
        retries=len(lineage) - len({entry.get("wave") for entry in lineage}),
        fingerprint=record.get("fingerprint", {}),
        side_by_side=last.get("trials", 1),
        load=last.get("load"),
        began=next((entry.get("began", "") for entry in lineage), ""),
        code_changed=any(
            line.startswith("code: ") and " differs" in line
            for entry in lineage
            for line in entry.get("changed", ())
        ),
    )


def read_curve(folder: Path, row: str) -> Curve:
    """Reads a metric from a metrics.jsonl; an empty curve if the file or the metric is missing."""
    points: list[tuple[float, float, float]] = []
    try:
        for line in iterate_metrics(folder, about=row):
            if row in line:
                points.append((line["step"], line[row], line.get(SECONDS, math.nan)))
    except OSError:
        pass
    columns = np.asarray(points, float).reshape(-1, 3).T
    return Curve(*columns)
