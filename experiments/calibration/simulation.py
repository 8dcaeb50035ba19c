"""Simulates how often the claims of a report are false, and how often they find a difference.

Every cell draws many comparisons whose truth is known, and hands them to `decide`, which the
sentences of a report call as well.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.report.statistics.decide import (
    Looks,
    decide,
    looks_at_any,
    looks_of_plan,
    relevance,
)
from trainer.report.statistics.estimates import mean_interval, two_way
from trainer.sweep import methods
from trainer.sweep.spaces import of_record

DRAWS = 20_000
UNITS = (4, 6, 8)
OF_FAILURES = (5, 8, 12, 16)
_OF_TABLES = (3, 5, 8)  # rows of a table of test examples
_BLOCK = 2_000  # draws computed at once, to bound the memory

# (generator, draws, arms, units) -> values [draws, arms, units] of arms without a difference.
Draw = Callable[[np.random.Generator, int, int, int], NDArray]


@dataclass(frozen=True)
class Rate:
    """How often something happened in a cell.

    Attributes:
        cell: what was simulated, in words.
        units: the number of units that were planned.
        arms: the number of arms.
        value: the share of the draws.
        bound: what the share must not exceed (errors), or must reach (powers).
    """

    cell: str
    units: int
    arms: int
    value: float
    bound: float


def _normal(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
    return rng.standard_normal((draws, arms, units))


def _heavy(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
    return rng.standard_t(3, (draws, arms, units))


def _lognormal(sigma: float) -> Draw:
    def draw(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
        return rng.lognormal(0.0, sigma, (draws, arms, units))

    return draw


def _one_lognormal(sigma: float, share: float) -> Draw:
    """Returns what draws one skewed arm, and normal ones with a share of its spread."""
    spread = share * np.sqrt(np.expm1(sigma**2) * np.exp(sigma**2))

    def draw(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
        values = spread * rng.standard_normal((draws, arms, units))
        values[:, 0] = rng.lognormal(0.0, sigma, (draws, units)) - np.exp(sigma**2 / 2)
        return values

    return draw


def _spreads(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
    """Draws arms of which every second has ten times the standard deviation of the others."""
    return rng.standard_normal((draws, arms, units)) * np.resize([1.0, 10.0], arms)[:, None]


def _correlated(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
    shared = rng.standard_normal((draws, 1, units))
    return (shared + rng.standard_normal((draws, arms, units))) / np.sqrt(2)


def _diverging(share: float) -> Draw:
    """Returns what draws units of which a share diverges by chance, in every arm."""

    def draw(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
        values = rng.standard_normal((draws, arms, units))
        return np.where(rng.random(values.shape) < share, np.inf, values)

    return draw


def _collapsing(share: float) -> Draw:
    """Returns what draws units of which a share ends at the loss of the first step by chance."""

    def draw(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
        values = 0.01 * rng.standard_normal((draws, arms, units))
        return values + np.where(rng.random(values.shape) < share, 2.3, 0.3)

    return draw


def _following(correlation: float) -> Draw:
    """Returns what draws units that are correlated with the unit before, as of one long run."""

    def draw(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
        values = rng.standard_normal((draws, arms, units))
        for unit in range(1, units):
            own = np.sqrt(1 - correlation**2) * values[..., unit]
            values[..., unit] = correlation * values[..., unit - 1] + own
        return values

    return draw


def _basins(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
    """Draws units that end in one of two basins, by a coin's throw."""
    values = 0.01 * rng.standard_normal((draws, arms, units))
    return values + rng.integers(0, 2, values.shape)


def _accuracies(rng: np.random.Generator, draws: int, arms: int, units: int) -> NDArray:
    return rng.binomial(360, 0.97, (draws, arms, units)) / 360


_ONE_TAIL = "one arm lognormal(1), others with hardly any spread"
_MODERATE = "one arm lognormal(0.5), others a quarter of its spread"


class EqualArms(NamedTuple):
    """Arms without a difference.

    Attributes:
        draw: draws their units.
        bound: the largest share of false claims that is allowed.
        initial: the metric before the first step; NaN if it is not known.
    """

    draw: Draw
    bound: float
    initial: float = math.nan


# What is drawn -> how.
EQUAL_ARMS = {
    "normal": EqualArms(_normal, 0.06),
    "Student's t with 3 degrees of freedom": EqualArms(_heavy, 0.06),
    "lognormal(1), every arm": EqualArms(_lognormal(1.0), 0.06),
    "standard deviations 1 and 10": EqualArms(_spreads, 0.06),
    "normal, seeds correlated by 0.5": EqualArms(_correlated, 0.06),
    "accuracies of 360 examples": EqualArms(_accuracies, 0.06),
    "normal, and one in ten units of every arm diverges": EqualArms(_diverging(0.1), 0.06),
    "normal, and every second unit of every arm diverges": EqualArms(_diverging(0.5), 0.06),
    "equal losses, and one in fifty units of every arm collapses": EqualArms(
        _collapsing(0.02), 0.06, 2.303
    ),
    "equal losses, and one in ten units of every arm collapses": EqualArms(
        _collapsing(0.1), 0.06, 2.303
    ),
    "equal losses, and every second unit of every arm collapses": EqualArms(
        _collapsing(0.5), 0.06, 2.303
    ),
    "two basins, as likely as each other": EqualArms(_basins, 0.06),
    "each unit correlated by 0.1 with the one before": EqualArms(_following(0.1), 0.08),
    "each unit correlated by 0.3 with the one before": EqualArms(_following(0.3), 0.16),
    _MODERATE: EqualArms(_one_lognormal(0.5, 0.25), 0.09),
    "one arm lognormal(1), others a quarter of its spread": EqualArms(
        _one_lognormal(1.0, 0.25), 0.16
    ),
    _ONE_TAIL: EqualArms(_one_lognormal(1.0, 1e-3), 0.20),
}


def errors_of_equal_arms(draws: int = DRAWS) -> Iterator[Rate]:
    """Yields how often a report calls one of several equal arms better.

    Each cell is looked at as planned; then extended to twice and three times the plan; then with
    `looks: any` up to three times the plan. A claim that is made at any time counts.

    Args:
        draws: of each cell.
    """
    for name, cell in EQUAL_ARMS.items():
        for units in UNITS:
            for arms in (2, 4):
                most = 3 * units
                kinds = {
                    "": [looks_of_plan(units)],
                    ", extended twice": [
                        looks_of_plan(units, tuple(range(2 * units, n + 1, units)))
                        for n in (units, 2 * units, most)
                    ],
                    ", looks: any": [looks_at_any(n) for n in (units, 2 * units, most)],
                }
                for kind, looks in kinds.items():
                    false = _share(cell, looks, (draws, arms, most))
                    yield Rate(name + kind, units, arms, false, cell.bound)
    for units in UNITS:
        for arms in (2, 4):
            looks = [looks_of_plan(units, skewed=True)]
            false = _share(EQUAL_ARMS[_MODERATE], looks, (draws, arms, units))
            yield Rate(f"{_MODERATE}, skewed: true", units, arms, false, 0.06)


_EVERY = 20  # the last unit after which is looked
_BOUNDS = {_ONE_TAIL: 0.22}  # where they are not those of three looks


def errors_at_every_look(draws: int = DRAWS) -> Iterator[Rate]:
    """Yields how often one of two equal arms is called better, if a report is read after each unit.

    A claim that is made at any time counts. The plan has 4 units, and is extended by one 16 times;
    or the file says `looks: any`.

    Args:
        draws: of each cell.
    """
    for name, cell in EQUAL_ARMS.items():
        most = _BOUNDS.get(name, cell.bound)
        kinds = {
            ", extended by one unit 16 times": [
                looks_of_plan(4, tuple(range(5, n + 1))) for n in range(4, _EVERY + 1)
            ],
            ", looks: any": [looks_at_any(n) for n in range(4, _EVERY + 1)],
        }
        for kind, looks in kinds.items():
            yield Rate(name + kind, _EVERY, 2, _share(cell, looks, (draws, 2, _EVERY)), most)


def _share(cell: EqualArms, looks: list[Looks], shape: tuple[int, int, int]) -> float:
    """Returns in how many draws any pair is decided at any of the looks, each after the others."""
    rng = np.random.default_rng(0)
    draws, arms, units = shape
    initial = [cell.initial] * arms
    count = 0
    for start in range(0, draws, _BLOCK):
        values = cell.draw(rng, min(_BLOCK, draws - start), arms, units)
        last = decide(values, looks[-1], initial=initial)
        found = (last.decided != 0).any(1)
        # A pair that was decided earlier stays so, unless a later look contradicts it: then it has
        # no interval. Only of such pairs the earlier looks need to be asked.
        left = values[~found & np.isnan(last.low).any(1)]
        earlier = np.zeros(len(left), bool)
        for each in looks[:-1]:
            earlier |= (decide(left, each, initial=initial).decided != 0).any(1)
        count += int(found.sum() + earlier.sum())
    return count / draws


def rare_failures(draws: int = DRAWS) -> Iterator[tuple[float, list[float]]]:
    """Yields how often an arm that rarely fails is called better than one with an equal mean.

    Its typical units are better: the claim is true of them, and false of means.

    Args:
        draws: of each cell.

    Yields:
        The share of units that fail, at a loss of 2.3 where others have 0.3, and for 5, 8, 12 and
        16 planned units how often the arm is called better.
    """
    for share in (0.02, 0.05, 0.1):
        found = []
        for units in OF_FAILURES:
            rng = np.random.default_rng(0)
            values = 0.01 * rng.standard_normal((draws, 2, units)) + 0.3
            values[:, 0] += np.where(rng.random((draws, units)) < share, 2.0, 0.0)
            values[:, 1] += 2.0 * share
            result = decide(values, looks_of_plan(units), initial=[2.303] * 2)
            found.append(float((result.decided[:, 0] < 0).mean()))
        yield share, found


def powers(draws: int = DRAWS) -> Iterator[Rate]:
    """Yields how often two arms whose difference has a given size are told apart, as planned.

    Args:
        draws: of each cell.
    """
    for effect, units, floor in ((2.0, 5, 0.84), (1.5, 8, 0.90)):
        rng = np.random.default_rng(0)
        values = rng.standard_normal((draws, 2, units)) / np.sqrt(2)
        values[:, 0] -= effect
        found = (decide(values, looks_of_plan(units)).decided < 0).mean()
        yield Rate(f"a difference of {effect} standard deviations", units, 2, float(found), floor)


def sentences(draws: int = DRAWS) -> Iterator[tuple[float, dict[str, float]]]:
    """Yields how often each sentence about a difference that matters is said.

    There are two arms and eight units; the difference that matters is one standard deviation of
    the paired differences.

    Args:
        draws: of each cell.

    Yields:
        The true difference in such standard deviations, and the share of each kind of sentence:
        the kinds of `relevance`, and "worse" where the wrong arm is called better.
    """
    for true in (0.0, 0.5, 1.0, 2.0):
        rng = np.random.default_rng(0)
        values = rng.standard_normal((draws, 2, 8)) / np.sqrt(2)
        values[:, 0] -= true
        found = decide(values, looks_of_plan(8))
        kinds = relevance(-found.high[:, 0], -found.low[:, 0], 1.0)
        kinds[found.decided[:, 0] > 0] = "worse"
        names = ("more", "better", "less", "equivalent", "open", "worse")
        yield true, {name: float((kinds == name).mean()) for name in names}


# Other test sets.

_EXAMPLES = 360
_MOST_TABLES = 2_000  # a table of examples has thousands of numbers
# What is drawn -> the standard deviations of the difference of an example, of a unit, and of both.
TEST_SETS = {
    "examples differ by 0.5, units by 0.02, both together by 0.3": (0.5, 0.02, 0.3),
    "examples differ by 0.2, units by 0.02, both together by 0.3": (0.2, 0.02, 0.3),
    "examples differ by 0.05, units by 0.02, both together by 0.3": (0.05, 0.02, 0.3),
}


def coverages(draws: int = DRAWS) -> Iterator[tuple[Rate, Rate]]:
    """Yields how often intervals include the true difference on all units and all examples.

    Args:
        draws: of each cell, at most 2,000.

    Yields:
        The two-way interval, and that over the means of units alone.
    """
    draws = min(draws, _MOST_TABLES)
    for name, (own, of_unit, rest) in TEST_SETS.items():
        for units in _OF_TABLES:
            rng = np.random.default_rng(0)
            counts = [0, 0]
            for _ in range(draws):
                table = own * rng.standard_normal(_EXAMPLES)
                table = table + of_unit * rng.standard_normal((units, 1))
                table = table + rest * rng.standard_normal((units, _EXAMPLES))
                for at, found in enumerate((two_way(table), mean_interval(table.mean(1)))):
                    counts[at] += found.low is not None and found.low < 0 < (found.high or 0.0)
            both, alone = (Rate(name, units, 2, count / draws, 0.93) for count in counts)
            yield both, alone


# Searches drawn from runs that were computed.


@dataclass(frozen=True)
class Runs:
    """Losses of one optimizer; arrays [rates, seeds], the learning rates ascending."""

    validation: NDArray
    test: NDArray


def read_runs(file: Path) -> Runs:
    """Reads a table of runs, with a row for each learning rate and seed.

    Args:
        file: CSV with the columns learning_rate, seed, validation_loss and test_loss.
    """
    table = np.genfromtxt(file, delimiter=",", names=True)
    table = np.sort(table, order=["learning_rate", "seed"])
    rates = len(np.unique(table["learning_rate"]))
    return Runs(*(table[name].reshape(rates, -1) for name in ("validation_loss", "test_loss")))


def _searched(
    rng: np.random.Generator, runs: Runs, draws: int, searches: int, trials: int, rates: slice
) -> tuple[NDArray, NDArray]:
    """Returns the best rate of each search and its loss on a fresh seed, both [draws, searches]."""
    validation, test = runs.validation[rates], runs.test[rates]
    points = rng.integers(len(validation), size=(draws, searches, trials))
    seeds = rng.integers(validation.shape[1], size=(draws, searches, 1))
    best = np.argmin(validation[points, seeds], axis=2)
    winners = np.take_along_axis(points, best[..., None], 2)[..., 0]
    fresh = rng.integers(validation.shape[1], size=(draws, searches))
    return winners, test[winners, fresh]


def errors_of_searches(runs: Runs, draws: int = DRAWS) -> Iterator[Rate]:
    """Yields how often one optimizer that was searched twice is better than itself.

    Args:
        runs: from which trials are drawn, with replacement.
        draws: of each cell.
    """
    full = slice(None)
    best = int(runs.validation.mean(1).argmin())
    # Of 24 rates over two decades five are a factor of 2.2, and two one of 1.5.
    narrow, beside = slice(best - 2, best + 3), slice(best - 4, best + 1)
    kinds = (
        ("equal spaces", full, 0.06),
        ("one space a fifth of the other", narrow, 0.09),
        ("one space a fifth of the other, its middle 1.5 times below the best", beside, 0.25),
    )
    for spaces, other, bound in kinds:
        for searches in UNITS:
            for trials in (4, 8) if other is full else (4,):
                rng = np.random.default_rng(0)
                values = np.stack(
                    [_searched(rng, runs, draws, searches, trials, s)[1] for s in (full, other)], 1
                )
                false = (decide(values, looks_of_plan(searches)).decided != 0).mean()
                cell = f"searches of {trials} trials, {spaces}"
                yield Rate(cell, searches, 2, float(false), bound)


def errors_of_asked_searches(runs: Runs, draws: int = DRAWS, pool: int = 200) -> Iterator[Rate]:
    """Yields how often an optimizer is better than itself if points are chosen by earlier results.

    Args:
        runs: from which trials and final runs are drawn, with replacement.
        draws: of each cell, from searches that are computed once.
        pool: how many these are.
    """
    rates, seeds = runs.validation.shape
    space = {"rate": of_record({"kind": "integers", "low": 0, "high": rates - 1})}
    asks = methods.tpe(seed=0, first=8, batch=4).asks(space, [space])
    assert asks is not None, "points of this method are chosen by results"
    rng, winners = np.random.default_rng(0), []
    for search in range(pool):
        told: list[tuple[list[float], float]] = []
        seed = rng.integers(seeds)
        for count in (8, 4, 4):
            for at in asks.coordinates(search, told, count):
                told.append((at, float(runs.validation[asks.values(at)["rate"], seed])))
        best = min(told, key=lambda each: each[1])[0]
        winners.append(asks.values(best)["rate"])
    for searches in UNITS:
        found = np.array(winners)[rng.integers(pool, size=(draws, 2, searches))]
        values = runs.test[found, rng.integers(seeds, size=found.shape)]
        false = (decide(values, looks_of_plan(searches)).decided != 0).mean()
        yield Rate("searches of 16 trials by tpe, equal spaces", searches, 2, float(false), 0.06)


def errors_of_configurations(runs: Runs, draws: int = DRAWS) -> Iterator[Rate]:
    """Yields how often the worse of two configurations is called better, with one search an arm.

    Args:
        runs: from which trials and final runs are drawn, with replacement.
        draws: of each cell.
    """
    truth = runs.test.mean(1)
    for seeds in UNITS:
        rng = np.random.default_rng(0)
        arms = [_searched(rng, runs, draws, 1, 12, slice(None))[0][:, 0] for _ in range(2)]
        fresh = rng.integers(runs.test.shape[1], size=(2, draws, seeds))
        values = np.stack([runs.test[a[:, None], f] for a, f in zip(arms, fresh, strict=True)], 1)
        decided = decide(values, looks_of_plan(seeds)).decided[:, 0]
        wrong = decided * (truth[arms[0]] - truth[arms[1]]) < 0
        cell = "one search of 12 trials: the wrong configuration"
        yield Rate(cell, seeds, 2, float(wrong.mean()), 0.01)
