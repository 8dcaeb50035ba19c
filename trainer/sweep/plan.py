"""The plan of a sweep: its trials, a pure function of its files, and the programs they share.

The states that runs keep for claims are planned, too: at which steps, and how many bytes they have.
"""

import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from trainer.config import Config, ConfigError, Source, Tree, dump, replace
from trainer.config.wording import listing
from trainer.messages import plural
from trainer.sweep.asked import Asks, search_seed
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.definition import Goal
from trainer.sweep.ladder import PlannedLadder, rung_of
from trainer.sweep.methods import Cuts, Explicit
from trainer.sweep.reading import ArmConfig, Definition
from trainer.sweep.spaces import PENDING, canonical, encoded
from trainer.sweep.tuned import Tuning, linked_of, tuning_of
from trainer.sweep.warning_text import Warnings, merge_warnings
from trainer.writers.json_files import as_json

ArmSearch = tuple[str, int]  # an arm, and a search of it

_MOST_RUNS = 100_000
# Between the first seed of the trials and the first of the final runs: the most seeds that can be
# counted, so that seeds which are added later are not those of the final runs.
_TO_FINAL_SEEDS = 10_000
# Each search has a block of so many seeds, enough for its trials and its final runs, however many
# seeds are added later.
_BLOCK = 2 * _TO_FINAL_SEEDS


def point_name(search: int, number: int) -> str:
    """Returns the name of a point: "2.0007" for number 7 of search 2, "0007" in search 0."""
    return f"{search}.{number:04d}" if search else f"{number:04d}"


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    arm: str
    number: int  # the number of the point in its search, from 0
    seed: int
    values: Mapping[str, Tree]  # path of the config -> value, without the seed; or `PENDING`
    base: Config  # the config of the arm
    # the folder of a winner's run on fresh seeds, "final" or "final.N"; "" for other trials
    final: str = ""
    search: int = 0  # from 0

    def __hash__(self) -> int:
        return hash(self.folder)

    @cached_property
    def config(self) -> Config:
        """The resolved config of the run: that of the arm with the values and the seed."""
        source = Source(f"the trial {self.arm}/{self.point}")
        return replace(self.base, {**self.values, "seed": self.seed}, source)

    @property
    def pending(self) -> bool:
        """Whether its values are not chosen yet."""
        return self.values is PENDING

    @property
    def point(self) -> str:
        """The search and the number: "2.0007", or "0007" in search 0."""
        return point_name(self.search, self.number)

    @property
    def name(self) -> str:
        """The arm, the point and the seed, such as "muon/0007/0" or "muon/2.0007/51340000"."""
        return f"{self.arm}/{self.point}/{self.seed}"

    @property
    def folder(self) -> str:
        """The folder of the trial in that of the sweep, such as "trials/muon/0007/0"."""
        return f"{self.final}/{self.arm}/{self.seed}" if self.final else f"trials/{self.name}"


@dataclass(frozen=True)
class PlannedArm:
    """An arm of a plan."""

    config: Config  # resolved, without the values of trials
    method: str  # how the trials are chosen, as a text
    space: Mapping[str, str]  # path of the config -> the values among which to search, as a text
    # the paths that one entry of the space sets together, for each that sets several
    linked: tuple[tuple[str, ...], ...] = ()
    cuts: Cuts | None = None  # None if all trials are computed to the end
    asks: Asks | None = None  # None if all points are known before there are results


@dataclass(frozen=True)
class SharedProgram:
    """Trials that share a program; plan.json has it by these names."""

    trials: tuple[str, ...]  # names, in the order of the plan
    inputs: tuple[str, ...]  # the config paths of the floats that are inputs of the program, sorted
    steps: int  # the last step of each trial
    batch_size: int  # examples
    flops: int  # floating-point operations of a step
    state_bytes: int  # of a trial, on each device
    # arm -> sentences about what is probably a mistake in its config
    warnings: Warnings = field(default_factory=dict)  # plans of earlier versions have none
    # the arms of a ladder that take their hyperparameters from lower rungs, whose final runs
    # share the program; None if there are none
    moved: tuple[str, ...] | None = field(default=None, metadata={"omit_none": True})
    # the step of the state with which each trial begins; None for 0
    first_step: int | None = field(default=None, metadata={"omit_none": True})

    @property
    def updates(self) -> int:
        """How many updates each trial makes."""
        return self.steps - (self.first_step or 0)

    def updates_until(self, step: int) -> int:
        """Returns how many of these updates a trial has made that is at a step."""
        return max(0, min(step, self.steps) - (self.first_step or 0))

    @cached_property
    def counts(self) -> Counter[str]:
        """How many of the trials are of each arm that has any."""
        return Counter(name.partition("/")[0] for name in self.trials)

    @property
    def arms(self) -> set[str]:
        """The names of the arms that the trials or the final runs are of."""
        return {*self.counts, *(self.moved or ())}

    @property
    def first(self) -> str:
        """The name of its first trial; of the first arm if it has final runs only."""
        return (*self.trials, *(self.moved or ()))[0]


@dataclass(frozen=True)
class Plan:
    """The plan of a sweep."""

    # `plan_sweep` lists its trials, `programs.find_programs` adds their programs, and
    # `plan_file.write_plan` writes it into the folder of the sweep, from which
    # `plan_file.read_plan` returns it.

    arms: Mapping[str, PlannedArm]  # in the order of the report
    # all runs: the arms in their order, then searches, then numbers, then seeds; those of the
    # first revision, then those that later ones added
    trials: tuple[Trial, ...]
    goal: Goal
    seeds: tuple[int, ...]  # of each point of search 0
    # of the runs of each winner of search 0, none of which is in `seeds`
    final_seeds: tuple[int, ...]
    budgets: str  # "equal", or "unequal" if the file allows it
    checkpoints: str  # which states the folder of a trial keeps: "none", "final" or "best"
    vmap: int | None  # how many trials are computed at once; None for one after another
    # how the results are judged, as `skewed`; see `definition.Sweep`
    looks: Literal["planned", "any"] = "planned"
    skewed: bool = False
    per_example: bool = True  # whether final runs keep their results on single test examples
    # for each search, what its seeds are larger by than those of search 0, modulo 2^32
    offsets: tuple[int, ...] = (0,)
    # the rungs on which the arms are; arms that it moves have no trials
    ladder: PlannedLadder | None = None
    branch: PlannedBranch | None = None  # the state of a run that all trials continue
    ablated: str = ""  # the arm of which the others are without a part; "" if there is none
    segments: int = 0  # into how many the states that a run keeps divide it; 0 if it keeps none
    differs: tuple[str, ...] = ()  # the kinds of differences between arms that the file names
    # of the trials, in the same order; empty before `find_programs`
    programs: tuple[SharedProgram, ...] = ()
    reasons: tuple[str, ...] = ()  # sentences about what makes more than one program
    vocabulary: tuple[str, ...] = ()  # further packages whose public functions the configs may name
    # what the folder has of the plan, as plan.json has it: the first revision, then what each
    # extension added; empty for a plan that is not in a folder
    revisions: tuple[Mapping[str, Any], ...] = ()

    @property
    def revision(self) -> int:
        """The number of the last revision, from 1."""
        return len(self.revisions)

    @property
    def digest(self) -> str:
        """The SHA-256 of the last revision and, through it, of those before."""
        return self.revisions[-1]["digest"]

    @property
    def warnings(self) -> dict[str, tuple[str, ...]]:
        """The warnings of all programs: arm -> sentences."""
        return merge_warnings(program.warnings for program in self.programs)

    @cached_property
    def by_name(self) -> dict[str, Trial]:
        """The runs by their names."""
        return {trial.name: trial for trial in self.trials}

    @cached_property
    def points(self) -> dict[ArmSearch, dict[int, list[Trial]]]:
        """Arm and search -> number of a point -> its trials, which differ in their seeds only."""
        found: dict[ArmSearch, dict[int, list[Trial]]] = {}
        for trial in self.trials:
            of_search = found.setdefault((trial.arm, trial.search), {})
            of_search.setdefault(trial.number, []).append(trial)
        return found

    @cached_property
    def searched(self) -> list[str]:
        """The arms that have trials: all but those that a ladder moves."""
        ladder = self.ladder
        return [arm for arm in self.arms if ladder is None or not ladder.is_moved(arm)]

    @property
    def counts(self) -> dict[str, int]:
        """For each arm that is searched, the number of points of its first search."""
        return {arm: len(self.points.get((arm, 0), ())) for arm in self.searched}

    @property
    def cuts(self) -> dict[str, Cuts]:
        """The cuts of each arm whose trials are stopped early."""
        return {name: arm.cuts for name, arm in self.arms.items() if arm.cuts is not None}

    @property
    def fixed(self) -> str:
        """Why nothing can be added to it, as a part of a sentence; "" if something can."""
        if self.ladder is not None:
            return "a ladder cannot be extended, because its rungs are judged together and once"
        stopped = "method.halving cannot be extended, because its trials were stopped among those"
        return f"{stopped} that it had, by the goal that it had" if self.cuts else ""

    @property
    def listed_seeds(self) -> dict[str, tuple[int, ...]]:
        """The seeds that are not those which a number of them stands for."""
        first, last = self.seeds[0], self.seeds[0] + _TO_FINAL_SEEDS
        every = {"seeds": (self.seeds, first), "final seeds": (self.final_seeds, last)}
        return {what: of for what, (of, x) in every.items() if of != (*range(x, x + len(of)),)}

    def of_arm(self, name: str) -> list[Trial]:
        """Returns the runs of an arm, in order."""
        return [trial for trial in self.trials if trial.arm == name]

    def example_of(self, program: SharedProgram) -> Trial:
        """Returns a trial that has a program."""
        return self.by_name.get(program.first) or self.examples_of(program.first)[0]

    def examples_of(self, name: str) -> list[Trial]:
        """Returns an arm's trials that are known; if a ladder moves it, those it may take."""
        # The latter are the trials from which it takes its hyperparameters, moved as winners are,
        # but for powers that are not fitted yet.
        ladder = self.ladder
        if ladder is None or not ladder.is_moved(name):
            return [trial for trial in self.of_arm(name) if not trial.pending]
        source, base = ladder.sources(name)[-1], self.arms[name].config
        return [
            dataclasses.replace(x, arm=name, values=ladder.expected(name, x.values), base=base)
            for x in self.examples_of(source)
        ]

    def keeps_examples(self, trial: Trial) -> bool:
        """Returns whether a trial keeps its results on single test examples."""
        return self.per_example and bool(trial.final)

    def content(self) -> dict[str, Any]:
        """Returns what the sweep's file says, as JSON can have it."""
        goal = self.goal
        aim = {"metric": goal.metric, "mode": goal.better, "select_on": goal.select_on}
        aim |= {"target": goal.target}
        given = {name: getattr(goal, name) for name in ("relevant", "rule", "sigma")}
        optional = {name: as_json(getattr(self, name)) for name in OPTIONAL}
        return {
            "arms": {name: _arm_entry(arm) for name, arm in self.arms.items()},
            "seeds": list(self.seeds),
            "final_seeds": list(self.final_seeds),
            "goal": aim | {name: value for name, value in given.items() if value is not None},
            "budgets": self.budgets,
            "checkpoints": self.checkpoints,
            "vmap": self.vmap,
            **{name: x for name, x in optional.items() if x != OPTIONAL[name]},
            "trials": [trial_entry(trial) for trial in self.trials],
        }

    @property
    def tunings(self) -> dict[str, Tuning]:
        """How each arm is tuned, by the trials of all revisions."""
        return {
            name: tuning_of(
                {(trial.search, trial.number): trial.values for trial in self.of_arm(name)},
                self.arms[name].config.root,
                linked_of(self.revisions, name) if self.revisions else [self.arms[name].linked],
            )
            for name in self.searched
        }

    @property
    def content_digest(self) -> str:
        """The SHA-256 of `content` as canonical JSON, in hexadecimal digits."""
        return hashlib.sha256(canonical(self.content()).encode()).hexdigest()


# Entries of a revision that are left out where they have these values: plans of earlier versions
# lack them, and equal files have equal plans.
OPTIONAL: Mapping[str, Any] = {
    each.name: as_json(each.default)
    for each in dataclasses.fields(Plan)
    if each.default is not dataclasses.MISSING
    and each.name not in ("programs", "reasons", "vocabulary", "revisions")
}


def searches_of(revision: Mapping[str, Any]) -> int:
    """Returns how many searches each arm has in a revision."""
    return len(revision.get("offsets", OPTIONAL["offsets"]))


def trial_entry(trial: Trial) -> list[Any]:
    """Returns what plan.json has of a trial: arm, number, seed, values, and the search unless 0."""
    # The values are null if they are not chosen yet.
    search = [trial.search] if trial.search else []
    values = None if trial.pending else encoded(trial.values)
    return [trial.arm, trial.number, trial.seed, values, *search]


def plan_sweep(definition: Definition) -> Plan:
    """Lists the trials of a sweep; raises ConfigError if arms or methods do not fit."""
    # The plan depends on the files only; with a larger number of trials, those that it had before
    # stay the same if their method grows.
    seeds, final_seeds = _seeds(definition)
    offsets = _offsets(definition, (*seeds, *final_seeds))
    searched = [arm for arm in definition.arms if not arm.moved]
    counts = {arm.name: _count(arm) for arm in searched}
    refuse_unequal(definition, "trials", counts)
    if (runs := sum(counts.values()) * len(seeds) * len(offsets)) > _MOST_RUNS:
        raise ConfigError(
            f"The sweep has {runs:,} runs, but at most {_MOST_RUNS:,} are planned: lower trials,"
            " searches or seeds, or remove values of a grid.",
            definition.config.sources[""],
        )
    trials = [
        Trial(arm.name, number, seed_of_search(seed, offset), values, arm.config, search=search)
        for arm in searched
        for search, offset in enumerate(offsets)
        for number, values in enumerate(_points(arm, search, counts[arm.name]))
        for seed in seeds
    ]
    sweep = definition.sweep
    as_they_are = ("goal", "budgets", "checkpoints", "vmap", "looks", "skewed")
    return Plan(
        arms={arm.name: _planned_arm(arm) for arm in definition.arms},
        trials=tuple(trials),
        seeds=seeds,
        final_seeds=final_seeds,
        offsets=offsets,
        **{name: getattr(sweep, name) for name in as_they_are},
        per_example=sweep.final is None or sweep.final.per_example,
        ladder=sweep.ladder and sweep.ladder.planned({x.name: x.paths for x in definition.arms}),
        branch=definition.branch,
        ablated="" if sweep.ablate is None else definition.arms[0].name,
        segments=0 if sweep.claims is None else sweep.claims.segments,
        differs=tuple(sweep.differs),
    )


def seed_of_search(seed: int, offset: int) -> int:
    """Returns a seed of a search from that of search 0 and the search's offset in the plan."""
    return (seed + offset) % 2**32


def _points(arm: ArmConfig, search: int, count: int) -> list[Mapping[str, Tree]]:
    """Returns the values of the points of a search of an arm."""
    try:
        found = arm.method.of_search(search).points(arm.space, count)
    except ValueError as error:
        raise ConfigError(f"{arm.title}: {error}", arm.source("method", "searches")) from error
    return [*map(arm.by_path, found), *[PENDING] * (count - len(found))]


def _offsets(definition: Definition, seeds: Sequence[int]) -> tuple[int, ...]:
    """Returns by how much the seeds of each search are larger than those of search 0."""
    # All arms have the same seeds in a search, whatever the seeds of their methods. Raises
    # ConfigError if two searches share one of `seeds`: a file's own may lie too far apart.
    sweep, sources = definition.sweep, definition.config.sources
    methods = {arm.name: arm.method for arm in definition.arms}
    listed = {arm: len(x.searches) for arm, x in methods.items() if isinstance(x, Explicit)}
    count = sweep.searches or max(listed.values(), default=1)
    for name, lists in listed.items():
        if lists != count:
            alone = "one list of trials, which every search would repeat"
            has = alone if lists == 1 else f"trials for {plural(lists, 'search')}"
            raise ConfigError(
                f"The arm {name!r} has {has}, and the sweep has {plural(count, 'search')}: give"
                " method.explicit a list of trials for each search, use method.sobol, or change"
                " searches.",
                sources.get("searches") or sources[""],
            )
    seed = sweep.method.seed or 0
    offsets = [0]
    for search in range(1, count):
        candidates = (search_seed(seed, search, attempt) for attempt in itertools.count())
        blocks = (1 + candidate % (2**32 // _BLOCK - 2) for candidate in candidates)
        offsets.append(next(x for block in blocks if (x := block * _BLOCK) not in offsets))
    of_searches = {seed_of_search(seed, offset) for seed in seeds for offset in offsets}
    if len(of_searches) < len(seeds) * len(offsets):
        raise ConfigError(
            "Two searches have a seed in common, because the seeds that the file lists lie further"
            f" apart than {_TO_FINAL_SEEDS:,}: list others, or give their number.",
            sources.get("seeds") or sources[""],
        )
    return tuple(offsets)


def _count(arm: ArmConfig) -> int:
    """Returns the number of points of an arm."""
    try:
        counted = arm.method.count(arm.space)
    except ValueError as error:
        raise ConfigError(f"{arm.title}: {error}", arm.source("space", "method")) from error
    wanted = counted if arm.trials is None else arm.trials
    size = math.prod(space.size or math.inf for space in arm.space.values())
    if wanted is None:
        wrong = f"needs a number of trials for its method ({arm.method.text}): add trials."
    elif counted is None and wanted > size:
        wrong = (
            f"has a space of {size:,} points, so that {wanted:,} trials would repeat some: lower"
            " trials, or use method.grid, which takes each point once."
        )
    elif counted is None or wanted == counted:
        return wanted
    elif not arm.paths:
        wrong = (
            f"has no space, so that its {wanted} trials would be equal: give it a space, or"
            " trials: 1."
        )
    else:
        wrong = (
            f"has {counted:,} trials by its method ({arm.method.text}), and trials is"
            f" {wanted:,}: remove trials, or change the values."
        )
    raise ConfigError(f"{arm.title} {wrong}", arm.source("trials", "method"))


def refuse_unequal(definition: Definition, what: str, budgets: Mapping[str, int]) -> None:
    """Raises ConfigError if arms have unequal budgets, unless the sweep's file allows them."""
    # On a ladder the arms of each rung are compared. `what` is "trials", "steps" or "examples";
    # `budgets` has their number for each arm.
    for rung in dict.fromkeys(map(rung_of, budgets)):
        of_rung = {name: count for name, count in budgets.items() if rung_of(name) == rung}
        if definition.sweep.budgets == "unequal" or len(set(of_rung.values())) == 1:
            continue
        shown = listing([f"{name} {count:,}" for name, count in of_rung.items()])
        raise ConfigError(
            f"The arms have different numbers of {what} ({shown}). Make them equal, or write"
            " budgets: unequal ('unequal' in Gin), which the report repeats.",
            definition.config.sources.get("arms"),
        )


def _seeds(definition: Definition) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the seeds of the trials, and those of the final runs."""
    sweep, sources = definition.sweep, definition.config.sources
    seeds = sweep.seeds
    if isinstance(seeds, int):
        starts = [arm.config.root.kwargs.get("seed", 0) for arm in definition.arms]
        shown = sorted(set(map(str, starts)))
        if len(shown) > 1 or type(starts[0]) is not int:
            raise ConfigError(
                f"The configs of the arms have the seeds {listing(shown)}, and seeds counts from"
                " the seed of the base: list the seeds, or remove seed from the arms.",
                sources.get("seeds") or sources.get("base") or sources[""],
            )
        seeds = range(starts[0], starts[0] + seeds)
    final = () if sweep.final is None else sweep.final.seeds
    if isinstance(final, int):
        final = range(seeds[0] + _TO_FINAL_SEEDS, seeds[0] + _TO_FINAL_SEEDS + final)
    if both := [str(seed) for seed in final if seed in seeds]:
        raise ConfigError(
            f"The final runs have seeds of the trials ({listing(both)}), on which the winners were"
            " selected: use other seeds.",
            sources.get("final.seeds"),
        )
    if (most := max((*seeds, *final))) >= 2**32:
        raise ConfigError(
            f"The seeds reach {most}, but a seed is at most 2**32 - 1: use lower ones.",
            sources.get("seeds") or sources[""],
        )
    return tuple(seeds), tuple(final)


def _planned_arm(arm: ArmConfig) -> PlannedArm:
    entries = [(space.parts or {key: space}).items() for key, space in arm.space.items()]
    axes = [{path: x for part, x in entry for path in arm.paths[part]} for entry in entries]
    spaces = {path: space.text for axis in axes for path, space in axis.items()}
    linked = tuple(tuple(axis) for axis in axes if len(axis) > 1)
    asks = arm.method.asks(arm.space, axes)
    return PlannedArm(arm.config, arm.method.text, spaces, linked, arm.method.cuts, asks)


def _arm_entry(arm: PlannedArm) -> dict[str, Any]:
    """Returns the method and the space of an arm, and the SHA-256 of its config as YAML."""
    config = hashlib.sha256(dump(arm.config.root).encode()).hexdigest()
    known = {"cuts": arm.cuts, "asks": arm.asks}
    optional = {name: as_json(x) for name, x in known.items() if x is not None}
    return {"method": arm.method, "space": dict(arm.space), "config": config, **optional}


# In `segments/STEP/` of the folder of a run, laid out as a checkpoint. Every row of metrics is of
# one step and its state, and blocks of steps end where a state is kept, so that a run which begins
# with such a state writes the rows that follow it, at any step.
SEGMENTS = "segments"


def kept_steps(steps: int, segments: int, first: int = 0) -> tuple[int, ...]:
    """Returns the steps after which a run keeps its state: all segments but the first begin there.

    They are fewer if there are fewer `steps` after the `first`, and none for 0 segments.

    Example:
        >>> kept_steps(100, 4), kept_steps(3, 8), kept_steps(100, 0)
        ((25, 50, 75), (1, 2), ())
        >>> kept_steps(100, 4, first=60)
        (70, 80, 90)
    """
    own = steps - first
    every = {first + number * own // segments for number in range(1, segments)}
    return tuple(sorted(every - {first}))


def kept_bytes(plan: Plan) -> int:
    """Returns how many bytes the states that all runs keep have together, at most."""
    # Those of a program that is sharded are counted on one of its devices. Each state has a
    # manifest of a few kilobytes besides.
    total, searches = 0, len(plan.offsets)
    for name, arm in plan.arms.items():
        own = [program for program in plan.programs if name in program.arms]
        of_run = [each.state_bytes * len(_kept(plan, each)) for each in own]
        total += len(plan.final_seeds) * searches * max(of_run)
        if (cuts := arm.cuts) is None:
            total += sum(x * each.counts[name] for x, each in zip(of_run, own, strict=True))
            continue
        runs = cuts.counts(plan.counts[name])
        states = sum(runs[sum(cut < step for cut in cuts.steps)] for step in _kept(plan, own[0]))
        total += states * len(plan.seeds) * searches * max(each.state_bytes for each in own)
    return total


def _kept(plan: Plan, program: SharedProgram) -> tuple[int, ...]:
    return kept_steps(program.steps, plan.segments, program.first_step or 0)


def check_kept(definition: Definition, plan: Plan) -> None:
    """Raises ConfigError if the states would have more bytes than the file of the sweep allows."""
    claims = definition.sweep.claims
    if claims is None or (size := kept_bytes(plan)) <= claims.most_bytes:
        return
    unit = 10 ** max(0, int(math.log10(size)) - 1)
    enough = f"{math.ceil(size / unit) * unit:_}"
    sources = definition.config.sources
    raise ConfigError(
        f"With claims, the runs would keep states of {size:,} bytes together, and at most"
        f" {claims.most_bytes:,} are allowed: write claims: {{segments: {claims.segments},"
        f" most_bytes: {enough}}} or fewer segments, or remove claims, and whole runs are computed"
        " again.",
        sources.get("claims.most_bytes") or sources["claims"],
    )


def kept_line(plan: Plan) -> list[str]:
    """Returns a line of the plan about the states that are kept; none if none are."""
    if not plan.segments:
        return []
    every = dict.fromkeys(_kept(plan, program) for program in plan.programs)
    steps = " or ".join(listing([f"{step:,}" for step in each], 12) for each in every)
    return [
        f"claims: each run keeps its states after steps {steps};"
        f" together at most {kept_bytes(plan):,} bytes"
    ]
