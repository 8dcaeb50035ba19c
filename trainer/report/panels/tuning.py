"""The panels of a search: what the best of k trials would have reached, and who was stopped early.

Nothing can show that a trial that was stopped would not have come out ahead; the panel of cuts
shows how much the order of those that went on still changed.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.messages import joined
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, shown
from trainer.report.results import Result, Workload, point_values, spans_decades
from trainer.report.statistics import best_of_k
from trainer.sweep.halving import Cut

_BANDS = 2  # arms whose bands are drawn; more would hide each other
_EQUAL = 1.01  # costs whose ratio is at most this count as equal
_TEXT = (
    "How good the best of k trials is on average, if k of an arm's trials are drawn without"
    " replacement (U statistic). The band holds the curve of the median best of k with 95%"
    " confidence for all k at once (arXiv:2311.09480); where the trials set no limit, it goes on to"
    " the edge of the figure. It is drawn for the two best arms. Curve and band"
    " treat trials as independent draws, which those of Sobol, Halton or a grid are not: there they"
    " are a guide. Where the curves cross, the better arm depends on the budget for tuning."
)
_CUT = (
    "Trials of {arms} are stopped early, so that their values at the end are not known, and neither"
    " is what the best of k of them would have reached: other trials would have gone on."
)
_ASKED = (
    "The points of {arms} were chosen by the results of earlier ones. Their curve is the best point"
    " so far, in the order in which they were chosen, the mean over searches; it has no band."
)
_COLUMNS = (
    *Column.named(arm="text", k="integer"),
    Column("expected", "expected best", "number"),
    Column("expected_v", "with replacement", "number"),
    Column("median", "median best", "number"),
    Column("low", "median from", "number"),
    Column("high", "to", "number"),
)
_NAMED = 9  # points that a cell lists
_CUTS = (
    "At each cut the points of a search were ordered by the goal after that step, and the trials of"
    " all but the best were stopped. What begins slowly, such as a small learning rate or an"
    " optimizer that gains late, is at a disadvantage, and no result tells how a point that was"
    " stopped would have ended. Two signs that a cut came too early: the winner was among the last"
    " that went on, or the order of those that went on changed much until the next cut or the end."
)
_ORDER = (
    "The place of the winner is that among all points at the cut. The pairs are those of points"
    " that went on and had values at the next cut, or at the end after the last one, without pairs"
    " of equal values: how many of them had the same order there."
)


def tuning_block(workload: Workload) -> Block:
    """Returns the panel of tuning curves."""
    goal, short = workload.goal, workload.cut_short
    whole = [arm for arm in workload.arms if arm not in short]
    arms = {arm: list(point_values(workload, arm).values()) for arm in whole}
    arms = {arm: values for arm, values in arms.items() if values}
    every = sum(arms.values(), [])
    notes = {_CUT: short, _ASKED: [arm for arm in workload.asked if arm in arms]}
    stopped = tuple(note.format(arms=joined(names)) for note, names in notes.items() if names)
    if not any(map(math.isfinite, every)):
        none = "There is no search, or none of its trials has a finite value."
        return Block(text=stopped if stopped and not whole else (none, *stopped))
    curves = {
        arm: _so_far(workload, arm) if arm in workload.asked else _curves(values, goal.better)
        for arm, values in arms.items()
    }
    rows = tuple(
        (arm, k, *line)
        for arm, columns in curves.items()
        for k, line in enumerate(zip(*columns, strict=True), 1)
    )
    best = {arm: min(values, key=lambda v: goal.sign * v) for arm, values in arms.items()}
    ends = ", ".join(f"{arm} {shown(v)}" for arm, v in best.items() if math.isfinite(v))
    figure = Figure(
        name="tuning",
        title=f"Best {goal.metric} of k trials, {goal.select_on} split",
        description=f"The expected best {goal.metric} of k trials drawn from those of each arm,"
        f" over k. With all trials: {ends}.",
        x=Axis("trials (k)", log=max(map(len, arms.values())) > 10),
        y=Axis(f"best {goal.metric}, {goal.select_on}", log=spans_decades(every)),
        series=_series(workload, arms, curves),
        table=Table("tuning", "Best of k trials", _COLUMNS, rows),
    )
    figures = [figure, *_by_cost(workload, arms, curves)]
    text = stopped if set(arms) <= set(workload.asked) else (_TEXT, *stopped)
    return Block(text=text, warnings=tuple(_warnings(arms)), figures=tuple(figures))


def _by_cost(
    workload: Workload, arms: dict[str, list[float]], curves: Mapping[str, Sequence[list[float]]]
) -> Iterator[Figure]:
    """Yields the tuning curves over steps and over FLOPs, where trials of arms differ in them."""
    # k trials of an arm cost k times the mean of its trials.
    goal = workload.goal
    for what, title, of in (
        ("steps", "steps", lambda run: float(run.planned)),
        ("flops", "FLOPs", lambda run: (run.flops or math.nan) * run.planned),
    ):
        costs = {arm: x for arm in arms if (x := _mean_cost(workload, arm, of)) is not None}
        if len(costs) < len(arms) or max(costs.values()) <= _EQUAL * min(costs.values()):
            continue
        series, rows = [], []
        for arm, (expected, *_) in curves.items():
            x = [costs[arm] * float(k) for k in range(1, len(expected) + 1)]
            series.append(Series("line", arm, x, expected, label=arm))
            rows += [(arm, x[i], i + 1, y) for i, y in enumerate(expected)]
        columns = (
            Column("arm", "arm"),
            Column(what, f"{title} of the search", "number"),
            Column("k", "k", "integer"),
            Column("expected", "expected best", "number"),
        )
        name = f"tuning_{what}"
        yield Figure(
            name=name,
            title=f"Best {goal.metric} by the {title} of the search, {goal.select_on} split",
            description=f"The expected best {goal.metric} of the trials that a budget of {title}"
            " pays for, by arm: the curves of the figure before over their cost.",
            x=Axis(f"{title} of the search", log=True),
            y=Axis(
                f"best {goal.metric}, {goal.select_on}", log=spans_decades(sum(arms.values(), []))
            ),
            series=tuple(series),
            table=Table(name, f"Best of k trials by {title}", columns, tuple(rows)),
        )


def _mean_cost(workload: Workload, arm: str, of: Callable[[Result], float]) -> float | None:
    costs = [of(run) for run in workload.trials_of(arm)]
    mean = math.fsum(costs) / len(costs) if costs else math.nan
    seeds = len({run.seed for run in workload.trials_of(arm) if run.search == 0})
    return mean * seeds if math.isfinite(mean) and mean > 0 else None


def _curves(values: Sequence[float], better: str) -> list[list[float]]:
    """Returns the columns of the table that follow k."""
    columns = (
        best_of_k.expected_best(values, better),
        best_of_k.expected_best_v(values, better),
        best_of_k.median_best(values, better),
        *best_of_k.bands(values, 0.95, better),
    )
    return [column.tolist() for column in columns]


def _so_far(workload: Workload, arm: str) -> list[list[Any]]:
    """Returns the columns of an arm whose points were chosen by results; all but one are empty."""
    sign, searches = workload.goal.sign, dict[int, list[float]]()
    for (search, number), value in sorted(point_values(workload, arm).items()):
        best = searches.setdefault(search, [])
        if number == len(best):  # a point before it has no result yet
            best.append(sign * min(sign * x for x in (value, *best[-1:])))
    curve = [math.fsum(of) / len(of) for of in zip(*searches.values(), strict=False)]
    return [curve, *([None] * len(curve) for _ in range(4))]


def _series(
    workload: Workload, arms: dict[str, list[float]], curves: Mapping[str, Sequence[list[float]]]
) -> tuple[Series, ...]:
    # The table has the bands of every arm.
    sign = workload.goal.sign
    drawn = [arm for arm in arms if arm not in workload.asked]
    with_band = sorted(drawn, key=lambda arm: min(sign * v for v in arms[arm]))[:_BANDS]
    bands, lines = [], []
    for arm, (expected, _, _, low, high) in curves.items():
        k = list(range(1, len(expected) + 1))
        if arm in with_band:
            bands.append(Series("band", arm, k, low, high, label="95% band of the median"))
        names = tuple(run.name for run in workload.trials_of(arm) if run.end != "missing")
        # The page computes a curve again from trials, and cannot do so from means over seeds.
        recipe = "best_of_k" if len(names) == len(k) else ""
        lines.append(Series("line", arm, k, expected, label=arm, trials=names, recipe=recipe))
    return (*bands, *lines)


def _warnings(arms: dict[str, list[float]]) -> Iterator[str]:
    for arm, values in arms.items():
        if (diverged := sum(map(math.isinf, values))) == len(values):
            yield f"No point of {arm} has a finite value."
        elif diverged:
            yield (
                f"{diverged} of {len(values)} points of {arm} have no finite value: its expected"
                " best is infinite until k is so large that one of the others is always drawn."
            )


def cuts_block(workload: Workload) -> Block:
    """Returns the panel of cuts."""
    cuts: list[tuple[Cut, int, int]] = []
    for arm, planned in workload.cuts.items():
        values = point_values(workload, arm)
        for search in range(workload.searches):
            ends = {number: x for (of, number), x in values.items() if of == search}
            made = workload.orders.get((arm, search), ())
            for cut, after in itertools.zip_longest(made, made[1:]):
                later = {} if after is None else _values_at(after)
                if after is None and cut.step == planned.steps[-1]:
                    later = {number: x for number, x in ends.items() if math.isfinite(x)}
                cuts.append((cut, *_same_order(cut, later)))
    if not cuts:
        return Block(text=("No cut was made yet.",))
    several = workload.searches > 1

    def winner(cut: Cut) -> int | None:
        number = workload.winners.get((cut.arm, cut.search))
        return cut.order.index(number) + 1 if number in cut.order else None

    def going_on(cut: Cut) -> str | None:  # of many points the first ones
        names = [f"{number:04d}" for number in cut.going_on[:_NAMED]]
        more = [f"and {cut.kept - _NAMED} more"] if cut.kept > _NAMED else []
        return ", ".join([*names, *more]) or None

    columns: Columns[tuple[Cut, int, int]] = {
        Column("arm", "arm"): lambda r: r[0].arm,
        Column("search", "search", "integer"): lambda r: r[0].search if several else None,
        Column("step", "cut at step", "integer"): lambda r: r[0].step,
        Column("points", "points", "integer"): lambda r: len(r[0].order),
        Column("valueless", "without value", "integer"): lambda r: r[0].values.count(None),
        Column("kept", "went on", "integer"): lambda r: r[0].kept,
        Column("winner", "place of the winner", "integer"): lambda r: winner(r[0]),
        Column("same", "pairs in the same order later", "integer"): lambda r: (
            r[1] if r[2] else None
        ),
        Column("pairs", "of", "integer"): lambda r: r[2] or None,
        Column("order", "those that went on, the best first", "code"): lambda r: going_on(r[0]),
    }
    table = Table.of("cuts", "Cuts of the searches", cuts, columns, _ORDER)
    return Block(text=(_CUTS,), tables=(table,))


def _values_at(cut: Cut) -> dict[int, float]:
    """Returns the values of points at a cut, without those that have none."""
    pairs = zip(cut.order, cut.values, strict=True)
    return {number: value for number, value in pairs if value is not None}


def _same_order(cut: Cut, after: dict[int, float]) -> tuple[int, int]:
    """Returns how many pairs, but those of equal values, have the same order, and of how many."""
    before = _values_at(cut)
    pairs = [
        (before[a] - before[b]) * (after[a] - after[b])
        for a, b in itertools.combinations([n for n in cut.going_on if n in after], 2)
        if before[a] != before[b] and after[a] != after[b]
    ]
    return sum(product > 0 for product in pairs), len(pairs)
