"""The results that a report compares: those of a sweep, or of single runs grouped by config."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
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
    """A metric of a run at its evaluations.

    Attributes:
        steps: number of updates before each evaluation.
        values: the metric.
        seconds: training time until then; NaN where it was not recorded.
    """

    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    seconds: NDArray[np.float64]


MISSING = Summary("missing", step=0)


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        name: its folder in that of the sweep, such as "trials/muon/0007/0" or "final/muon/10000";
            of a single run, its folder.
        folder: of the run.
        arm: the arm that it belongs to.
        seed: its seed.
        number: the number of its point in the space of the arm; None for a single run.
        summary: its summary.json; its `end` is "missing" if it has not ended.
        steps: the last step that was planned.
        first_step: the step of the state that it began with: 0, unless it continued another run.
        flops: floating-point operations of a step; None if they are not known.
        values: config path -> value, for the axes of the search space.
        retries: how often its computation was started again after an interruption.
        fingerprint: what its bits depend on, from run.json.
        search: the number of the search that it belongs to, from 0.
        side_by_side: how many trials shared its wave.
        load: the load average per core when it ended; None if unknown.
        began: when its first process began, in UTC; "" if unknown.
        code_changed: whether it was resumed with changed code of the user.
    """

    name: str
    folder: Path
    arm: str
    seed: int
    number: int | None
    summary: Summary = MISSING
    steps: int = 0
    first_step: int = 0
    flops: float | None = None
    values: Mapping[str, Tree] = field(default_factory=dict)
    retries: int = 0
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    search: int = 0
    side_by_side: int = 1
    load: float | None = None
    began: str = ""
    code_changed: bool = False

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
        """Returns the last value of a metric, by its name in metrics.jsonl; None if there is none.

        It is None if the run has not ended, diverged, failed, or has no finite value. The names
        that begin with perf/ are fields of `summary`.
        """
        return self.summary.value(row)


@dataclass(frozen=True)
class Goal:
    """The metric by which runs are compared.

    Attributes:
        metric: the name without a split: "loss".
        better: whether the smallest or the largest value is the best.
        select_on: the split on which winners were selected, and on which learning curves and
            targets are measured.
        report_on: the split on which arms are compared.
        target: a value of the metric; None if there is none.
        relevant: the smallest difference that matters; None if the file does not say.
        primary: the metric by which winners were selected, if it is another one.
        rule: by which an arm has reached the target; None if the plan had none before its results.
    """

    metric: str
    better: Literal["min", "max"]
    select_on: str
    report_on: str
    target: float | None = None
    relevant: float | None = None
    primary: str = ""
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

    @property
    def words(self) -> str:
        """What is reported, such as "loss on the test split"."""
        return f"{self.metric} on the {self.report_on} split"


@dataclass(frozen=True)
class Space:
    """The search space of an arm.

    Attributes:
        method: how its points were chosen, such as "sobol, seed 0".
        axes: config path -> the space as text, such as "log_uniform 0.001 to 0.1".
    """

    method: str = ""
    axes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Revision:
    """One revision of the plan of a sweep.

    Attributes:
        number: from 1.
        digest: the SHA-256 of the revision.
        trials: arm -> how many runs it added.
        known: how many runs were finished when it was made; None for the first.
        winners_known: whether the winners were chosen by then.
        compared_known: whether winners were chosen, or compared runs had ended, by then; or, if it
            added searches, trials of two arms.
        changes: other changes of the plan, such as "goal: ...".
        arms: the arms that it has.
        units: how many units it has: searches, or final seeds if each arm is searched once.
        new_winners: the arms whose compared configuration is another one than before.
        points: arm -> how many points it added to the searches of the arm; absent if none.
        spaces: arm -> the space from which those points are.
    """

    number: int
    digest: str
    trials: Mapping[str, int]
    known: int | None
    winners_known: bool
    compared_known: bool
    changes: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    units: int = 0
    new_winners: tuple[str, ...] = ()
    points: Mapping[str, int] = field(default_factory=dict)
    spaces: Mapping[str, Space] = field(default_factory=dict)


def planned_revision(revisions: Sequence[Revision]) -> Revision:
    """Returns the last revision before any compared run was known: all until it are one plan."""
    return [*itertools.takewhile(lambda each: not each.compared_known, revisions)][-1]


@dataclass(frozen=True)
class Workload:
    """What one sweep computed, or a set of single runs.

    Attributes:
        name: for headings: the name of the sweep's folder.
        path: the folder; None for single runs.
        goal: the metric by which runs are compared.
        arms: the names of the arms, in the order of the file.
        trials: the runs of the search; empty for single runs.
        finals: the runs that are compared: those of winners on fresh seeds, or single runs.
        spaces: arm -> its search space.
        winners: arm and search -> the number of its best point; absent if it has none.
        revisions: of the plan.
        completed: the number of the last revision of which all runs have ended; 0 if none has.
        searches: how many independent searches each arm has.
        units: the numbers of the searches, or the final seeds, in the order of the plan; empty for
            single runs.
        looks: "planned" or "any", as the file has it.
        skewed: whether the file says that differences may be skewed.
        replaced: final runs of earlier winners, which other points replaced when the sweep was
            extended.
        budgets: "equal", or "unequal" if the file allows it.
        missing: sentences about what is not computed yet.
        faults: files of the sweep or of the runs that disagree, each with what is wrong.
        code: name in the user's code -> the hashes that it had, in order, as far as a ledger has
            them.
        again: the trials that were computed again after their results had been removed -> whether
            these results were failures.
        initial: arm -> its metrics before the first step, by their names in rows; without those
            that are not known.
        vocabulary: further packages whose functions the configs name.
        configs: arm -> its config, without the values of trials.
        warnings: arm -> sentences of its plan about what is probably a mistake in its config.
        linked: arm -> the paths that one entry of its space sets together, for each revision that
            added points; see `trainer.sweep.tuned`.
        listed_seeds: "seeds" or "final seeds" -> those that the file lists, where it does not count
            them.
        differs: the kinds of differences between arms that the file names, as it did before any
            compared run was known.
        caveats: sentences on what the ledger does not show, and what the file changed too late.
        picked: why runs of sweeps that a user named are not judged, in a sentence; "" if they may
            be.
        ablated: the arm with which all others are compared, which are without one of its parts; ""
            if every two arms are compared.
        ladder: that of the sweep, or None. Arms of a whole ladder have the names of the plan, such
            as "muon@2x"; see `on_rungs`.
        rung: what follows the names of the arms in the plan, such as "2x", of a workload that is
            one rung of a ladder; "" otherwise.
        families: among how many workloads of the sweep the error of a verdict is divided.
        chosen_from: arm -> the number of points of each search on lower rungs, for a rung on which
            the arms have the hyperparameters of these; empty otherwise.
        failed_below: the trials of these searches that failed, with the arms of the rung.
        branch: the state of a run that all runs continue, or None.
        cuts: arm -> the steps at which its worse trials are stopped; without arms that are not cut.
        orders: arm and search -> the cuts that were made, in order.
    """

    name: str
    path: Path | None
    goal: Goal
    arms: tuple[str, ...]
    trials: tuple[Result, ...]
    finals: tuple[Result, ...]
    spaces: Mapping[str, Space]
    winners: Mapping[tuple[str, int], int]
    revisions: tuple[Revision, ...] = ()
    completed: int = 0
    searches: int = 1
    units: tuple[int, ...] = ()
    looks: str = "planned"
    skewed: bool = False
    replaced: tuple[Result, ...] = ()
    budgets: str = "equal"
    missing: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    code: Mapping[str, Sequence[str]] = field(default_factory=dict)
    again: Mapping[str, bool] = field(default_factory=dict)
    initial: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    configs: Mapping[str, Call] = field(default_factory=dict)
    warnings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    linked: Mapping[str, Sequence[Linked]] = field(default_factory=dict)
    listed_seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    differs: Sequence[str] = ()
    caveats: tuple[str, ...] = ()
    picked: str = ""
    ablated: str = ""
    ladder: PlannedLadder | None = None
    rung: str = ""
    families: int = 1
    chosen_from: Mapping[str, int] = field(default_factory=dict)
    failed_below: tuple[Result, ...] = ()
    branch: PlannedBranch | None = None
    cuts: Mapping[str, Cuts] = field(default_factory=dict)
    orders: Mapping[tuple[str, int], Sequence[Cut]] = field(default_factory=dict)
    _curves: dict[str, Curve] = field(default_factory=dict, repr=False)
    _examples: dict[str, Examples | None] = field(default_factory=dict, repr=False)

    @property
    def cut_short(self) -> list[str]:
        """The arms of which a trial was stopped at a cut, or may be."""
        early = {run.arm for run in self.trials if run.end in ("pruned", MISSING.end)}
        return [arm for arm in self.cuts if arm in early]

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
        """Returns the value of each unit of an arm, in the order of the plan.

        A unit is a search, whose value is the mean over its final seeds, or a final seed. A unit
        with a run that diverged has infinity as the worst value. A unit is left out until all its
        runs have ended, and as long as one of them is failed, which is not a result.
        """
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

    def count_without_gap(self, units: Collection[int]) -> int:
        """Returns how many units of the plan, from the first one without a gap, are in `units`."""
        order = self.units or sorted(units)
        return next((n for n, unit in enumerate(order) if unit not in units), len(order))

    def values_of(self, arm: str, row: str | None = None) -> dict[int, float]:
        """Returns the values of an arm's compared runs by seed; runs without one are left out.

        `row` is the name of a metric in metrics.jsonl; None for the reported one.
        """
        values = {run.seed: run.value(row or self.goal.reported) for run in self.finals_of(arm)}
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
