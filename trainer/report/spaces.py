"""The points of searches: their values, and their places along the axes of a space."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainer.config import Tree
from trainer.report.results import Result, Workload
from trainer.report.statistics.sensitivity import edge
from trainer.sweep.spaces import Bounds, bounds
from trainer.sweep.tuned import Tuning, tuning_of

Place = tuple[int, int]  # a search, and the number of a point in it


def point_values(workload: Workload, arm: str) -> dict[Place, float]:
    """Returns the goal of each point of an arm's searches, the mean over its seeds."""
    # Only points with all results have a value; it is infinite if a seed diverged or failed.
    of_seeds = seed_values(workload, arm).items()
    return {place: math.fsum(values) / len(values) for place, values in of_seeds}


def seed_values(workload: Workload, arm: str) -> dict[Place, list[float]]:
    """Returns the goal of each point of an arm's searches for each seed; see `point_values`."""
    values: dict[Place, list[float | None]] = {}
    for run in workload.trials_of(arm):
        value = run.value(workload.goal.selected)
        if value is None and run.end != "missing":
            value = workload.goal.sign * math.inf
        values.setdefault(place_of(run), []).append(value)
    return {place: each for place, each in values.items() if None not in each}  # type: ignore[misc]


def place_of(run: Result) -> Place:
    """Returns the search and the number of the point of a run."""
    return run.search, run.number or 0


# Parts of a path that say little: the place of an optimizer, and that a rate has a schedule.
_PLAIN = ("optimizer", "groups", "peak_value")


def axes_of(workloads: Iterable[Workload]) -> dict[str, str]:
    """Returns short names for axes, such as "matrices.learning_rate", by config path."""
    # The peak of a schedule and a constant in the same place are the same axis of two arms.
    spaces = [space for workload in workloads for space in workload.spaces.values()]
    names = {path: _plain(path) for space in spaces for path in space.axes}
    for space in spaces:
        within = [names[path] for path in space.axes]
        for path in space.axes:
            # Two axes of one arm must have different names.
            if within.count(_plain(path)) > 1:
                names[path] = path
    return names


def _plain(path: str) -> str:
    kept = [part for part in path.split(".") if part not in _PLAIN]
    return ".".join(kept[-3:]) or path


def tuning(workload: Workload, arm: str) -> Tuning:
    """Returns how an arm is tuned by its trials, whether or not they have ended."""
    points = {(each.search, each.number): each.values for each in workload.trials_of(arm)}
    return tuning_of(points, workload.configs.get(arm), workload.linked.get(arm, ()))


def tunings(workload: Workload) -> dict[str, Tuning]:
    """Returns how each arm is tuned; an empty dict for single runs."""
    return {arm: tuning(workload, arm) for arm in workload.arms} if workload.trials else {}


def number_of(value: Tree) -> float | None:
    """Returns a value of a config as a number; None if it is not one."""
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if usable else None


@dataclass(frozen=True)
class Scan:
    """The points of an arm along one axis of its space, by the value on the axis."""

    arm: str
    path: str  # the config path of the axis
    alone: bool  # whether the arm searched no other axis
    at: tuple[float, ...]  # the values on the axis
    values: tuple[float, ...]  # the goal of each point; infinity as the worst value
    best: int  # the index of the best point
    names: tuple[str, ...]  # a trial of each point
    seeds: tuple[tuple[float, ...], ...]  # the goal of each point for each of its seeds


def scans(workload: Workload, arm: str) -> list[Scan]:
    """Returns the points of an arm along each axis whose values are numbers."""
    values, seeds = point_values(workload, arm), seed_values(workload, arm)
    first = {place_of(run): run for run in reversed(workload.trials_of(arm))}
    found: list[Scan] = []
    for path in workload.spaces[arm].axes if arm in workload.spaces else ():
        points = [
            (x, values[place], first[place].name, tuple(seeds[place]))
            for place in values
            if (x := number_of(first[place].values.get(path))) is not None
        ]
        if not points:
            continue
        at, goals, names, of_seeds = zip(*sorted(points), strict=True)
        # Paths that always have the same value, such as the rates of two groups, are one axis.
        if not any((at, names) == (scan.at, scan.names) for scan in found):
            best = min(range(len(at)), key=lambda i: workload.goal.sign * goals[i])
            found.append(Scan(arm, path, True, at, goals, best, names, of_seeds))
    alone = tuning(workload, arm).count <= 1
    return [replace(scan, alone=alone) for scan in found]


def edge_of(at: Sequence[float], best: int, text: str) -> tuple[Bounds, str | None]:
    """Returns the bounds of a space, and the edge at which the best point lies, or None."""
    # `at` are the points on the axis, `best` the index of the best one. `text` is the space, as a
    # plan has it; one that lists values ends with those that were tried.
    space = bounds(text) or Bounds("values", min(at), max(at))
    if len(set(at)) < 3:
        return space, None
    return space, edge(at, best, space.low, space.high, space.log)


def spans_decades(values: Iterable[float]) -> bool:
    """Returns whether values get a logarithmic axis: positive, and over a decade apart."""
    # Values that are not finite are ignored.
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
