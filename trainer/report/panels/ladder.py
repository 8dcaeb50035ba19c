"""The panel of a ladder: results by rung, speed-ups over the baseline, regret and best rates."""

import math
from collections.abc import Iterator, Sequence

from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table
from trainer.report.ladder import Climb, Speedup, Trend
from trainer.report.results import Workload
from trainer.report.spaces import spans_decades
from trainer.report.statistics import mean_interval
from trainer.report.wording import joined, shown

_ASIDE = 1.03  # by which the next arm is drawn further right, so that intervals do not overlap
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
    texts = []
    for arm in climb.others:
        found = [each for each in climb.speedups if each.arm == arm]
        if found:
            listed = joined([f"{_factor(each)} on {each.rung}" for each in found])
            texts.append(f"{arm} {listed}")
    whose = "" if climb.unit == "search" else " of the configurations that one search found"
    what = f"Speed-ups over {climb.planned.baseline} in {climb.cost[0]} to an equal result{whose}"
    over = f"over {climb.chain_words()}, simultaneous 95% intervals"
    sentences = [f"{what} ({over}): {'; '.join(texts)}."] if texts else []
    return [*sentences, *(_trend_sentence(climb, climb.trend(arm)) for arm in climb.others)]


def _factor(each: Speedup) -> str:
    """Returns a speed-up with its interval, or its bound, as a part of a sentence."""
    missing = each.chains - len(each.matches)
    if each.estimate is None or missing:
        return f"unknown ({missing} of {each.chains} without a value)"
    value, bounds = shown(math.exp(each.estimate.value)), each.bounds
    if bounds["least"] and bounds["most"]:
        return "unknown (some at least, some at most)"
    if bounds["least"]:
        return f"at least {value} (no interval: {bounds['least']} of {each.chains} are bounds)"
    if bounds["most"]:
        return f"at most {value} (no interval: {bounds['most']} of {each.chains} are bounds)"
    if each.estimate.low is None or each.estimate.high is None:
        return f"{value} (no interval)"
    return (
        f"{value} ({shown(math.exp(each.estimate.low))} to {shown(math.exp(each.estimate.high))})"
    )


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
    arm, rung = Column("arm", "arm"), Column("rung", "rung")
    ends = Column("low", "from", "number"), Column("high", "to", "number")
    yield Table(
        "ladder_speedups",
        f"Speed-ups over {climb.planned.baseline}, in {climb.cost[0]}",
        (
            arm,
            rung,
            Column("speedup", "speed-up", "number"),
            *ends,
            Column("least", "at least", "integer"),
            Column("most", "at most", "integer"),
            Column("without_value", "without value", "integer"),
        ),
        tuple(_speedup_row(each) for each in climb.speedups),
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
    yield Table(
        "ladder_regret",
        "Regret of the rule",
        (
            arm,
            rung,
            Column("regret", "regret", "number"),
            *ends,
            Column("units", "chains", "integer"),
        ),
        tuple(
            (r.arm, r.rung, r.estimate.value, r.estimate.low, r.estimate.high, r.chains)
            for r in climb.regrets
        ),
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
    yield _trend_table(
        climb, "ladder_powers", f"Power of the {climb.cost[0]}", climb.powers(), _FIT
    )


def _speedup_row(each: Speedup) -> tuple[Cell, ...]:
    low = high = value = None
    if each.estimate is not None and len(each.matches) == each.chains:
        value = math.exp(each.estimate.value)
        if each.estimate.low is not None and each.estimate.high is not None:
            low, high = math.exp(each.estimate.low), math.exp(each.estimate.high)
    bounds = each.bounds
    missing = each.chains - len(each.matches)
    return (each.arm, each.rung, value, low, high, bounds["least"], bounds["most"], missing)


def _trend_table(
    climb: Climb, name: str, title: str, trends: Sequence[Trend], note: str, doubling: bool = False
) -> Table:
    """Returns a table of slopes; `doubling` shows 2 to the power of each instead."""
    rows = []
    for each in trends:
        found = each.estimate
        ends = (None, None, None) if found is None else (found.value, found.low, found.high)
        shown_ends = [None if x is None else 2**x if doubling else x for x in ends]
        rows.append((each.arm, each.of or None, each.rungs, *shown_ends))
    columns = (
        Column("arm", "arm"),
        Column("axis", "axis"),
        Column("rungs", "rungs", "integer"),
        Column("slope", "factor" if doubling else "power", "number"),
        Column("low", "from", "number"),
        Column("high", "to", "number"),
    )
    over = f" Intervals are of t over {climb.chain_words()}, and hold for all rows at once."
    return Table(name, title, columns, tuple(rows), note + over).compact()


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
        line = [(x, mean.value) for (a, x), mean in means.items() if a == arm]
        if line:
            series.append(Series("line", arm, *map(list, zip(*line, strict=True)), label=arm))
        if points:
            at, values = map(list, zip(*points, strict=True))
            series.append(Series("points", arm, at, values, trials=tuple(names)))
    columns = (
        Column("arm", "arm"),
        Column("rung", "rung"),
        Column("units", "chains", "integer"),
        Column("mean", f"mean {goal.metric}, {goal.report_on}", "number"),
        Column("low", "95% from", "number"),
        Column("high", "to", "number"),
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
    series, rows = [Series("rule", "", (), [1.0], label="the baseline")], []
    for index, arm in enumerate(climb.others):
        aside = _ASIDE**index
        found = [each for each in climb.speedups if each.arm == arm and each.matches]
        whole = [each for each in found if len(each.matches) == each.chains and each.estimate]
        x, y = (
            [aside * each.factor for each in whole],
            [math.exp(e.estimate.value) for e in whole if e.estimate],
        )
        series.append(Series("line", arm, x, y, label=arm))
        sure = [
            (aside * each.factor, math.exp(e.low), math.exp(e.high))
            for each in whole
            if (e := each.estimate) is not None and e.low is not None and e.high is not None
        ]
        if sure:
            at, low, high = map(list, zip(*sure, strict=True))
            series.append(Series("interval", arm, at, low, high, label="simultaneous 95% interval"))
        points = [(each, chain, m) for each in found for chain, m in each.matches.items()]
        factors = [math.exp(m.log_cost) for _, _, m in points]
        series.append(
            Series("points", arm, [aside * each.factor for each, _, _ in points], factors)
        )
        rows += [
            (
                arm,
                each.rung,
                chain,
                math.exp(m.log_cost),
                {"least": "at least", "most": "at most"}.get(m.bound),
            )
            for each, chain, m in points
        ]
    columns = (
        Column("arm", "arm"),
        Column("rung", "rung"),
        Column("chain", climb.unit, "integer"),
        Column("speedup", "speed-up", "number"),
        Column("bound", "bound"),
    )
    name = climb.planned.path.rpartition(".")[2]
    return Figure(
        name="ladder_speedup",
        title=f"Speed-up over {climb.planned.baseline} in {climb.cost[0]}, by {name}",
        description="The speed-up of each arm and chain on each rung; points that are bounds are in"
        " the table.",
        x=Axis(f"{name}, times that of the lowest rung", log=True),
        y=Axis(f"speed-up in {climb.cost[0]}", log=True),
        series=tuple(series),
        table=Table("ladder_speedup", "Speed-ups of single chains", columns, tuple(rows)),
    )
