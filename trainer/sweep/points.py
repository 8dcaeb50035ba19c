"""The points that a search chose by the results of earlier ones, in the folder of a sweep.

    SWEEP/points.json    the batches of such points, with the results by which they were chosen

The plan has the trials of all points from the beginning. Those of later batches are pending: they
have no values until all points before them in their search have ended. Whichever worker then has
the lock of the sweep chooses the next batch, and adds it to the file. Start with `with_points` and
`choose_points`.
"""

import contextlib
import hashlib
import itertools
import math
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.messages import UserError
from trainer.sweep.asked import Asks
from trainer.sweep.final import is_same_value, rank, read_list
from trainer.sweep.ledger import POINTS_FILE, LedgerWriter
from trainer.sweep.plan import ArmSearch, Plan, point_name
from trainer.writers.json_files import damaged
from trainer.writers.summary import SUMMARY_FILE, Summary, read_outcome

_ADVICE = "it has the points that were chosen by results: restore it from a copy."


@dataclass(frozen=True)
class Batch:
    """Points of a search that were chosen together; points.json has a list of them."""

    arm: str
    search: int
    first: int  # the number of the first one
    # the goal of each point before, the mean over its seeds; None if it has no finite value
    told: tuple[float | None, ...]
    coordinates: tuple[tuple[float, ...], ...]  # of each point, in [0, 1]
    software: str  # what chose them, such as "optuna 5.0.0, numpy 2.4.6 on x86_64 0f3c1a2b"


Batches = dict[ArmSearch, list[Batch]]


def with_points(folder: Path, plan: Plan) -> Plan:
    """Returns a plan with the values of the points that were chosen so far; raises DamagedFile."""
    if not (batches := _read(folder, plan)):
        return plan
    chosen = {
        (*key, number): plan.arms[key[0]].asks.values(at)  # type: ignore[union-attr]
        for key, of in batches.items()
        for batch in of
        for number, at in enumerate(batch.coordinates, batch.first)
    }
    trials = []
    for trial in plan.trials:
        values = chosen.get((trial.arm, trial.search, trial.number), trial.values)
        if not trial.pending and values != trial.values:
            name = f"{trial.arm}/{trial.point}"
            raise damaged(folder / POINTS_FILE, f"its {name} is not that of plan.json", _ADVICE)
        trials.append(replace(trial, values=values) if trial.pending else trial)
    return replace(plan, trials=tuple(trials))


def _read(folder: Path, plan: Plan) -> Batches:
    """Reads the batches of each search, in order; raises DamagedFile for others than planned."""
    file, found = folder / POINTS_FILE, Batches()
    asked = any(arm.asks is not None for arm in plan.arms.values())
    for each in read_list(file, list[Batch], _ADVICE) if asked else ():
        points = plan.points.get((each.arm, each.search), {})
        asks = plan.arms[each.arm].asks if points else None
        of_search = found.setdefault((each.arm, each.search), [])
        first = sum(len(batch.coordinates) for batch in of_search)
        right = asks is not None and each.first == first == len(each.told) < len(points)
        if asks is not None and right:
            right = 0 < len(each.coordinates) <= asks.batch_at(first, len(points))
            right &= all(len(at) == len(asks.axes) for at in each.coordinates)
            right &= all(0 <= u <= 1 for at in each.coordinates for u in at)
        if not right:
            name = f"{each.arm}/{point_name(each.search, each.first)}"
            raise damaged(file, f"its batch from {name} on is not one of the plan", _ADVICE)
        of_search.append(each)
    return found


def choose_points(folder: Path, plan: Plan, ledger: LedgerWriter, ended: Collection[str]) -> bool:
    """Chooses the next points of each search whose known points have ended; returns whether any."""
    # `ended` are the trials that have a result, by their folders. The lock of the sweep is needed.
    # Raises UserError if a result is damaged.
    due: dict[ArmSearch, int] = {}
    for key, points in plan.points.items():
        known = [trials for trials in points.values() if not trials[0].pending]
        if 0 < len(known) < len(points):
            if all(trial.folder in ended for trials in known for trial in trials):
                due[key] = len(known)
    if not due:
        return False
    batches = _read(folder, plan)
    for key, known in due.items():
        asks, of_search = _asks(plan, key), batches.setdefault(key, [])
        if asks.lacking is not None:
            raise UserError(f"The next points of {key[0]} cannot be chosen. {asks.lacking}")
        if (told := _results(plan, key, known, lambda name: read_outcome(folder / name))) is None:
            trials = (trial for number in range(known) for trial in plan.points[key][number])
            lost = next(t.folder for t in trials if read_outcome(folder / t.folder) is None)
            raise UserError(
                f"The next points of {key[0]} cannot be chosen: {folder / lost / SUMMARY_FILE} is"
                " missing or damaged. Restore it, or remove its folder, and the trial is computed"
                " again."
            )
        if not of_search:  # the first batch, which depends on no results
            of_search.append(_batch(plan, key, of_search, (), asks.batch_at(0, known)))
        count = asks.batch_at(known, len(plan.points[key]))
        of_search.append(_batch(plan, key, of_search, told, count))
    ledger.write_choices(POINTS_FILE, itertools.chain.from_iterable(batches.values()))
    return True


def _asks(plan: Plan, key: ArmSearch) -> Asks:
    """Returns how the points of a search are chosen, which has batches or pending points."""
    asks = plan.arms[key[0]].asks
    assert asks is not None, "only such searches have them"
    return asks


def _results(
    plan: Plan, key: ArmSearch, known: int, outcome: Callable[[str], Summary | None]
) -> tuple[float | None, ...] | None:
    """Returns what `Batch.told` is after some points; None if one has not all of its results."""
    trials = tuple(trial for number in range(known) for trial in plan.points[key][number])
    outcomes = {trial.folder: outcome(trial.folder) for trial in trials}
    if None in outcomes.values():
        return None
    means = rank(replace(plan, trials=trials), outcomes).get(key, {})
    return tuple(x if math.isfinite(x := means[number]) else None for number in range(known))


def _batch(
    plan: Plan, key: ArmSearch, before: Sequence[Batch], told: Sequence[float | None], count: int
) -> Batch:
    """Returns the next points of a search, by the batches before and their results."""
    asks, sign = _asks(plan, key), 1 if plan.goal.better == "min" else -1
    places = itertools.chain.from_iterable(batch.coordinates for batch in before)
    pairs = [(at, None if x is None else sign * x) for at, x in zip(places, told, strict=True)]
    found = asks.coordinates(key[1], pairs, count)
    return Batch(*key, len(told), tuple(told), tuple(map(tuple, found)), _software(asks))


def wrong_points(
    folder: Path, plan: Plan, outcome: Callable[[str], Summary | None], again: bool
) -> Iterator[str]:
    """Yields what in points.json differs from the results of trials, as parts of sentences."""
    # `outcome` takes the folder of a trial. `again` chooses the points again, where versions and
    # instructions of the processor are the same; with others they may differ in their last bits.
    # Raises DamagedFile as `with_points` does.
    for key, batches in _read(folder, plan).items():
        for n, batch in enumerate(batches):
            if (told := _results(plan, key, batch.first, outcome)) is None:
                break  # one was removed, to be computed again
            name = f"{key[0]}/{point_name(key[1], batch.first)}"
            if not all(map(is_same_value, told, batch.told)):
                yield f"the results by which it chose {name} are not those of the trials"
            elif again and batch.software == _software(_asks(plan, key)):
                new = _batch(plan, key, batches[:n], batch.told, len(batch.coordinates))
                if new.coordinates != batch.coordinates:
                    yield f"its {name} is not what {batch.software} chooses by the results before"


def not_chosen_again(folder: Path, plan: Plan) -> Iterator[str]:
    """Yields sentences about points that `wrong_points` cannot choose again here."""
    every = [batch for of in _read(folder, plan).values() for batch in of]
    for arm, software in dict.fromkeys((batch.arm, batch.software) for batch in every):
        here = _software(_asks(plan, (arm, 0)))
        if software != here:
            yield (
                f"Points of {arm} were not chosen again by their results: {software} chose them,"
                f" and {f'here is {here}' if here else 'not all of that is installed here'}."
            )


def _software(asks: Asks) -> str:
    """Returns the package that chooses points, with what the last bits of its answer depend on."""
    from trainer.workdir.fingerprint import processor  # whose package imports jax

    with contextlib.suppress(PackageNotFoundError):
        isa = hashlib.sha256(str(processor()["isa"]).encode()).hexdigest()[:8]
        versions = [f"{name} {version(name)}" for name in (*asks.packages, "numpy")]
        return f"{', '.join(versions)} on {platform.machine()} {isa}"
    return ""  # one is not installed
