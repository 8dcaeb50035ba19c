"""The panel of a ladder: speed-ups over the baseline, their trend, regret and best rates.

The unit is a chain: one search of an arm with its winners on all rungs, or one seed if each arm was
searched once. All intervals are t intervals over chains. `Climb` has what all rungs show together.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any, Literal, NamedTuple

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, shown
from trainer.report.pairs import reason_not_to_judge
from trainer.report.panels.targets import why_not_clocked
from trainer.report.results import Result, Workload, edge_of, number_of, spans_decades
from trainer.report.statistics.decide import LEVEL
from trainer.report.statistics.estimates import Estimate, mean_interval
from trainer.sweep.ladder import RETUNED, PlannedLadder

_FEWEST_TO_FIT = 3  # rungs through which a power law is drawn
_ASIDE = 1.03  # by which the next arm is drawn further right, so that intervals do not overlap
_BOUNDS = {"least": "at least", "most": "at most"}
_INTERPOLATED = (
    "The speed-up of an arm on a rung is the cost at which the baseline has the same result, over"
    " that of the arm. Between two rungs of the baseline it is interpolated by monotone cubics over"
    " the logarithm of the cost; where no run of the baseline is as good, the speed-up is at least"
    " that of its longest runs. Every run was planned for its length: a learning rate that decays"
    " to zero ends there, so that points of one run's curve are no shorter runs."
)
_SPEEDUPS = (
    "The geometric mean over the chains; intervals hold for all rows at once. Where chains are"
    " bounds, there is no interval."
)
_TIMED = " Time is the median of an arm's runs on a rung; its own error is not in the intervals."
_FIT = (
    "The power of the cost by which the loss changes, by a straight line through the logarithms."
    " It describes these rungs and no others: no asymptote is fitted, because a few rungs cannot"
    " tell it from the power (on four rungs with noise of 0.3%, a true power of -0.3 was estimated"
    " as -0.1 to -0.47)."
)


class Match(NamedTuple):
    """The cost at which a baseline has the value of an arm."""

    # `bound` is "" if the cost was interpolated between two rungs; "least" if the baseline has no
    # value as good, so that the cost is at least that of its highest rung; "most" if its lowest
    # rung is as good already.

    log_cost: float  # the logarithm of the cost
    bound: Literal["", "least", "most"] = ""


def match(costs: Sequence[float], values: Sequence[float], value: float, sign: int) -> Match | None:
    """Returns at which cost a baseline has a value; None if it has none.

    Between two rungs it is interpolated over the logarithm of the cost, by monotone cubics (Fritsch
    and Butland, PCHIP), which go through all results and rise or fall where these do. A line lies
    above a curve that flattens: with rungs of 2 it finds a speed-up of 1.5 too large by 1.7%, on
    average, and the cubics by 0.2%. `sign` is 1 if small values are better, or else -1. A
    baseline has none if its costs do not rise or a value is not finite.

    Example:
        >>> found = match([100, 200, 400], [3.0, 2.0, 1.0], 1.5, sign=1)
        >>> round(math.exp(found.log_cost), 3), found.bound
        (282.843, '')
    """
    curve = [sign * each for each in values]
    wanted = sign * value
    if not all(map(math.isfinite, (*curve, wanted))) or any(b <= a for a, b in pairwise(costs)):
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
class RungSpeedup:
    """How many times less an arm costs on a rung than the baseline that has the same result."""

    arm: str
    rung: str
    factor: float  # the size of the rung over that of the lowest
    # chain -> the logarithm of its speed-up and its bound; absent for a chain without a value
    matches: Mapping[int, Match]
    chains: int
    confidence: float  # of the interval of its mean

    @property
    def estimate(self) -> Estimate | None:
        """The mean of the logarithms, without an interval if a chain has no value or a bound."""
        if not self.matches:
            return None
        found = mean_interval([each.log_cost for each in self.matches.values()], self.confidence)
        return found if self.exact else found._replace(low=None, high=None)

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
    def mean(self) -> tuple[float | None, ...]:
        """The geometric mean over the chains and its interval; None where there is none."""
        if (found := self.estimate) is None or self.missing:
            return None, None, None
        ends = found.value, found.low, found.high
        return tuple(None if end is None else math.exp(end) for end in ends)


class Trend(NamedTuple):
    """A slope over the rungs of a ladder."""

    arm: str
    of: str  # what changes: a config path, or ""
    rungs: int  # how many rungs it is fitted on
    estimate: Estimate | None  # the slope with its interval over chains; None if there is none
    why: str = ""  # why there is none, as a sentence; "" if there is one


class Regret(NamedTuple):
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
        self.again = {each.rung.removesuffix(RETUNED): each for each in again}
        self.name = planned.path.rpartition(".")[2]  # of what differs between rungs
        self.goal = workloads[0].goal
        self._all = workloads
        lowest, baseline = self.rungs[0], planned.baseline
        self.unit, self.chains = lowest.unit, lowest.units  # what a chain is, and their numbers
        self.chain_words = plural(len(self.chains), self.unit)  # such as "5 searches"
        # the arms that are compared with the baseline; none without a baseline
        self.others = [arm for arm in lowest.arms if baseline not in (None, arm)]
        self.why_not_clocked = why_not_clocked(*self.rungs)  # "" if times can be compared
        self.cost, *_ = self.costs  # steps, or FLOPs where those of a step differ between rungs
        self.speedups_in = {cost: self._speedups(cost) for cost in self.costs}
        self.speedups = self.speedups_in[self.cost]

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
    def costs(self) -> dict[str, Callable[[Result], float]]:
        """What a run costs, by name; the first, `cost`, is that of most of the panel."""
        runs = [run for each in self.rungs for run in each.finals]
        found: dict[str, Callable[[Result], float]] = {}
        if len({(run.arm, run.flops) for run in runs}) == len({run.arm for run in runs}):
            found["steps"] = lambda run: float(run.steps)  # of which each costs the same
        known = {run.flops for run in runs}
        if not found or len(known) > 1 and None not in known:  # else all arms have equal ones
            found["FLOPs"] = lambda run: (run.flops or math.nan) * run.steps
        if not self.why_not_clocked:
            found["training time"] = lambda r: (r.end == "done" and r.summary.seconds) or math.nan
        return found

    def costs_of(self, workload: Workload, arm: str, cost: str | None = None) -> float:
        """Returns the cost of a run of an arm on a rung: the median, since single ones are slow."""
        costs = [self.costs[cost or self.cost](run) for run in workload.finals if run.arm == arm]
        return median([*filter(math.isfinite, costs)] or [math.nan])

    def _speedups(self, cost: str) -> list[RungSpeedup]:
        """Returns speed-ups of arms over the baseline on each rung; [] if they are not judged."""
        if (baseline := self.planned.baseline) is None or self.why_not_judged:
            return []
        climbed = [each for each in self.rungs if each.units_of(baseline)]
        costs = [self.costs_of(each, baseline, cost) for each in climbed]
        curves = [each.units_of(baseline) for each in climbed]

        def matches_of(arm: str, workload: Workload) -> dict[int, Match]:
            log_cost, found = math.log(self.costs_of(workload, arm, cost)), {}
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
            if each.units_of(arm)
        ]
        of_all = len(self.chains), 1 - LEVEL / max(1, len(found))
        return [
            RungSpeedup(arm, each.rung, self.factor_of(each.rung), matches, *of_all)
            for arm, each, matches in found
        ]

    def trend(self, arm: str) -> Trend:
        """Returns how the speed-up of an arm changes: its power of the size of the rung."""
        exact = [each for each in self.speedups if each.arm == arm and each.exact]
        if len(exact) < 2:
            why = f"{arm} has a speed-up of every {self.unit} on fewer than two rungs."
            return Trend(arm, "", len(exact), None, why)
        x = [math.log(each.factor) for each in exact]
        slopes = [
            linear_regression(x, [e.matches[chain].log_cost for e in exact]).slope
            for chain in self.chains
        ]
        confidence = 1 - LEVEL / max(1, len(self.others))
        return Trend(arm, "", len(exact), mean_interval(slopes, confidence))

    @cached_property
    def regrets(self) -> list[Regret]:
        """What the rule costs on each rung that was searched beside it; [] if not judged."""
        if self.why_not_judged:
            return []
        found = []
        for rung, again in self.again.items():
            moved = next(each for each in self.rungs if each.rung == rung)
            for arm in again.arms:
                here, tuned = moved.units_of(arm), again.units_of(arm)
                worse = [self.goal.sign * (x - tuned[c]) for c, x in here.items() if c in tuned]
                if known := [*filter(math.isfinite, worse)]:
                    found.append((arm, rung, known))
        confidence = 1 - LEVEL / max(1, len(found))
        return [Regret(arm, rung, mean_interval(each, confidence)) for arm, rung, each in found]

    @cached_property
    def best_rates(self) -> list[BestRate]:
        """The learning rate of each winner on the rungs that were searched, the lowest first."""
        searched = [each for each in (*self.rungs, *self.again.values()) if each.trials]
        found = []
        for each in sorted(searched, key=lambda w: self.factor_of(w.rung.removesuffix(RETUNED))):
            rung = each.rung.removesuffix(RETUNED)
            for (arm, search), number in each.winners.items():
                runs = [run for run in each.trials_of(arm) if run.search == search]
                for path, text in each.spaces[arm].axes.items():
                    points = [(run.number, number_of(run.values.get(path))) for run in runs]
                    known = {n: x for n, x in points if x is not None and x > 0}
                    if "learning_rate" in path and number in known:
                        at, best = [*known.values()], known[number]
                        _, where = edge_of(at, at.index(best), text)
                        found.append(BestRate(arm, path, rung, search, best, where))
        return found

    def rate_trends(self) -> Iterator[Trend]:
        """Yields the power of the size of the rung by which each best learning rate changes."""
        found: dict[tuple[str, str], list[BestRate]] = {}
        for each in self.best_rates:
            found.setdefault((each.arm, each.path), []).append(each)
        for (arm, path), rates in found.items():
            labels = list(dict.fromkeys(each.rung for each in rates))
            at_edge = list(dict.fromkeys(each.rung for each in rates if each.edge))
            slopes, why = [], ""
            for chain in dict.fromkeys(each.chain for each in rates):
                own = [each for each in rates if each.chain == chain]
                if len(own) == len(labels) > 1:
                    x = [math.log(self.factor_of(each.rung)) for each in own]
                    slopes.append(
                        linear_regression(x, [math.log(each.value) for each in own]).slope
                    )
            if len(labels) < 2:
                why = f"The best {path} of {arm} was searched on one rung."
            elif at_edge:
                why = (
                    f"The best {path} of {arm} lies at an edge of its space on {joined(at_edge)},"
                    " so that no slope is fitted: a wider space may have a better one."
                )
            elif not slopes:
                why = f"No search of {arm} has all its winners."
            estimate = None if why else mean_interval(slopes, 1 - LEVEL / len(found))
            yield Trend(arm, path, len(labels), estimate, why)

    def powers(self) -> list[Trend]:
        """Returns the power of the cost by which each loss changes, without an asymptote."""
        if self.why_not_judged or self.goal.metric != "loss":
            return []
        trends, arms = [], self.rungs[0].arms
        for arm in arms:
            climbed = [each for each in self.rungs if each.units_of(arm)]
            values = [each.units_of(arm) for each in climbed]
            every = [value for each in values for value in each.values()]
            x = [math.log(self.costs_of(each, arm)) for each in climbed]
            if len({*x}) < _FEWEST_TO_FIT or not all(0 < value < math.inf for value in every):
                continue
            chains = [chain for chain in self.chains if all(chain in each for each in values)]
            logs = [[math.log(each[chain]) for each in values] for chain in chains]
            if slopes := [linear_regression(x, y).slope for y in logs]:
                estimate = mean_interval(slopes, 1 - LEVEL / len(arms))
                trends.append(Trend(arm, "", len(climbed), estimate))
        return trends


def speedup_sentences(workloads: Sequence[Workload]) -> list[str]:
    """Returns what a ladder says of its arms over all rungs; no sentence without a ladder."""
    if workloads[0].ladder is None:
        return []
    climb = Climb(workloads)
    if not climb.others:
        return []
    if climb.why_not_judged:
        return [climb.why_not_judged]
    whose = "" if climb.unit == "search" else " of the configurations that one search found"
    what = f"Speed-ups over {climb.planned.baseline} in {climb.cost} to an equal result{whose}"
    what += f" (over {climb.chain_words}, simultaneous 95% intervals)"
    sentences = []
    for cost, speedups in climb.speedups_in.items() if climb.speedups else ():
        found: dict[str, list[str]] = {}
        for each in speedups:
            found.setdefault(each.arm, []).append(f"{_factor(each)} on {each.rung}")
        texts = [f"{arm} {joined(listed)}" for arm, listed in found.items()]
        sentences.append(f"{f'In {cost}' if sentences else what}: {'; '.join(texts)}.")
    if sentences and climb.why_not_clocked:
        sentences.append(f"None is given in training time: {climb.why_not_clocked}")
    return [*sentences, *(_trend_sentence(climb, climb.trend(arm)) for arm in climb.others)]


def _factor(each: RungSpeedup) -> str:
    """Returns a speed-up with its interval, or its bound, as a part of a sentence."""
    mean, low, high = each.mean
    if mean is None:
        return f"unknown ({each.missing} of {each.chains} without a value)"
    value, bounds = shown(mean), each.bounds
    if bounds["least"] and bounds["most"]:
        return "unknown (some at least, some at most)"
    for bound, words in _BOUNDS.items():
        if count := bounds[bound]:
            return f"{words} {value} (no interval: {count} of {each.chains} are bounds)"
    if low is None or high is None:
        return f"{value} (no interval)"
    return f"{value} ({shown(low)} to {shown(high)})"


def _trend_sentence(climb: Climb, trend: Trend) -> str:
    """Says whether a speed-up changes from rung to rung."""
    if trend.estimate is None:
        return f"Whether its speed-up changes is not known: {trend.why}"
    value, low, high = trend.estimate.value, trend.estimate.low, trend.estimate.high
    if low is None or high is None:
        return f"Whether the speed-up of {trend.arm} changes with {climb.name} has no interval."
    size = (
        f"by a factor of {shown(2**value)} each time {climb.name} doubles (simultaneous 95%"
        f" interval {shown(2**low)} to {shown(2**high)}, {climb.chain_words}, {trend.rungs} rungs)"
    )
    if low > 0:
        return f"The speed-up of {trend.arm} grows {size}."
    if high < 0:
        return f"The speed-up of {trend.arm} shrinks {size}."
    return f"It is not decided whether the speed-up of {trend.arm} changes: {size}."


def ladder_block(workloads: Sequence[Workload]) -> Block:
    """Returns the panel of a ladder, of whose rungs there are at least two."""
    climb = Climb(workloads)
    text = [f"{climb.planned.text()}.".capitalize()]
    if climb.why_not_judged:
        text.append(climb.why_not_judged)
    text += [trend.why for trend in climb.rate_trends() if trend.why]
    figures = [_results_figure(climb)]
    if climb.speedups:
        text.append(_INTERPOLATED)
        figures.append(_speedup_figure(climb))
    tables = [table for table in _tables(climb) if table.rows]
    return Block(text=tuple(text), figures=tuple(figures), tables=tuple(tables))


def _tables(climb: Climb) -> Iterator[Table]:
    columns: Columns[RungSpeedup] = {
        Column("arm", "arm"): lambda r: r.arm,
        Column("rung", "rung"): lambda r: r.rung,
        Column("speedup", "speed-up", "number"): lambda r: r.mean[0],
        Column("low", "from", "number"): lambda r: r.mean[1],
        Column("high", "to", "number"): lambda r: r.mean[2],
        Column("least", "at least", "integer"): lambda r: r.bounds["least"],
        Column("most", "at most", "integer"): lambda r: r.bounds["most"],
        Column("without_value", "without value", "integer"): lambda r: r.missing,
    }
    for cost, found in climb.speedups_in.items():
        suffix = "" if cost == climb.cost else f"_{cost.replace(' ', '_').lower()}"
        title = f"Speed-ups over {climb.planned.baseline}, in {cost}"
        note = _SPEEDUPS + (_TIMED if cost == "training time" else "")
        yield Table.of(f"ladder_speedups{suffix}", title, found, columns, note)
    yield _trend_table(
        climb,
        "ladder_trends",
        "Change of the speed-up with the rung",
        [climb.trend(each) for each in climb.others] if climb.speedups else [],
        "The factor by which the speed-up changes each time the rung doubles, over the rungs on"
        " which every chain has one that is not a bound.",
        doubling=True,
    )
    yield Table.of(
        "ladder_regret",
        "Regret of the rule",
        climb.regrets,
        {
            Column("arm", "arm"): lambda r: r.arm,
            Column("rung", "rung"): lambda r: r.rung,
            Column("regret", "regret", "number"): lambda r: r.estimate.value,
            Column("low", "from", "number"): lambda r: r.estimate.low,
            Column("high", "to", "number"): lambda r: r.estimate.high,
            Column("units", "chains", "integer"): lambda r: r.estimate.n,
        },
        f"How much worse the {climb.goal.words} is with the hyperparameters of the rule than with"
        " those of a search on the rung, on fresh seeds; below 0 if the rule is better. Intervals"
        " hold for all rows at once.",
    )
    yield _trend_table(
        climb,
        "ladder_rates",
        "Change of the best learning rate with the rung",
        climb.rate_trends(),
        "The power of the size of the rung by which the best rate changes: -1 if it must be divided"
        " by it. Each best rate is one of a few trials, so that its own error is large.",
    )
    title = f"Power of the {climb.cost}"
    yield _trend_table(climb, "ladder_powers", title, climb.powers(), _FIT)


def _trend_table(
    climb: Climb, name: str, title: str, trends: Iterable[Trend], note: str, doubling: bool = False
) -> Table:
    """Returns a table of slopes; `doubling` shows 2 to the power of each instead."""

    def number(value: float | None) -> float | None:
        return 2**value if doubling and value is not None else value

    over = f" Intervals are of t over {climb.chain_words}, and hold for all rows at once."
    columns: Columns[Trend] = {
        Column("arm", "arm"): lambda r: r.arm,
        Column("axis", "axis"): lambda r: r.of or None,
        Column("rungs", "rungs", "integer"): lambda r: r.rungs,
        Column("slope", "factor" if doubling else "power", "number"): lambda r: (
            r.estimate and number(r.estimate.value)
        ),
        Column("low", "from", "number"): lambda r: r.estimate and number(r.estimate.low),
        Column("high", "to", "number"): lambda r: r.estimate and number(r.estimate.high),
    }
    return Table.of(name, title, trends, columns, note + over).compact()


def _results_figure(climb: Climb) -> Figure:
    """Draws the result of each chain by rung, and the means."""
    goal = climb.goal
    series, rows, means = [], [], {}
    for arm in climb.rungs[0].arms:
        points: list[tuple[float, float]] = []
        names: list[str] = []
        for each in climb.rungs:
            values = each.units_of(arm)
            runs = {each.unit_of(run): run.name for run in reversed(each.finals) if run.arm == arm}
            finite = {unit: value for unit, value in values.items() if math.isfinite(value)}
            x = climb.factor_of(each.rung)
            points += [(x, value) for value in finite.values()]
            names += [runs[unit] for unit in finite]
            if finite and len(finite) == len(values):
                means[arm, x] = mean = mean_interval(list(finite.values()))
                rows.append((arm, each.rung, len(finite), mean.value, mean.low, mean.high))
        if line := [(x, mean.value) for (a, x), mean in means.items() if a == arm]:
            series.append(Series("line", arm, *map(list, zip(*line, strict=True)), label=arm))
        if points:
            at, values = map(list, zip(*points, strict=True))
            series.append(Series("points", arm, at, values, trials=tuple(names)))
    columns = (
        *Column.named(arm="text", rung="text"),
        Column("units", "chains", "integer"),
        Column("mean", f"mean {goal.metric}, {goal.report_on}", "number"),
        *Column.ends(),
    )
    return Figure(
        name="ladder_results",
        title=f"{goal.words.capitalize()} by {climb.name}",
        description=f"The {goal.words} of the final runs on each rung of {climb.name}, by arm; the"
        " lines connect means.",
        x=Axis(f"{climb.name}, times that of the lowest rung", log=True),
        y=Axis(goal.words, spans_decades(v for each in series for v in each.y)),
        series=tuple(series),
        table=Table("ladder_results", f"{goal.words.capitalize()} by rung", columns, tuple(rows)),
    )


def _speedup_figure(climb: Climb) -> Figure:
    """Draws the speed-up of each chain by rung, the means and their intervals."""
    series = [Series("rule", "", (), [1.0], label="the baseline")]
    every: list[tuple[RungSpeedup, int, Match]] = []
    for index, arm in enumerate(climb.others):
        aside = _ASIDE**index
        found = [each for each in climb.speedups if each.arm == arm and each.matches]
        whole = [(aside * each.factor, *each.mean) for each in found if not each.missing]
        x, y = [x for x, *_ in whole], [mean for _, mean, *_ in whole if mean is not None]
        series.append(Series("line", arm, x, y, label=arm))
        if sure := [(x, a, b) for x, _, a, b in whole if a is not None and b is not None]:
            at, low, high = map(list, zip(*sure, strict=True))
            series.append(Series("interval", arm, at, low, high, label="simultaneous 95% interval"))
        points = [(each, chain, m) for each in found for chain, m in each.matches.items()]
        x = [aside * each.factor for each, _, _ in points]
        series.append(Series("points", arm, x, [math.exp(m.log_cost) for _, _, m in points]))
        every += points
    columns: Columns[tuple[RungSpeedup, int, Match]] = {
        Column("arm", "arm"): lambda r: r[0].arm,
        Column("rung", "rung"): lambda r: r[0].rung,
        Column("chain", climb.unit, "integer"): lambda r: r[1],
        Column("speedup", "speed-up", "number"): lambda r: math.exp(r[2].log_cost),
        Column("bound", "bound"): lambda r: _BOUNDS.get(r[2].bound),
    }
    return Figure(
        name="ladder_speedup",
        title=f"Speed-up over {climb.planned.baseline} in {climb.cost}, by {climb.name}",
        description="The speed-up of each arm and chain on each rung; points that are bounds are in"
        " the table.",
        x=Axis(f"{climb.name}, times that of the lowest rung", log=True),
        y=Axis(f"speed-up in {climb.cost}", log=True),
        series=tuple(series),
        table=Table.of("ladder_speedup", "Speed-ups of single chains", every, columns),
    )
