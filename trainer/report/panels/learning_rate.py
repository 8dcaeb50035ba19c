"""The panel of sensitivity to the learning rate, and warnings about the edges of spaces."""

import math
from collections.abc import Mapping, Sequence
from shlex import quote

import numpy as np

from trainer.messages import joined
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table
from trainer.report.results import Scan, Workload, at_edge, number_of, scans, spans_decades
from trainer.report.statistics.estimates import finite, mean_interval, sensitivity
from trainer.sweep.spaces import Bounds

_NOTE = (
    "Sensitivity is the mean over logarithmic rates of how much worse a rate is than the best one,"
    " where a rate that is worse than the initial value counts as that (arXiv:2309.14322): 0 if"
    " every rate is as good. It is computed for each seed, and depends on the interval that was"
    " searched: compare arms with intervals of the same ratio. An arm that is bad at every rate is"
    " insensitive as well: read the number together with the value at the best rate."
)
_CUT = (
    "Trials of {arms} are stopped early: what their learning rates would have reached at the end"
    " is not known, and neither is a sensitivity."
)
_ASKED = (
    "The points of {arms} were chosen by the results of earlier ones, and crowd where these are"
    " good: no sensitivity is computed from them."
)
_SEVERAL = (
    " Where an arm searched several axes at once, the others vary from point to point: its points"
    " are not connected, and its sensitivity contains theirs."
)


def learning_rate_block(workload: Workload, names: Mapping[str, str]) -> Block:
    """Returns the panel of the learning rate, and warnings about best points at edges of spaces."""
    every = [scan for arm in workload.arms for scan in scans(workload, arm)]
    rates = [scan for scan in every if "learning_rate" in scan.path and min(scan.at) > 0]
    cut = list(dict.fromkeys(scan.arm for scan in rates if scan.arm in workload.cut_short))
    rates = [scan for scan in rates if scan.arm not in cut]
    warnings = [text for scan in every if (text := _warning(workload, scan, names[scan.path]))]
    asked = [arm for arm in workload.asked if arm in {scan.arm for scan in rates}]
    notes = {_CUT: cut, _ASKED: asked}
    text = tuple(note.format(arms=joined(arms)) for note, arms in notes.items() if arms)
    if not rates:
        none = "No arm searched a learning rate." if workload.trials else "There is no search."
        return Block(text=text or (none,), warnings=tuple(warnings))
    # The worst metric of the arms before training, which earlier versions did not measure.
    sign, arms = workload.goal.sign, {scan.arm for scan in rates}
    of_arms = [workload.initial_of(arm, workload.goal.selected) for arm in arms]
    initial = sign * float((sign * np.array(of_arms)).max())  # NaN if one is not known
    figures = []
    for index, name in enumerate(dict.fromkeys(names[scan.path] for scan in rates), 1):
        of_axis = [scan for scan in rates if names[scan.path] == name]
        figures.append(_figure(workload, of_axis, name, initial, f"learning_rate_{index}"))
    found = {scan: _sensitivity(workload, scan, initial) for scan in rates}
    columns: Columns[Scan] = {
        Column("arm", "arm"): lambda r: r.arm,
        Column("axis", "axis"): lambda r: names[r.path],
        Column("low", "from", "number"): lambda r: min(r.at),
        Column("high", "to", "number"): lambda r: max(r.at),
        Column("best_rate", "best rate", "number"): lambda r: r.at[r.best],
        Column("best", "value there", "number"): lambda r: finite(r.values[r.best]),
        Column("diverged", "without value", "integer"): lambda r: sum(map(math.isinf, r.values)),
        Column("sensitivity", "sensitivity", "number"): lambda r: found[r][0],
        Column("sensitivity_low", "95% from", "number"): lambda r: found[r][1],
        Column("sensitivity_high", "to", "number"): lambda r: found[r][2],
    }
    note = _NOTE + (_SEVERAL if any(not scan.alone for scan in rates) else "")
    if math.isfinite(initial):
        note += f" The initial {workload.goal.metric} is {initial:.4g}."
    table = Table.of("sensitivity", "Sensitivity", rates, columns, note).compact()
    return Block(text=text, warnings=tuple(warnings), figures=tuple(figures), tables=(table,))


def _sensitivity(workload: Workload, scan: Scan, initial: float) -> tuple[float | None, ...]:
    """Returns the mean over the seeds that have a sensitivity, and the ends of its interval."""
    sign, found = workload.goal.sign, []
    known = math.isfinite(initial) and math.isfinite(scan.values[scan.best])
    if scan.arm in workload.asked or not known:
        return (None,) * 3
    ended = [run for run in workload.trials_of(scan.arm) if run.end != "missing"]
    for seed in sorted({run.seed for run in ended}):  # each search has other seeds
        points = []
        for run in ended:
            at, value = number_of(run.values.get(scan.path)), run.value(workload.goal.selected)
            if run.seed == seed and at is not None:
                points.append((at, math.inf if value is None else sign * value))
        if any(math.isfinite(value) for _, value in points):
            rates, values = zip(*points, strict=True)
            number = sensitivity(rates, values, sign * initial)
            found += [] if number is None else [number]
    mean = mean_interval(found) if found else None
    return (None,) * 3 if mean is None else (mean.value, mean.low, mean.high)


def _figure(
    workload: Workload, scans: Sequence[Scan], name: str, initial: float, stem: str
) -> Figure:
    goal = workload.goal
    series: list[Series] = []
    description = f"The goal of each point of the search over {name}, by arm."
    # Draw a rule at the initial value, unless it would flatten the points; but in any case if some
    # values are not finite, because these are drawn at it.
    values = [value for scan in scans for value in scan.values]
    low, high = min(values), max(values)
    near = not all(map(math.isfinite, values)) or 2 * low - high <= initial <= 2 * high - low
    if math.isfinite(initial) and near:
        series.append(Series("rule", "", (), [initial], label="initial value"))
    elif math.isfinite(initial):
        description += f" The initial value, {initial:.4g}, lies outside."

    def capped(values: Sequence[float]) -> list[float]:  # the better of a value and the initial one
        if not math.isfinite(initial):
            return list(values)
        return [goal.sign * min(goal.sign * x, goal.sign * initial) for x in values]

    for scan in scans:
        drawn = capped(scan.values)
        if scan.alone:
            series.append(Series("line", scan.arm, scan.at, drawn, label=scan.arm))
        known = [[*filter(math.isfinite, capped(of_point))] for of_point in scan.seeds]
        least, most = (tuple(of(x, default=math.nan) for x in known) for of in (min, max))
        if any(a < b for a, b in zip(least, most, strict=True)):
            ends = least, most
            series.append(Series("interval", scan.arm, scan.at, *ends, label="range of the seeds"))
        series.append(Series("points", scan.arm, scan.at, drawn, trials=scan.names))
    columns = (
        Column("arm", "arm"),
        Column("learning_rate", name, "number"),
        Column("value", goal.metric, "number"),
        *Column.named(seeds="integer", smallest="number", largest="number"),
    )
    rows = tuple(
        (scan.arm, x, value, len(values), min(values), max(values))
        for scan in scans
        for x, value, values in zip(scan.at, scan.values, scan.seeds, strict=True)
    )
    return Figure(
        name=stem,
        title=f"{goal.metric.capitalize()} by {name}, {goal.select_on} split",
        description=description,
        x=Axis(name, log=True),
        y=Axis(f"{goal.metric}, {goal.select_on}", spans_decades(v for s in series for v in s.y)),
        series=tuple(series),
        table=Table(stem, f"Points of the search by {name}", columns, rows),
    )


def _warning(workload: Workload, scan: Scan, name: str) -> str | None:
    """Returns a warning if the best point of an arm lies at an edge of its space."""
    if (found := at_edge(workload, scan)) is None:
        return None
    best, space, where = found
    warning = (
        f"The best {name} of {scan.arm}, {best:.4g}, lies at the {where} edge of its space"
        f" ({workload.spaces[scan.arm].axes[scan.path]}): a better one may lie beyond."
    )
    alike = " Widen the spaces of all arms alike." if len(workload.spaces) > 1 else ""
    if workload.cuts or scan.arm in workload.asked:  # such arms cannot be given another space
        wider = _wider(space, where).rstrip(",")
        return f"{warning} To look there, start another sweep with {wider}.{alike}"
    return (
        f"{warning}{alike} To look there, write {_wider(space, where)} and a larger number of"
        " trials into the sweep's file, and run: python -m trainer sweep extend"
        f" {quote(str(workload.path))} --config=FILE"
    )


def _wider(space: Bounds, where: str) -> str:
    """Returns the text to write for a space that is wider beyond an edge."""
    low, high = space.low, space.high
    if space.kind == "values":
        return f"values below {low:g}" if where == "low" else f"values above {high:g}"
    if space.log:
        low, high = (low / 10, high) if where == "low" else (low, 10 * high)
    elif where == "low":
        # An argument whose space has no negative values can rarely be negative.
        low = max(low - (high - low), 0.0) if low >= 0 else low - (high - low)
    else:
        # Decay rates and probabilities must not pass 1.
        high = min(2 * high - low, 1.0) if low >= 0 and high < 1 else 2 * high - low
    return f"space.{space.kind} {{low: {low:g}, high: {high:g}}}, if it may have such values,"
