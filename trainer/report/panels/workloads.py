"""The panel across workloads: speedups, performance profiles and AlgoPerf's score."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.report.document import Axis, Block, Cell, Column, Figure, Series, Table, column_names
from trainer.report.panels.targets import target_of, to_target, why_not_clocked
from trainer.report.results import Workload
from trainer.report.statistics.scores import (
    algoperf_score,
    leave_one_out,
    performance_profile,
    score_intervals,
    speedups,
    time_of_studies,
)
from trainer.report.wording import joined

_LARGEST_RATIO = 4.0  # the r_max of AlgoPerf's score


def workloads_block(workloads: Sequence[Workload]) -> Block:
    """Returns the panel across workloads, of which there are at least two."""
    arms = [a for a in workloads[0].arms if all(a in each.arms for each in workloads)]
    arms = [a for a in arms if all(each.finals_of(a) for each in workloads)]
    left_out = dict.fromkeys(a for each in workloads for a in each.arms if a not in arms)
    warnings = []
    if left_out:
        warnings.append(
            f"{joined(list(left_out))} {'is' if len(left_out) == 1 else 'are'} left out, because"
            " not every workload has compared runs of that arm."
        )
    targets = [target_of(each) for each in workloads]
    if len(arms) < 2 or any(value is None for value, _ in targets):
        text = (
            "Scores across workloads need two arms that every workload has, and a target for each."
        )
        return Block(text=(text,), warnings=tuple(warnings))
    values = [value for value, _ in targets if value is not None]
    clocked = not any(why_not_clocked(each) for each in workloads)
    runs = _runs(workloads, arms, values, clocked)
    times = np.asarray([[_median(each) for each in of_arm] for of_arm in runs], float)
    if any(each.goal.target is None for each in workloads):
        warnings.append(
            "Targets that were not given are those that the runner-up reached, so that they depend"
            " on the arms that take part: give a target to report scores."
        )
    what = "training time" if clocked else "steps"
    text = (
        f"Each arm has one time for each workload: the median {what} to the target over its"
        " compared runs, where a miss is later than any other. A score depends on the other arms,"
        " because each workload is measured by its fastest: the columns at the right leave one arm"
        " out.",
    )
    if not clocked:
        why = next(why for each in workloads if (why := why_not_clocked(each)))
        warnings.append(f"Scores are over steps, because times cannot be trusted: {why}")
    tables = (
        _times_table(workloads, arms, times, clocked),
        _scores(arms, times, runs),
        _pairs(arms, times),
    )
    return Block(
        text=text, warnings=tuple(warnings), figures=(_profile(arms, times),), tables=tables
    )


def _runs(
    workloads: Sequence[Workload], arms: Sequence[str], targets: Sequence[float], clock: bool
) -> list[list[list[float]]]:
    """Returns the times to the target of each compared run, [arm][workload]."""
    return [
        [
            to_target(each, arm, target, clock)
            for each, target in zip(workloads, targets, strict=True)
        ]
        for arm in arms
    ]


def _median(times: Sequence[float]) -> float:
    """Returns the median over runs, each a study with one trial."""
    return time_of_studies([[time] for time in times])


def _times_table(
    workloads: Sequence[Workload], arms: Sequence[str], times: NDArray, clocked: bool
) -> Table:
    kind = "seconds" if clocked else "integer"
    columns = [Column("arm", "arm")]
    titles = [each.name for each in workloads]
    names = column_names(titles, {"arm"})
    columns += [Column(name, title, kind) for name, title in zip(names, titles, strict=True)]
    rows = tuple(
        (arm, *(_finite(x) for x in row)) for arm, row in zip(arms, times.tolist(), strict=True)
    )
    return Table("workloads_times", "Times to the targets", tuple(columns), rows, "– is a miss.")


def _scores(
    arms: Sequence[str], times: NDArray, runs: Sequence[Sequence[Sequence[float]]]
) -> Table:
    scores = algoperf_score(times, _LARGEST_RATIO)
    low, high = score_intervals(runs, _LARGEST_RATIO)
    without = leave_one_out(times, _LARGEST_RATIO)
    columns = [Column("arm", "arm"), Column("score", "score", "number")]
    columns += [Column("low", "95% from", "number"), Column("high", "to", "number")]
    titles = [f"without {arm}" for arm in arms]
    names = column_names(titles, {"arm", "score", "low", "high"})
    columns += [Column(name, title, "number") for name, title in zip(names, titles, strict=True)]
    rows: list[tuple[Cell, ...]] = []
    for index, arm in enumerate(arms):
        left = [_finite(float(without[i][index])) for i in range(len(arms))]
        ends = float(low[index]), float(high[index])
        rows.append((arm, float(scores[index]), *ends, *left))
    note = (
        "AlgoPerf's score (arXiv:2306.07179), without its qualification rules: the mean over ratios"
        " from 1 to 4 of the share of workloads on which an arm needs at most that many times the"
        " fastest arm's time. The intervals are of a bootstrap over the runs of each workload; they"
        f" say nothing about other workloads. {_swaps(arms, scores, without)}"
    )
    return Table("workloads_scores", "AlgoPerf score", tuple(columns), tuple(rows), note)


def _swaps(arms: Sequence[str], scores: NDArray, without: dict[int, NDArray]) -> str:
    """Says whether leaving an arm out changes the order of the first two of the others."""
    order = [int(i) for i in np.argsort(-scores, kind="stable")]
    for gone, rest in without.items():
        left = [i for i in order if i != gone]
        if len(left) > 1 and rest[left[0]] < max(rest[i] for i in left[1:]):
            first = max(left, key=lambda i: rest[i])  # noqa: B023
            return f"Without {arms[gone]}, {arms[first]} comes before {arms[left[0]]}."
    return "The best of the remaining arms stays the best, whichever arm is left out."


def _pairs(arms: Sequence[str], times: NDArray) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for (a, b), each in speedups(times).items():
        if a < b:
            misses = (each.only_first, each.only_second, each.neither)
            rows.append((arms[a], arms[b], each.factor, each.both, *misses))
    columns = (
        Column("arm", "arm"),
        Column("other", "over"),
        Column("speedup", "speedup", "number"),
        Column("both", "both met", "integer"),
        Column("only_first", "only the first", "integer"),
        Column("only_second", "only the second", "integer"),
        Column("neither", "neither", "integer"),
    )
    note = (
        "The geometric mean, over the workloads on which both arms met the target, of the second"
        " arm's time divided by the first's. Workloads that one arm missed are counted at the right"
        " and are not in the mean."
    )
    return Table("workloads_speedups", "Speedups", columns, tuple(rows), note)


def _profile(arms: Sequence[str], times: NDArray) -> Figure:
    met = times[:, np.isfinite(times).any(axis=0)]  # the workloads that any arm met
    ratios = met / met.min(axis=0)
    finite = ratios[np.isfinite(ratios)]
    end = max(_LARGEST_RATIO, float(finite.max(initial=1.0)))
    taus = np.unique([1.0, *finite[finite <= end], end])
    shares = performance_profile(times, taus)
    series = [
        Series("steps", arm, taus.tolist(), shares[i].tolist(), label=arm)
        for i, arm in enumerate(arms)
    ]
    rows = tuple(
        (arm, float(tau), float(share))
        for arm, line in zip(arms, shares, strict=True)
        for tau, share in zip(taus, line, strict=True)
    )
    return Figure(
        name="workloads_profile",
        title="Performance profile",
        description=(
            "For each arm, the share of workloads on which its time to the target is at most the"
            " given multiple of the fastest arm's."
        ),
        x=Axis("multiple of the fastest time"),
        y=Axis("share of workloads"),
        series=tuple(series),
        table=Table(
            "workloads_profile",
            "Performance profile",
            (
                Column("arm", "arm"),
                Column("multiple", "multiple", "number"),
                Column("share", "share", "share"),
            ),
            rows,
        ),
    )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
