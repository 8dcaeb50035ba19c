"""What the file of a sweep says: the fields of `Sweep`. `trainer.sweep.reading` reads it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.sweep.ablation import Ablation, check_arm_name
from trainer.sweep.branch import Branch
from trainer.sweep.confounders import Kind
from trainer.sweep.ladder import Ladder
from trainer.sweep.methods import Method, grid
from trainer.sweep.spaces import Space
from trainer.sweep.target_rule import LASTING, RuleName, TargetRule
from trainer.writers.lines import PREFIXES

_MOST_SEEDS = 10_000
_FEWEST_SEARCHES, _MOST_SEARCHES = 3, 1_000
# A file name has at most 255 bytes. Files and folders are named after arms; the other 55 are for
# what is added to a name, also for temporary files.
_LONGEST_NAME = 200
# What an argument must be a call of, if it is not the function of the same name.
_KINDS = {"method": "a function of method, such as method.grid", "arms": "arm"}


def _check_kind(name: str, value: Any, kind: type) -> None:
    """Raises ValueError for an object of another class, which a call may have returned."""
    if value is not None and not isinstance(value, kind):
        # The text leaves the object out: its fields would be taken for places of the mistake.
        raise ValueError(f"{name} must be a call of {_KINDS.get(name, name)}.")


def _check_searches(searches: int | None, final: "Final | None") -> None:
    """Raises ValueError for a number of searches over which arms cannot be compared."""
    if searches in (None, 1):
        return
    if not _FEWEST_SEARCHES <= searches <= _MOST_SEARCHES:
        raise ValueError(
            f"searches is {searches}, but arms are compared over at least {_FEWEST_SEARCHES}"
            f" searches and at most {_MOST_SEARCHES:,}: write 5, or 1 to compare configurations."
        )
    if final is None:
        raise ValueError(
            f"searches is {searches} and final is null, but searches are compared by the runs of"
            " their winners on fresh seeds: write final: {seeds: 1}."
        )


def _check_seeds(seeds: int | Sequence[int]) -> None:
    """Raises ValueError for a number of seeds out of its range, or a list that repeats one."""
    if isinstance(seeds, int):
        if not 1 <= seeds <= _MOST_SEEDS:
            raise ValueError(f"seeds is {seeds}, but must be at least 1 and at most {_MOST_SEEDS}.")
        return
    if not seeds:
        raise ValueError("seeds is empty: give a number of seeds, or list them.")
    for index, seed in enumerate(seeds):
        if not 0 <= seed < 2**32:
            raise ValueError(f"seeds has {seed}, but a seed is between 0 and 2**32 - 1.")
        if seed in seeds[:index]:
            raise ValueError(f"seeds has {seed} twice: remove one.")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison: a config, laid over the base, and a space.

    Attributes:
        files: configs that are laid over the base, in its language; relative to the file that
            names them.
        set: path -> value, laid over the files. In Gin a path may also be a selector, as in Gin's
            bindings: "optim.muon.weight_decay" sets the argument wherever that binding would.
        space: path or selector -> the values among which to search.
        trials: number of trials; None for the sweep's.
        method: how the trials are chosen; None for the sweep's.
    """

    files: str | Sequence[str] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Space] | None = None
    trials: int | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        if self.space is not None and not self.space:
            raise ValueError(
                "space is empty: give it a path and its values, or remove it for an arm of a single"
                " trial."
            )
        for key, each in (self.space or {}).items():
            if not isinstance(each, Space):
                text = f"The entry {key!r} of space must be a call of a function of space."
                raise ValueError(text)
        if self.trials is not None and self.trials < 1:
            raise ValueError(f"trials is {self.trials}, but an arm has at least one trial.")
        _check_kind("method", self.method, Method)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What makes one trial better than another.

    Attributes:
        metric: the name of a metric of the experiment, without a split: "loss", "accuracy". It is
            that of the last step, not the best one of a run.
        mode: whether the best value is the smallest ("min") or the largest ("max"); None is "min"
            for the loss, and must not be None for another metric.
        select_on: the split on which trials are compared. The winners are reported on the test
            split. A data set without a validation split needs `select_on: test`, which the report
            repeats.
        target: a value of the metric; the report says how many steps each trial needs to reach it.
        relevant: the smallest difference of the metric that matters, above 0; the report says
            whether a difference is larger, smaller, or excluded.
        rule: how the report decides after how many steps the final runs of an arm have reached the
            target together: "earliest_lasting_step" is the earliest evaluated step from which on
            their mean is better by a margin to the last step, at p < .001; "earliest_step" is the
            earliest at which it is, as in the optimizer track of modded-nanogpt. None is the first
            of the two if there is sigma, and else no such decision.
        sigma: for `rule`, the standard deviation of the metric between runs of a configuration, as
            it is known from other runs.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] | None = None
    select_on: Literal["validation", "test"] = "validation"
    target: float | None = None
    relevant: float | None = None
    rule: RuleName | None = None
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.rule is None and self.sigma is not None:
            object.__setattr__(self, "rule", LASTING)  # a frozen dataclass
        if self.rule is not None and self.target is None:
            raise ValueError("rule and sigma are about a target, but there is no target: add one.")
        if self.rule is not None and (self.sigma is None or not 0 < self.sigma < math.inf):
            raise ValueError(
                f"rule is {self.rule!r}, which needs sigma, a number above 0: the standard"
                " deviation of the metric between runs of a configuration."
            )
        if self.relevant is not None and not 0 < self.relevant < math.inf:
            raise ValueError(
                f"relevant is {self.relevant:g}, but it is the smallest difference that matters:"
                " write a number above 0, or remove it."
            )
        if self.mode is None and self.metric != "loss":
            raise ValueError(
                f"mode is missing for the metric {self.metric!r}: write 'max' if larger values are"
                " better, or else 'min'."
            )

    @property
    def target_rule(self) -> TargetRule | None:
        """The rule by which runs have reached the target; None if there is none."""
        if self.rule is None or self.target is None or self.sigma is None:
            return None
        return TargetRule(self.target, self.sigma, self.better, self.rule)

    @property
    def better(self) -> Literal["min", "max"]:
        """The mode, with its default."""
        return self.mode or "min"

    @property
    def row(self) -> str:
        """The name of the metric in metrics.jsonl, such as "validation/accuracy"."""
        return PREFIXES[self.select_on] + self.metric


@dataclass(frozen=True, kw_only=True)
class Final:
    """The runs that follow the search: the winner of each arm on seeds that no trial used.

    Attributes:
        seeds: the number of seeds, counted from 10,000 after the first seed of the trials, so that
            trials with more seeds never use them; or a list of seeds.
        per_example: whether each run keeps its loss and metrics on every test example, or the first
            100,000, from which the report computes whether another test set may turn the order
            around. It takes one more evaluation of the test split.
    """

    seeds: int | Sequence[int] = 8
    per_example: bool = True

    def __post_init__(self) -> None:
        _check_seeds(self.seeds)


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What runs keep so that others can compute segments of them again, by `claim verify`.

    Attributes:
        segments: into how many segments of equal length each run is divided, at least 2. It keeps
            the states at which all but the first of them begin.
        most_bytes: how many bytes the kept states of all runs may have together. A sweep that would
            keep more is refused before anything is computed.
    """

    segments: int = 8
    most_bytes: int = 1_000_000_000

    def __post_init__(self) -> None:
        if self.segments < 2:
            raise ValueError(
                f"segments is {self.segments}, but at least 2 are needed for a state between them:"
                " write claims: {segments: 8}, or remove claims, and whole runs are computed again."
            )
        if self.most_bytes < 1:
            raise ValueError(
                f"most_bytes is {self.most_bytes}, but it is how many bytes the kept states may"
                " have: write a number above 0, or remove claims to keep none."
            )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Describes a sweep completely; each field is an argument of the root of its file.

    Attributes:
        base: the config of a run, or several files of which later ones override earlier ones; Gin
            or YAML; relative to the file that names them. With a branch it is by default the config
            of its run.
        arms: name -> arm, in the order of the report; empty for one arm, the base, with `space`.
        set: path -> value, laid over the files of every arm; see `Arm`.
        space: path or selector -> the values among which to search; only without arms.
        trials: number of trials for each arm, and each search of it; None for as many as the method
            determines, such as a grid.
        ladder: rungs at which the arms are compared, such as several numbers of steps; see
            `trainer.sweep.ladder.Ladder`. None for the configs as they are.
        ablate: what is taken out of the one arm, one thing at a time; see
            `trainer.sweep.ablation.Ablation`. None for nothing.
        branch: a state of a run that all trials continue; see `trainer.sweep.branch.Branch`. None
            trains them from the first step.
        searches: how many independent searches each arm has, 1 or at least 3. With several, each
            has a winner, and arms are compared over the searches, paired: search r has the same
            points of the unit cube and the same seeds in every arm. None for 1, or for as many as
            method.explicit lists.
        seeds: for each trial, the number of seeds, counted from the seed of the base; or a list of
            seeds.
        method: how the trials of an arm are chosen, and at which steps the worse ones are stopped.
        goal: what makes one trial better than another.
        final: the runs of each winner on fresh seeds; None for no such runs.
        looks: "planned" judges the results when all planned runs have ended, and after that when
            an extension has; "any" allows to judge them at any time, at the price of power. It
            cannot be changed when there are results.
        skewed: whether a few runs may be far worse than the others of their arm, as a lognormal
            distribution has it. The arms are then compared once, at a stricter level.
        budgets: "equal" refuses arms that differ in their numbers of trials, steps or examples;
            "unequal" allows it, and the report says so.
        differs: in what the arms differ on purpose, besides what they compare: "schedule",
            "weight_decay", "clipping", "ema", "accumulation", "batch", "steps", "seeds" (of the
            data), "model", "data", "loss", "settings" (other arguments of a run), "arguments"
            (of optimizers in groups that are not compared), "space" (its width, place and method),
            "tuned" (how many hyperparameters). "nothing" allows equal arms. The plan warns of what
            is not named, and the report repeats both.
        checkpoints: which state the folder of a trial keeps: "none", the "final" one, or the
            "best" by the goal, of those after every `save_every` steps, and the final one.
        claims: what runs keep so that others can compute segments of them again; None for nothing,
            and whole runs are computed again.
        vmap: how many trials of a program are computed at once by `jax.vmap`, at least 2, which may
            be faster on a GPU. Their bits then depend on this number, and are not those of the
            trials alone; the difference is measured. None computes the trials of a wave in turn,
            each with the bits that it has alone.
    """

    base: str | Sequence[str] = ()
    arms: Mapping[str, Arm] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Space] | None = None
    trials: int | None = None
    ladder: Ladder | None = None
    ablate: Ablation | None = None
    branch: Branch | None = None
    searches: int | None = None
    seeds: int | Sequence[int] = 1
    method: Method = grid()
    goal: Goal = Goal()
    final: Final | None = Final()
    looks: Literal["planned", "any"] = "planned"
    skewed: bool = False
    budgets: Literal["equal", "unequal"] = "equal"
    differs: Sequence[Kind] = ()
    checkpoints: Literal["none", "final", "best"] = "none"
    claims: Claims | None = None
    vmap: int | None = None

    def __post_init__(self) -> None:
        if not self.base and self.branch is None:
            raise ValueError("base is empty: name the config of a run.")
        if self.vmap is not None and self.vmap < 2:
            raise ValueError(
                f"vmap is {self.vmap}, but at least 2 trials are computed at once: write a larger"
                " number, or remove vmap."
            )
        if self.vmap is not None and self.claims is not None:
            raise ValueError(
                f"The sweep has claims and vmap: {self.vmap}, but trials that are computed at once"
                " have other bits than alone, so that nobody can compute a segment of one again:"
                " remove one of them."
            )
        if self.arms and self.space is not None:
            raise ValueError(
                "The sweep has arms and space. With arms, each has a space of its own: move space"
                " into the arms."
            )
        Arm(space=self.space, trials=self.trials, method=self.method)  # checks them
        _check_searches(self.searches, self.final)
        _check_seeds(self.seeds)
        if self.skewed and self.looks == "any":
            raise ValueError(
                "looks is 'any' and skewed is true, but the test that holds at any look is wrong"
                " for skewed differences: remove one of them."
            )
        kinds = {"goal": Goal, "final": Final, "claims": Claims}
        kinds |= {"ladder": Ladder, "ablate": Ablation, "branch": Branch}
        for name, kind in kinds.items():
            _check_kind(name, getattr(self, name), kind)
        for arm in self.arms.values():
            _check_kind("arms", arm, Arm)
        for study in (self.ladder, self.ablate):
            if study is not None:
                study.check(self)
        if self.goal.rule is not None and self.searches not in (None, 1):
            raise ValueError(
                f"goal has the rule {self.goal.rule!r} and searches is {self.searches}, but the"
                " rule is about runs of one configuration, and each search finds another one:"
                " remove one of them."
            )
        lower: dict[str, str] = {}
        for name in map(str, self.arms):
            check_arm_name("arms", name)
            if len(name) > _LONGEST_NAME:
                raise ValueError(
                    f"arms has a name of {len(name)} characters, {name[:20]}..., after which files"
                    f" are named: use at most {_LONGEST_NAME}."
                )
            # Folders are named after arms, and some file systems ignore the case.
            if (other := lower.setdefault(name.lower(), name)) != name:
                raise ValueError(
                    f"arms has the names {other!r} and {name!r}, which differ only in upper and"
                    " lower case and would share a folder: rename one."
                )
