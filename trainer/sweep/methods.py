"""How a sweep chooses the points of a space; a config names them as method.sobol and so on.

A method is deterministic. The first n points of `random`, `halton` and `sobol` stay the same when
more of them are asked for.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.config import Tree
from trainer.config.wording import listing
from trainer.sweep.spaces import Space

__all__ = ["explicit", "grid", "halton", "random", "sobol"]

Point = Mapping[str, Tree]  # the key of a space -> a value of the space


class Method(Protocol):
    """Chooses the points of a space."""

    @property
    def text(self) -> str:
        """The method as one line, such as "sobol, seed 0"."""
        ...

    def count(self, space: Mapping[str, Space]) -> int | None:
        """Returns the number of points, if the method itself determines it, or else None.

        Args:
            space: key -> space, in the order of the file.

        Raises:
            ValueError: the method cannot choose points of the space.
        """
        ...

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the points in their order.

        Args:
            space: key -> space, in the order of the file.
            count: the number of points.
        """
        ...


@dataclass(frozen=True)
class Grid:
    """All combinations; the last key of the space changes fastest."""

    text: str = "grid"

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
        grids = [each.grid or () for each in space.values()]
        chosen = itertools.islice(itertools.product(*grids), count)
        return [dict(zip(space, values, strict=True)) for values in chosen]


@dataclass(frozen=True)
class Sampled:
    """Points from a sequence of coordinates in [0, 1).

    Attributes:
        text: see `Method`.
        coordinates: (dimensions, count) -> [count, dimensions].
    """

    text: str
    coordinates: Callable[[int, int], np.ndarray]

    def count(self, space: Mapping[str, Space]) -> int | None:
        """Returns 1 for a space without keys, which has one point; see `Method`."""
        return None if space else 1

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the values at the coordinates; see `Method`."""
        if not space:
            return [{}] * count
        rows = self.coordinates(len(space), count).tolist()
        return [
            {key: each.at(u) for (key, each), u in zip(space.items(), row, strict=True)}
            for row in rows
        ]


@dataclass(frozen=True)
class Explicit:
    """Points that the file lists; their keys are paths."""

    trials: Sequence[Point]
    text: str = "explicit"

    def count(self, space: Mapping[str, Space]) -> int:
        """Returns the length of the list; see `Method`."""
        if space:
            raise ValueError(
                "method.explicit lists the values of every trial, so that an arm with this method"
                " has no space: remove one of them."
            )
        return len(self.trials)

    def points(self, space: Mapping[str, Space], count: int) -> Sequence[Point]:
        """Returns the list; see `Method`."""
        return self.trials


def grid() -> Method:
    """Returns the method that tries all combinations; the last key of the space changes fastest."""
    return Grid()


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
    _check_seed(seed)

    def coordinates(dimensions: int, count: int) -> np.ndarray:
        def row(n: int) -> np.ndarray:
            words = np.random.Philox(key=seed, counter=n << 64).random_raw(dimensions)
            return (words >> np.uint64(11)) * 2.0**-53

        return np.stack([row(n) for n in range(count)])

    return Sampled(f"random, seed {seed}", coordinates)


def halton(seed: int = 0) -> Method:
    """Returns the scrambled Halton sequence (Owen 2017, arXiv:1706.02808) of scipy.

    Args:
        seed: of the scrambling, at least 0 and less than 2**64.

    Raises:
        ValueError: the seed is out of its range.
    """
    return _of_scipy("Halton", seed)


def sobol(seed: int = 0) -> Method:
    """Returns the scrambled Sobol sequence (Owen 1998) of scipy; a power of 2 fills a space best.

    Args:
        seed: of the scrambling, at least 0 and less than 2**64.

    Raises:
        ValueError: the seed is out of its range.
    """
    return _of_scipy("Sobol", seed)


def explicit(trials: Sequence[Mapping[str, Any]]) -> Method:
    """Returns the method that tries the points of a list.

    Args:
        trials: for each trial path -> value, all with the same paths.

    Raises:
        ValueError: the list is empty, or its entries have different paths.
    """
    if not trials:
        raise ValueError("trials is empty: list a dict from path to value for each trial.")
    for index, point in enumerate(trials):
        if not point:
            raise ValueError(f"trials[{index}] is empty: it sets no path.")
        if set(point) != set(trials[0]):
            differing = listing(sorted(set(point) ^ set(trials[0])))
            raise ValueError(
                f"trials[{index}] and trials[0] set different paths ({differing}): give each trial"
                " a value for every path."
            )
    return Explicit(tuple(trials))


def _of_scipy(name: str, seed: int) -> Method:
    """Returns a scrambled sequence of scipy.stats.qmc, by the name of its class."""
    _check_seed(seed)

    def coordinates(dimensions: int, count: int) -> np.ndarray:
        from scipy.stats import qmc

        with warnings.catch_warnings():
            # Sobol warns of a number of points that is no power of 2, as the docstring says.
            warnings.simplefilter("ignore", UserWarning)
            return getattr(qmc, name)(dimensions, scramble=True, rng=seed).random(count)

    return Sampled(f"{name.lower()}, seed {seed}", coordinates)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be between 0 and 2**64 - 1, got {seed}.")
