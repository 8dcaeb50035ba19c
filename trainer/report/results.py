"""The results that a report compares: those of a sweep, or of single runs grouped by config.

A `Workload` has all of them. The functions below it return the points of its searches: their
values, and their places along the axes of a space.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import Call, Tree
from trainer.engine.examples import Examples
from trainer.report.statistics.estimates import edge
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.halving import Cut
from trainer.sweep.ladder import PlannedLadder
from trainer.sweep.methods import Cuts
from trainer.sweep.per_example_file import read_examples
from trainer.sweep.spaces import Bounds, bounds
from trainer.sweep.target_rule import TargetRule
from trainer.sweep.tuned import Linked, Tuning, tuning_of
from trainer.writers import iterate_metrics
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import ENDS, Summary


class Curve(NamedTuple):
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
    at_once: int = 1  # how many trials of its wave were computed at once, by `vmap`
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
class ReportGoal:
    """The metric by which runs are compared."""

    metric: str  # the name without a split: "loss"
    better: Literal["min", "max"]
    select_on: str  # the split of the selection of winners, of learning curves and of targets
    report_on: str  # the split on which arms are compared
    target: float | None = None  # a value of the metric; None if there is none
    relevant: float | None = None  # the smallest difference that matters; None if not known
    primary: str = ""  # the metric by which winners were selected, if it is another one
    rule: TargetRule | None = None  # of the target; None if there was none before the results

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
class ArmSpace:
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
    spaces: Mapping[str, ArmSpace] = field(default_factory=dict)  # arm -> that of those points


def planned_revision(revisions: Sequence[Revision]) -> Revision:
    """Returns the last revision before any compared run was known: all until it are one plan."""
    return [*itertools.takewhile(lambda each: not each.compared_known, revisions)][-1]


@dataclass(frozen=True)
class Workload:
    """What one sweep computed, or a set of single runs."""

    name: str  # for headings: the name of the sweep's folder
    goal: ReportGoal
    arms: tuple[str, ...]  # in the order of the file
    finals: tuple[Result, ...]  # what is compared: winners on fresh seeds, or single runs
    path: Path | None = None  # None for single runs
    trials: tuple[Result, ...] = ()  # the runs of the search; empty for single runs
    spaces: Mapping[str, ArmSpace] = field(default_factory=dict)
    # arm and search -> its best point, if it has one
    winners: Mapping[tuple[str, int], int] = field(default_factory=dict)
    # the trials that an extension has added since the winners were chosen, which does not count
    # them until all have ended
    later: frozenset[str] = frozenset()
    revisions: tuple[Revision, ...] = ()
    completed: int = 0  # the last revision of which all runs have ended; 0 if none has
    searches: int = 1  # how many independent searches each arm has
    units: tuple[int, ...] = ()  # searches or final seeds, as planned; empty for single runs
    looks: str = "planned"  # "planned" or "any", as the file has it
    skewed: bool = False  # whether the file says that differences may be skewed
    replaced: tuple[Result, ...] = ()  # final runs of winners that an extension replaced
    budgets: str = "equal"  # "equal", or "unequal" if the file allows it
    missing: tuple[str, ...] = ()  # sentences about what is not computed yet
    faults: tuple[str, ...] = ()  # files that disagree, each with what is wrong
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
    differs: Sequence[str] = ()  # kinds of differences that the file named before results
    caveats: tuple[str, ...] = ()  # on what the ledger does not show, or changed too late
    picked: str = ""  # why runs that were picked from sweeps are not judged; "" if they may be
    ablated: str = ""  # the arm that is compared with itself without each part; "" for all pairs
    ladder: PlannedLadder | None = None  # its arms are named as "muon@2x"; see `on_rungs`
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
    def comparisons(self) -> int:
        """The number of pairs over which the error of its claims is divided."""
        return max(1, number_of_pairs(len(self.arms), self.ablated)) * self.families

    @property
    def failed(self) -> list[Result]:
        """The runs that failed: compared ones, and trials among which winners were chosen."""
        # They are no results: an arm with one of them is not judged until it was computed again.
        # Without a trial, an arm has had fewer of them than the others. A trial that failed again
        # is a result, of its hyperparameters: it ranks last.
        once = [r for r in (*self.trials, *self.failed_below) if not self.again.get(r.name)]
        runs = {run.name: run for run in (*self.finals, *once)}.values()
        return [run for run in runs if run.end == "failed"]

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

    def initial_of(self, arm: str, name: str) -> float:
        """Returns a metric of an arm before its first step, by its name in rows; NaN if unknown."""
        return self.initial.get(arm, {}).get(name, math.nan)

    def finals_of(self, arm: str) -> list[Result]:
        """Returns the compared runs of an arm that have ended, by seed."""
        found = [run for run in self.finals if run.arm == arm and run.end != "missing"]
        return sorted(found, key=lambda run: run.seed)

    def trials_of(self, arm: str) -> list[Result]:
        """Returns the runs of an arm's search among which its winners were chosen, or will be."""
        return [run for run in self.trials if run.arm == arm and run.name not in self.later]

    def points_of_search(self, arm: str) -> int:
        """Returns the number of points of each search of an arm; 0 for single runs."""
        # On a rung of a ladder that is not searched, it is that of the search on lower rungs.
        own = len({run.number for run in self.trials_of(arm) if run.search == 0})
        return self.chosen_from.get(arm, own)

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

    def values_of(self, arm: str, row: str) -> list[float]:
        """Returns a metric of an arm's compared runs, by seed; runs without it are left out."""
        values = {run.seed: run.value(row) for run in self.finals_of(arm)}
        return [value for value in values.values() if value is not None]

    def curve(self, run: Result) -> Curve:
        """Returns the selected metric at every evaluation of a run; each is read once."""
        if run.name not in self._curves:
            row, points = self.goal.selected, list[tuple[float, float, float]]()
            with contextlib.suppress(OSError):
                for line in iterate_metrics(run.folder, about=row):
                    if row in line:
                        points.append((line["step"], line[row], line.get("perf/seconds", math.nan)))
            self._curves[run.name] = Curve(*np.asarray(points, float).reshape(-1, 3).T)
        return self._curves[run.name]

    def examples(self, run: Result) -> Examples | None:
        """Returns the results of a run on single test examples, or None; each is read once."""
        if run.name not in self._examples:
            self._examples[run.name] = read_examples(run.folder)
        return self._examples[run.name]


def number_of_pairs(arms: int, ablated: str = "") -> int:
    """Returns how many pairs are compared: every two arms, or each with the `ablated` whole one."""
    return arms - 1 if ablated else math.comb(arms, 2)


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
        at_once=last.get("vmap", {}).get("width", 1),
        load=last.get("load"),
        began=next((entry.get("began", "") for entry in lineage), ""),
        code_changed=any(
            line.startswith("code: ") and " differs" in line
            for entry in lineage
            for line in entry.get("changed", ())
        ),
    )


_CHANCE = 0.025  # of one side, that an end of what was tried wins so often
Place = tuple[int, int]  # a search, and the number of a point in it


def point_values(workload: Workload, arm: str) -> dict[Place, float]:
    """Returns the goal of each point of an arm's searches, the mean over its seeds."""
    # Only points with all results have a value; it is infinite if a seed diverged or failed.
    of_seeds = seed_values(workload, arm).items()
    return {place: math.fsum(values) / len(values) for place, values in of_seeds}


def seed_values(workload: Workload, arm: str) -> dict[Place, list[float]]:
    """Returns the goal of each point of an arm's searches for each seed; see `point_values`."""
    values: dict[Place, list[float | None]] = {}
    for run in workload.trials_of(arm):
        if (value := run.value(workload.goal.selected)) is None and run.end != "missing":
            value = workload.goal.sign * math.inf
        values.setdefault((run.search, run.number or 0), []).append(value)
    return {place: each for place, each in values.items() if None not in each}  # type: ignore[misc]


# Parts of a path that say little: the place of an optimizer, and that a rate has a schedule.
_PLAIN = ("optimizer", "groups", "peak_value")


def axes_of(workloads: Iterable[Workload]) -> dict[str, str]:
    """Returns short names for axes, such as "matrices.learning_rate", by config path."""
    # The peak of a schedule and a constant in the same place are the same axis of two arms.
    spaces = [space for workload in workloads for space in workload.spaces.values()]
    names = {path: _plain(path) for space in spaces for path in space.axes}
    for space in spaces:
        within = [names[path] for path in space.axes]
        for path in space.axes:
            # Two axes of one arm must have different names.
            if within.count(_plain(path)) > 1:
                names[path] = path
    return names


def _plain(path: str) -> str:
    return ".".join([part for part in path.split(".") if part not in _PLAIN][-3:]) or path


def tuning(workload: Workload, arm: str) -> Tuning:
    """Returns how an arm is tuned by its trials, whether or not they have ended."""
    points = {(each.search, each.number): each.values for each in workload.trials_of(arm)}
    return tuning_of(points, workload.configs.get(arm), workload.linked.get(arm, ()))


def tunings(workload: Workload) -> dict[str, Tuning]:
    """Returns how each arm is tuned; an empty dict for single runs."""
    return {arm: tuning(workload, arm) for arm in workload.arms} if workload.trials else {}


def number_of(value: Tree) -> float | None:
    """Returns a value of a config as a number; None if it is not one."""
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if usable else None


class Scan(NamedTuple):
    """The points of an arm along one axis of its space, by the value on the axis."""

    arm: str
    path: str  # the config path of the axis
    alone: bool  # whether the arm searched no other axis
    at: tuple[float, ...]  # the values on the axis
    values: tuple[float, ...]  # the goal of each point; infinity as the worst value
    best: int  # the index of the best point
    names: tuple[str, ...]  # a trial of each point
    seeds: tuple[tuple[float, ...], ...]  # the goal of each point for each of its seeds


def scans(workload: Workload, arm: str) -> list[Scan]:
    """Returns the points of an arm along each axis whose values are numbers."""
    values, seeds = point_values(workload, arm), seed_values(workload, arm)
    first = {(run.search, run.number or 0): run for run in reversed(workload.trials_of(arm))}
    alone = tuning(workload, arm).count <= 1
    found: list[Scan] = []
    for path in workload.spaces[arm].axes if arm in workload.spaces else ():
        points = [
            (x, values[place], first[place].name, tuple(seeds[place]))
            for place in values
            if (x := number_of(first[place].values.get(path))) is not None
        ]
        if not points:
            continue
        at, goals, names, of_seeds = zip(*sorted(points), strict=True)
        # Paths that always have the same value, such as the rates of two groups, are one axis.
        if not any((at, names) == (scan.at, scan.names) for scan in found):
            best = min(range(len(at)), key=lambda i: workload.goal.sign * goals[i])
            found.append(Scan(arm, path, alone, at, goals, best, names, of_seeds))
    return found


def edge_of(at: Sequence[float], best: int, text: str) -> tuple[Bounds, str | None]:
    """Returns the bounds of a space, and the edge at which the best point lies, or None."""
    # `at` are the points on the axis, `best` the index of the best one. `text` is the space, as a
    # plan has it; one that lists values ends with those that were tried.
    space = bounds(text) or Bounds("values", min(at), max(at))
    return space, edge(at, best, space.low, space.high, space.log)


def at_edge(workload: Workload, scan: Scan) -> tuple[float, Bounds, str] | None:
    """Returns the best value, the bounds and the edge, if an arm's best point lies at an edge."""
    if not math.isfinite(scan.values[scan.best]) or workload.path is None:
        return None
    space, where = edge_of(scan.at, scan.best, workload.spaces[scan.arm].axes[scan.path])
    if where is None or (where == "low" and scan.at[scan.best] == 0):  # nothing is below 0
        return None
    return scan.at[scan.best], space, where


def winners_at_ends(workload: Workload, scan: Scan) -> tuple[int, int, str] | None:
    """Returns in how many searches of how many the smallest or the largest value tried has won."""
    # None if that is no more than what chance does: in a search of k values each one may win. The
    # text is "smallest" or "largest".
    tried: dict[int, dict[int | None, float]] = {}
    for run in workload.trials_of(scan.arm):
        if (value := number_of(run.values.get(scan.path))) is not None:
            tried.setdefault(run.search, {})[run.number] = value
    ends, counts = {"smallest": 0, "largest": 0}, [len({*x.values()}) for x in tried.values()]
    for search, values in tried.items():
        won = values.get(workload.winners.get((scan.arm, search)))
        ends["smallest"] += won == min(values.values())
        ends["largest"] += won == max(values.values())
    end, count = max(ends.items(), key=lambda item: item[1])
    if min(counts, default=0) < 3 or workload.path is None:
        return None
    if end == "smallest" and all(min(values.values()) == 0 for values in tried.values()):
        return None  # nothing is smaller
    from scipy.special import bdtrc  # importing it takes a third of a second

    by_chance = bdtrc(count - 1, len(tried), 1 / min(counts))
    return (count, len(tried), end) if by_chance < _CHANCE else None


def spans_decades(values: Iterable[float]) -> bool:
    """Returns whether values get a logarithmic axis: positive, and over a decade apart."""
    # Values that are not finite are ignored.
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
