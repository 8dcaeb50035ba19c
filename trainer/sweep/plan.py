"""The plan of a sweep: the list of its trials, a pure function of its files."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainer.config import Config, ConfigError, Source, Tree, dump, replace
from trainer.config.wording import listing
from trainer.sweep.encoding import canonical, encoded
from trainer.sweep.methods import Point
from trainer.sweep.reading import ArmConfig, Definition

_MOST_RUNS = 100_000
# Between the first seed of the trials and the first of the final runs: more than the most seeds
# that can be counted, so that seeds which are added later are not those of the final runs.
_TO_FINAL_SEEDS = 10_000


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        arm: the name of the arm.
        number: the number of the point in the arm's space, from 0.
        seed: the seed of the run.
        values: path of the config -> value, without the seed.
        base: the config of the arm.
        final: the folder of the runs of winners on fresh seeds, "final" as a rule, if it is one
            of them; "" for a trial of the search.
    """

    arm: str
    number: int
    seed: int
    values: Mapping[str, Tree]
    base: Config
    final: str = ""

    def __hash__(self) -> int:
        return hash(self.folder)

    @cached_property
    def config(self) -> Config:
        """The resolved config of the run: that of the arm with the values and the seed."""
        source = Source(f"the trial {self.arm}/{self.number:04d}")
        return replace(self.base, {**self.values, "seed": self.seed}, source)

    @property
    def name(self) -> str:
        """The arm, the number and the seed, such as "muon/0007/0"."""
        return f"{self.arm}/{self.number:04d}/{self.seed}"

    @property
    def folder(self) -> str:
        """The folder of the trial in that of the sweep, such as "trials/muon/0007/0"."""
        return f"{self.final}/{self.arm}/{self.seed}" if self.final else f"trials/{self.name}"


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep.

    Attributes:
        definition: the sweep.
        trials: all runs: the arms in their order, then numbers, then seeds.
        counts: arm -> number of points in its space.
        seeds: the seeds of each point.
        final_seeds: the seeds of the runs of each arm's winner, none of which is in `seeds`.
    """

    definition: Definition
    trials: tuple[Trial, ...]
    counts: Mapping[str, int]
    seeds: tuple[int, ...]
    final_seeds: tuple[int, ...]

    def of_arm(self, name: str) -> list[Trial]:
        """Returns the runs of an arm, in order.

        Args:
            name: the name of the arm.
        """
        return [trial for trial in self.trials if trial.arm == name]

    def content(self) -> dict[str, Any]:
        """Returns all that the plan says, as JSON can have it."""
        sweep = self.definition.sweep
        goal, arms = sweep.goal, self.definition.arms
        return {
            "arms": {arm.name: _described(arm) for arm in arms},
            "seeds": list(self.seeds),
            "final_seeds": list(self.final_seeds),
            "goal": {
                "metric": goal.metric,
                "mode": goal.better,
                "select_on": goal.select_on,
                "target": goal.target,
            },
            "budgets": sweep.budgets,
            "checkpoints": sweep.checkpoints,
            "trials": [[t.arm, t.number, t.seed, encoded(t.values)] for t in self.trials],
        }

    @property
    def digest(self) -> str:
        """The SHA-256 of `content` as canonical JSON, in hexadecimal digits."""
        return hashlib.sha256(canonical(self.content()).encode()).hexdigest()


def make_plan(definition: Definition) -> SweepPlan:
    """Lists the trials of a sweep.

    Args:
        definition: the sweep, from `reading.read_sweep`.

    Returns:
        The plan. It depends on the files only; with a larger number of trials, those of `random`,
        `halton` and `sobol` that it had before stay the same.

    Raises:
        ConfigError: an arm's method does not fit its space or number of trials, arms have unequal
            numbers of trials although budgets are equal, or there are more than 100,000 runs.
    """
    seeds, final_seeds = _seeds(definition)
    counts = {arm.name: _count(arm) for arm in definition.arms}
    refuse_unequal(definition, "trials", counts)
    runs = sum(counts.values()) * len(seeds)
    if runs > _MOST_RUNS:
        raise ConfigError(
            f"The sweep has {runs:,} runs, but at most {_MOST_RUNS:,} are planned: lower trials or"
            " seeds, or remove values of a grid.",
            definition.config.sources[""],
        )
    trials = []
    for arm in definition.arms:
        points = arm.method.points(arm.space, counts[arm.name])
        for number, point in enumerate(points):
            values = _by_path(arm, point)
            trials += [Trial(arm.name, number, seed, values, arm.config) for seed in seeds]
    return SweepPlan(definition, tuple(trials), counts, seeds, final_seeds)


def _count(arm: ArmConfig) -> int:
    """Returns the number of points of an arm."""
    try:
        counted = arm.method.count(arm.space)
    except ValueError as error:
        raise ConfigError(f"{arm.title}: {error}", arm.source("space", "method")) from error
    wanted, source = arm.trials, arm.source("trials", "method")
    if counted is None and wanted is None:
        raise ConfigError(
            f"{arm.title} needs a number of trials for its method ({arm.method.text}): add trials.",
            source,
        )
    if counted is not None and wanted not in (None, counted):
        if not arm.paths:
            raise ConfigError(
                f"{arm.title} has no space, so that its {wanted} trials would be equal: give it a"
                " space, or trials: 1.",
                source,
            )
        raise ConfigError(
            f"{arm.title} has {counted:,} trials by its method ({arm.method.text}), and trials is"
            f" {wanted:,}: remove trials, or change the values.",
            source,
        )
    count = wanted if counted is None else counted
    assert count is not None
    sizes = [space.size for space in arm.space.values()]
    if counted is None and None not in sizes:
        size = math.prod(size or 1 for size in sizes)
        if count > size:
            raise ConfigError(
                f"{arm.title} has a space of {size:,} points, so that {count:,} trials would"
                " repeat some: lower trials, or use method.grid, which takes each point once.",
                source,
            )
    return count


def refuse_unequal(definition: Definition, what: str, budgets: Mapping[str, int]) -> None:
    """Checks that the arms of a sweep have equal budgets, unless its file allows unequal ones.

    Args:
        definition: the sweep.
        what: what the budgets count, "trials", "steps" or "examples".
        budgets: arm -> how many the arm has.

    Raises:
        ConfigError: they are unequal.
    """
    if definition.sweep.budgets == "unequal" or len(set(budgets.values())) == 1:
        return
    shown = listing([f"{name} {count:,}" for name, count in budgets.items()])
    raise ConfigError(
        f"The arms have different numbers of {what} ({shown}). Make them equal, or write budgets:"
        " unequal ('unequal' in Gin), which the report repeats.",
        definition.config.sources.get("arms"),
    )


def _seeds(definition: Definition) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the seeds of the trials, and those of the final runs."""
    sweep, config = definition.sweep, definition.config
    first = {arm.name: arm.config.root.kwargs.get("seed", 0) for arm in definition.arms}
    starts = sorted(set(map(str, first.values())))
    start = next(iter(first.values()))
    if isinstance(sweep.seeds, int):
        if len(starts) > 1 or type(start) is not int:
            raise ConfigError(
                f"The configs of the arms have the seeds {listing(starts)}, and seeds counts from"
                " the seed of the base: list the seeds, or remove seed from the arms.",
                config.sources.get("seeds") or config.sources["base"],
            )
        seeds = tuple(range(start, start + sweep.seeds))
    else:
        seeds = tuple(sweep.seeds)
    final = () if sweep.final is None else sweep.final.seeds
    if isinstance(final, int):
        final = range(seeds[0] + _TO_FINAL_SEEDS, seeds[0] + _TO_FINAL_SEEDS + final)
    both = [str(seed) for seed in final if seed in seeds]
    if both:
        raise ConfigError(
            f"The final runs have seeds of the trials ({listing(both)}), on which the winners were"
            " selected: use other seeds.",
            config.sources.get("final.seeds"),
        )
    if (most := max((*seeds, *final))) >= 2**32:
        raise ConfigError(
            f"The seeds reach {most}, but a seed is at most 2**32 - 1: use lower ones.",
            config.sources.get("seeds") or config.sources[""],
        )
    return seeds, tuple(final)


def _by_path(arm: ArmConfig, point: Point) -> dict[str, Tree]:
    """Returns the values of a point by the paths of the arm's config."""
    values: dict[str, Tree] = {}
    for key, value in point.items():
        space = arm.space.get(key)
        inner = value if space is not None and space.paths is not None else {key: value}
        for each, one in inner.items():
            values.update(dict.fromkeys(arm.paths[each], one))
    return values


def _described(arm: ArmConfig) -> dict[str, Any]:
    """Returns the method and the space of an arm, and the SHA-256 of its config as YAML."""
    spaces = {}
    for key, space in arm.space.items():
        for inner, each in (space.parts or {key: space}).items():
            spaces |= dict.fromkeys(arm.paths[inner], each.text)
    return {
        "method": arm.method.text,
        "space": spaces,
        "config": hashlib.sha256(dump(arm.config.root).encode()).hexdigest(),
    }
