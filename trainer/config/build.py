"""Checks a tree against the functions that it names, and builds objects from it."""

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trainer.config import signatures, wording
from trainer.config.signatures import Function, Slot, TypeMismatch
from trainer.config.tree import (
    Call,
    Config,
    ConfigError,
    Key,
    Source,
    Tree,
    child_trees,
    functions,
    join,
    split_path,
)
from trainer.config.units import Units, is_steps, looks_like_quantity, quantity
from trainer.config.vocabulary import LANGUAGES, Language, Vocabulary
from trainer.config.wording import brief, describe, known_names, listing, nearest
from trainer.config.yaml_reader import PARTIAL


class Floats(NamedTuple):
    """Replaces floats and functions of a config while it is built."""

    # takes the path of a float, such as "optimizer.clip_norm", its value and the annotation of its
    # argument; returns what to use instead, or the value itself
    replace: Callable[[str, float, Any], Any]
    # takes each function that the config names; returns the one to call instead, or itself
    function: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call

    def within(
        self, function: Function, values: Mapping[str, Any], path: str
    ) -> tuple[Function, dict[str, Any]]:
        """Returns a function and its built arguments, with the defaults that were replaced."""
        found = dict(values)
        for name, parameter in function.parameters.items():
            default = parameter.default
            # A default that is a float is an input of the program as well: which floats are inputs
            # must not depend on whether the config repeats a default.
            if name not in values and type(default) is float:
                value = self.replace(join(path, name), default, parameter.hint)
                if value is not default:
                    found[name] = value
        return replace(function, call=self.function(function.call)), found


class Builder:
    """Builds the objects that a config describes; ConfigError if a package cannot be imported.

    Example:
        >>> from trainer import config
        >>> builder = config.Builder(config.load(["configs/muon_vit.yaml"]))
        >>> builder.check()
        >>> adamw = builder.build("optimizer.groups.rest.optimizer", units=config.Units(1000))
        >>> adamw.func.__name__, adamw.keywords["weight_decay"]
        ('adamw', 0.05)
    """

    # `only` is what the config may name; None for all that one with its root may.
    def __init__(
        self, config: Config, vocabulary: Sequence[str] = (), only: Language | None = None
    ):
        self.config = config
        language, named = only or LANGUAGES[config.root.name], functions(config.root)
        self._vocabulary = Vocabulary(vocabulary, language, named)

    def function(self, name: str) -> Function:
        """Returns a function by its dotted name, such as "optax.adamw"; raises ConfigError."""
        return self._vocabulary.function(name)

    def check(self) -> None:
        """Raises ConfigError for wrong names, arguments and types, all of them; calls nothing."""
        mistakes = _Mistakes()
        with mistakes.collected():
            _Traversal(self.config, self._vocabulary, calling=False).start("")
        for unused in self.config.unused:
            if unused.function is None:
                continue
            with mistakes.collected():
                functions = self._vocabulary.ending_with(unused.function, unused.source)
                if not any(unused.argument in each.parameters for each in functions):
                    text = unknown_argument(functions[0], unused.argument)
                    raise ConfigError(text, unused.source)
        mistakes.raise_all()

    def build(
        self,
        path: str = "",
        *,
        units: Units | None = None,
        overrides: Mapping[str, Any] | None = None,
        floats: Floats | None = None,
    ) -> Any:
        """Builds the node at a path, "" for the root; raises ConfigError, and KeyError for none."""
        # A call is an optimizer factory if its argument is annotated with `functools.partial` or an
        # optax transformation. It becomes a partial of its function; its arguments are built, and
        # optimizers among them become partials too. Any other function is called. `overrides` has
        # objects by path, used instead of building the nodes at these paths.
        for each in [path, *(overrides or ())]:
            if each not in self.config.sources:
                raise KeyError(f"The config has no node at {each!r}.")
        given = units or Units(), overrides or {}, floats
        return _Traversal(self.config, self._vocabulary, *given).start(path)


class _Mistakes:
    """Collects mistakes of which none is due to another, and raises them as one error."""

    def __init__(self, errors: Sequence[ConfigError] = ()):
        self._errors = list(errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps a ConfigError of the block for `raise_all`."""
        try:
            yield
        except ConfigErrors as error:
            self._errors += error.errors
        except ConfigError as error:
            self._errors.append(error)

    def raise_all(self) -> None:
        errors = list({str(error): error for error in self._errors}.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigErrors(errors)


class ConfigErrors(ConfigError):
    """Several mistakes, each in a line, in the order of the files."""

    def __init__(self, errors: Sequence[ConfigError]):
        sources = [error.source or Source("") for error in errors]
        files = [source.file for source in sources]
        order = sorted(range(len(files)), key=lambda n: (files.index(files[n]), sources[n].line))
        lines = [" ".join(str(errors[n]).split()) for n in order]
        more = [f"... and {len(lines) - 10} more."] if len(lines) > 10 else []
        super().__init__("\n".join([f"{len(lines)} mistakes:", *lines[:10], *more]))
        self.errors = errors


@dataclass(frozen=True)
class _Traversal:
    """Visits the tree once, and calls its functions or, for a check, only compares signatures."""

    config: Config
    vocabulary: Vocabulary
    units: Units = Units()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    floats: Floats | None = None
    calling: bool = True

    def start(self, path: str) -> Any:
        """Builds the node at a path, converted to the annotation of its argument."""
        tree, here, slot = self.config.root, "", Slot()
        for key in split_path(tree, path):
            slot = self._below(tree, key, slot, here)
            tree, here = child_trees(tree)[key], join(here, key)
        return self.value(tree, slot, path)

    def _below(self, tree: Tree, key: Key, slot: Slot, path: str) -> Slot:
        if isinstance(tree, Call):
            function = self.vocabulary.function(tree.name, self.config.sources[path])
            self._check_arguments(tree, function, path, None)
            return slot.of_argument(function, str(key), signatures.takes_optimizer(slot.hint))
        try:
            if isinstance(tree, dict):
                return slot.of_entry(key)
            return slot.of_elements(len(tree))[0][int(key)]
        except TypeMismatch:
            # `check` reports this value; here only the part of it at the path is built.
            return replace(slot, hint=Any, default=None)

    def value(self, tree: Tree, slot: Slot, path: str) -> Any:
        if path in self.overrides:
            return self.overrides[path]
        try:
            if isinstance(tree, Call):
                return self._call(tree, slot, path)
            if isinstance(tree, list):
                return self._list(tree, slot, path)
            if isinstance(tree, dict):
                return self._dict(tree, slot, path)
            if slot.takes_mask and not (tree is None or isinstance(tree, bool)):
                raise TypeMismatch
            leaf = self._leaf(tree, slot, path)
            # Replaced after the conversion: a 1 in the place of a float is 1.0.
            if self.floats is not None and type(leaf) is float:
                return self.floats.replace(path, leaf, slot.hint)
            return leaf
        except TypeMismatch:
            raise ConfigError(type_mismatch(tree, slot), self.config.sources[path]) from None

    def _leaf(self, value: Tree, slot: Slot, path: str) -> Any:
        if slot.takes_dtype and value is not None and not signatures.exists(value):
            raise TypeMismatch
        if isinstance(value, str) and slot.takes_steps:
            if quantity(value) is not None:
                return self._steps(value, self.config.sources[path])
            # An annotation that takes strings too would let '3 epoks' pass.
            if is_steps(slot.hint) or looks_like_quantity(value):
                raise TypeMismatch
        return signatures.leaf(value, slot.hint, slot.default)

    def _steps(self, value: str, source: Source | None) -> int:
        # A check knows no data set, so that it cannot convert units; the result is not used.
        return self.units.steps(value, source) if self.calling else 0

    def _list(self, tree: list, slot: Slot, path: str) -> Any:
        slots, kind = slot.of_elements(len(tree))
        built, mistakes = [], _Mistakes()
        for index, item in enumerate(tree):
            with mistakes.collected():
                built.append(self.value(item, slots[index], join(path, index)))
        mistakes.raise_all()
        return kind(built) if self.calling else built

    def _dict(self, tree: dict, slot: Slot, path: str) -> dict:
        key_slot = replace(slot, hint=signatures.entries(slot.hint)[0], default=None)
        built, mistakes = {}, _Mistakes()
        for key, item in tree.items():
            with mistakes.collected():
                built_key = self._key(key, key_slot, path)
                # Equal once their units are converted, perhaps. In a check all of them are 0.
                if built_key in built and self.calling:
                    text = f"Two keys of {path!r} are {built_key!r}. Remove one."
                    raise ConfigError(text, self.config.argument_source(join(path, key)))
                built[built_key] = self.value(item, slot.of_entry(key), join(path, key))
        mistakes.raise_all()
        return built

    def _key(self, key: Key, slot: Slot, path: str) -> Any:
        try:
            return self._leaf(key, slot, join(path, key))
        except TypeMismatch:
            text = f"{slot.owner} takes {signatures.describe_annotation(slot.hint)} as a key of"
            text += f" {slot.argument!r}, and was given {describe(key)}."
            raise ConfigError(text, self.config.argument_source(join(path, key))) from None

    def _call(self, call: Call, slot: Slot, path: str) -> Any:
        is_factory = signatures.takes_optimizer(slot.hint)
        # An optimizer needs all required arguments now; another function may get some when called.
        is_waiting = call.partial and (not is_factory or signatures.takes_callable(slot.hint))
        function = self.vocabulary.function(call.name, self.config.sources[path])
        # A schedule may stand for any float of an optimizer, although no annotation says so.
        is_schedule = slot.in_factory and signatures.takes_float(slot.hint)
        if is_factory:
            fits = signatures.returns_optimizer(slot.hint, function.returns)
        elif call.partial:
            fits = signatures.takes_function(slot.hint)
            fits &= not signatures.returns_factory(slot.hint, function.returns)
        else:
            fits = is_schedule or signatures.takes_result(slot.hint, function.returns)
        if not fits:
            raise TypeMismatch
        values, mistakes = {}, _Mistakes()
        with mistakes.collected():
            self._check_arguments(call, function, path, None if is_waiting else slot)
        for name, item in call.kwargs.items():
            if name in function.parameters:
                below = slot.of_argument(function, name, is_factory)
                with mistakes.collected():
                    values[name] = self.value(item, below, join(path, name))
        mistakes.raise_all()
        # Defaults that are numbers of steps with a unit are converted, too.
        for name, parameter in function.parameters.items():
            default = parameter.default
            if name not in values and isinstance(default, str) and quantity(default) is not None:
                if Slot().of_argument(function, name, False).takes_steps:
                    values[name] = self._steps(default, self.config.sources[path])
        if not self.calling:
            return None
        if self.floats is not None:
            function, values = self.floats.within(function, values, path)
        bound = function.bind(values)
        if is_factory:
            return bound
        if call.partial:
            # A partial without arguments would hide that the function is a class.
            return bound if bound.args or bound.keywords else function.call
        return self._result(bound, function.name, path)

    def _result(self, bound: functools.partial, name: str, path: str) -> Any:
        try:
            return bound()
        except ConfigError:
            raise
        # A function may reject its arguments with any exception, and a script's helper may exit.
        except (Exception, SystemExit) as error:
            said = exception_text(error)
            source = self.config.source_of_error(path, said)
            if not self.vocabulary.language.has(name):
                if not isinstance(error, ValueError):  # its sentence needs no type before it
                    said = wording.summary(error, name)
                elif line := wording.location(error, name):
                    said = f"{said.rstrip('.: ')}{line}"
            text = said if said.startswith(f"{name} ") else f"{name} refuses its arguments: {said}"
            if changed := [x for x in self.config.overridden(path) if x != str(source)]:
                text = f"{text.rstrip('.: ')}. Its arguments were changed by {', '.join(changed)}."
            raise ConfigError(text, source) from error

    def _check_arguments(
        self, call: Call, function: Function, path: str, slot: Slot | None
    ) -> None:
        """Raises ConfigError for arguments that a function does not have."""
        # If a `slot` is given, no required argument may be missing either.
        unknown = []
        for name in call.kwargs:
            if name not in function.parameters:
                if path:
                    text = unknown_argument(function, name)
                else:
                    text = unknown_at_root(call, function, name, self.config.sources)
                unknown.append(ConfigError(text, self.config.argument_source(join(path, name))))
        _Mistakes(unknown).raise_all()  # without what is missing: its name may be misspelt
        required = [name for name, each in function.parameters.items() if each.required]
        missing = [name for name in required if name not in call.kwargs]
        if slot is not None and missing:
            text = missing_arguments(function, missing, slot)
            raise ConfigError(text, self.config.sources[path])


# Messages about calls that do not fit: what was given, what exists, what to do.

_UNKNOWN_DTYPE = re.compile(r"data type '([^']*)' not understood")  # a message of numpy


def exception_text(error: BaseException) -> str:
    """Returns the message of an exception on one line, with its type unless a ValueError."""
    text = " ".join(str(error).split())
    if unknown := _UNKNOWN_DTYPE.search(text):
        text = f"{text.rstrip('.')}. {signatures.dtype_advice(unknown[1])}"
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def call_hint(call: Call) -> str:
    """Returns advice for a config that names a function where its result is expected."""
    return f" To pass what {call.name} returns, call it: @{call.name}() or !{call.name}."


def unknown_argument(function: Function, name: str) -> str:
    """Returns the message for an argument that a function does not have."""
    names = list(function.parameters)
    text = f"{function.name} has no argument {name!r}. "
    text += known_names(name, names, "It has") if names else "It takes no arguments."
    if function.open_ended:
        text += " It takes **kwargs, but a config names only arguments that its signature names."
    return text


def unknown_at_root(root: Call, function: Function, name: str, paths: Iterable[str]) -> str:
    """Returns the message for an argument that the root of a config does not have."""
    text = unknown_argument(function, name)
    below = [path for path in paths if path.endswith(f".{name}")]
    elsewhere = f" This config has {name} at {listing(below, 4)}." if below else ""
    own = LANGUAGES[root.name]
    # The kind that has the most of its arguments comes first.
    for other in sorted(
        LANGUAGES.values(),
        key=lambda x: -len({*root.kwargs} & {*Vocabulary(language=x).function(x.root).parameters}),
    ):
        if other is own or name not in Vocabulary(language=other).function(other.root).parameters:
            continue
        if not difflib.get_close_matches(name, function.parameters, 1, 0.85):
            text = f"{function.name} has no argument {name!r}."
        if not root.kwargs.keys().isdisjoint(own.marks):
            return f"{text}{elsewhere} {name!r} belongs to {other.what}: {other.place}."
        return f"{text}{elsewhere} This is the config of {other.what}: {other.command}."
    return text + elsewhere


def missing_arguments(function: Function, missing: Sequence[str], slot: Slot) -> str:
    """Returns the message for required arguments that are missing."""
    what, them = ("the arguments", "them") if len(missing) > 1 else ("the argument", "it")
    text = f"{function.name} needs {what} {listing(missing)}"
    if "rngs" in missing:  # of flax's nnx
        return (
            f"{text}, and a config cannot provide rngs. models.from_nnx builds nnx modules: name"
            f" the module there without calling it, constructor = @{function.name} in Gin or"
            f" constructor: !partial:{function.name} {{}} in YAML."
        )
    hint = slot.hint
    called = signatures.takes_optimizer(hint) or signatures.accepts_anything(hint)
    if called or not signatures.takes_function(hint):
        return f"{text}: add {them}."
    return (
        f"{text}: add {them}; or, to pass {function.name} itself without calling it, write"
        f" @{function.name} in Gin and !{PARTIAL}{function.name} {{}} in YAML."
    )


def type_mismatch(tree: Tree, slot: Slot) -> str:
    """Returns the message for a value that does not fit its argument, with advice."""
    words = "a mask" if slot.takes_mask else signatures.describe_annotation(slot.hint)
    words = "the name of a dtype" if slot.takes_dtype else words
    text = f"{slot.owner} takes {words} for {slot.argument!r}, and was given {describe(tree)}."
    parts, anything = signatures.union_members(slot.hint), signatures.accepts_anything(slot.hint)
    if isinstance(tree, Call):
        if tree.name == "optim.optimizer":
            text += (
                " optim.optimizer updates all parameters of a run, so it cannot be part of another"
                " optimizer: name a single optimizer here, and add groups at the root for other"
                " parameters."
            )
        elif words == "a Group" and tree.name != "optim.group":
            text += f" Call optim.group to make a group, with {tree.name} as its optimizer."
        elif tree.partial and not signatures.takes_optimizer(slot.hint):
            text += call_hint(tree)
    elif slot.takes_mask:
        text += (
            " A mask is a function of the parameters, or a tree of booleans like theirs. To select"
            " parameters by path, use a group: optim.group(match, optimizer)."
        )
    elif slot.takes_dtype:
        text += f" {signatures.dtype_advice(tree)}"
    elif isinstance(tree, str) and (near := nearest(tree, signatures.choices(slot.hint))):
        text += f" Did you mean {near!r}?"
    elif isinstance(tree, str) and _is_number(tree) and not anything and {int, float} & {*parts}:
        written = (
            "without quotes" if math.isfinite(float(tree)) else "as .nan, .inf or -.inf in YAML"
        )
        text += f" A number is written {written}."
    elif isinstance(tree, float) and signatures.takes_int(slot.hint) and tree.is_integer():
        text += f" Write it as {int(tree):_}." if abs(tree) < 1e15 else ""
    elif isinstance(tree, float) and slot.takes_steps and 0 < tree < 1:
        text += f" A share of the steps of the run is written with a sign, as in '{100 * tree:g}%'."
    elif isinstance(tree, str | float) and slot.takes_steps:
        text += " A number of steps may also be '5%', '3 epochs', '1_000 examples', '10M tokens'"
        text += " or '20 tokens/parameter'."
    elif isinstance(tree, str) and signatures.takes_int(slot.hint) and quantity(tree):
        text += (
            " Only numbers of steps have units: arguments that are named like warmup_steps, or"
            " annotated like Annotated[int, 'steps']."
        )
    elif isinstance(tree, str) and tree.lower() == "none" and (anything or type(None) in parts):
        text += " The value None is written None in Gin and null in YAML."
    elif words == "a Space" and isinstance(tree, list):
        text += (
            f" Values to choose from are written !space.values {{values: {brief(tree)}}} in YAML,"
            " and as the argument values of @space.values() in Gin."
        )
    elif words == "a Space" and isinstance(tree, dict):
        text += " An interval is written !space.log_uniform {low: 1e-4, high: 1e-2}, in YAML."
    elif words == "a Space":
        text += " A value that all trials have is written under set, not under space."
    elif signatures.takes_optimizer(slot.hint) and signatures.takes_callable(slot.hint):
        text += " Write a function itself as @name.of.it in Gin and !partial:name.of.it in YAML."
    elif signatures.takes_function(slot.hint) or not any(map(signatures.is_scalar, parts)):
        text += " A call is written @name.of.function() in Gin and !name.of.function in YAML."
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
