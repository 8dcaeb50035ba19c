"""The plan of a sweep: the list of its trials, a pure function of its files."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import Call, Config, ConfigError, Source, Tree, dump, replace
from trainer.config.wording import listing
from trainer.sweep.methods import Point
from trainer.sweep.reading import ArmConfig, Definition

_MOST_RUNS = 100_000


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        arm: the name of the arm.
        number: the number of the point in the arm's space, from 0.
        seed: the seed of the run.
        values: path of the config -> value, without the seed.
        config: the resolved config of the run.
        final: whether it is a run of the arm's winner on a fresh seed.
    """

    arm: str
    number: int
    seed: int
    values: Mapping[str, Tree]
    config: Config
    final: bool = False

    @property
    def name(self) -> str:
        """The arm, the number and the seed, such as "muon/0007/0"."""
        return f"{self.arm}/{self.number:04d}/{self.seed}"

    @property
    def folder(self) -> str:
        """The folder of the trial in that of the sweep, such as "trials/muon/0007/0"."""
        return f"final/{self.arm}/{self.seed}" if self.final else f"trials/{self.name}"


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

    def text(self) -> str:
        """Returns the plan as canonical JSON: equal plans have equal texts."""
        sweep = self.definition.sweep
        goal, arms = sweep.goal, self.definition.arms
        content = {
            "arms": {arm.name: {"method": arm.method.text, "config": _digest(arm)} for arm in arms},
            "seeds": self.seeds,
            "final_seeds": self.final_seeds,
            "goal": [goal.metric, goal.better, goal.select_on, goal.target],
            "budgets": sweep.budgets,
            "trials": [[t.arm, t.number, t.seed, _encoded(t.values)] for t in self.trials],
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def digest(self) -> str:
        """The SHA-256 of `text`, in hexadecimal digits."""
        return hashlib.sha256(self.text().encode()).hexdigest()


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
            source = Source(f"the trial {arm.name}/{number:04d}")
            for seed in seeds:
                config = replace(arm.config, {**values, "seed": seed}, source)
                trials.append(Trial(arm.name, number, seed, values, config))
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
        final = range(max(seeds) + 1, max(seeds) + 1 + final)
    both = [str(seed) for seed in final if seed in seeds]
    if both:
        raise ConfigError(
            f"The final runs have seeds of the trials ({listing(both)}), on which the winners were"
            " selected: use other seeds.",
            config.sources.get("final.seeds"),
        )
    if (most := max(*seeds, *final)) >= 2**32:
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


def _digest(arm: ArmConfig) -> str:
    return hashlib.sha256(dump(arm.config.root).encode()).hexdigest()


def _encoded(values: Mapping[str, Tree]) -> dict[str, Any]:
    return {path: _plain(value) for path, value in values.items()}


def _plain(value: Tree) -> Any:
    """Returns a value that JSON can have; a tree becomes its canonical YAML."""
    if isinstance(value, Call | Mapping | Sequence) and not isinstance(value, str):
        return {"yaml": dump(Call("value", {"value": value}))}
    return value
