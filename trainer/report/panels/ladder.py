"""The panel of a ladder: results by rung, speed-ups over the baseline, regret and best rates."""

import math
from collections.abc import Iterator, Sequence

from trainer.messages import joined
from trainer.report.columns import INTERVAL, named_columns
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table
from trainer.report.ladder import Climb, Match, Speedup, Trend
from trainer.report.results import Workload
from trainer.report.spaces import spans_decades
from trainer.report.statistics.estimates import mean_interval
from trainer.report.wording import shown

_ASIDE = 1.03  # by which the next arm is drawn further right, so that intervals do not overlap
_BOUNDS = {"least": "at least", "most": "at most"}
_INTERPOLATED = (
    "The speed-up of an arm on a rung is the cost at which the baseline has the same result, over"
    " that of the arm. Between two rungs of the baseline it is interpolated by monotone cubics over"
    " the logarithm of the cost; where no run of the baseline is as good, the speed-up is at least"
    " that of its longest runs. Every run was planned for its length: a learning rate that decays"
    " to zero ends there, so that points of one run's curve are no shorter runs."
)
_FIT = (
    "The power of the cost by which the loss changes, by a straight line through the logarithms."
    " It describes these rungs and no others: no asymptote is fitted, because a few rungs cannot"
    " tell it from the power (on four rungs with noise of 0.3%, a true power of -0.3 was estimated"
    " as -0.1 to -0.47)."
)


def speedup_sentences(workloads: Sequence[Workload]) -> list[str]:
    """Returns what a ladder says of its arms over all rungs; no sentence without a ladder."""
    if workloads[0].ladder is None:
        return []
    climb = Climb(workloads)
    if not climb.others:
        return []
    if climb.why_not_judged:
        return [climb.why_not_judged]
    found: dict[str, list[str]] = {}
    for each in climb.speedups:
        found.setdefault(each.arm, []).append(f"{_factor(each)} on {each.rung}")
    texts = [f"{arm} {joined(listed)}" for arm, listed in found.items()]
    whose = "" if climb.unit == "search" else " of the configurations that one search found"
    what = f"Speed-ups over {climb.planned.baseline} in {climb.cost[0]} to an equal result{whose}"
    over = f"over {climb.chain_words()}, simultaneous 95% intervals"
    sentences = [f"{what} ({over}): {'; '.join(texts)}."] if texts else []
    return [*sentences, *(_trend_sentence(climb, climb.trend(arm)) for arm in climb.others)]


def _factor(each: Speedup) -> str:
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
    name = climb.planned.path.rpartition(".")[2]
    if low is None or high is None:
        return f"Whether the speed-up of {trend.arm} changes with {name} has no interval."
    size = (
        f"by a factor of {shown(2**value)} each time {name} doubles (simultaneous 95% interval"
        f" {shown(2**low)} to {shown(2**high)}, {climb.chain_words()}, {trend.rungs} rungs)"
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
    yield Table.of(
        "ladder_speedups",
        f"Speed-ups over {climb.planned.baseline}, in {climb.cost[0]}",
        climb.speedups,
        {
            Column("arm", "arm"): lambda r: r.arm,
            Column("rung", "rung"): lambda r: r.rung,
            Column("speedup", "speed-up", "number"): lambda r: r.mean[0],
            Column("low", "from", "number"): lambda r: r.mean[1],
            Column("high", "to", "number"): lambda r: r.mean[2],
            Column("least", "at least", "integer"): lambda r: r.bounds["least"],
            Column("most", "at most", "integer"): lambda r: r.bounds["most"],
            Column("without_value", "without value", "integer"): lambda r: r.missing,
        },
        "The geometric mean over the chains; intervals hold for all rows at once. Where chains are"
        " bounds, there is no interval.",
    )
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
    title = f"Power of the {climb.cost[0]}"
    yield _trend_table(climb, "ladder_powers", title, climb.powers(), _FIT)


def _trend_table(
    climb: Climb, name: str, title: str, trends: Sequence[Trend], note: str, doubling: bool = False
) -> Table:
    """Returns a table of slopes; `doubling` shows 2 to the power of each instead."""

    def number(value: float | None) -> float | None:
        return 2**value if doubling and value is not None else value

    over = f" Intervals are of t over {climb.chain_words()}, and hold for all rows at once."
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
            values = each.units_of(arm) if arm in each.arms else {}
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
        *named_columns(arm="text", rung="text"),
        Column("units", "chains", "integer"),
        Column("mean", f"mean {goal.metric}, {goal.report_on}", "number"),
        *INTERVAL,
    )
    name = climb.planned.path.rpartition(".")[2]
    return Figure(
        name="ladder_results",
        title=f"{goal.words.capitalize()} by {name}",
        description=f"The {goal.words} of the final runs on each rung of {name}, by arm; the lines"
        " connect means.",
        x=Axis(f"{name}, times that of the lowest rung", log=True),
        y=Axis(goal.words, spans_decades(v for each in series for v in each.y)),
        series=tuple(series),
        table=Table("ladder_results", f"{goal.words.capitalize()} by rung", columns, tuple(rows)),
    )


def _speedup_figure(climb: Climb) -> Figure:
    """Draws the speed-up of each chain by rung, the means and their intervals."""
    series = [Series("rule", "", (), [1.0], label="the baseline")]
    every: list[tuple[Speedup, int, Match]] = []
    for index, arm in enumerate(climb.others):
        aside = _ASIDE**index
        found = [each for each in climb.speedups if each.arm == arm and each.matches]
        whole = [(aside * each.factor, *each.mean) for each in found if not each.missing]
        x, y = [x for x, *_ in whole], [mean for _, mean, *_ in whole if mean is not None]
        series.append(Series("line", arm, x, y, label=arm))
        sure = [(x, a, b) for x, _, a, b in whole if a is not None and b is not None]
        if sure:
            at, low, high = map(list, zip(*sure, strict=True))
            series.append(Series("interval", arm, at, low, high, label="simultaneous 95% interval"))
        points = [(each, chain, m) for each in found for chain, m in each.matches.items()]
        x = [aside * each.factor for each, _, _ in points]
        series.append(Series("points", arm, x, [math.exp(m.log_cost) for _, _, m in points]))
        every += points
    columns: Columns[tuple[Speedup, int, Match]] = {
        Column("arm", "arm"): lambda r: r[0].arm,
        Column("rung", "rung"): lambda r: r[0].rung,
        Column("chain", climb.unit, "integer"): lambda r: r[1],
        Column("speedup", "speed-up", "number"): lambda r: math.exp(r[2].log_cost),
        Column("bound", "bound"): lambda r: _BOUNDS.get(r[2].bound),
    }
    name = climb.planned.path.rpartition(".")[2]
    return Figure(
        name="ladder_speedup",
        title=f"Speed-up over {climb.planned.baseline} in {climb.cost[0]}, by {name}",
        description="The speed-up of each arm and chain on each rung; points that are bounds are in"
        " the table.",
        x=Axis(f"{name}, times that of the lowest rung", log=True),
        y=Axis(f"speed-up in {climb.cost[0]}", log=True),
        series=tuple(series),
        table=Table.of("ladder_speedup", "Speed-ups of single chains", every, columns),
    )
