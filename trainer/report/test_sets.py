"""Intervals for other test sets, from the differences between arms on single test examples."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.engine.examples import Examples
from trainer.report.results import Workload
from trainer.report.statistics.held_out import TwoWay, two_way


@dataclass(frozen=True)
class OtherTestSets:
    """The interval of a difference for other units and other test examples."""

    # better minus worse; None if the runs were not scored on the same examples
    found: TwoWay | None
    complete: bool = True  # over all test examples, not the first 100,000


def other_test_sets(
    workload: Workload, better: str, worse: str, differences: Mapping[int, float]
) -> OtherTestSets | None:
    """Computes a pair's interval from results on single test examples; None if a run lacks them."""
    # `differences` is unit -> difference of the reported metric, better minus worse. A run lacks
    # such results, for example, because an earlier version computed it, or because the metric is
    # not a mean over examples.
    goal = workload.goal
    if goal.report_on != "test":
        return None
    # arm -> unit -> the results of its runs on single examples
    found: dict[str, dict[int, list[Examples | None]]] = {
        arm: {unit: [] for unit in differences} for arm in (better, worse)
    }
    for run in workload.finals:
        if run.arm in found and (unit := workload.unit_of(run)) in differences:
            found[run.arm][unit].append(workload.examples(run))
    runs = [run for units in found.values() for unit in units.values() for run in unit]
    kept = [run for run in runs if run is not None and goal.metric in run.values]
    if len(kept) < len(runs):
        return None
    first = kept[0]
    weights = first.weights[goal.metric]
    same = all(run.sha256 == first.sha256 for run in kept)
    if not same or not all(np.array_equal(run.weights[goal.metric], weights) for run in kept):
        return OtherTestSets(None)
    means = []  # over the final seeds of each unit, [units, examples]
    for of_units in found.values():
        values = [
            [run.values[goal.metric] for run in runs if run is not None]
            for runs in of_units.values()
        ]
        means.append(np.array([np.mean(each, axis=0, dtype=float) for each in values]))
    table = means[0] - means[1]
    if first.complete:  # the means over examples are known exactly, although files have float16
        exact = np.array(list(differences.values()))
        table += (exact - np.average(table, axis=1, weights=weights))[:, None]
    return OtherTestSets(two_way(table, weights=weights), first.complete)
