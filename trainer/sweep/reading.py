"""Reads the file of a sweep, and the configs of its arms. Start with `read_sweep`."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config import Builder, Call, Config, ConfigError, Source, Tree, join, load
from trainer.config.files import SHIPPED
from trainer.config.nodes import with_calls
from trainer.config.tree import child_trees, same
from trainer.config.vocabulary import SEARCHES, SWEEP
from trainer.sweep.ablation import Ablation, removals
from trainer.sweep.arm_paths import ArmPaths
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.definition import Arm, Sweep
from trainer.sweep.ladder import check_spaces, on_rung, rungs_of
from trainer.sweep.methods import Explicit, Method, Point
from trainer.sweep.spaces import Space, bounds

if TYPE_CHECKING:
    from trainer.sweep.continued_run import ContinuedRun

# Arguments whose values stay trees: they are values of a config, and are not built here.
_TREES = {("sweep", "set"), ("arm", "set"), ("space.values", "values")}
_TREES |= {("method.explicit", "trials"), ("ladder", "also"), ("ablate", "settings")}


@dataclass(frozen=True)
class ArmConfig:
    """An arm with its resolved config."""

    name: str
    title: str  # the arm as the subject of a sentence
    config: Config  # the base with the arm's files and settings
    space: Mapping[str, Space]  # key -> space, in the order of the file
    # path or selector of the space -> the paths of `config` that it sets
    paths: Mapping[str, tuple[str, ...]]
    # path or selector of the space -> the path of its space in the config of the sweep
    places: Mapping[str, str]
    method: Method
    trials: int | None  # the number that the file asks for; None if it does not
    at: str  # the path of the arm in the config of the sweep; "" is its root
    sweep: Config  # the config of the sweep
    # on a rung that is not searched, with the hyperparameters of its winners on lower rungs
    moved: bool = False

    @property
    def listed(self) -> dict[str, list[Tree]]:
        """The values that the space lists, by the paths of `config`."""
        found: dict[str, list[Tree]] = {}
        for key, space in self.space.items():
            for value in space.grid or () if space.size else ():
                for path, one in self.by_path({key: value}).items():
                    found.setdefault(path, []).append(one)
        return found

    def by_path(self, point: Point) -> dict[str, Tree]:
        """Returns the values of a point by the paths of `config`."""
        values: dict[str, Tree] = {}
        for key, value in point.items():
            space = self.space.get(key)
            inner = value if space is not None and space.parts is not None else {key: value}
            for each, one in inner.items():
                values.update(dict.fromkeys(self.paths[each], one))
        return values

    def whole_rates(self, floats: Collection[str]) -> list[str]:
        """Returns a sentence for each learning rate, one of the paths `floats`, among integers."""
        parts = [x for key, each in self.space.items() for x in (each.parts or {key: each}).items()]
        return [
            f"{path} is a learning rate, and its space has whole numbers only, {space.text}: use"
            " space.log_uniform."
            for key, space in parts
            if (interval := bounds(space.text)) is not None and interval.kind == "integers"
            for path in self.paths[key]
            if path in floats and "learning_rate" in path
        ]

    def source(self, *names: str) -> Source:
        """Returns the place of the first argument that the file has, or else of the arm itself."""
        # All `names` are looked for in the arm first, and then at the root.
        places = [*(join(self.at, name) for name in names), *names]
        found = [place for place in places if place in self.sweep.sources]
        return self.sweep.argument_source(found[0] if found else self.at) or self.sweep.sources[""]

    def source_of(self, path: str, value: Tree) -> Source:
        """Returns the place of a value of the space, which is for `path` of `config`."""
        key = next(key for key, paths in self.paths.items() if path in paths)
        place = self.places[key]
        tree = self.sweep.at(place)
        if isinstance(tree, Call) and tree.name == "space.values":
            place, tree = join(place, "values"), tree.kwargs["values"]
        return self.sweep.sources[self._listed_at(tree, place, key, value) or place]

    def _listed_at(self, tree: Tree, place: str, key: str, value: Tree) -> str | None:
        """Returns the path of a value in a list; method.explicit lists dicts, or lists of dicts."""
        for index, each in enumerate(tree if isinstance(tree, list) else ()):
            at = join(place, index)
            if self.space.get(key) is None and isinstance(each, list):
                if (found := self._listed_at(each, at, key, value)) is not None:
                    return found
            elif same(each.get(key) if isinstance(each, dict) else each, value):
                return at
        return None


@dataclass(frozen=True)
class Definition:
    """What the files of a sweep say."""

    sweep: Sweep
    config: Config  # that the sweep was built from
    arms: tuple[ArmConfig, ...]  # in their order, at least one
    branch: PlannedBranch | None = None  # the state of a run that all trials continue


def read_sweep(
    config: Config,
    vocabulary: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    planned: Mapping[str, tuple[Config, Sequence[str]]] | None = None,
) -> Definition:
    """Builds a sweep and reads the configs of its arms.

    `config` is from `trainer.config.load` with the language `SWEEP`; `search_paths` are folders for
    files that are not found otherwise; `planned` has the arms of a plan whose files need not be
    here: name -> config and the paths that trials set. Raises ConfigError if the file has a
    mistake, a config of an arm cannot be read, or an arm does not have a path.

    Example:
        >>> from trainer.config.vocabulary import SWEEP
        >>> config = load(["tests/sweeps/muon.yaml"], language=SWEEP)
        >>> [arm.name for arm in read_sweep(config).arms]
        ['muon', 'adamw']
    """
    config = with_calls(config, SWEEP.nodes, {"arms": "arm"})
    builder = Builder(config, vocabulary, None if planned is None else SEARCHES)
    if planned is None:
        builder.check()
    sweep = builder.build("", overrides=dict(_trees(config.root, "")))
    reader = _Reader(sweep, config, search_paths, planned)
    if sweep.branch is not None and planned is None:
        from trainer.sweep.continued_run import ContinuedRun  # which needs jax

        (folder,) = reader.files("branch.run", sweep.branch.run)
        reader.run = ContinuedRun(sweep.branch, folder, config, vocabulary)
    named = [(name, arm, f"arms.{name}") for name, arm in sweep.arms.items()]
    named = named or [("base", Arm(space=sweep.space), "")]
    if sweep.ablate is not None:
        named += reader.without_parts(sweep.ablate, *named[0])
    arms = [each for one in named for each in reader.arms(*one)]
    if sweep.ladder is not None:
        check_spaces(sweep.ladder, {arm.title: arm.places for arm in arms}, config)
    return Definition(sweep, config, tuple(arms), reader.run and reader.run.planned)


def _trees(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    """Yields the path and the value of each argument that is not built."""
    for key, child in child_trees(tree).items():
        if isinstance(tree, Call) and (tree.name, key) in _TREES:
            yield join(path, key), child
        else:
            yield from _trees(child, join(path, key))


class AbsentArm(LookupError):
    """A file has an arm, by its name, that a plan does not have."""


@dataclass
class _Reader:
    """Reads the configs of arms; for its fields, see `read_sweep`."""

    sweep: Sweep
    config: Config
    search_paths: Sequence[str]
    planned: Mapping[str, tuple[Config, Sequence[str]]] | None
    run: "ContinuedRun | None" = None  # that all trials continue

    def arms(self, name: str, arm: Arm, at: str) -> Iterator[ArmConfig]:
        """Yields an arm, or that arm on each rung of the ladder; for `at` see `_arm`."""
        if (ladder := self.sweep.ladder) is None:
            yield self._arm(name, arm, at)
            return
        for index, there, moved in rungs_of(ladder, name):
            yield self._arm(there, arm, at, index, moved)

    def without_parts(
        self, ablation: Ablation, name: str, arm: Arm, at: str
    ) -> list[tuple[str, Arm, str]]:
        """Returns the name, the arm and its place for each arm without a part."""
        whole = self._arm(name, arm, at)
        found = removals(ablation, whole.title, whole.config, self.config)
        if name in found:
            text = f"ablate has an arm named {name!r}, as the whole one is: rename that one."
            raise ConfigError(text, self.config.sources["ablate"])
        return [(x, self._without(x, values, whole, arm), at) for x, values in found.items()]

    def _without(self, name: str, values: Mapping[str, Tree], whole: ArmConfig, arm: Arm) -> Arm:
        """Returns an arm without a part, and without what its space has within that part."""
        # `name` is that of the arm without it; for `values` see `removals`.
        removed = tuple(f"{path}." for path in values)
        space = {}
        for key, each in (arm.space or {}).items():
            reached = [whole.paths[inner] for inner in each.parts or (key,)]
            within = [any(f"{x}.".startswith(removed) for x in paths) for paths in reached]
            if any(within) and not all(within):
                raise ConfigError(
                    f"{whole.title} moves {key!r} together with paths of what {name} takes"
                    " out: search them apart, or keep that part.",
                    self.config.argument_source(whole.places[next(iter(each.parts or (key,)))]),
                )
            if not any(within):
                space[key] = each
        return replace(arm, set={**arm.set, **values}, space=space or None)

    def _arm(
        self, name: str, arm: Arm, at: str, rung: int | None = None, moved: bool = False
    ) -> ArmConfig:
        """Returns an arm, whose path in the config of the sweep is `at`."""
        # `rung` is the index of its rung on the ladder; for `moved` see `ArmConfig`.
        title = f"The arm {name!r}" if at else "The base"
        if self.planned is None:
            config, paths = self._read(title, arm, at, rung)
        elif name in self.planned:
            config, known = self.planned[name]
            paths = ArmPaths(title, (), (), known)
        else:
            raise AbsentArm(name)
        method, space = arm.method or self.sweep.method, arm.space or {}
        places = self._places(space, method, at)
        if self.run is not None:
            self.run.check_space(title, places)
        return ArmConfig(
            name=name,
            title=title,
            config=config,
            space=space,
            paths=paths.all_reached(
                config, {key: self.config.argument_source(each) for key, each in places.items()}
            ),
            places=places,
            method=method,
            trials=arm.trials if arm.trials is not None else self.sweep.trials,
            at=at,
            sweep=self.config,
            moved=moved,
        )

    def _read(self, title: str, arm: Arm, at: str, rung: int | None) -> tuple[Config, ArmPaths]:
        """Returns the config of an arm, and what finds paths in it; for `rung` see `_arm`."""
        base = self.files("base", self.sweep.base) if self.sweep.base else []
        if self.run is not None and not base:
            base = [self.run.config_file]
        place = join(at, "files") if arm.files else "base" if self.sweep.base else "branch.run"
        files = [*base, *self.files(join(at, "files"), arm.files)]
        try:
            config = load(files, search_paths=self.search_paths)
        except ConfigError as error:
            text = f"{title} cannot be read: {error}"
            raise ConfigError(text, self.config.sources[place]) from error
        paths = ArmPaths(title, files, self.search_paths)
        if self.run is not None:
            config = self.run.continue_with(config)
        settings = {"set": self.sweep.set} | ({join(at, "set"): arm.set} if at else {})
        for place, values in settings.items():
            for key, value in values.items():
                source = self.config.argument_source(join(place, key)) or self.config.sources[at]
                config = paths.set(config, key, value, source)
        if rung is not None and self.sweep.ladder is not None:
            config = on_rung(self.sweep.ladder, rung, config, paths, self.config)
        if self.run is not None:
            config = self.run.choose_states(config, title)
        return config, paths

    def files(self, place: str, names: str | Sequence[str]) -> list[str]:
        """Returns the paths of files, relative to the file that names them."""
        if isinstance(names, str):
            named = {place: names}
        else:
            named = {join(place, index): name for index, name in enumerate(names)}
        found = []
        for at, name in named.items():
            file = self.config.sources[at].file
            beside = "" if file.startswith("--") else os.path.dirname(file)
            found.append(name if name.startswith(SHIPPED) else os.path.join(beside, name))
        return found

    def _places(self, space: Mapping[str, Space], method: Method, at: str) -> dict[str, str]:
        """Returns the path in the sweep's config that has the values of each path or selector."""
        places: dict[str, str] = {}
        for key, each in space.items():
            entry = join(join(at, "space"), key)
            parts = {path: join(join(entry, "spaces"), path) for path in each.parts or ()}
            places |= {key: entry} if each.parts is None else parts
        if isinstance(method, Explicit):
            own = join(at, "method")
            place = own if own in self.config.sources else "method"
            place = join(place, "points.trials" if method.cuts else "trials")
            places |= dict.fromkeys(method.searches[0][0], place)
        return places
