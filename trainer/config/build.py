"""Checks a tree against the functions that it names, and builds it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.config import annotations, blame, conversion, refusals
from trainer.config.conversion import Misfit
from trainer.config.signatures import Function
from trainer.config.slots import Slot
from trainer.config.tree import (
    Call,
    Config,
    ConfigError,
    Key,
    Source,
    Tree,
    Unused,
    branches,
    join,
    locate,
)
from trainer.config.units import Units, is_steps, looks_like_quantity, quantity
from trainer.config.vocabulary import Vocabulary

__all__ = ["Builder", "Units"]


class Builder:
    """Builds the objects that a config describes.

    Args:
        config: the config.
        vocabulary: packages beside ours whose functions the config may name.

    Raises:
        ConfigError: a package of the vocabulary is none, or clashes with ours.
    """

    def __init__(self, config: Config, vocabulary: Sequence[str] = ()):
        self.config = config
        self._vocabulary = Vocabulary(vocabulary)

    def check(self) -> None:
        """Raises ConfigError for a wrong name, argument or type anywhere; calls nothing."""
        _Walk(self.config, self._vocabulary, None, {}, calling=False).start("")
        for unused in self.config.unused:
            self._check_unused(unused)

    def _check_unused(self, unused: Unused) -> None:
        """Raises ConfigError for a binding whose function or argument does not exist."""
        if unused.function is None:
            return
        functions = self._vocabulary.ending_with(unused.function, unused.source)
        if not any(unused.argument in function.parameters for function in functions):
            text = refusals.unknown_argument(functions[0], unused.argument)
            raise ConfigError(text, unused.source)

    def build(
        self, path: str = "", *, units: Units | None = None, given: Mapping[str, Any] | None = None
    ) -> Any:
        """Builds the node at a path.

        A call in the place of an optimizer (its parameter is annotated with `functools.partial` or
        an optax transformation) is a recipe: it becomes a partial of its function, whose own
        arguments are built, and optimizers among them are recipes again. Any other is called.

        Args:
            path: the node, by its dotted path; "" is the root, an experiment.
            units: what step counts with a unit are measured by.
            given: objects that stand for the nodes at some paths, instead of building them.

        Returns:
            What the function of the node returns; of a leaf, its value.

        Raises:
            ConfigError: the tree does not fit its functions, or one of them raises.
            KeyError: there is no node at the path, or at a path of `given`.
        """
        for each in [path, *(given or ())]:
            if each not in self.config.sources:
                raise KeyError(f"The config has no node at {each!r}.")
        walk = _Walk(self.config, self._vocabulary, units, given or {}, calling=True)
        return walk.start(path)


class _Walk:
    """One pass over the tree, which calls the functions or, for a check, only looks at them."""

    def __init__(
        self,
        config: Config,
        vocabulary: Vocabulary,
        units: Units | None,
        given: Mapping[str, Any],
        calling: bool,
    ):
        self._config = config
        self._vocabulary = vocabulary
        self._units = units
        self._given = given
        self._calling = calling

    def start(self, path: str) -> Any:
        """Builds the node at a path, as the place in which it stands wants it."""
        tree, here, slot = self._config.root, "", Slot()
        for key in locate(tree, path):
            slot = self._below(tree, key, slot, here)
            tree, here = branches(tree)[key], join(here, key)
        return self.value(tree, slot, path)

    def _below(self, tree: Tree, key: Key, slot: Slot, path: str) -> Slot:
        if isinstance(tree, Call):
            function = self._function(tree, path, complete=False)
            return slot.of_argument(function, str(key), annotations.mentions_recipe(slot.hint))
        try:
            if isinstance(tree, dict):
                return slot.of_entry(key)
            return slot.of_elements(len(tree))[0][int(key)]
        except Misfit:
            return replace(slot, hint=Any, default=None)

    def value(self, tree: Tree, slot: Slot, path: str) -> Any:
        if path in self._given:
            return self._given[path]
        try:
            if isinstance(tree, Call):
                return self._call(tree, slot, path)
            if isinstance(tree, list):
                return self._list(tree, slot, path)
            if isinstance(tree, dict):
                return self._dict(tree, slot, path)
            if slot.takes_mask and not (tree is None or isinstance(tree, bool)):
                raise Misfit
            return self._leaf(tree, slot, path)
        except Misfit:
            raise ConfigError(refusals.misfit(tree, slot), self._config.sources[path]) from None

    def _leaf(self, value: Tree, slot: Slot, path: str) -> Any:
        if isinstance(value, str) and slot.takes_steps:
            if quantity(value) is not None:
                return self._steps(value, self._config.sources[path])
            if is_steps(slot.hint) or looks_like_quantity(value):
                raise Misfit
        return conversion.leaf(value, slot.hint, slot.default)

    def _steps(self, value: str, source: Source | None) -> int:
        if self._calling:
            return (self._units or Units()).steps(value, source)
        return 0

    def _list(self, tree: list, slot: Slot, path: str) -> Any:
        slots, kind = slot.of_elements(len(tree))
        built = [self.value(item, slots[i], join(path, i)) for i, item in enumerate(tree)]
        return kind(built) if self._calling else built

    def _dict(self, tree: dict, slot: Slot, path: str) -> dict:
        key_slot = slot.of_keys()
        built = {}
        for key, item in tree.items():
            below = join(path, key)
            try:
                built_key = self._leaf(key, key_slot, below)
            except Misfit:
                source = self._config.argument_source(below)
                raise ConfigError(refusals.misfit_key(key, key_slot), source) from None
            if built_key in built and self._calling:
                source = self._config.argument_source(below)
                raise ConfigError(f"Another key of {path!r} is {built_key!r} too.", source)
            built[built_key] = self.value(item, slot.of_entry(key), below)
        return built

    def _call(self, call: Call, slot: Slot, path: str) -> Any:
        is_recipe = annotations.mentions_recipe(slot.hint)
        # An optimizer's factory is called as it is; any other function is given the rest later.
        is_waiting = call.partial and (not is_recipe or annotations.takes_callable(slot.hint))
        function = self._function(call, path, complete=not is_waiting)
        is_schedule = slot.in_recipe and annotations.takes_float(slot.hint)
        if is_recipe:
            fits = annotations.takes_recipe(slot.hint, function.returns)
        elif call.partial:
            fits = annotations.takes_function(slot.hint)
            fits &= not annotations.is_factory_of_what_fits(slot.hint, function.returns)
        else:
            fits = is_schedule or annotations.takes_result(slot.hint, function.returns)
        if not fits:
            raise Misfit
        values = {
            name: self.value(item, slot.of_argument(function, name, is_recipe), join(path, name))
            for name, item in call.kwargs.items()
        }
        values |= self._default_steps(function, values, path)
        if not self._calling:
            return None
        bound = function.bind(values)
        if is_recipe:
            return bound
        if call.partial:
            return bound if bound.args or bound.keywords else function.call
        return self._result(bound, function.name, path)

    def _result(self, bound: functools.partial, name: str, path: str) -> Any:
        try:
            return bound()
        except ConfigError:
            raise
        except Exception as error:  # whatever a function says about its arguments
            said = refusals.said(error)
            source = self._config.accused(path, said)
            if not isinstance(error, ValueError) and not self._vocabulary.is_ours(name):
                said = blame.told(error, name)
            raise ConfigError(f"{name} refuses its arguments: {said}", source) from error

    def _function(self, call: Call, path: str, complete: bool) -> Function:
        """Returns the function of a call, if it takes these arguments; raises ConfigError.

        If `complete`, they must also be all that it needs.
        """
        function = self._vocabulary.function(call.name, self._config.sources[path])
        for name in call.kwargs:
            if name not in function.parameters:
                source = self._config.argument_source(join(path, name))
                raise ConfigError(refusals.unknown_argument(function, name), source)
        missing = [
            name
            for name, parameter in function.parameters.items()
            if parameter.required and name not in call.kwargs
        ]
        if complete and missing:
            raise ConfigError(
                refusals.missing_arguments(function, missing), self._config.sources[path]
            )
        return function

    def _default_steps(
        self, function: Function, values: Mapping[str, Any], path: str
    ) -> dict[str, int]:
        """Returns the defaults of a function that are step counts with a unit, resolved."""
        slots = {
            name: Slot().of_argument(function, name, False)
            for name, parameter in function.parameters.items()
            if name not in values and isinstance(parameter.default, str)
        }
        return {
            name: self._steps(slot.default, self._config.sources[path])
            for name, slot in slots.items()
            if slot.takes_steps and quantity(slot.default) is not None
        }
