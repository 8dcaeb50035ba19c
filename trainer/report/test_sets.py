"""Intervals for other test sets, from the differences between arms on single test examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.engine.examples import Examples
from trainer.report.results import Workload
from trainer.report.statistics import TwoWay, two_way


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
    of_arms = [_of_arm(workload, arm, list(differences)) for arm in (better, worse)]
    runs = [run for of_units in of_arms for of_unit in of_units for run in of_unit]
    kept = [run for run in runs if run is not None and goal.metric in run.values]
    if len(kept) < len(runs):
        return None
    first = kept[0]
    weights = first.weights[goal.metric]
    same = all(
        run.sha256 == first.sha256 and np.array_equal(run.weights[goal.metric], weights)
        for run in kept
    )
    if not same:
        return OtherTestSets(None)
    means = [_means(of_units, goal.metric) for of_units in of_arms]
    table = means[0] - means[1]
    if first.complete:  # the means over examples are known exactly, although files have float16
        exact = np.array(list(differences.values()))
        table += (exact - np.average(table, axis=1, weights=weights))[:, None]
    return OtherTestSets(two_way(table, weights=weights), first.complete)


def _of_arm(workload: Workload, arm: str, units: Sequence[int]) -> list[list[Examples | None]]:
    """Returns the results of each run of each unit on single examples."""
    found: dict[int, list[Examples | None]] = {unit: [] for unit in units}
    for run in workload.finals:
        if run.arm == arm and (unit := workload.unit_of(run)) in found:
            found[unit].append(workload.examples(run))
    return list(found.values())


def _means(of_units: Sequence[Sequence[Examples | None]], metric: str) -> NDArray[np.float64]:
    """Returns the means over the final seeds of each unit, [units, examples]."""
    return np.array(
        [
            np.mean([run.values[metric] for run in runs if run is not None], axis=0, dtype=float)
            for runs in of_units
        ]
    )
