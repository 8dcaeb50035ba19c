"""What is known of an optimizer: its function, its docstring, its cost, and a config that uses it.

The docstring is read at once; costs and configs are computed when they are first asked for, which
takes some hundredths of a second each.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from optim.factories import kind_of, recipes_within
from trainer.cli import docstrings
from trainer.cli.optimizer_families import (
    AFTER,
    EXAMPLES,
    FAMILIES,
    OUR_SPACES,
    PIECES,
    PUBLISHED_SPACES,
    Published,
    SearchSpace,
    decade,
    parsed,
    published,
    published_entries,
)
from trainer.config import Builder, Call, Config, ConfigError, Source, Tree, Units
from trainer.config.edit import config_of_tree
from trainer.config.schema import is_optimizer
from trainer.config.signatures import Function
from trainer.config.tree import functions, walk
from trainer.config.vocabulary import Vocabulary
from trainer.config.wording import cause, listing, nearest
from trainer.engine import flops
from trainer.messages import UserError, joined

PARTS = "Parts of optim.chain"
COMPOSITIONS = "Published compositions"
_RATE, _FLOAT = 1e-3, 0.1  # arguments of which nothing is known
_CHAIN = "optim.chain"
_REST = Call(
    "optim.group", {"match": ".*", "optimizer": Call("optax.adamw", {"learning_rate": 1e-3})}
)


class Facts:
    """What is known of an optimizer, or of a piece of one."""

    # `rule` has the formulas of the docstring, or else its second paragraph; `failure` says why its
    # cost is not known, such as the error of a user's optimizer when it was measured.

    def __init__(
        self,
        function: Function,
        family: str,
        packages: Sequence[str] = (),
        composition: Published | None = None,
    ):
        self.function = function
        self.name = function.name  # in a config
        self.family = family
        self.composition = composition  # what it is of, if it is one; `function` is the outer call
        self.failure = ""
        self._packages = tuple(packages)
        if composition is not None:
            self.name, self.summary, self.rule = composition.name, composition.summary, ""
            self.references = docstrings.references(f"References: {composition.paper}")
            return
        call, bound = function.call, ""
        while isinstance(call, partial):  # optax.nadam is optax.adam with an argument
            bound = bound or ", ".join(f"{name}={x!r}" for name, x in call.keywords.items())
            call = call.func
        doc = inspect.getdoc(call) or ""
        self.summary = docstrings.summary_of(doc)
        if bound:
            self.summary = f"{self.summary.rstrip('.')}, with {bound}."
        self.rule = docstrings.rule(doc)
        self.references = docstrings.references(doc)

    @property
    def spaces(self) -> Sequence[SearchSpace]:
        """Its published search spaces, or else ours; none if it has none."""
        if self.composition is not None:
            return [decade(self.composition.rate, "its rate above", self.composition.rate_path)]
        return PUBLISHED_SPACES.get(
            self.name, [OUR_SPACES[self.name]] if self.name in OUR_SPACES else []
        )

    @property
    def is_part(self) -> bool:
        """Whether it is no optimizer by itself, and stands in optim.chain."""
        return self.name.startswith("parts.") or self.family in list(PIECES)[:1]

    @cached_property
    def optimizer(self) -> Call | None:
        """The optimizer that a config can begin with; None if none is known."""
        if self.composition is not None:
            return self.composition.optimizer
        if (call := EXAMPLES.get(self.name)) is None:
            if (given := self._arguments()) is None or self.family in list(PIECES)[1:]:
                return None
            call = Call(self.name, given)
        if self.is_part and call.name != _CHAIN:
            momentum = Call("parts.momentum", {})
            parts: dict[str, list[Tree]] = {"before": [momentum, call]}
            if self.name in AFTER:
                parts = {"before": [momentum], "after": [call]}
            elif self.name == "parts.momentum" or self.family != PARTS:  # a direction by itself
                parts = {"before": [call]}
            call = Call(_CHAIN, {"learning_rate": _RATE, **parts})
        return call

    def _arguments(self) -> dict[str, float] | None:
        """Returns values of the rate and of required arguments; None if one is not a float."""
        found = {}
        for name, parameter in self.function.parameters.items():
            is_rate = name == "learning_rate"
            if is_rate and self.spaces and not isinstance(parameter.default, float):
                found[name] = _middle(self.spaces[0])
            elif parameter.required:
                if kind_of(self.function.call, name) != "float":
                    return None
                found[name] = _RATE if is_rate else _FLOAT
        return found

    @cached_property
    def recipe(self) -> partial | None:
        """The `optimizer` as a group has it; None if there is none."""
        if self.optimizer is None:
            return None
        config = _with_optimizer("optimizer: null", self.optimizer)
        return Builder(config, self._packages).build("optimizer", units=Units(300))

    @property
    def has_groups(self) -> bool:
        """Whether `optimizer` is that of a whole run, with its groups."""
        return self.optimizer is not None and self.optimizer.name == "optim.optimizer"

    @cached_property
    def cost(self) -> flops.Cost | None:
        """What it keeps and computes; None if `optimizer` is None, or an update raises an error."""
        try:
            if self.has_groups:
                self.failure = "it wraps the optimizers of all groups, whose cost is to be added"
                return None
            if self.recipe is None:
                return None
            if not self.is_part:
                return flops.measure_optimizer(self.recipe)
            recipes = recipes_within(self.recipe)
            part = next(each for each in recipes if each.func is self.function.call)
            return flops.measure_part(part)
        except Exception as error:
            if self.family not in self._packages:
                raise
            self.failure = cause(error)  # of the user's function, which may raise anything
            return None

    def schedules(self) -> dict[str, bool]:
        """Returns which of its float arguments can follow a schedule; {} without an example."""
        if self.cost is None or self.recipe is None:
            return {}
        return flops.follows_schedules(self.recipe, self.function.call)

    @cached_property
    def inside(self) -> list[str]:
        """The optimizers inside `optimizer`, whose cost is part of its own."""
        if self.optimizer is None or self.is_part:
            return []
        known = {name for family in FAMILIES.values() for name in family}
        known -= {self.function.name, "optax.chain"}
        return [name for name in dict.fromkeys(functions(self.optimizer)) if name in known]

    @cached_property
    def config(self) -> Config | None:
        """A config of a run that uses it; None if its cost is not known."""
        if self.optimizer is None or (self.cost is None and not self.has_groups):
            return None
        needs = () if self.cost is None else self.cost.needs
        optimizer = self.optimizer
        if "matrices" in needs:
            matrices = Call("optim.group", {"match": "block.*/kernel", "optimizer": optimizer})
            optimizer = Call("optim.optimizer", {"groups": {"matrices": matrices, "rest": _REST}})
        size = "null" if "whole batches" in needs else 128
        model = f"model: !models.mlp {{width: 32}}\ndata: !data.digits {{batch_size: {size}}}\n"
        if "observations" in needs:
            model = "model: !models.gpt {width: 32, depth: 2, num_heads: 2, qk_norm: false}\n"
            model += "data: !data.text {length: 64, batch_size: 16}\n"
        rest = "loss: !losses.softmax_cross_entropy {}\noptimizer: null\nsteps: 300\n"
        return _with_optimizer(model + rest, optimizer)

    @property
    def path(self) -> str:
        """The path of the call of this function in `config`; of the chain that a part is in."""
        assert self.config is not None
        name = _CHAIN if self.is_part else self.function.name
        return next(path for path, call in calls(self.config.root) if call.name == name)


def families(packages: Sequence[str] = ()) -> dict[str, list[Facts]]:
    """Returns what a config can name as an optimizer, or a part of optim.chain, by family."""
    # Each of the user's packages is a family. Raises ConfigError if one cannot be imported.
    vocabulary = Vocabulary(packages)
    compositions = [
        _composition(x, vocabulary, packages) for x in published_entries() if not x.missing
    ]
    names = {**FAMILIES, PARTS: vocabulary.names("parts")}
    for package in packages:
        found = map(vocabulary.function, vocabulary.names(package))
        names[package] = [each.name for each in found if is_optimizer(each)]
    found = {
        family: [Facts(vocabulary.function(name), family, packages) for name in members]
        for family, members in names.items()
    }
    return {**found, COMPOSITIONS: compositions}


def _composition(given: Published, vocabulary: Vocabulary, packages: Sequence[str]) -> Facts:
    return Facts(vocabulary.function(given.optimizer.name), COMPOSITIONS, packages, given)


def find_optimizer(name: str, packages: Sequence[str] = ()) -> tuple[Facts, list[str]]:
    """Finds an optimizer or a piece of one by its name; UserError if there is none."""
    # A name is such as "optim.muon", "muon", "floor" or "NorMuon". The list has the full names of
    # others to which a short name applies as well.
    vocabulary = Vocabulary(packages)
    tables = {**FAMILIES, PARTS: vocabulary.names("parts"), **PIECES}
    tables |= {package: vocabulary.names(package) for package in packages}
    known = {each: family for family, names in tables.items() for each in names}
    # Of a module of a package, which is imported because it is named.
    package = next((each for each in packages if name.startswith(f"{each}.")), None)
    if package and name not in known:
        with contextlib.suppress(ConfigError):
            if is_optimizer(function := vocabulary.function(name)):
                return Facts(function, package, packages), []
    spelled = name.replace("optim.parts.", "parts.")
    found = [each for each in known if each == spelled]
    found = found or [each for each in known if each.endswith(f".{spelled}")]
    if not found:
        if (composition := published(name)) is None:
            raise UserError(_no_such(name, known, vocabulary, packages))
        if composition.missing:
            raise UserError(f"{composition.name} ({composition.paper}): {composition.missing}.")
        return _composition(composition, vocabulary, packages), []
    # Those of Lockstep first, as in the families.
    found.sort(key=lambda each: each.startswith("optax."))
    return Facts(vocabulary.function(found[0]), known[found[0]], packages), found[1:]


def _no_such(
    name: str, known: dict[str, str], vocabulary: Vocabulary, packages: Sequence[str]
) -> str:
    try:
        other = vocabulary.function(name).name
    except ConfigError:
        other = ""
    hint = f"There is no optimizer {name!r}."
    if other:
        hint = f"{other} is a function that a config may name, but not an optimizer."
    last = {each.name: each.name for each in published_entries()}
    last |= {each.rpartition(".")[2]: each for each in reversed(known)}
    near = nearest(name, known) or last.get(nearest(name.rpartition(".")[2], last) or "")
    if near and not other:
        hint += f" Did you mean {near!r}?"
    if packages and "." not in name and not other:
        whole = " or ".join(f"{package}.MODULE.{name}" for package in packages)
        hint += f" For one in a module of {joined(packages)}, write {whole}."
    elif "." in name and not near and not other:
        roots = listing(sorted({each.partition(".")[0] for each in known}))
        hint += (
            f" A name begins with {roots}; for a package of yours, add --vocabulary=PACKAGE to the"
            " command."
        )
    return f"{hint} python -m trainer optimizers lists all of them."


def _middle(space: SearchSpace) -> float:
    """Returns a rate in the middle of a space; that of an interval is rounded to one digit."""
    if space.around is not None:
        return space.around
    given = parsed(space.axes["learning_rate"]).kwargs
    if "low" in given:
        return float(f"{math.sqrt(given['low'] * given['high']):.1g}")
    return given["values"][(len(given["values"]) - 1) // 2]


def _with_optimizer(text: str, optimizer: Call) -> Config:
    """Returns the config that a text in YAML has, with this optimizer."""
    root = Call("experiment", {**parsed(text), "optimizer": optimizer})
    return config_of_tree(root, Source("optimizers"))


def calls(tree: Tree) -> Iterator[tuple[str, Call]]:
    """Yields the path and each call of a tree, the outer ones first."""
    return ((path, part) for path, part in walk(tree) if isinstance(part, Call))
