"""The panel across workloads: speedups, performance profiles and AlgoPerf's score."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.messages import joined
from trainer.report.columns import columns_of, named_columns
from trainer.report.document import Axis, Block, Column, Columns, Figure, Series, Table, finite
from trainer.report.panels.targets import target_of, to_target, why_not_clocked
from trainer.report.results import Workload
from trainer.report.statistics import scores

_LARGEST_RATIO = 4.0  # the r_max of AlgoPerf's score


def workloads_block(workloads: Sequence[Workload]) -> Block:
    """Returns the panel across workloads, of which there are at least two."""
    arms = [a for a in workloads[0].arms if all(each.finals_of(a) for each in workloads)]
    left_out = dict.fromkeys(a for each in workloads for a in each.arms if a not in arms)
    warnings = []
    if left_out:
        warnings.append(
            f"{joined(list(left_out))} {'is' if len(left_out) == 1 else 'are'} left out, because"
            " not every workload has compared runs of that arm."
        )
    values = [value for value, _ in map(target_of, workloads) if value is not None]
    if len(arms) < 2 or len(values) < len(workloads):
        text = (
            "Scores across workloads need two arms that every workload has, and a target for each."
        )
        return Block(text=(text,), warnings=tuple(warnings))
    why = next(filter(None, map(why_not_clocked, workloads)), "")
    goals = list(zip(workloads, values, strict=True))
    # The times to the target of each compared run, [arm][workload], and the medians over these,
    # each of which is a study with one trial.
    runs = [[to_target(each, arm, x, clock=not why) for each, x in goals] for arm in arms]
    times = np.asarray([[scores.time_of_studies([[x] for x in xs]) for xs in own] for own in runs])
    if any(each.goal.target is None for each in workloads):
        warnings.append(
            "Targets that were not given are those that the runner-up reached, so that they depend"
            " on the arms that take part: give a target to report scores."
        )
    what = "steps" if why else "training time"
    text = (
        f"Each arm has one time for each workload: the median {what} to the target over its"
        " compared runs, where a miss is later than any other. A score depends on the other arms,"
        " because each workload is measured by its fastest: the columns at the right leave one arm"
        " out.",
    )
    if why:
        warnings.append(f"Scores are over steps, because times cannot be trusted: {why}")
    kind = "integer" if why else "seconds"
    columns = Column("arm", "arm"), *columns_of([w.name for w in workloads], {"arm"}, kind)
    rows = tuple((arm, *map(finite, row)) for arm, row in zip(arms, times.tolist(), strict=True))
    of_times = Table("workloads_times", "Times to the targets", columns, rows, "– is a miss.")
    tables = (of_times, _scores(arms, times, runs), _pairs(arms, times))
    figures = (_profile(arms, times),)
    return Block(text=text, warnings=tuple(warnings), figures=figures, tables=tables)


def _scores(
    arms: Sequence[str], times: NDArray, runs: Sequence[Sequence[Sequence[float]]]
) -> Table:
    means = scores.algoperf_score(times, _LARGEST_RATIO)
    low, high = scores.score_intervals(runs, _LARGEST_RATIO)
    without = scores.leave_one_out(times, _LARGEST_RATIO)
    columns: Columns[int] = {
        Column("arm", "arm"): lambda i: arms[i],
        Column("score", "score", "number"): lambda i: float(means[i]),
        Column("low", "95% from", "number"): lambda i: float(low[i]),
        Column("high", "to", "number"): lambda i: float(high[i]),
    }
    titles, taken = [f"without {arm}" for arm in arms], {column.name for column in columns}
    for gone, column in enumerate(columns_of(titles, taken, "number")):
        columns[column] = lambda i, rest=without[gone]: finite(float(rest[i]))
    note = (
        "AlgoPerf's score (arXiv:2306.07179), without its qualification rules: the mean over ratios"
        " from 1 to 4 of the share of workloads on which an arm needs at most that many times the"
        " fastest arm's time. The intervals are of a bootstrap over the runs of each workload; they"
        f" say nothing about other workloads. {_swaps(arms, means, without)}"
    )
    return Table.of("workloads_scores", "AlgoPerf score", range(len(arms)), columns, note)


def _swaps(arms: Sequence[str], means: NDArray, without: dict[int, NDArray]) -> str:
    """Says whether leaving an arm out changes the order of the first two of the others."""
    order = [int(i) for i in np.argsort(-means, kind="stable")]
    for gone, rest in without.items():
        left = [i for i in order if i != gone]
        if len(left) > 1 and rest[left[0]] < max(rest[i] for i in left[1:]):
            first = max(left, key=lambda i: rest[i])  # noqa: B023
            return f"Without {arms[gone]}, {arms[first]} comes before {arms[left[0]]}."
    return "The best of the remaining arms stays the best, whichever arm is left out."


def _pairs(arms: Sequence[str], times: NDArray) -> Table:
    found = [(arms[a], arms[b], each) for (a, b), each in scores.speedups(times).items() if a < b]
    columns: Columns[tuple[str, str, scores.Speedup]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("other", "over"): lambda r: r[1],
        Column("speedup", "speedup", "number"): lambda r: r[2].factor,
        Column("both", "both met", "integer"): lambda r: r[2].both,
        Column("only_first", "only the first", "integer"): lambda r: r[2].only_first,
        Column("only_second", "only the second", "integer"): lambda r: r[2].only_second,
        Column("neither", "neither", "integer"): lambda r: r[2].neither,
    }
    note = (
        "The geometric mean, over the workloads on which both arms met the target, of the second"
        " arm's time divided by the first's. Workloads that one arm missed are counted at the right"
        " and are not in the mean."
    )
    return Table.of("workloads_speedups", "Speedups", found, columns, note)


def _profile(arms: Sequence[str], times: NDArray) -> Figure:
    met = times[:, np.isfinite(times).any(axis=0)]  # the workloads that any arm met
    ratios = met / met.min(axis=0)
    finite = ratios[np.isfinite(ratios)]
    end = max(_LARGEST_RATIO, float(finite.max(initial=1.0)))
    taus = np.unique([1.0, *finite[finite <= end], end])
    shares = scores.performance_profile(times, taus)
    columns = named_columns(arm="text", multiple="number", share="share")
    lines = dict(zip(arms, shares.tolist(), strict=True))
    x = taus.tolist()
    rows = tuple((arm, *each) for arm, y in lines.items() for each in zip(x, y, strict=True))
    return Figure(
        name="workloads_profile",
        title="Performance profile",
        description=(
            "For each arm, the share of workloads on which its time to the target is at most the"
            " given multiple of the fastest arm's."
        ),
        x=Axis("multiple of the fastest time"),
        y=Axis("share of workloads"),
        series=tuple(Series("steps", arm, x, y, label=arm) for arm, y in lines.items()),
        table=Table("workloads_profile", "Performance profile", columns, rows),
    )
