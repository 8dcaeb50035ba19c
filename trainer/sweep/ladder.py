"""A ladder: the arms of a sweep at several durations, widths or batch sizes, its rungs.

Each arm of the file becomes one arm of the plan on each rung, "muon@2x". On a rung the arms are
searched, or take the hyperparameters of their winners on lower rungs, by a rule that the file
states. Start with the fields of `Ladder`; `PlannedLadder` is what the plan keeps of it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config import Config, ConfigError, Tree, join
from trainer.config.wording import known_names, listing
from trainer.sweep.arm_paths import ArmPaths

_LABEL = re.compile(r"[A-Za-z0-9_.-]+")
_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)x")
RETUNED = "-retuned"
_MOST_RUNGS = 32
_TUNED_TO_FIT = 3  # rungs that are searched by default, if a power is fitted on them
FITTED = "fitted"


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs at which the arms of a sweep are compared.

    Attributes:
        path: the config path that differs between rungs, such as "steps", "model.width" or
            "data.batch_size".
        values: its value on each rung, in rising order: numbers, or multiples of the value in the
            arm's config, such as "2x". At least two.
        also: other paths that change with it -> their values on the rungs.
        rule: how the hyperparameters of an arm get from rung to rung. "retuned": each arm is
            searched on each rung. "fixed": they are those of the winner on the highest rung that is
            searched. A mapping from paths of spaces to powers multiplies these values by a power of
            the ratio of the rungs, and leaves others fixed: {learning_rate: -1} divides the
            learning rate by the width on a ladder of widths. The power "fitted" continues the line
            through the logarithms of the best values on the rungs that are searched.
        tuned: how many rungs are searched, the lowest ones; None for all if the rule is "retuned",
            3 if a power is fitted, and otherwise 1.
        retuned: rungs above these on which the arms are searched as well, for the regret: how much
            worse the hyperparameters by the rule are than those of a search.
        baseline: an arm of whose steps the report says how many times fewer each other arm takes to
            the same result. It alone climbs to the last rung. None for no such numbers.
    """

    path: str
    values: Sequence[int | float | str]
    also: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rule: str | Mapping[str, Any] = "retuned"
    tuned: int | None = None
    retuned: Sequence[int | float | str] = ()
    baseline: str | None = None

    def __post_init__(self) -> None:
        if not 2 <= len(self.values) <= _MOST_RUNGS:
            raise ValueError(
                f"values has {len(self.values)} rungs, but a ladder has at least 2 and at most"
                f" {_MOST_RUNGS}."
            )
        sizes = [_size(value) for value in self.values]
        if len({isinstance(value, str) for value in self.values}) > 1:
            raise ValueError(
                f"values mixes numbers and multiples ({listing([str(v) for v in self.values])}):"
                " write all as numbers, or all as multiples such as 2x."
            )
        if any(low >= high for low, high in zip(sizes, sizes[1:], strict=False)):
            raise ValueError(
                f"values must rise from rung to rung, got {listing([str(v) for v in self.values])}."
            )
        for path, values in self.also.items():
            if len(values) != len(self.values):
                raise ValueError(
                    f"also has {len(values)} values of {path!r}, and the ladder has"
                    f" {len(self.values)} rungs: give one value for each rung."
                )
        self._check_rule()

    def _check_rule(self) -> None:
        if isinstance(self.rule, str) and self.rule not in ("retuned", "fixed"):
            hint = known_names(self.rule, ("retuned", "fixed"))
            raise ValueError(
                f"rule is {self.rule!r}. {hint} Or map paths of the spaces to powers, such as"
                " {optimizer.learning_rate: -1}."
            )
        for path, power in self.powers.items():
            number = isinstance(power, int | float) and not isinstance(power, bool)
            if power != FITTED and not (number and math.isfinite(power)):
                raise ValueError(f"The power of {path!r} in rule must be a number or {FITTED!r}.")
        rungs = len(self.values)
        if self.rule == "retuned":
            if self.tuned is not None or self.retuned:
                raise ValueError(
                    "tuned and retuned are for rules that move hyperparameters, and rule is"
                    " 'retuned', which searches every rung: remove them, or write rule: fixed."
                )
            return
        fewest = 2 if self.fits else 1
        if not fewest <= self.searched < rungs:
            raise ValueError(
                f"tuned is {self.searched}, but must be at least {fewest} and less than the"
                f" {rungs} rungs of the ladder"
                + (": a power is fitted on two rungs or more." if self.fits else ".")
            )
        above = self.labels[self.searched :]
        for label in map(label_of, self.retuned):
            if label not in above:
                raise ValueError(
                    f"retuned has the rung {label}, but the rungs that are not searched already"
                    f" are {listing(list(above))}."
                )

    def check(self, sweep: Any) -> None:
        """Raises ValueError if the ladder does not fit the rest of a `definition.Sweep`."""
        if sweep.branch is not None:
            raise ValueError(
                "The sweep has a ladder and a branch, but a ladder compares whole runs of several"
                " sizes, and a branch continues one run: remove one of them."
            )
        methods = [sweep.method, *(arm.method for arm in sweep.arms.values())]
        if any(method is not None and method.cuts for method in methods):
            raise ValueError(
                "The sweep has a ladder and method.halving, whose cuts are steps of one length of"
                " training: use another method for a ladder, or a sweep for each length."
            )
        if self.baseline is not None and self.baseline not in sweep.arms:
            raise ValueError(
                f"ladder has the baseline {self.baseline!r}, which is not an arm."
                f" {known_names(self.baseline, sweep.arms)}"
            )
        if sweep.final is None and self.searched < len(self.values):
            raise ValueError(
                "final is null, but on the rungs that the ladder does not search, an arm has the"
                " final runs of its winners only: write final: {seeds: 1}, or rule: retuned."
            )

    @property
    def powers(self) -> Mapping[str, Any]:
        """Path of a space -> the power by which the rule moves its values."""
        return {} if isinstance(self.rule, str) else self.rule

    @property
    def fits(self) -> bool:
        """Whether a power is fitted."""
        return FITTED in self.powers.values()

    @property
    def searched(self) -> int:
        """How many rungs are searched, the lowest ones."""
        if self.rule == "retuned":
            return len(self.values)
        if self.tuned is not None:
            return self.tuned
        return _TUNED_TO_FIT if self.fits else 1

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the rungs."""
        return tuple(map(label_of, self.values))

    def planned(self, paths: Mapping[str, Mapping[str, Sequence[str]]]) -> "PlannedLadder":
        """Returns what the plan keeps, with the rule by the paths of each arm."""
        # `paths` is arm of the plan -> path or selector of its space -> the paths that it sets.
        powers: dict[str, dict[str, float | str]] = {}
        for name, of_arm in paths.items():
            for key, power in self.powers.items():
                for path in of_arm.get(key, ()):
                    number = power if power == FITTED else float(power)
                    powers.setdefault(split_name(name)[0], {})[path] = number
        sizes = [_size(value) for value in self.values]
        return PlannedLadder(
            path=self.path,
            labels=self.labels,
            factors=tuple(size / sizes[0] for size in sizes),
            searched=self.searched,
            retuned=tuple(map(label_of, self.retuned)),
            baseline=self.baseline,
            powers=powers,
        )


def _size(value: float | str) -> float:
    """Returns the size of a rung, or of the multiple; raises ValueError if it is neither."""
    if isinstance(value, str):
        found = _MULTIPLE.fullmatch(value)
        if found is None or not float(found[1]) > 0:
            raise ValueError(
                f"values has {value!r}, which is neither a number nor a multiple such as '2x'."
            )
        return float(found[1])
    if not 0 < value < math.inf or isinstance(value, bool):
        raise ValueError(f"values has {value!r}, but a rung is a number above 0.")
    return float(value)


def label_of(value: float | str) -> str:
    """Returns the name of a rung, which is part of the names of folders, such as "2x" or "128"."""
    text = value if isinstance(value, str) else f"{value:.12g}".replace("+", "")
    assert _LABEL.fullmatch(text), "sizes are checked before"
    return text


def _multiplied(usual: Tree, rung: str) -> float | int:
    """Returns the multiple on a rung, such as '2x', of the value in the config of an arm."""
    # Raises ValueError if that is not a number, or an integer would get a fraction.
    if not isinstance(usual, int | float) or isinstance(usual, bool):
        raise ValueError(
            f"the config has no number there to multiply by {rung}, only {usual!r}: write numbers"
            " in values"
        )
    found = usual * _size(rung)
    if isinstance(usual, float):
        return found
    if found != round(found):
        raise ValueError(f"{rung} of {usual} is {found:g}, which is not a whole number")
    return round(found)


def on_rung(ladder: Ladder, rung: int, config: Config, paths: ArmPaths, sweep: Config) -> Config:
    """Returns the config of an arm with the values of a rung; may raise ConfigError."""
    # It raises if the arm does not have a path, or no value to multiply. `sweep` is the config of
    # the sweep, for places in its file.
    place = sweep.sources["ladder"]
    source = sweep.argument_source(join("ladder.values", rung)) or place
    for path in paths.reached(config, ladder.path, 0, source):
        value = ladder.values[rung]
        if isinstance(value, str):
            if path not in config.sources:
                hint = known_names(path, config.sources)
                text = f"{paths.title} has no value of {path!r} to multiply. {hint} Or write"
                raise ConfigError(f"{text} numbers in values.", source)
            try:
                value = _multiplied(config.at(path), value)
            except ValueError as error:
                text = f"{paths.title} has no rung for {path}: {error}."
                raise ConfigError(text, source) from error
        config = paths.set(config, path, value, source)
    for path, values in ladder.also.items():
        at = sweep.argument_source(join("ladder.also", path)) or place
        config = paths.set(config, path, values[rung], at)
    return config


def check_spaces(ladder: Ladder, places: Mapping[str, Mapping[str, str]], sweep: Config) -> None:
    """Raises ConfigError if a space has what the ladder sets, or none what its rule moves."""
    # `places` is title of an arm -> path or selector of its space -> its path in `sweep`, the
    # config of the sweep.
    for title, of_arm in places.items():
        for path in (ladder.path, *ladder.also):
            if path in of_arm:
                raise ConfigError(
                    f"{title} searches {path!r}, which the ladder sets on each rung: remove it from"
                    " the space, or from the ladder.",
                    sweep.argument_source(of_arm[path]) or sweep.sources["ladder"],
                )
    known = dict.fromkeys(path for of_arm in places.values() for path in of_arm)
    for path in ladder.powers:
        if path not in known:
            raise ConfigError(
                f"rule moves {path!r}, which is in no space."
                f" {known_names(path, known, 'The spaces have')}",
                sweep.argument_source(join("ladder.rule", path)),
            )


@dataclass(frozen=True)
class PlannedLadder:
    """What the plan of a sweep keeps of its ladder; plan.json has it by these names."""

    path: str  # the config path that differs between rungs
    labels: tuple[str, ...]  # the names of the rungs, from the lowest
    factors: tuple[float, ...]  # the size of each rung divided by that of the lowest
    searched: int  # how many rungs are searched, the lowest ones
    retuned: tuple[str, ...] = ()  # the names of the rungs above them that are searched as well
    baseline: str | None = None  # the arm with which others are compared
    # arm -> config path -> the power by which the rule moves it, or "fitted"
    powers: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)

    def is_moved(self, name: str) -> bool:
        """Returns whether an arm of the plan takes its hyperparameters from lower rungs."""
        _, label, again = split_name(name)
        return not again and self.labels.index(label) >= self.searched

    def sources(self, name: str) -> list[str]:
        """Returns the arms of the plan from whose winners `moved` computes, the lowest first."""
        arm, _, _ = split_name(name)
        return [name_on(arm, label) for label in self.labels[: self.searched]]

    def moved(self, name: str, winners: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
        """Returns the values of an arm that takes them from the winners of its `sources`.

        Example:
            >>> powers = {"muon": {"rate": -1.0}}
            >>> ladder = PlannedLadder("width", ("64", "256"), (1, 4), 1, powers=powers)
            >>> ladder.moved("muon@256", [{"rate": 0.5, "decay": 0.1}])
            {'rate': 0.125, 'decay': 0.1}
        """
        arm, label, _ = split_name(name)
        powers = self.powers.get(arm, {})
        factor = self.factors[self.labels.index(label)]
        known = self.factors[: self.searched]
        found: dict[str, Tree] = {}
        for path, value in winners[-1].items():
            if (power := powers.get(path)) is None:
                found[path] = value
            elif isinstance(power, str):
                found[path] = _continued(known, [each[path] for each in winners], factor)
            else:
                found[path] = _number(value) * (factor / known[-1]) ** power
        return found

    def expected(self, name: str, values: Mapping[str, Tree]) -> dict[str, Tree]:
        """Returns what `moved` returns for one winner, if powers that are fitted are 0."""
        arm, _, _ = split_name(name)
        known = {path: p for path, p in self.powers.get(arm, {}).items() if p != FITTED}
        return replace(self, powers={arm: known}).moved(name, [values])

    def text(self) -> str:
        """Returns the ladder as a sentence for the plan."""
        low, high = self.labels[0], self.labels[-1]
        if self.searched == len(self.labels):
            how = "each arm is searched on each rung"
        else:
            tuned = listing(list(self.labels[: self.searched]), 8)
            how = f"each arm is searched on {tuned}, and its winners run on the rungs above"
            found = {path: power for each in self.powers.values() for path, power in each.items()}
            texts = [
                f"{path} times {'a fitted power' if power == FITTED else f'the power {power:g}'}"
                for path, power in found.items()
            ]
            if texts:
                how += f" with {listing(texts, 4)} of the ratio of rungs"
        if self.retuned:
            how += f"; on {listing(list(self.retuned), 8)} it is searched as well"
        if self.baseline is not None:
            how += f"; only {self.baseline}, the baseline, climbs to {high}"
        return f"ladder: {self.path} on {len(self.labels)} rungs, {low} to {high}: {how}"


def _number(value: Tree) -> float:
    assert isinstance(value, int | float), "a rule moves floats only, which the plan has checked"
    return float(value)


def _continued(factors: Sequence[float], values: Sequence[Tree], factor: float) -> float:
    """Continues the least-squares line of log values over log factors."""
    x = [math.log(each) for each in factors]
    y = [math.log(_number(each)) for each in values]
    middle, height = math.fsum(x) / len(x), math.fsum(y) / len(y)
    slope = math.fsum((a - middle) * (b - height) for a, b in zip(x, y, strict=True))
    slope /= math.fsum((a - middle) ** 2 for a in x)
    return math.exp(height + slope * (math.log(factor) - middle))


def name_on(arm: str, label: str, retuned: bool = False) -> str:
    """Returns the name of an arm of the plan: the arm of the file on a rung, such as "muon@2x"."""
    return f"{arm}@{label}{RETUNED if retuned else ''}"


def split_name(name: str) -> tuple[str, str, bool]:
    """Returns the arm of the file, the rung, and whether it is searched beside the rule.

    Example:
        >>> split_name("muon@2x"), split_name("muon@2x-retuned")
        (('muon', '2x', False), ('muon', '2x', True))
    """
    arm, _, label = name.partition("@")
    return arm, label.removesuffix(RETUNED), label.endswith(RETUNED)


def rung_of(name: str) -> str:
    """Returns what follows the arm of the file in the name of an arm: "2x", or "" on no ladder."""
    return name.partition("@")[2]


def rungs_of(ladder: Ladder, arm: str) -> Iterator[tuple[int, str, bool]]:
    """Yields the index of each rung of an arm, its name there, and whether it is not searched."""
    rungs = len(ladder.values) - (ladder.baseline is not None and arm != ladder.baseline)
    again = set(map(label_of, ladder.retuned))
    for index, label in enumerate(ladder.labels[:rungs]):
        yield index, name_on(arm, label), index >= ladder.searched
        if label in again:
            yield index, name_on(arm, label, retuned=True), False
