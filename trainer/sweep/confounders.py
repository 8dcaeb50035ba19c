"""Finds in what the arms of a sweep differ besides what they compare, and unlike losses.

Start with `arm_differences`.
"""

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from trainer.config import Call, Tree
from trainer.config.tree import child_trees, join, split_path, walk
from trainer.config.wording import brief
from trainer.messages import joined
from trainer.sweep.spaces import bounds
from trainer.sweep.tuned import Tuning, unequally_tuned

Kind = Literal[
    "schedule",
    "weight_decay",
    "clipping",
    "ema",
    "accumulation",
    "batch",
    "steps",
    "seeds",
    "model",
    "data",
    "loss",
    "settings",
    "arguments",
    "space",
    "tuned",
    "nothing",
]
_OF_PATH = {
    "data.batch_size": "batch",
    "data_seed": "seeds",
    "ema_decay": "ema",
    "microbatches": "accumulation",
    **{name: name for name in ("steps", "model", "data", "loss")},
}
# Arguments of a run's root that change none of its results.
WITHOUT_EFFECT = ("log_every", "save_every", "keep_latest", "best_metric", "best_mode")
WITHOUT_EFFECT += ("checkpoints", "diagnostics", "hooks", "writers", "watchdog", "steps_per_call")
_NOT_COMPARED = ("optimizer", "seed", "metrics", "train_metrics", *WITHOUT_EFFECT)
_SEARCHED = "searched"
# Arguments of optimizers by their kinds; all others are the optimizer's own.
_ARGUMENTS = {
    "schedule": re.compile(r"(\w+_)?learning_rate|step_size_fn"),
    "weight_decay": re.compile(r"(\w+_)?weight_decay(_rate)?"),
    "clipping": re.compile(r"clip_norm"),
    "accumulation": re.compile(r"every_k_schedule"),
}
# Parts of optimizers that are nothing else.
_DECAY = re.compile(r"parts\.(cautious_)?decay|optax\.add_decayed_weights")
_CLIP = re.compile(r"(\w+\.)*(clip|clip_by_\w+|adaptive_grad_clip)")
# The arguments of schedules that a rate is multiplied by.
SCALES = ("peak_value", "value", "init_value", "values")
_WIDER = 1.499  # spaces whose widths have this ratio or a larger one are unequal: 3 decades to 2
_WIDTHS = {
    "log_uniform": "decades of their logarithmic axes",
    "uniform": "shares of the largest value of their uniform axes",
    "values": "decades of their listed values",
}

_Shape = tuple[str, tuple[tuple[str, str], ...]]  # a value; or a function and its arguments


class ComparedArm(NamedTuple):
    """An arm, as it is compared with others."""

    tree: Call | None  # the config of one of its runs, with its defaults; None if it is not known
    space: Mapping[str, str]  # config path -> the values that are searched, as text
    points: Sequence[Mapping[str, Tree]]  # the values of its trials by config path
    tuning: Tuning | None  # None if it is not searched
    # whether the sweep is a branch, which says with which state each arm begins
    branched: bool = False
    method: str = ""  # how its points were chosen, as text; "" if it is not searched


class Differences(NamedTuple):
    """In what arms differ."""

    # whether they have different optimizers, which they then compare, or different arguments or
    # rates of one; also where that is not known
    optimizers: bool
    # all other differences: the kind, and the values with the arms that have them; for the kinds
    # "space" and "tuned" a sentence
    others: list[tuple[str, str]]

    def unnamed(self, named: Collection[str]) -> list[str]:
        """Returns the kinds that the file does not name, unless one is all that is compared."""
        kinds = [*dict.fromkeys(kind for kind, _ in self.others if kind not in named)]
        return kinds if self.optimizers or len(kinds) > 1 else []

    def sentences(self, named: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yields "compared", "named" or "open" for a difference, and a sentence about it."""
        # `named` are the kinds that the file of the sweep names. With one optimizer in all arms,
        # the only kind that it does not name is what they compare.
        rest = "open" if self.unnamed(named) else "compared"
        more = "more than their optimizers" if self.optimizers else "several respects"
        words = {"compared": "What is compared: ", "open": f"The arms differ in {more}: "}
        words["named"] = "As the file says, the arms differ in "
        texts: dict[str, list[str]] = {}
        for kind, text in self.others:
            of = "named" if kind in named else rest
            if kind in ("space", "tuned"):
                yield of, text
            else:
                texts.setdefault(of, []).append(text)
        yield from ((of, f"{words[of]}{'; '.join(each)}.") for of, each in texts.items())


def arm_differences(sides: Mapping[str, ComparedArm], past: bool) -> Differences:
    """Returns in what arms differ; `past` says whether the trials have ended."""
    # What every arm searches is no difference; what only some of them search is one. The arguments
    # of functions are compared where the arms call the same ones.
    tunings = {arm: side.tuning for arm, side in sides.items() if side.tuning is not None}
    found = [("tuned", text) for text in unequally_tuned(tunings, past)]
    search = "The arms searched" if past else "The arms search"
    spaces = (*_methods(sides, search), *_widths(sides, search), *_apart(sides, search))
    found += [("space", text) for text in spaces]
    roots = {arm: _comparable(side) for arm, side in sides.items() if side.tree is not None}
    if len(roots) < 2:
        return Differences(True, found)
    leaves = {
        arm: dict(arguments({k: x for k, x in root.kwargs.items() if k not in _NOT_COMPARED}, ""))
        for arm, root in roots.items()
    }
    for path, values in differing_arguments(leaves).items():
        kind = _OF_PATH.get(path) or _OF_PATH.get(path.partition(".")[0], "settings")
        found.append((kind, f"{path} {values_text(values)}"))
    optimizers = {arm: _Optimizer(root.kwargs.get("optimizer")) for arm, root in roots.items()}
    for kind in _ARGUMENTS:
        found += [(kind, text) for text in _unlike(kind, optimizers)]
    compared, texts = _besides(optimizers)
    return Differences(compared, found + [("arguments", text) for text in texts])


def _comparable(side: ComparedArm) -> Any:
    """Returns the config of an arm, in which what is searched has no value."""
    searched = {*side.space, *(path for values in side.points for path in values)}
    left_out = ("warm_start.optimizer", "warm_start.follow") if side.branched else ()

    def marked(tree: Tree, path: str) -> Any:
        if path in searched:
            return Call(_SEARCHED, {}) if isinstance(tree, Call) else _SEARCHED
        children = {
            key: marked(child, inner)
            for key, child in child_trees(tree).items()
            if (inner := join(path, key)) not in left_out
        }
        if isinstance(tree, Call):
            return Call(tree.name, children, tree.partial)
        return list(children.values()) if isinstance(tree, list) else children or tree

    return marked(side.tree, "")


def named_by(differs: Sequence[str], ablated: str) -> Sequence[str]:
    """Returns the kinds that a file names; an ablation, which has an arm `ablated`, by itself."""
    # A part that is taken out may take a hyperparameter with it.
    return ("space", "tuned") if ablated else differs


class _Optimizer:
    """What the optimizer of an arm has of each kind, by its groups, and what is its own."""

    # `kinds` is kind -> group, or "" outside of groups -> its values; those of rates are shapes.
    # `own` is path -> value of the other arguments, the scales of rates among them; `functions` are
    # those of `own` that are functions.

    def __init__(self, tree: Tree):
        self.kinds: dict[str, dict[str, set[_Shape]]] = {kind: {} for kind in _ARGUMENTS}
        self.own: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        groups = child_trees(tree).get("groups")
        self.groups = list(map(str, groups)) if isinstance(groups, dict) else []
        self._walk(tree, "", "")

    def _walk(self, tree: Tree, place: str, group: str) -> None:
        """Adds a part of the optimizer; `place` is its path without parts that are of a kind."""
        name, children = tree.name if isinstance(tree, Call) else "", child_trees(tree)
        parts = children.get("args") if name == "optax.chain" else None
        if isinstance(parts, list) and sum(map(_is_own, parts)) == 1:
            for part in parts:  # such a chain is the optimizer that it has
                self._walk(part, place, group)
        elif _CLIP.fullmatch(name):
            self._add("clipping", tree, place, group)
        elif _DECAY.fullmatch(name):
            rate = children.get("rate", children.get("weight_decay"))
            self._add("weight_decay", rate, place, group)
            if isinstance(around := children.get("around"), Call):
                self._walk(around, place, group)
        else:
            if name or not isinstance(tree, list | dict):
                self.own[place] = name or _plain(tree)
            if name:
                self.functions[place] = name
            number = 0
            for key, child in children.items():
                kind = next((k for k, of in _ARGUMENTS.items() if of.fullmatch(str(key))), None)
                inner = join(place, number if isinstance(tree, list) else key)
                if name and kind is not None:
                    self._add(kind, child, inner, group)
                else:
                    self._walk(child, inner, str(key) if place == "groups" else group)
                number += _is_own(child)

    def _add(self, kind: str, tree: Tree, place: str, group: str) -> None:
        """Adds an argument that is of a kind, unless it does nothing."""
        value = _plain(tree), ()
        if kind == "schedule" and tree is not None:
            value, self.own[place] = _shape(tree)
        elif tree is None or tree == 0:
            return
        self.kinds[kind].setdefault(group, set()).add(value)


def _besides(optimizers: Mapping[str, _Optimizer]) -> tuple[bool, list[str]]:
    """Returns whether arms compare optimizers, and texts of arguments that differ besides."""
    # Two arms compare the groups in which they have different functions. Those with the same ones
    # in all groups compare the arguments of one; if they differ in several, all are returned.
    compared, found = False, dict[str, dict[str, str]]()
    for pair in itertools.combinations(optimizers, 2):
        a, b = (optimizers[arm] for arm in pair)
        other = {*a.groups} ^ {*b.groups}  # or of which only one has
        places = [each for each in (*a.own, *b.own) if a.own.get(each) != b.own.get(each)]
        other |= {_group_of(x) for x in places if a.functions.get(x) != b.functions.get(x)}
        rest = [each for each in places if _group_of(each) not in other]
        if other or len({*map(_group_of, rest)}) == 1:
            compared = True
            rest = rest if other else []
        for place in rest:
            values = {arm: optimizers[arm].own.get(place, "absent") for arm in pair}
            found.setdefault(place, {}).update(values)
    texts = [f"{join('optimizer', place)} {values_text(of)}" for place, of in found.items()]
    return compared, texts


def _group_of(place: str) -> str:
    """Returns the group of whose optimizer an argument is; "" for all others."""
    return found[1] if (found := re.match(r"groups\.(.+?)\.optimizer(\.|$)", place)) else ""


def _is_own(tree: Tree) -> bool:
    """Returns whether a part is one of an optimizer, and not only clipping or weight decay."""
    name = tree.name if isinstance(tree, Call) else ""
    around = isinstance(child_trees(tree).get("around"), Call)
    return not _CLIP.fullmatch(name) and (around or not _DECAY.fullmatch(name))


def _plain(tree: Tree) -> str:
    number = isinstance(tree, int | float) and not isinstance(tree, bool)
    return f"{tree:.12g}" if number else brief(tree, 200)


def _shape(tree: Tree) -> tuple[_Shape, str]:
    """Returns the shape of a rate or its schedule, and its scale as text."""
    if not isinstance(tree, Call):
        return ("constant", ()), _plain(tree)
    key = next((each for each in SCALES if each in tree.kwargs), "")
    scale: Any = tree.kwargs.get(key)
    items = {name: _plain(x) for name, x in tree.kwargs.items() if name != key}
    if isinstance(scale, int | float) and scale:
        for name, value in tree.kwargs.items():
            if name in items and name.endswith("_value") and isinstance(value, int | float):
                items[name] = f"{value / scale:.4g} of {key}"
    elif isinstance(scale, list):
        items[key] = _plain(scale)
    name = tree.name.rpartition(".")[2].removesuffix("_schedule")
    return (name, tuple(items.items())), _plain(scale)


def _unlike(kind: str, optimizers: Mapping[str, _Optimizer]) -> Iterator[str]:
    """Yields the values of a kind in which optimizers differ, with their arms."""
    # Optimizers with the same groups are compared by group, and others as wholes.
    every = {arm: each.kinds[kind] for arm, each in optimizers.items()}
    groups = [each.groups for each in optimizers.values()]
    names = ["", *groups[0]]
    if any(set(each) != set(groups[0]) for each in groups):
        names = [""]
        for arm, each in optimizers.items():
            values = set().union(*every[arm].values())
            lacks = kind == "weight_decay" and not all(map(every[arm].get, each.groups))
            every[arm] = {"": values | ({("none", ())} if lacks and values else set())}
    shapes = [shape for each in every.values() for of in each.values() for shape in of]
    values_of = Counter(name for name, _ in {item for _, each in shapes for item in each})
    unlike = [name for name, number in values_of.items() if number > 1]
    found: dict[str, list[str]] = {}
    for group in names:
        texts = {arm: _text(each.get(group, set()), unlike) for arm, each in every.items()}
        if len(set(texts.values())) > 1:
            found.setdefault(values_text(texts), []).append(group)
    for values, of in found.items():
        where = f" in {joined(of)}" if any(of) and len(of) < len(names) - 1 else ""
        yield f"{kind.replace('_', ' ')}{where} {values}"


def _text(values: Collection[_Shape], unlike: Collection[str]) -> str:
    """Returns values as text, of their arguments only those that differ."""
    texts = []
    for name, items in values:
        inner = ", ".join(f"{key}={value}" for key, value in items if key in unlike)
        texts.append(f"{name}({inner})" if inner else name)
    return " and ".join(sorted(texts)) or "none"


def _widths(sides: Mapping[str, ComparedArm], search: str) -> Iterator[str]:
    """Yields sentences about spaces that are much wider than others, or of other kinds."""
    # `search` is how such a sentence begins.
    tuned = {arm: side for arm, side in sides.items() if side.tuning and side.tuning.count}
    widths: dict[str, dict[str, float]] = {arm: {} for arm in tuned}
    for arm, side in tuned.items():  # the widths of what it tunes, added for each kind of a space
        for paths in side.tuning.hyperparameters if side.tuning else ():
            width, kind = max(_width(side, path) for path in paths)
            widths[arm][kind] = widths[arm].get(kind, 0.0) + width
    for kind, words in _WIDTHS.items():
        of = {arm: each[kind] for arm, each in widths.items() if kind in each}
        if len(of) == len(widths) > 1 and max(of.values()) >= _WIDER * min(of.values()):
            listed = joined([f"{arm} {each:.3g}" for arm, each in of.items()])
            yield f"{search} spaces of unequal width, in {words}: {listed}."
    counts = {side.tuning.count for side in tuned.values() if side.tuning}
    if len(counts) == 1 and len({frozenset(each) for each in widths.values()}) > 1:
        listed = values_text({arm: " and ".join(each) for arm, each in widths.items()})
        yield f"{search} spaces of unlike kinds: {listed}."


def _width(side: ComparedArm, path: str) -> tuple[float, str]:
    """Returns the width of the space of a path, and its kind."""
    space, found = bounds(side.space.get(path, "")), _range(side, path)
    if space is not None and not space.log:
        return (space.high - space.low) / max(abs(space.low), abs(space.high)), "uniform"
    if found is None or found.texts or found.low <= 0:
        return 0.0, "other values"
    return math.log10(found.high / found.low), "values" if space is None else "log_uniform"


def _methods(sides: Mapping[str, ComparedArm], search: str) -> Iterator[str]:
    """Yields a sentence about arms that are searched by different methods, seeds aside."""
    texts = {arm: re.sub(r", seed \d+", "", x.method) for arm, x in sides.items() if x.space}
    if len({*texts.values()} - {""}) > 1:
        yield f"{search} by different methods: {values_text(texts)}."


def _apart(sides: Mapping[str, ComparedArm], search: str) -> Iterator[str]:
    """Yields sentences about spaces of an argument of one function that have nothing in common."""
    of_all = [each for side in sides.values() for each in (side.space, *side.points)]
    for path in dict.fromkeys(path for each in of_all for path in each):
        of = {
            (arm, *_functions(side.tree, path)): found
            for arm, side in sides.items()
            if side.tree is not None and (found := _range(side, path))
        }
        apart: dict[str, str] = {}
        for (one, a), (other, b) in itertools.combinations(of.items(), 2):
            overlap = max(a.low, b.low) <= min(a.high, b.high) or a.texts & b.texts
            if one[1:] == other[1:] != () and not overlap:
                apart |= {one[0]: a.text, other[0]: b.text}
        if apart:
            yield f"{search} spaces of {path} that do not overlap: {values_text(apart)}."


class _Range(NamedTuple):
    """The values of a space: the ends of its numbers, its other values, and all of it as text."""

    low: float
    high: float
    texts: frozenset[str]
    text: str


def _range(side: ComparedArm, path: str) -> _Range | None:
    """Returns the values of a path that is searched; None if it is not."""
    space = bounds(side.space.get(path, ""))
    values = [each[path] for each in side.points if path in each]
    if space is not None:
        values = [space.low, space.high]
    if not values:
        return None
    numbers = [x for x in values if type(x) in (int, float)]
    texts = {str([*arguments(x, "")]): brief(x) for x in values if type(x) not in (int, float)}
    low, high = min(numbers, default=math.inf), max(numbers, default=-math.inf)
    listed = [f"{low:g} to {high:g}"] if numbers else []
    return _Range(low, high, frozenset(texts), joined([*listed, *texts.values()]))


def _functions(tree: Tree, path: str) -> list[str]:
    """Returns the functions within which a path is; none if it does not exist."""
    names = []
    with contextlib.suppress(KeyError):
        for key in split_path(tree, path):
            names.append(tree.name if isinstance(tree, Call) else "")
            tree = child_trees(tree).get(key)
    return names


class UnlikeLoss(NamedTuple):
    """Why the losses of arms cannot be compared."""

    path: str  # the argument that differs
    text: str  # a sentence
    values: Mapping[str, str]  # arm -> the value; empty if the argument is searched


def unlike_loss(trees: Mapping[str, Call], searched: Collection[str]) -> UnlikeLoss | None:
    """Returns why the losses of arms cannot be compared; None if all are one function."""
    # `trees` are the configs of the arms with their defaults; `searched` has the config paths in
    # which the trials of an arm differ.
    of_arms = [list(child_trees(tree.kwargs.get("metrics"))) for tree in trees.values()]
    first = of_arms[0] if of_arms else []
    common = (name for name in first if all(name in each for each in of_arms))
    which = "both" if len(trees) == 2 else "all of them"
    # If they have none in common, it is an example.
    named = f"name a metric that {which} compute, such as {next(common, 'accuracy')}"
    for path in searched:
        if path.split(".")[0] == "loss":
            return UnlikeLoss(
                path,
                f"The loss of a trial depends on {path}, which is searched, so that losses cannot"
                f" be compared: {named}.",
                {},
            )
    found = {arm: dict(arguments(tree.kwargs["loss"], "loss")) for arm, tree in trees.items()}
    for path, values in differing_arguments(found).items():
        return UnlikeLoss(
            path,
            f"The losses of the arms are not the same function ({path} {values_text(values)}), so"
            f" that they cannot be compared: {named}.",
            values,
        )
    return None


def differing_arguments(found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the arguments in which arms differ: path -> arm -> the value, from `arguments`."""
    # The value is "absent" where the arm has no such argument, and "given" where it has entries
    # below the path. Where two arms call different functions, their arguments are left out.
    paths = dict.fromkeys(path for each in found.values() for path in each)
    different: dict[str, dict[str, str]] = {}
    for path in paths:
        values = {}
        for arm, each in found.items():
            below = any(other.startswith(f"{path}.") for other in each)
            values[arm] = each.get(path, "given" if below else "absent")
        inside = any(path.startswith(f"{parent}.") for parent in different)
        if len(set(values.values())) > 1 and not inside:
            different[path] = values
    return different


def arguments(tree: Tree, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path and value of each argument below `path`, and the function of each call."""
    for at, part in walk(tree, path):
        if isinstance(part, Call):
            yield at, part.name
        elif not child_trees(part):
            yield at, part if isinstance(part, str) else brief(part)


def values_text(values: Mapping[str, str]) -> str:
    """Returns values with the arms that have them: "64 (muon) and 128 (adamw, sgd)"."""
    return joined(with_arms(values))


def with_arms(values: Mapping[str, str]) -> list[str]:
    """Returns each different value with the arms that have it: "128 (adamw, sgd)"."""
    arms: dict[str, list[str]] = {}
    for arm, value in values.items():
        arms.setdefault(value, []).append(arm)
    return [f"{value} ({', '.join(of)})" for value, of in arms.items()]
