"""What the rungs of a ladder show together: speed-ups over the baseline, their trend, and regret.

The unit is a chain: one search of an arm with its winners on all rungs, or one seed if each arm was
searched once. All intervals are t intervals over chains. Start with `Climb`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from trainer.messages import joined, plural
from trainer.report.pairs import reason_not_to_judge
from trainer.report.results import Result, Workload
from trainer.report.spaces import edge_of, number_of
from trainer.report.statistics.decide import LEVEL
from trainer.report.statistics.estimates import Estimate, mean_interval
from trainer.sweep.ladder import RETUNED, PlannedLadder

_FEWEST_TO_FIT = 3  # rungs through which a power law is drawn


@dataclass(frozen=True)
class Match:
    """The cost at which a baseline has the value of an arm."""

    # `bound` is "" if the cost was interpolated between two rungs; "least" if the baseline has no
    # value as good, so that the cost is at least that of its highest rung; "most" if its lowest
    # rung is as good already.

    log_cost: float  # the logarithm of the cost
    bound: Literal["", "least", "most"] = ""


def match(costs: Sequence[float], values: Sequence[float], value: float, sign: int) -> Match | None:
    """Returns at which of the rising costs a baseline has a value; None if one is not finite.

    Between two rungs it is interpolated over the logarithm of the cost, by monotone cubics (Fritsch
    and Butland, PCHIP), which go through all results and rise or fall where these do. A line lies
    above a curve that flattens: with rungs of 2 it finds a speed-up of 1.5 too large by 1.7%, on
    average, and the cubics by 0.2%. `sign` is 1 if small values are better, or else -1.

    Example:
        >>> found = match([100, 200, 400], [3.0, 2.0, 1.0], 1.5, sign=1)
        >>> round(math.exp(found.log_cost), 3), found.bound
        (282.843, '')
    """
    curve = [sign * each for each in values]
    wanted = sign * value
    if not all(map(math.isfinite, (*curve, wanted))):
        return None
    logs = [math.log(cost) for cost in costs]
    if curve[0] <= wanted:
        return Match(logs[0], "" if curve[0] == wanted else "most")
    if min(curve) > wanted:
        return Match(logs[-1], "least")
    from scipy.interpolate import PchipInterpolator

    first = next(index for index, each in enumerate(curve) if each <= wanted)
    if curve[first] == wanted:
        return Match(logs[first])
    interpolated: Any = PchipInterpolator(logs, curve)  # its types say that it takes an int
    roots = interpolated.solve(wanted, extrapolate=False)
    return Match(float(min(root for root in roots if logs[first - 1] <= root <= logs[first])))


@dataclass(frozen=True)
class Speedup:
    """How many times less an arm costs on a rung than the baseline that has the same result."""

    arm: str
    rung: str
    factor: float  # the size of the rung over that of the lowest
    # chain -> the logarithm of its speed-up and its bound; absent for a chain without a value
    matches: Mapping[int, Match]
    chains: int
    # the mean of the logarithms; without an interval if a chain has no value or a bound
    estimate: Estimate | None

    @property
    def bounds(self) -> dict[str, int]:
        """How many chains have a bound: "least" and "most"."""
        found = Counter(each.bound for each in self.matches.values())
        return {"least": found["least"], "most": found["most"]}

    @property
    def missing(self) -> int:
        """How many chains have no value."""
        return self.chains - len(self.matches)

    @property
    def exact(self) -> bool:
        """Whether every chain has a speed-up that was interpolated."""
        return not self.missing and not any(self.bounds.values())

    @property
    def mean(self) -> tuple[float | None, float | None, float | None]:
        """The geometric mean over the chains and its interval; None where there is none."""
        if self.estimate is None or self.missing:
            return None, None, None
        ends = (self.estimate.low, self.estimate.high)
        low, high = (None if end is None else math.exp(end) for end in ends)
        return math.exp(self.estimate.value), low, high


@dataclass(frozen=True)
class Trend:
    """A slope over the rungs of a ladder."""

    arm: str
    of: str  # what changes: a config path, or ""
    rungs: int  # how many rungs it is fitted on
    estimate: Estimate | None  # the slope with its interval over chains; None if there is none
    why: str = ""  # why there is none, as a sentence; "" if there is one


@dataclass(frozen=True)
class Regret:
    """How much worse the hyperparameters of the rule are on a rung than those of a search there."""

    arm: str
    rung: str
    estimate: Estimate  # the mean difference over chains, above 0 if the rule is worse


class BestRate(NamedTuple):
    """The learning rate of a winner."""

    arm: str
    path: str  # the config path of the rate
    rung: str
    chain: int  # the number of the search
    value: float
    edge: str | None  # the edge of its space at which it lies, "low" or "high"; None if it does not


class Climb:
    """The rungs of a ladder, from `sweep_results.on_rungs`, and what they show together."""

    # `rungs` are those with the hyperparameters of the rule, from the lowest; `again` are those on
    # which arms were searched beside the rule, by their labels.

    def __init__(self, workloads: Sequence[Workload]):
        planned = workloads[0].ladder
        assert planned is not None
        self.planned: PlannedLadder = planned
        self.rungs = [each for each in workloads if not each.rung.endswith(RETUNED)]
        again = [each for each in workloads if each.rung.endswith(RETUNED)]
        self.again = {_label(each): each for each in again}
        self.goal = workloads[0].goal
        self._all = workloads
        lowest, baseline = self.rungs[0], planned.baseline
        self.unit, self.chains = lowest.unit, lowest.units  # what a chain is, and their numbers
        # the arms that are compared with the baseline; none without a baseline
        self.others = [arm for arm in lowest.arms if baseline not in (None, arm)]

    @cached_property
    def why_not_judged(self) -> str:
        """Why nothing is said of the rungs together, as a sentence; "" if it may be."""
        first = self.rungs[0]
        if first.completed < len(first.revisions):
            return "Nothing is said of the rungs together before all runs of the ladder have ended."
        if first.skewed:
            return (
                "Nothing is said of the rungs together, because the file says that differences may"
                " be skewed, and t intervals over few chains do not hold for these."
            )
        return next(filter(None, map(reason_not_to_judge, self._all)), "")

    def factor_of(self, rung: str) -> float:
        """Returns the size of a rung over that of the lowest."""
        return self.planned.factors[self.planned.labels.index(rung)]

    @cached_property
    def cost(self) -> tuple[str, Callable[[Result], float]]:
        """What a run costs, by name: its steps, or its FLOPs where those of a step differ."""
        of_arm: dict[str, set[float | None]] = {}
        for each in self.rungs:
            for run in each.finals:
                of_arm.setdefault(run.arm, set()).add(run.flops)
        if all(len(found) == 1 for found in of_arm.values()):
            return "steps", lambda run: float(run.steps)
        return "FLOPs", lambda run: (run.flops or math.nan) * run.steps

    def costs_of(self, workload: Workload, arm: str) -> float:
        """Returns the cost of a run of an arm on a rung."""
        return self.cost[1](next(run for run in workload.finals if run.arm == arm))

    # Speed-ups.

    @cached_property
    def speedups(self) -> list[Speedup]:
        """The speed-up of each arm over the baseline on each rung; [] if they are not judged."""
        baseline = self.planned.baseline
        if baseline is None or self.why_not_judged:
            return []
        climbed = [each for each in self.rungs if baseline in each.arms and each.units_of(baseline)]
        costs = [self.costs_of(each, baseline) for each in climbed]
        curves = [each.units_of(baseline) for each in climbed]

        def matches_of(arm: str, workload: Workload) -> dict[int, Match]:
            log_cost, found = math.log(self.costs_of(workload, arm)), {}
            for chain, value in workload.units_of(arm).items():
                if all(chain in curve for curve in curves):
                    at = match(costs, [curve[chain] for curve in curves], value, self.goal.sign)
                    if at is not None:
                        found[chain] = Match(at.log_cost - log_cost, at.bound)
            return found

        found = [
            (arm, each, matches_of(arm, each))
            for arm in self.others
            for each in self.rungs
            if arm in each.arms and each.units_of(arm)
        ]
        confidence = 1 - LEVEL / max(1, len(found))
        return [self._speedup(arm, each, matches, confidence) for arm, each, matches in found]

    def _speedup(
        self, arm: str, workload: Workload, matches: Mapping[int, Match], confidence: float
    ) -> Speedup:
        logs = [each.log_cost for each in matches.values()]
        estimate = mean_interval(logs, confidence) if logs else None
        rung, chains = workload.rung, len(self.chains)
        found = Speedup(arm, rung, self.factor_of(rung), matches, chains, estimate)
        if estimate is None or found.exact:
            return found
        return replace(found, estimate=replace(estimate, low=None, high=None))

    def trend(self, arm: str) -> Trend:
        """Returns how the speed-up of an arm changes: its power of the size of the rung."""
        exact = [each for each in self.speedups if each.arm == arm and each.exact]
        if len(exact) < 2:
            why = f"{arm} has a speed-up of every {self.unit} on fewer than two rungs."
            return Trend(arm, "", len(exact), None, why)
        x = [math.log(each.factor) for each in exact]
        slopes = [slope(x, [e.matches[chain].log_cost for e in exact]) for chain in self.chains]
        confidence = 1 - LEVEL / max(1, len(self.others))
        return Trend(arm, "", len(exact), mean_interval(slopes, confidence))

    # Hyperparameters.

    @cached_property
    def regrets(self) -> list[Regret]:
        """What the rule costs on each rung that was searched beside it; [] if not judged."""
        if self.why_not_judged:
            return []
        found = []
        for rung, again in self.again.items():
            moved = next(each for each in self.rungs if each.rung == rung)
            for arm in again.arms:
                tuned = again.units_of(arm)
                pairs = [(x, tuned[c]) for c, x in moved.units_of(arm).items() if c in tuned]
                known = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
                if known:
                    found.append((arm, rung, [self.goal.sign * (x - y) for x, y in known]))
        confidence = 1 - LEVEL / max(1, len(found))
        return [Regret(arm, rung, mean_interval(each, confidence)) for arm, rung, each in found]

    @cached_property
    def best_rates(self) -> list[BestRate]:
        """The learning rate of each winner on the rungs that were searched, the lowest first."""
        searched = [each for each in (*self.rungs, *self.again.values()) if each.trials]
        found = []
        for each in sorted(searched, key=lambda w: self.factor_of(_label(w))):
            for (arm, search), number in each.winners.items():
                runs = [run for run in each.trials_of(arm) if run.search == search]
                for path, text in each.spaces[arm].axes.items():
                    if "learning_rate" not in path:
                        continue
                    points = [(run.number, number_of(run.values.get(path))) for run in runs]
                    known = {n: x for n, x in points if x is not None and x > 0}
                    if number in known:
                        at, best = [*known.values()], known[number]
                        _, where = edge_of(at, at.index(best), text)
                        found.append(BestRate(arm, path, _label(each), search, best, where))
        return found

    def rate_trends(self) -> list[Trend]:
        """Returns the power of the size of the rung by which each best learning rate changes."""
        found: dict[tuple[str, str], list[BestRate]] = {}
        for each in self.best_rates:
            found.setdefault((each.arm, each.path), []).append(each)
        confidence = 1 - LEVEL / max(1, len(found))
        return [self._rate_trend(*key, each, confidence) for key, each in found.items()]

    def _rate_trend(
        self, arm: str, path: str, found: Sequence[BestRate], confidence: float
    ) -> Trend:
        labels = list(dict.fromkeys(each.rung for each in found))
        at_edge = list(dict.fromkeys(each.rung for each in found if each.edge))
        slopes = []
        for chain in dict.fromkeys(each.chain for each in found):
            own = [each for each in found if each.chain == chain]
            if len(own) == len(labels) > 1:
                x = [math.log(self.factor_of(each.rung)) for each in own]
                slopes.append(slope(x, [math.log(each.value) for each in own]))
        why = ""
        if len(labels) < 2:
            why = f"The best {path} of {arm} was searched on one rung."
        elif at_edge:
            why = (
                f"The best {path} of {arm} lies at an edge of its space on {joined(at_edge)}, so"
                " that no slope is fitted: a wider space may have a better one."
            )
        elif not slopes:
            why = f"No search of {arm} has all its winners."
        estimate = None if why else mean_interval(slopes, confidence)
        return Trend(arm, path, len(labels), estimate, why)

    # Results by cost.

    def powers(self) -> list[Trend]:
        """Returns the power of the cost by which each loss changes, without an asymptote."""
        if self.why_not_judged or self.goal.metric != "loss":
            return []
        arms = self.rungs[0].arms
        confidence = 1 - LEVEL / len(arms)
        return [each for arm in arms if (each := self._power(arm, confidence)) is not None]

    def _power(self, arm: str, confidence: float) -> Trend | None:
        climbed = [each for each in self.rungs if arm in each.arms and each.units_of(arm)]
        values = [each.units_of(arm) for each in climbed]
        every = [value for each in values for value in each.values()]
        if len(climbed) < _FEWEST_TO_FIT or not all(0 < value < math.inf for value in every):
            return None
        x = [math.log(self.costs_of(each, arm)) for each in climbed]
        chains = [chain for chain in self.chains if all(chain in each for each in values)]
        slopes = [slope(x, [math.log(each[chain]) for each in values]) for chain in chains]
        return Trend(arm, "", len(climbed), mean_interval(slopes, confidence)) if slopes else None

    def chain_words(self) -> str:
        """Returns over what the intervals are, such as "5 searches"."""
        return plural(len(self.chains), self.unit)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the slope of the least-squares line.

    Example:
        >>> slope([0.0, 1.0, 2.0], [1.0, 2.0, 5.0])
        2.0
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    centred = a - a.mean()
    return float(centred @ (b - b.mean()) / (centred @ centred))


def _label(workload: Workload) -> str:
    """Returns the name of a rung, whether or not it is searched beside the rule."""
    return workload.rung.removesuffix(RETUNED)
