"""The panel of sensitivity to the learning rate, and warnings about the edges of spaces."""

import math
from collections.abc import Mapping, Sequence
from shlex import quote

from trainer.messages import joined
from trainer.report.columns import named_columns
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, finite
from trainer.report.results import Workload
from trainer.report.spaces import Scan, edge_of, number_of, scans, spans_decades
from trainer.report.statistics.estimates import mean_interval
from trainer.report.statistics.sensitivity import sensitivity
from trainer.sweep.spaces import Bounds

_NAMED = 4  # how many axes a sentence lists
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


def learning_rate_block(workload: Workload, prefix: str, names: Mapping[str, str]) -> Block:
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
    known = [x for a in arms if (x := workload.initial_of(a, workload.goal.selected)) is not None]
    initial = sign * max(sign * x for x in known) if len(known) == len(arms) else math.nan
    figures = []
    for index, name in enumerate(dict.fromkeys(names[scan.path] for scan in rates), 1):
        of_axis = [scan for scan in rates if names[scan.path] == name]
        stem = f"{prefix}learning_rate_{index}"
        figures.append(_figure(workload, of_axis, name, initial, stem))
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
    table = Table.of(f"{prefix}sensitivity", "Sensitivity", rates, columns, note).compact()
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
    if _is_near(initial, [v for scan in scans for v in scan.values]):
        series.append(Series("rule", "", (), [initial], label="initial value"))
    elif math.isfinite(initial):
        description += f" The initial value, {initial:.4g}, lies outside."
    for scan in scans:
        capped = [_capped(v, initial, goal.sign) for v in scan.values]
        if scan.alone:
            series.append(Series("line", scan.arm, scan.at, capped, label=scan.arm))
        spread = [_spread(values, initial, goal.sign) for values in scan.seeds]
        if any(low < high for low, high in spread):
            ends = zip(*spread, strict=True)
            series.append(Series("interval", scan.arm, scan.at, *ends, label="range of the seeds"))
        series.append(Series("points", scan.arm, scan.at, capped, trials=scan.names))
    columns = (
        Column("arm", "arm"),
        Column("learning_rate", name, "number"),
        Column("value", goal.metric, "number"),
        *named_columns(seeds="integer", smallest="number", largest="number"),
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


def _is_near(initial: float, values: Sequence[float]) -> bool:
    """Returns whether a rule at the initial value would not flatten the points of a figure."""
    # It is drawn in any case if some values are not finite, because these are drawn at it.
    low, high = min(values), max(values)
    if not math.isfinite(low) or not math.isfinite(high):
        return math.isfinite(initial)
    return 2 * low - high <= initial <= 2 * high - low


def _capped(value: float, initial: float, sign: int) -> float:
    """Returns the better one of a value and the initial value."""
    return value if not math.isfinite(initial) else sign * min(sign * value, sign * initial)


def _spread(values: Sequence[float], initial: float, sign: int) -> tuple[float, float]:
    """Returns the smallest and the largest value of the seeds of a point, capped."""
    capped = [_capped(value, initial, sign) for value in values]
    finite = [value for value in capped if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)


def edge_sentence(workload: Workload, names: Mapping[str, str]) -> str:
    """Returns a sentence naming arms whose best points lie at an edge of their spaces, or ""."""
    every = [scan for arm in workload.arms for scan in scans(workload, arm)]
    found = [f"{names[x.path]} of {x.arm}" for x in every if _edge(workload, x)]
    if not found:
        return ""
    what = "lie at edges of their spaces" if len(found) > 1 else "lies at an edge of its space"
    return (
        f"The best {joined(found, _NAMED)} {what}, and a wider one may have a better point; the"
        ' section "Sensitivity to the learning rate" says how to look there.'
    )


def _edge(workload: Workload, scan: Scan) -> tuple[float, Bounds, str] | None:
    """Returns the best value, the bounds and the edge, if an arm's best point lies at an edge."""
    if not math.isfinite(scan.values[scan.best]) or workload.path is None:
        return None
    space, where = edge_of(scan.at, scan.best, workload.spaces[scan.arm].axes[scan.path])
    return None if where is None else (scan.at[scan.best], space, where)


def _warning(workload: Workload, scan: Scan, name: str) -> str | None:
    """Returns a warning if the best point of an arm lies at an edge of its space."""
    if (found := _edge(workload, scan)) is None:
        return None
    best, space, where = found
    warning = (
        f"The best {name} of {scan.arm}, {best:.4g}, lies at the {where} edge of its space"
        f" ({workload.spaces[scan.arm].axes[scan.path]}): a better one may lie beyond."
    )
    if workload.cuts or scan.arm in workload.asked:  # such arms cannot be given another space
        wider = _wider(space, where).rstrip(",")
        return f"{warning} To look there, start another sweep with {wider}."
    return (
        f"{warning} To look there, write {_wider(space, where)} and a larger number of trials into"
        f" the sweep's file, and run: python -m trainer sweep extend {quote(str(workload.path))}"
        " --config=FILE"
    )


def _wider(space: Bounds, where: str) -> str:
    """Returns the text to write for a space that is wider beyond an edge."""
    low, high = space.low, space.high
    if space.kind == "values":
        return (
            f"values {'below' if where == 'low' else 'above'} {low if where == 'low' else high:g}"
        )
    if space.log:
        low, high = (low / 10, high) if where == "low" else (low, 10 * high)
    elif where == "low":
        # An argument whose space has no negative values can rarely be negative.
        low = max(low - (high - low), 0.0) if low >= 0 else low - (high - low)
    else:
        # Decay rates and probabilities must not pass 1.
        high = min(2 * high - low, 1.0) if low >= 0 and high < 1 else 2 * high - low
    return f"space.{space.kind} {{low: {low:g}, high: {high:g}}}, if it may have such values,"
