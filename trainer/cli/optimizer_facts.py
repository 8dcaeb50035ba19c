"""What is known of an optimizer: its function, its docstring, its cost, and a config that uses it.

The docstring is read at once; costs and configs are computed when they are first asked for, which
takes some hundredths of a second each.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from optim.factories import recipes_within, takes_float
from trainer.cli import docstrings
from trainer.cli.optimizer_families import AFTER, EXAMPLES, FAMILIES, PIECES
from trainer.config import Builder, Call, Config, ConfigError, Source, Tree, Units, join
from trainer.config.nodes import Node, plain, to_config
from trainer.config.schema import is_optimizer
from trainer.config.signatures import Function
from trainer.config.tree import child_trees
from trainer.config.vocabulary import Vocabulary
from trainer.config.wording import cause, listing, nearest
from trainer.config.yaml_reader import read
from trainer.engine import optimizer_cost
from trainer.engine.optimizer_cost import Cost
from trainer.messages import UserError
from trainer.sweep.published_spaces import SearchSpace, spaces_of

PARTS = "Parts of optim.chain"
_RATE, _FLOAT = 1e-3, 0.1  # arguments of which nothing is known
_CHAIN = "!optim.chain"
_ADAMW = "!optax.adamw {learning_rate: 1e-3}"


class Facts:
    """What is known of an optimizer, or of a piece of one."""

    # `rule` has the formulas of the docstring, or else its second paragraph; `failure` is the error
    # of a user's optimizer when its cost was measured.

    def __init__(self, function: Function, family: str, packages: Sequence[str] = ()):
        self.function = function
        self.name = function.name  # in a config
        self.family = family
        self.failure = ""
        self._packages = tuple(packages)
        doc = docstrings.docstring(function.call)
        self.summary = docstrings.summary(doc)
        if isinstance(function.call, partial):  # optax.nadam is optax.adam with an argument
            bound = ", ".join(f"{name}={x!r}" for name, x in function.call.keywords.items())
            self.summary = f"{self.summary.rstrip('.')}, with {bound}."
        self.rule = docstrings.rule(doc)
        self.references = docstrings.references(doc)

    @property
    def spaces(self) -> Sequence[SearchSpace]:
        """Its search spaces; see `published_spaces`."""
        return spaces_of(self.name)

    @property
    def is_part(self) -> bool:
        """Whether it is no optimizer by itself, and stands in optim.chain."""
        return self.name.startswith("parts.") or self.family in list(PIECES)[:1]

    @cached_property
    def example(self) -> str | None:
        """The optimizer that a config can begin with, in YAML; None if none is known."""
        call = EXAMPLES.get(self.name)
        if call is None:
            given = self._arguments()
            if given is None or self.family in list(PIECES)[1:]:
                return None
            call = f"!{self.name} {{{', '.join(f'{name}: {x!r}' for name, x in given.items())}}}"
        if not self.is_part or call.startswith(_CHAIN):
            return call
        parts = f"before: [!parts.momentum {{}}, {call}]"
        if self.name in AFTER:
            parts = f"before: [!parts.momentum {{}}], after: [{call}]"
        elif self.name == "parts.momentum" or self.family != PARTS:  # a direction by itself
            parts = f"before: [{call}]"
        return f"{_CHAIN} {{learning_rate: {_RATE}, {parts}}}"

    def _arguments(self) -> dict[str, float] | None:
        """Returns values of the rate and of required arguments; None if one is not a float."""
        found = {}
        for name, parameter in self.function.parameters.items():
            is_rate = name == "learning_rate"
            if is_rate and self.spaces and not isinstance(parameter.default, float):
                found[name] = _middle(self.spaces[0])
            elif parameter.required:
                if not takes_float(self.function.call, name):
                    return None
                found[name] = _RATE if is_rate else _FLOAT
        return found

    @cached_property
    def recipe(self) -> partial | None:
        """The optimizer of `example` as a group has it; None if there is none."""
        if self.example is None:
            return None
        config = _config(f"optimizer: {self.example}")
        return Builder(config, self._packages).build("optimizer", units=Units(300))

    @cached_property
    def cost(self) -> Cost | None:
        """What it keeps and computes; None if `example` is None, or an update raises an error."""
        try:
            if self.recipe is None:
                return None
            if not self.is_part:
                return optimizer_cost.measure(self.recipe)
            calls = recipes_within(self.recipe)
            part = next(each for each in calls if each.func is self.function.call)
            return optimizer_cost.measure_part(part)
        except Exception as error:
            if self.family not in self._packages:
                raise
            self.failure = cause(error)  # of the user's function, which may raise anything
            return None

    def schedules(self) -> dict[str, bool]:
        """Returns which of its float arguments can follow a schedule; {} without an example."""
        if self.cost is None or self.recipe is None:
            return {}
        return optimizer_cost.follows_schedules(self.recipe, self.function.call)

    @cached_property
    def inside(self) -> list[str]:
        """The optimizers inside that of `example`, whose cost is part of its own."""
        if self.example is None or self.is_part:
            return []
        calls = _calls(_config(f"optimizer: {self.example}").root)
        known = {name for family in FAMILIES.values() for name in family}
        known -= {self.name, "optax.chain"}
        return [name for name in dict.fromkeys(name for _, name in calls) if name in known]

    @cached_property
    def config(self) -> Config | None:
        """A config of a run that uses it; None if its cost is not known."""
        if self.example is None or self.cost is None:
            return None
        optimizer = self.example
        if "matrices" in self.cost.needs:
            optimizer = (
                f"!optim.optimizer {{groups: {{matrices: !optim.group {{match: .*/kernel,"
                f" optimizer: {self.example}}}, rest: !optim.group {{match: .*,"
                f" optimizer: {_ADAMW}}}}}}}"
            )
        size = "null" if "whole batches" in self.cost.needs else 128
        return _config(
            f"model: !models.mlp {{width: 32}}\ndata: !data.digits {{batch_size: {size}}}\n"
            f"loss: !losses.softmax_cross_entropy {{}}\noptimizer: {optimizer}\nsteps: 300\n"
        )

    @property
    def path(self) -> str:
        """The path of the call of this function in `config`; of the chain that a part is in."""
        assert self.config is not None
        name = _CHAIN[1:] if self.is_part else self.name
        return next(path for path, called in _calls(self.config.root) if called == name)


def families(packages: Sequence[str] = ()) -> dict[str, list[Facts]]:
    """Returns what a config can name as an optimizer, or a part of optim.chain, by family."""
    # Each of the user's packages is a family. Raises ConfigError if one cannot be imported.
    vocabulary = Vocabulary(packages)
    names = {**FAMILIES, PARTS: vocabulary.names("parts")}
    for package in packages:
        found = map(vocabulary.function, vocabulary.names(package))
        names[package] = [each.name for each in found if is_optimizer(each)]
    return {
        family: [Facts(vocabulary.function(name), family, packages) for name in members]
        for family, members in names.items()
    }


def find(name: str, packages: Sequence[str] = ()) -> tuple[Facts, list[str]]:
    """Finds an optimizer or a piece of one by its name; UserError if there is none."""
    # A name is such as "optim.muon", "muon" or "floor". The list has the full names of others to
    # which a short name applies as well.
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
        raise UserError(_no_such(name, known, vocabulary))
    # Those of Lockstep first, as in the families.
    found.sort(key=lambda each: each.startswith("optax."))
    facts = Facts(vocabulary.function(found[0]), known[found[0]], packages)
    return facts, found[1:]


def _no_such(name: str, known: dict[str, str], vocabulary: Vocabulary) -> str:
    try:
        other = vocabulary.function(name).name
    except ConfigError:
        other = ""
    hint = f"There is no optimizer {name!r}."
    if other:
        hint = f"{other} is a function that a config may name, but not an optimizer."
    last = {each.rpartition(".")[2]: each for each in reversed(known)}
    near = nearest(name, known) or last.get(nearest(name.rpartition(".")[2], last) or "")
    if near and not other:
        hint += f" Did you mean {near!r}?"
    elif "." in name and not other:
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
    node = read(space.axes["learning_rate"], Source("space"))
    assert node is not None
    given = plain(node).kwargs
    if "low" in given:
        return float(f"{math.sqrt(given['low'] * given['high']):.1g}")
    return given["values"][(len(given["values"]) - 1) // 2]


def _config(text: str) -> Config:
    node = read(text, Source("optimizers"))
    assert node is not None
    return to_config(Node(Call("experiment", node.value), node.source))


def _calls(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path and the name of each call."""
    if isinstance(tree, Call):
        yield path, tree.name
    for key, child in child_trees(tree).items():
        yield from _calls(child, join(path, key))
