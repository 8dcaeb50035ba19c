"""Checks a tree against the functions that it names, and builds objects from it."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trainer.config import annotations, build_errors, signatures, wording
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
                    text = build_errors.unknown_argument(functions[0], unused.argument)
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
            return slot.of_argument(function, str(key), annotations.takes_optimizer(slot.hint))
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
            text = build_errors.type_mismatch(tree, slot)
            raise ConfigError(text, self.config.sources[path]) from None

    def _leaf(self, value: Tree, slot: Slot, path: str) -> Any:
        if slot.takes_dtype and value is not None and not annotations.exists(value):
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
            text = f"{slot.owner} takes {annotations.describe(slot.hint)} as a key of"
            text += f" {slot.argument!r}, and was given {wording.describe(key)}."
            raise ConfigError(text, self.config.argument_source(join(path, key))) from None

    def _call(self, call: Call, slot: Slot, path: str) -> Any:
        is_factory = annotations.takes_optimizer(slot.hint)
        # An optimizer needs all required arguments now; another function may get some when called.
        is_waiting = call.partial and (not is_factory or annotations.takes_callable(slot.hint))
        function = self.vocabulary.function(call.name, self.config.sources[path])
        # A schedule may stand for any float of an optimizer, although no annotation says so.
        is_schedule = slot.in_factory and annotations.takes_float(slot.hint)
        if is_factory:
            fits = annotations.returns_optimizer(slot.hint, function.returns)
        elif call.partial:
            fits = annotations.takes_function(slot.hint)
            fits &= not annotations.returns_factory(slot.hint, function.returns)
        else:
            fits = is_schedule or annotations.takes_result(slot.hint, function.returns)
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
            said = build_errors.exception_text(error)
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
                    text = build_errors.unknown_argument(function, name)
                else:
                    text = build_errors.unknown_at_root(call, function, name, self.config.sources)
                unknown.append(ConfigError(text, self.config.argument_source(join(path, name))))
        _Mistakes(unknown).raise_all()  # without what is missing: its name may be misspelt
        required = [name for name, each in function.parameters.items() if each.required]
        missing = [name for name in required if name not in call.kwargs]
        if slot is not None and missing:
            text = build_errors.missing_arguments(function, missing, slot)
            raise ConfigError(text, self.config.sources[path])
