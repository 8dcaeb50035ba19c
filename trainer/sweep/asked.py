"""Methods of search that choose points by results of earlier ones, most with Optuna and cmaes.

`Asks` is what plan.json has of such a method, as `methods.tpe` returns it. Which points were chosen
is in the folder of the sweep; see `points`.
"""

import hashlib
import importlib.util
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.config import Tree
from trainer.sweep.spaces import decoded, of_record


def search_seed(seed: int, search: int, attempt: int = 0) -> int:
    """Returns the seed of one of several independent searches; `seed` itself for search 0."""
    # Hashes make the searches of two sweeps different; counting from the seed would share most of
    # them. `attempt` counts the hashes that could not be used.
    if search == 0:
        return seed
    digest = hashlib.sha256(f"search {seed} {search} {attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def scrambled(name: str, seed: int, dimensions: int, count: int) -> np.ndarray:
    """Returns coordinates [count, dimensions] of a scrambled sequence of scipy.stats.qmc."""
    from scipy.stats import qmc

    with warnings.catch_warnings():
        # Sobol warns of a number of points that is not a power of 2; the docstring says that.
        warnings.simplefilter("ignore", UserWarning)
        return getattr(qmc, name)(dimensions, scramble=True, rng=seed).random(count)


@dataclass(frozen=True)
class Asks:
    """How an arm's points are chosen by results; plan.json has it by these names."""

    kind: str  # "tpe", "gp", "cmaes" or "coordinate_descent"
    seed: int
    # How many points are chosen before there are results, and how many together after that. Those
    # of a descent are the lines of its grid, whose axes have lists of values.
    first: int
    batch: int
    # for each coordinate, path of the config -> `Space.record`, its values encoded
    axes: tuple[Mapping[str, Any], ...]
    # where a descent begins, by places in its lists; None if that is drawn
    center: tuple[int, ...] | None = field(default=None, metadata={"omit_none": True})

    def values(self, coordinates: Sequence[float]) -> dict[str, Tree]:
        """Returns path -> value of a point."""
        pairs = zip(self.axes, coordinates, strict=True)
        return {p: of_record(decoded(x)).at(u) for axis, u in pairs for p, x in axis.items()}

    def batch_at(self, known: int, count: int) -> int:
        """Returns how many of `count` points are chosen together after those that are known."""
        if self.kind == "coordinate_descent":
            return min(self._line(known)[1], count - known)
        if known < self.first:
            return min(self.first, count)
        return min(self.batch - (known - self.first) % self.batch, count - known)

    @property
    def lacking(self) -> str | None:
        """A sentence about a package that is not installed; None if none is missing."""
        if self.kind != "gp" or importlib.util.find_spec("torch") is not None:
            return None
        return (
            "method.gp needs torch, which is not installed: pip install 'lockstep-jax[gp]', or use"
            " method.tpe."
        )

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that choose the points."""
        packages = {"tpe": ("optuna",), "gp": ("optuna", "torch"), "cmaes": ("cmaes",)}
        return packages.get(self.kind, ("scipy",))

    def coordinates(
        self, search: int, told: Sequence[tuple[Sequence[float], float | None]], count: int
    ) -> list[list[float]]:
        """Returns the coordinates, in [0, 1], of the points that follow those of a search."""
        from scipy import stats

        if self.kind == "coordinate_descent":
            return self._of_descent(search_seed(self.seed, search), told, count)
        # `told` has the coordinates and the results of these, in their order. Smaller results are
        # better, and None is a point without a finite one. The samplers are told normal scores of
        # the ranks: a loss of 1e4 at a rate that is too high would hide what else there is from a
        # Gaussian process. The others depend on the order only.
        ranks = stats.rankdata([math.inf if value is None else value for _, value in told])
        scores = stats.norm.ppf((ranks - 0.5) / max(1, len(told))).tolist()
        known = [(list(at), score) for (at, _), score in zip(told, scores, strict=True)]
        if self.kind == "cmaes":
            return self._of_cmaes(search_seed(self.seed, search), known, count)
        if not known:
            seed = search_seed(self.seed, search)
            return scrambled("Sobol", seed, len(self.axes), count).tolist()
        return self._of_optuna(search, known, count)

    def _of_optuna(self, search: int, known: Sequence[tuple[list[float], float]], count: int):
        import optuna
        from optuna.distributions import BaseDistribution, FloatDistribution

        # A new sampler for each batch, so that the points do not depend on which process chooses
        # them: a sampler that goes on has a state that no file has.
        text = f"asked {self.seed} {search} {len(known)}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        axes: dict[str, BaseDistribution] = {
            f"{n:03}": FloatDistribution(0.0, 1.0) for n in range(len(self.axes))
        }
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that multivariate and constant_liar are experimental
            if self.kind == "gp":
                sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=0)
            else:
                sampler = optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True
                )
            study = optuna.create_study(sampler=sampler)
            for at, value in known:
                params = dict(zip(axes, at, strict=True))
                study.add_trial(
                    optuna.trial.create_trial(params=params, distributions=axes, value=value)
                )
            asked = [study.ask(axes) for _ in range(count)]
        return [[trial.params[name] for name in axes] for trial in asked]

    def _of_cmaes(self, seed: int, known: Sequence[tuple[list[float], float]], count: int):
        from cmaes import CMA

        size = len(self.axes)
        strategy = CMA(
            mean=np.full(size, 0.5),
            sigma=0.25,
            bounds=np.array([[0.0, 1.0]] * size),
            seed=seed % 2**32,
            population_size=self.batch,
        )
        # Its random numbers and its distribution are those after all generations so far.
        for start in range(0, len(known) - self.batch + 1, self.batch):
            for _ in range(self.batch):
                strategy.ask()
            generation = known[start : start + self.batch]
            strategy.tell([(np.array(at), value) for at, value in generation])
        return [strategy.ask().tolist() for _ in range(count)]

    @property
    def _sizes(self) -> list[int]:
        """The number of values of each axis of a descent."""
        return [len(decoded(next(iter(axis.values())))["values"]) for axis in self.axes]

    def _line(self, known: int) -> tuple[int, int]:
        """Returns the axis along which a descent goes on, and how many points its line has left."""
        sizes = self._sizes
        axis, end = 0, sizes[0]  # the first line has the beginning of the search, too
        while known >= end:
            axis = (axis + 1) % len(sizes)
            end += sizes[axis] - 1
        return axis, end - known

    def _of_descent(
        self, seed: int, told: Sequence[tuple[Sequence[float], float | None]], count: int
    ) -> list[list[float]]:
        sizes = self._sizes
        known: dict[tuple[int, ...], float] = {}
        for at, value in told:
            known[_places(at, sizes)] = math.inf if value is None else value
        first = self.center or _places(scrambled("Sobol", seed, len(sizes), 1)[0], sizes)
        best = min(known, key=known.__getitem__, default=first)
        axis, _ = self._line(len(told))
        order = [*range(axis, len(sizes)), *range(axis)]
        lines = [(*best[:a], k, *best[a + 1 :]) for a in order for k in range(sizes[a])]
        # What the search has had is not computed again: the lines after it follow, and the rest.
        new: dict[tuple[int, ...], None] = {}
        for point in itertools.chain(lines, itertools.product(*map(range, sizes))):
            if len(new) == count:
                break
            if point not in known:
                new[point] = None
        return [[(k + 0.5) / n for k, n in zip(x, sizes, strict=True)] for x in new]


def _places(at: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the places of coordinates in lists of some sizes."""
    return tuple(min(int(u * size), size - 1) for u, size in zip(at, sizes, strict=True))
