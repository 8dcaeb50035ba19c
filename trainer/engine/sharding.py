"""Shards the parameters and the state of a run over a mesh, by ordered rules.

A rule is a pattern of paths and the mesh axes that split the last dimensions of the parameters that
it matches. `ShardingRules` has those of an experiment, and then the defaults of its model.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optim.division import Axes
from optim.paths import SlowPattern, flatten, fullmatch, nearest_parameters, path_name
from trainer.config.wording import known_names, listing
from trainer.engine.contracts import ComponentError
from trainer.engine.mesh import AXES, replicated

_GRAMMAR = (
    "A rule has one word for each of the last dimensions: an axis of the mesh ('data', 'fsdp' or "
    "'tensor'), several joined by '+', or '-' for a dimension that is not split."
)


class Rule(NamedTuple):
    """The mesh axes of the last dimensions of the parameters that a pattern matches."""

    pattern: re.Pattern[str]  # matches whole paths
    words: tuple[Axes, ...]  # of the last dimensions; those before them are not split
    text: str  # as it is written, for errors
    component: str  # what is at fault in a config, such as "sharding.head/kernel"

    def takes(self, path: str) -> bool:
        """Returns whether the pattern matches a path; raises ComponentError if it takes long."""
        try:
            return fullmatch(self.pattern, path) is not None
        except SlowPattern as error:
            raise self.wrong(str(error)) from None

    def wrong(self, why: str) -> ComponentError:
        """Returns an error about the rule."""
        return ComponentError(self.component, f"{self.text}: {why}")


def read_rule(pattern: str, axes: str, owner: str, component: str) -> Rule:
    """Reads a rule of a pattern and axes such as "fsdp tensor"; raises ComponentError."""
    # `axes` has a word for each of the last dimensions. `owner` is whose rule it is, for errors.
    text = f"The rule {pattern!r}: {axes!r} of {owner}"
    words = tuple(() if word == "-" else tuple(word.split("+")) for word in axes.split())
    try:
        rule = Rule(re.compile(pattern), words, text, component)
    except re.error as error:
        raise ComponentError(
            component, f"{text}: The pattern is not a regular expression: {error}."
        ) from None
    if not words:
        raise rule.wrong(f"It names no axes. {_GRAMMAR}")
    named = [name for word in words for name in word]
    for name in named:
        if name not in AXES:
            raise rule.wrong(f"There is no axis {name!r}. {known_names(name, AXES)} {_GRAMMAR}")
        if named.count(name) > 1:
            raise rule.wrong(
                f"It names the axis {name!r} twice, and an axis can split one dimension only. Write"
                " '-' in one of the places."
            )
    return rule


class ShardingRules:
    """Decides which mesh axes split the parameters of a run.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"))
        >>> rules = ShardingRules(mesh, {"head/.*": "- tensor"})
        >>> leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
        >>> rules.axes_of({"head": {"kernel": leaf(8, 10)}, "scale": leaf(3, 8)})
        {'head/kernel': ((), ('tensor',)), 'scale': ((), ('fsdp',))}
    """

    # The first rule of the experiment that matches a parameter decides, and nothing is added to it.
    # For any other parameter the first default of the model that matches decides, and "fsdp" then
    # splits the longest dimension that the default leaves free and that the axis divides. An axis
    # that the mesh lacks, or whose size is 1, splits nothing.

    def __init__(
        self, mesh: Mesh | AbstractMesh, rules: Mapping[str, str] | None = None, model: Any = None
    ):
        self.mesh: Any = mesh
        self._sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        self._rules = [
            read_rule(pattern, axes, "sharding", f"sharding.{pattern}")
            for pattern, axes in (rules or {}).items()
        ]
        self._defaults = [
            read_rule(pattern, axes, "the model", "model")
            for pattern, axes in getattr(model, "sharding", None) or ()
        ]
        self._heads = getattr(model, "heads", None) or ()

    @property
    def may_split(self) -> bool:
        """Whether a parameter may be split; "data" splits some only by rules of the experiment."""
        return bool(self._sizes.keys() - {"data"}) or bool(self._sizes and self._rules)

    def axes_of(self, params: Any) -> dict[str, tuple[Axes, ...]]:
        """Returns path -> the mesh axes of each dimension, for every parameter."""
        # Raises ComponentError for a rule of the experiment that does not fit.
        by_path = flatten(params)
        rule_of = {path: _first(self._rules, path) for path in by_path}
        for rule in self._rules:
            if rule not in rule_of.values():
                raise _dead(rule, by_path, rule_of)
        found = {}
        for path, x in by_path.items():
            rule = rule_of[path]
            found[path] = self._split(rule, path, x.shape) if rule else self._default(path, x.shape)
        return found

    def left_whole(self, params: Any) -> list[str]:
        """Returns lines about what the defaults leave whole, as an axis does not divide it."""
        whole: dict[tuple[int, Axes], list[str]] = {}
        unsplit = []
        for path, x in flatten(params).items():
            if _first(self._rules, path) is not None:
                continue
            if (rule := _first(self._defaults, path)) is not None:
                for size, axes in zip(x.shape, self._words(rule, path, x.shape), strict=True):
                    if size % self._parts(axes):
                        whole.setdefault((size, axes), []).append(path)
            axes = self._default(path, x.shape)
            free = not axes or not all(axes)
            if free and "fsdp" in self._sizes and not any("fsdp" in of_one for of_one in axes):
                unsplit.append(f"{path} [{', '.join(map(str, x.shape))}]")
        lines = [
            f"sharding: {listing(paths)}: {self._named(axes)} does not divide the dimension of "
            f"{size:,}, which stays whole; {_sizes_near(size, self._parts(axes))} would be split"
            for (size, axes), paths in whole.items()
        ]
        found = self.axes_of(params).values()
        if "tensor" in self._sizes and not any("tensor" in x for axes in found for x in axes):
            lines.append(
                f"sharding: {self._named(('tensor',))} splits no parameter, and the devices along "
                "it compute the same: write rules in `sharding`, or leave the axis out"
            )
        if unsplit:
            lines.append(
                f"sharding: {self._named(('fsdp',))} divides no free dimension of "
                f"{listing(unsplit, 4)}: the devices along it all keep the same of them, "
                "unless a rule of `sharding` splits them"
            )
        return lines

    def _named(self, axes: Axes) -> str:
        """Returns "tensor 2", the axes with their sizes."""
        return " and ".join(f"{name} {self._sizes[name]}" for name in axes)

    def _parts(self, axes: Iterable[str]) -> int:
        return math.prod(self._sizes[name] for name in axes)

    def _words(self, rule: Rule, path: str, shape: Sequence[int]) -> tuple[Axes, ...]:
        """Returns the axes of a rule for each dimension, without those that the mesh lacks."""
        words = rule.words
        if not any(words):
            return ((),) * len(shape)  # what splits nothing fits every shape
        if len(words) > len(shape):
            raise rule.wrong(
                f"It has {len(words)} words, but {path} {list(shape)} has {len(shape)} "
                f"dimension{'' if len(shape) == 1 else 's'}. {_GRAMMAR} Leave out words, or match "
                "fewer parameters."
            )
        present = [tuple(name for name in word if name in self._sizes) for word in words]
        return (*((),) * (len(shape) - len(words)), *present)

    def _split(self, rule: Rule, path: str, shape: Sequence[int]) -> tuple[Axes, ...]:
        """Returns the axes of each dimension by a rule of the experiment."""
        found = self._words(rule, path, shape)
        for size, axes in zip(shape, found, strict=True):
            if size % (parts := self._parts(axes)):
                raise rule.wrong(
                    f"The dimension of {size:,} of {path} {list(shape)} does not divide over "
                    f"{self._named(axes)}. {_sizes_near(size, parts)} would; or write '-' in its "
                    "place."
                )
        return found

    def _default(self, path: str, shape: Sequence[int]) -> tuple[Axes, ...]:
        """Returns the axes of each dimension by the model's defaults, and then by "fsdp"."""
        found: list[Axes] = [()] * len(shape)
        if (rule := _first(self._defaults, path)) is not None:
            words = self._words(rule, path, shape)
            self._check_heads(path, words)
            sizes = zip(shape, words, strict=True)
            found = [axes if size and size % self._parts(axes) == 0 else () for size, axes in sizes]
        return self._with_fsdp(shape, found)

    def _with_fsdp(
        self, shape: Sequence[int], axes: Sequence[Axes], first: int = 0
    ) -> tuple[Axes, ...]:
        """Adds "fsdp" to the longest dimension from `first` on that has no axes and is divided."""
        if (shards := self._sizes.get("fsdp")) is None or any("fsdp" in of_one for of_one in axes):
            return tuple(axes)
        # A dimension of length 0 divides evenly, too, but has nothing to split.
        fitting = [
            i
            for i in range(first, len(shape))
            if not axes[i] and shape[i] % shards == 0 and shape[i] >= shards
        ]
        longest = max(fitting, key=lambda i: shape[i], default=None)
        return tuple(("fsdp",) if i == longest else of_one for i, of_one in enumerate(axes))

    def _check_heads(self, path: str, words: Sequence[Axes]) -> None:
        """Raises ComponentError if a default splits attention between less than whole heads."""
        if not any("tensor" in axes for axes in words):
            return
        parts = self._sizes["tensor"]
        for heads in self._heads:
            if heads.count % parts and fullmatch(re.compile(heads.match), path):
                fits = [n for n in range(1, parts) if heads.count % n == 0]
                raise ComponentError(
                    f"model.{heads.argument}",
                    f"{heads.argument} is {heads.count}, and the mesh has tensor {parts}: the "
                    f"model splits {path} so that each device has whole heads. Choose a number of "
                    f"heads that {parts} divides, such as {_sizes_near(heads.count, parts)}, a "
                    f"tensor of {' or '.join(map(str, fits))}, or write a rule for these "
                    f"parameters in sharding, such as {{{heads.match!r}: '-'}}.",
                )

    # The state.

    def factor_axes(
        self, side: str, shape: Sequence[int], of: Sequence[int], axes: Sequence[Axes]
    ) -> tuple[Axes, ...]:
        """Returns the axes of each dimension of what an optimizer keeps for a side of matrices."""
        # For [..., rows, rows] or [..., rows] ("left"), or those of columns ("right"). The first of
        # these dimensions is split as that of the parameter, of shape `of`. If "fsdp" splits the
        # parameter, but not there, it splits the factor's longest free dimension.
        place = -2 if side == "left" else -1
        batch, size = tuple(of[:-2]), of[place] if len(of) > 1 else 0
        found: list[Axes] = [()] * len(shape)
        more = 0
        for inner in ((*batch, size, size), (*batch, size)):
            if tuple(shape[-len(inner) :]) == inner:
                more = len(shape) - len(inner)
                known = [*axes[: len(batch)], axes[place]]
                found[more : more + len(known)] = known
                break
        else:  # matrices whose sides are other dimensions of the parameter, or several
            if len(shape) > 1 and shape[-1] == shape[-2]:
                own = tuple(_merged(side, shape[-1], of, axes))
                found[-2] = own if shape[-1] % self._parts(own) == 0 else ()
        if any("fsdp" in of_one for of_one in axes):
            return self._with_fsdp(shape, found, more)
        return tuple(found)


_FACTOR = re.compile(r"(left|right)(_[a-z_]+)?")
"""The fields of states that have a value for each side of a matrix, such as `SoapState`'s."""


def state_shardings(rules: ShardingRules, state: Any, params: Any) -> Any:
    """Returns a tree of shardings that split a state as the parameters its leaves belong to."""
    # A leaf belongs to the parameter whose path, the longest such, and whose shape are the ends of
    # its own. Axes before those (trials, past steps of L-BFGS) are not split. Fields `left...` and
    # `right...` are split by `factor_axes`; other leaves are replicated.
    shapes = {path: tuple(x.shape) for path, x in flatten(params).items()}
    axes = rules.axes_of(params)

    def place(path: Any, x: Any) -> NamedSharding:
        names = path_name(path).split("/")
        for start in range(len(names)):
            if (tail := "/".join(names[start:])) not in shapes:
                continue
            side = _FACTOR.fullmatch(names[start - 1]) if start else None
            if side is not None:
                found = rules.factor_axes(side[1], x.shape, shapes[tail], axes[tail])
                return _sharding(rules.mesh, found)
            more = len(x.shape) - len(shapes[tail])
            if more >= 0 and tuple(x.shape[more:]) == shapes[tail]:
                return _sharding(rules.mesh, (*[()] * more, *axes[tail]))
        return replicated(rules.mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def _sharding(mesh: Any, axes: Sequence[Axes]) -> NamedSharding:
    if not any(axes):
        return replicated(mesh)
    entries = [None if not of_one else of_one[0] if len(of_one) == 1 else of_one for of_one in axes]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _merged(side: str, size: int, of: Sequence[int], axes: Sequence[Axes]) -> list[str]:
    """Returns the axes of a parameter's dimensions that are merged to one of a size."""
    # They follow each other, and are the last ones for columns, and those before the last dimension
    # for rows, or else the only ones whose product is the size.
    places = itertools.combinations(range(len(of) + 1), 2)  # of a first dimension and the one after
    runs = [run for run in places if math.prod(of[slice(*run)]) == size]
    wanted = len(of) if side == "right" else len(of) - 1
    there = [run for run in runs if run[1] == wanted] or runs
    if len(there) != 1:
        return []
    return [name for of_one in axes[slice(*there[0])] for name in of_one]


def _first(rules: Sequence[Rule], path: str) -> Rule | None:
    return next((rule for rule in rules if rule.takes(path)), None)


def _sizes_near(size: int, parts: int) -> str:
    """Returns the multiples of a number of parts that are nearest to a size, in words."""
    below = size // parts * parts
    return " or ".join(f"{each:,}" for each in (below, below + parts) if each)


def _dead(rule: Rule, paths: Collection[str], rule_of: Mapping[str, Rule | None]) -> ComponentError:
    """Returns the error about a rule by which no parameter is split."""
    taken = next((path for path in paths if rule.takes(path)), None)
    earlier = rule_of[taken] if taken is not None else None
    if earlier is not None:
        return rule.wrong(
            f"Every parameter that it matches is split by an earlier rule, as {taken} by "
            f"{earlier.pattern.pattern!r}. Put it before that, or remove it."
        )
    near = nearest_parameters(rule.pattern, paths, "rule")
    return rule.wrong(f"It matches no parameter. {near}")
