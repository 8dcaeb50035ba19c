"""How a sweep chooses the points of a space; a config names them as method.sobol and so on.

A method is deterministic, and says whether its first n points stay when more are asked for. Most
know all points before anything is computed; `tpe`, `gp`, `cmaes` and `coordinate_descent` choose
later points by the results of earlier ones.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from trainer.config import Tree
from trainer.config.wording import brief, listing
from trainer.messages import plural
from trainer.sweep.asked import Asks, scrambled, search_seed
from trainer.sweep.spaces import Space, encoded, values

__all__ = [
    "cmaes",
    "coordinate_descent",
    "explicit",
    "gp",
    "grid",
    "halton",
    "halving",
    "latin_hypercube",
    "random",
    "sobol",
    "tpe",
]

Point = Mapping[str, Tree]  # the key of a space -> a value of the space


@dataclass(frozen=True)
class Cuts:
    """At which steps the trials of a search are cut to a share of them."""

    steps: tuple[int, ...]  # increasing
    factor: int  # of n points, `max(1, n // factor)` go on

    @property
    def text(self) -> str:
        """The cuts as a part of a line."""
        at = "step" if len(self.steps) == 1 else "steps"
        steps = ", ".join(map(str, self.steps))
        return f"cut to 1/{self.factor}, but at least one point, at {at} {steps}"

    def counts(self, points: int) -> list[int]:
        """Returns how many of some points there are before each cut, and after the last one.

        Example:
            >>> Cuts((100, 300), 3).counts(27)
            [27, 9, 3]
        """
        return [max(1, points // self.factor**cuts) for cuts in range(len(self.steps) + 1)]

    def going_on(self, points: int, step: int) -> int:
        """Returns how many of some points go on from the cut at a step.

        Example:
            >>> Cuts((100, 300), 3).going_on(27, 100)
            9
        """
        return self.counts(points)[1 + self.steps.index(step)]

    def total(self, points: int, steps: int) -> int:
        """Returns the steps that some points need together, if whole trials have `steps`.

        Example:
            >>> Cuts((100, 300), 3).total(27, 900)
            6300
        """
        ends = (0, *self.steps, steps)
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        return sum(n * x for n, x in zip(self.counts(points), lengths, strict=True))

    def after(self, step: int) -> int | None:
        """Returns the first cut after a step; None if there is none."""
        return next((each for each in self.steps if each > step), None)


@dataclass(frozen=True)
class Method:
    """Chooses the points of a space, which is key -> space, in the order of the file."""

    kind: str  # the function that returned it
    seed: int | None  # None if a point is known by its values, and not by its number
    _: KW_ONLY
    grows: bool = True  # whether the first n points stay the same when more are asked for
    # the steps at which trials are stopped; None if all are computed to the end
    cuts: Cuts | None = None
    search: int = 0  # of which of several independent searches it chooses the points

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, got {self.seed}.")

    @property
    def text(self) -> str:
        """The method as one line, such as "sobol, seed 0"."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.kind}{seed}" + ("" if self.cuts is None else f"; {self.cuts.text}")

    def count(self, space: Mapping[str, Space]) -> int | None:
        """Returns the number of points, or None if the method does not determine it."""
        # Raises ValueError if the method cannot choose points of the space.
        raise NotImplementedError

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the first `count` points in their order; fewer if the others need results."""
        # Raises ValueError if the method cannot choose so many, or has no such search.
        raise NotImplementedError

    def asks(self, space: Mapping[str, Space], axes: Sequence[Mapping[str, Space]]) -> Asks | None:
        """Returns how points are chosen by results; None if all are known before there are any."""
        # `axes` has path of the config -> space for each key of the space.

    def of_search(self, search: int) -> Self:
        """Returns the method with the points of a search, from 0, that of the method itself."""
        return replace(self, search=search)


class Grid(Method):
    """All combinations; the last key of the space changes fastest."""

    def count(self, space: Mapping[str, Space]) -> int:
        """Returns the product of the numbers of values; see `Method`."""
        for key, each in space.items():
            if each.grid is None:
                raise ValueError(
                    f"A grid needs a number of values for {key!r}, which is {each.text}: add"
                    " points, list them with space.values, or use another method."
                )
        return math.prod(len(each.grid or ()) for each in space.values())

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the combinations; see `Method`."""
        if self.search:
            raise ValueError(
                "A grid has the same points in every search, so that its searches are not"
                " independent: use method.sobol, method.random or method.halton, or searches: 1."
            )
        grids = [each.grid or () for each in space.values()]
        chosen = itertools.islice(itertools.product(*grids), count)
        return [dict(zip(space, values, strict=True)) for values in chosen]


@dataclass(frozen=True)
class Sampled(Method):
    """Points from a sequence of coordinates in [0, 1)."""

    seed: int
    # (seed, dimensions, count) -> coordinates [count, dimensions]
    sequence: Callable[[int, int, int], np.ndarray]

    def count(self, space: Mapping[str, Space]) -> int | None:
        """Returns 1 for a space without keys, which has one point; see `Method`."""
        return None if space else 1

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the values at the coordinates; see `Method`."""
        if not space:
            return [{}] * count
        seed = search_seed(self.seed, self.search)
        return _points_at(space, self.sequence(seed, len(space), count).tolist())


@dataclass(frozen=True)
class Asked(Method):
    """Points that are chosen in batches, by the results of those before in their search."""

    seed: int
    first: int
    batch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first < 2:
            raise ValueError(
                f"first is {self.first}, but at least 2 points are needed to learn from."
            )
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}, but must be at least 1.")

    @property
    def text(self) -> str:
        """See `Method`."""
        start = f", the first {self.first:,} by Sobol" if self.kind != "cmaes" else ""
        return f"{self.kind}, seed {self.seed}{start}, in batches of {self.batch:,}"

    def asks(self, space: Mapping[str, Space], axes: Sequence[Mapping[str, Space]]) -> Asks:
        """Returns how the points are chosen for axes that are path -> space; see `Method`."""
        records = tuple({p: encoded(x.record) for p, x in axis.items()} for axis in axes)
        return Asks(self.kind, self.seed, self.first, self.batch, records)

    def count(self, space: Mapping[str, Space]) -> int | None:
        """Returns None, and refuses a space that is too small; see `Method`."""
        fewest = 2 if self.kind == "cmaes" else 1
        if len(space) < fewest:
            raise ValueError(
                f"method.{self.kind} needs a space of at least {plural(fewest, 'value')}, and this"
                f" one has {len(space) or 'none'}: add one, or use method.sobol."
            )
        return None

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the points of the first batch; see `Method`."""
        if self.kind == "cmaes" and count % self.batch:
            raise ValueError(
                f"method.cmaes chooses {self.batch:,} points at a time, and trials is {count:,}:"
                f" write a multiple, such as {-(-count // self.batch) * self.batch:,}."
            )
        asks = self.asks(space, [{key: each} for key, each in space.items()])
        return _points_at(space, asks.coordinates(self.search, [], asks.batch_at(0, count)))


@dataclass(frozen=True)
class Descent(Asked):
    """Points of a grid that lie, line after line, around the best one so far."""

    center: Mapping[str, Tree] | None = None  # the first point; None if each search draws it

    @property
    def text(self) -> str:
        """See `Method`."""
        start = f"seed {self.seed}" if self.center is None else f"from {brief(dict(self.center))}"
        return f"{self.kind}, {start}, one value of the space after the other"

    def asks(self, space: Mapping[str, Space], axes: Sequence[Mapping[str, Space]]) -> Asks:
        """Returns how the points are chosen, with grids as lists of values; see `Method`."""
        lists = [{path: values(x.grid or ()) for path, x in axis.items()} for axis in axes]
        return replace(super().asks(space, lists), center=self._places(space))

    def count(self, space: Mapping[str, Space]) -> int | None:
        """Returns None, and refuses a space without a grid, or a center outside it."""
        Grid("grid", None).count(space)
        self._places(space)
        return super().count(space)

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the points of the first line, and refuses more than the grid has."""
        if count > (most := Grid("grid", None).count(space)):
            raise ValueError(f"trials is {count:,}, but the grid of the space has {most:,} points.")
        return super().points({key: values(each.grid or ()) for key, each in space.items()}, count)

    def of_search(self, search: int) -> Self:
        """Returns the method for a search; see `Method`."""
        if search and self.center is not None:
            raise ValueError(
                "Searches that begin at one center are not independent: leave out `center`, so that"
                " each draws where it begins, or write searches: 1."
            )
        return super().of_search(search)

    def _places(self, space: Mapping[str, Space]) -> tuple[int, ...] | None:
        """Returns the places of the center in the grids of a space; None without a center."""
        if self.center is None:
            return None
        lists = {key: list(each.grid or ()) for key, each in space.items()}
        if self.center.keys() == lists.keys() and all(
            self.center[k] in x for k, x in lists.items()
        ):
            return tuple(values.index(self.center[key]) for key, values in lists.items())
        known = "; ".join(f"{key}: {brief(each)}" for key, each in lists.items())
        raise ValueError(
            f"center is {brief(dict(self.center))}, but needs one of the values of each key of the"
            f" space: {known}."
        )


@dataclass(frozen=True)
class Explicit(Method):
    """Points that the file lists; their keys are paths."""

    searches: Sequence[Sequence[Point]]  # the points of each search, equally many

    def count(self, space: Mapping[str, Space]) -> int:
        """Returns the length of the list; see `Method`."""
        if space:
            raise ValueError(
                "method.explicit lists the values of every trial, so that an arm with this method"
                " has no space: remove one of them."
            )
        return len(self.searches[0])

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the list of the search; see `Method`."""
        if self.search >= len(self.searches):
            raise ValueError(
                f"method.explicit lists the trials of {plural(len(self.searches), 'search')}:"
                " give it a list of trials for each search, or write as many searches."
            )
        return self.searches[self.search]


def _points_at(space: Mapping[str, Space], coordinates: Sequence[Sequence[float]]) -> list[Point]:
    """Returns the points at some coordinates."""
    return [
        {key: each.at(u) for (key, each), u in zip(space.items(), row, strict=True)}
        for row in coordinates
    ]


def grid() -> Method:
    """Returns the method that tries all combinations; the last key of the space changes fastest."""
    return Grid("grid", None)


def random(seed: int = 0) -> Method:
    """Returns the method that draws every coordinate independently.

    The coordinates of point n are the first outputs of Philox 4x64-10 (Salmon et al. 2011) with
    the key `seed`, from the counter n * 2**64 + 1 on, divided by 2**64 after the last eleven bits
    are dropped.

    Args:
        seed: at least 0 and less than 2**64.

    Raises:
        ValueError: the seed is out of its range.
    """

    def coordinates(seed: int, dimensions: int, count: int) -> np.ndarray:
        streams = (np.random.Philox(key=seed, counter=n << 64) for n in range(count))
        words = np.stack([stream.random_raw(dimensions) for stream in streams])
        return (words >> np.uint64(11)) * 2.0**-53

    return Sampled("random", seed, coordinates)


def halton(seed: int = 0) -> Method:
    """Returns the scrambled Halton sequence (Owen 2017, arXiv:1706.02808) of scipy.

    Args:
        seed: of the scrambling, at least 0 and less than 2**64.

    Raises:
        ValueError: the seed is out of its range.
    """
    return Sampled("halton", seed, partial(scrambled, "Halton"))


def sobol(seed: int = 0) -> Method:
    """Returns the scrambled Sobol sequence (Owen 1998) of scipy; a power of 2 fills a space best.

    Args:
        seed: of the scrambling, at least 0 and less than 2**64.

    Raises:
        ValueError: the seed is out of its range.
    """
    return Sampled("sobol", seed, partial(scrambled, "Sobol"))


def latin_hypercube(seed: int = 0) -> Method:
    """Returns the Latin hypercube of scipy: of n points, one in each of n slices of every value.

    With more points all of them are others, so that `sweep extend` adds searches, and no trials.
    See McKay, Beckman and Conover 1979 (Technometrics 21).

    Args:
        seed: at least 0 and less than 2**64.

    Raises:
        ValueError: the seed is out of its range.
    """
    return Sampled("latin_hypercube", seed, partial(scrambled, "LatinHypercube"), grows=False)


def tpe(seed: int = 0, first: int = 8, batch: int = 4) -> Method:
    """Returns the tree-structured Parzen estimator of Optuna, which learns from earlier points.

    The first points of a search are those of `method.sobol` with the same seed. Each further batch
    is chosen when all points before it have their results, by a new sampler whose seed depends on
    `seed`, the search and the number of its first point: the points are the same, whoever computes
    them and however often workers are killed. The sampler models all hyperparameters together
    (`multivariate`), and keeps the points of a batch apart (`constant_liar`). Points are
    ordered by the goal, the mean over their seeds; those without a finite value come last.
    All values of the space must be inputs of the program, as floats of optimizers are. See Bergstra
    et al. 2011 (NeurIPS 24), and Watanabe 2023 (arXiv:2304.11127).

    Args:
        seed: at least 0 and less than 2**64.
        first: how many points are chosen before there are results, at least 2.
        batch: how many points are chosen together after that; a smaller number learns more from
            each, a larger one occupies more workers.

    Raises:
        ValueError: the seed, `first` or `batch` is out of its range.

    Example:
        >>> tpe(seed=1).text
        'tpe, seed 1, the first 8 by Sobol, in batches of 4'
    """
    return Asked("tpe", seed, first, batch)


def gp(seed: int = 0, first: int = 8, batch: int = 4) -> Method:
    """Returns Bayesian optimization with a Gaussian process, as Optuna implements it.

    Batches, seeds and results are as in `method.tpe`. It needs torch: install lockstep-jax[gp].
    Choosing a point takes about a second, which pays where a trial takes minutes. On another kind
    of processor the last bits of the model, and so the points, may be others; those that were
    chosen stay as they are.

    Args:
        seed: at least 0 and less than 2**64.
        first: how many points are chosen before there are results, at least 2.
        batch: how many points are chosen together after that.

    Raises:
        ValueError: the seed, `first` or `batch` is out of its range.
    """
    return Asked("gp", seed, first, batch)


def cmaes(seed: int = 0, batch: int = 8) -> Method:
    """Returns the evolution strategy CMA-ES, in the package cmaes, which Optuna uses as well.

    Each batch is a generation. The first one is drawn around the middle of the space, with a
    standard deviation of a quarter of its width. Seeds and results are as in `method.tpe`. The
    number of trials must be a multiple of `batch`, and the space must have two values or more. See
    Hansen 2016 (arXiv:1604.00772).

    Args:
        seed: at least 0 and less than 2**64.
        batch: the number of points of a generation, at least 4.

    Raises:
        ValueError: the seed or `batch` is out of its range.
    """
    if batch < 4:
        raise ValueError(f"batch is {batch}, but a generation has at least 4 points.")
    return Asked("cmaes", seed, batch, batch)


def coordinate_descent(seed: int = 0, center: Mapping[str, Any] | None = None) -> Method:
    """Returns the search of a grid along one value of the space after the other.

    The first points of a search are a line: its beginning, and the same point with each other value
    of the first key of the space. Every further line is that of the next key, through the point
    with the best result so far; after the last key comes the first. In place of points
    that the search has had already come those of the lines after it. A line is one batch, as in
    `method.tpe`: it is chosen when all points before it have their results. A round through spaces
    of 7, 5 and 3 values has 13 trials, with the beginning.

    Args:
        seed: of where each search begins, which is drawn; at least 0 and less than 2**64.
        center: key of the space -> one of its values, where the search begins; only one search can
            begin there. Default: drawn.

    Raises:
        ValueError: the seed is out of its range.

    Example:
        >>> coordinate_descent(seed=1).text
        'coordinate_descent, seed 1, one value of the space after the other'
    """
    return Descent("coordinate_descent", seed, 2, 1, center=center)


def explicit(trials: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]]) -> Method:
    """Returns the method that tries the points of a list.

    Args:
        trials: for each trial path -> value, all with the same paths; or for each of several
            searches such a list, all of the same length.

    Raises:
        ValueError: a list is empty, lists have different lengths, or entries different paths.
    """
    if not trials:
        raise ValueError("trials is empty: list a dict from path to value for each trial.")
    lists = [isinstance(each, Sequence) for each in trials]
    if any(lists) and not all(lists):
        raise ValueError(
            "trials has both lists and dicts: list a dict from path to value for each trial, or for"
            " each search such a list."
        )
    searches: Any = trials if all(lists) else [trials]
    for index, points in enumerate(searches):
        if not points or len(points) != len(searches[0]):
            raise ValueError(
                f"trials[{index}] lists {plural(len(points), 'trial')} and trials[0]"
                f" {len(searches[0])}: every search has the same number of trials, at least one."
            )
        _check_points(points, f"trials[{index}]" if all(lists) else "trials", searches[0][0])
    return Explicit("explicit", None, tuple(map(tuple, searches)))


def halving(points: Method, cuts: Sequence[int], factor: int = 3) -> Method:
    """Returns the method that stops the worse trials early, by synchronous successive halving.

    All trials of an arm begin. At each cut, when all of them have come so far, the points of a
    search are ordered by the goal, the mean over their seeds; of n points, the best `n // factor`
    go on, at least one, and the trials of the others end as "pruned". Ties are decided by the
    number of the point. A point that diverged on any seed does not go on. The schedules are those
    of the whole run, so that a trial has the bits of that run with `--until`. Each search is cut
    for itself.

    The order at a cut need not be that at the end: an optimizer or a rate that begins slowly is at
    a disadvantage. The report shows how the order changed. See Karnin et al. 2013 (ICML), and
    Jamieson and Talwalkar 2016 (arXiv:1502.07943).

    Args:
        points: the method that chooses the points, such as `method.sobol`.
        cuts: the steps of the cuts, increasing, each of which must be evaluated.
        factor: at least 2; of n points, n // factor go on.

    Raises:
        ValueError: a cut is below 1, cuts do not increase, `factor` is below 2, or `points` is not
            a method that chooses points.

    Example:
        >>> method = halving(sobol(seed=0), cuts=[100, 300])
        >>> method.text
        'sobol, seed 0; cut to 1/3, but at least one point, at steps 100, 300'
    """
    if not isinstance(points, Grid | Sampled | Explicit) or points.cuts is not None:
        raise ValueError(
            "points must be a method that chooses all points before there are results, such as"
            " method.sobol or method.grid."
        )
    if not cuts:
        raise ValueError("cuts is empty: list the steps at which trials are stopped.")
    if any(after <= before for before, after in itertools.pairwise((0, *cuts))):
        raise ValueError(
            f"cuts is {list(cuts)}, but must be steps from 1 on, each after the one before."
        )
    if factor < 2:
        raise ValueError(
            f"factor is {factor}, but must be at least 2: of n points, n // factor go on."
        )
    return replace(points, cuts=Cuts(tuple(cuts), factor))


def _check_points(points: Sequence[Mapping[str, Any]], name: str, first: Mapping[str, Any]) -> None:
    """Raises ValueError for a point without paths, or with other paths than the first point."""
    for index, point in enumerate(points):
        if not point:
            raise ValueError(f"{name}[{index}] is empty: it sets no path.")
        if set(point) != set(first):
            differing = listing(sorted(set(point) ^ set(first)))
            raise ValueError(
                f"{name}[{index}] and the first trial set different paths ({differing}): give each"
                " trial a value for every path."
            )
