"""Writes a config with every argument of every call, the defaults too."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import signatures
from trainer.config.build import Builder
from trainer.config.signatures import Slot, TypeMismatch
from trainer.config.tree import Call, Config, ConfigError, Tree, join
from trainer.config.units import quantity
from trainer.config.yaml_writer import dump

_HEAD = """\
# Every argument of every call, the defaults of this version among them. It describes the same
# run as the config that it was made from, with the same bits.
"""
_NOT_SPELLED = "# Defaults that it leaves to the functions, as a config cannot say the same:\n"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 100  # characters of a default in a comment


def full_text(config: Config, vocabulary: Sequence[str] = ()) -> str:
    """Returns the YAML of a config with the defaults of every call, which means the same run."""
    # Comments at the end list the defaults that no config can spell, such as a function or an
    # array, with their paths; and those of calls that stand for a function (`!partial:`), which
    # whoever calls it may replace.
    root, left = complete(config, vocabulary)
    lines = [f"#   {path}: {text}\n" for path, text in left.items()]
    return "".join([_HEAD, dump(root), *([_NOT_SPELLED] if lines else []), *lines])


def complete(
    config: Config, vocabulary: Sequence[str] = (), keep_unknown: bool = False
) -> tuple[Call, dict[str, str]]:
    """Returns a tree with all defaults, and path -> text for those that a config cannot spell.

    A call of a function that is not found raises ConfigError, or with `keep_unknown` stays as it is
    written.

    Example:
        >>> from trainer import config
        >>> root, _ = complete(config.load(["configs/muon_vit.yaml"]))
        >>> root.kwargs["precision"], root.kwargs["log_every"]
        ('float32', '2%')
    """
    completion = _Completion(Builder(config, vocabulary).function, keep_unknown)
    return completion.call(config.root, Slot(), ""), completion.left


class _Completion:
    """Copies a tree, and adds defaults to its calls; `left` are those that cannot be added."""

    def __init__(self, function_of: Any, keep_unknown: bool = False):
        self._function_of, self._keep_unknown = function_of, keep_unknown
        self.left: dict[str, str] = {}

    def call(self, call: Call, slot: Slot, path: str) -> Call:
        try:
            function = self._function_of(call.name)
        except ConfigError:
            if self._keep_unknown:
                return call
            raise
        is_factory = signatures.takes_optimizer(slot.hint)
        kwargs = {
            name: self._tree(x, slot.of_argument(function, name, is_factory), join(path, name))
            for name, x in call.kwargs.items()
        }
        # The default of a field of a dataclass may come from its `default_factory`.
        called: Any = function.call
        fields = dataclasses.fields(called) if dataclasses.is_dataclass(called) else ()
        makers = {x.name: x.default_factory for x in fields}
        for name, parameter in function.parameters.items():
            if name in kwargs or parameter.default is inspect.Parameter.empty:
                continue
            make = makers.get(name, dataclasses.MISSING)
            default = parameter.default if make is dataclasses.MISSING else make()
            argument = slot.of_argument(function, name, is_factory)
            try:
                # Whoever calls a partial may pass an argument by position, which must be free then.
                if call.partial:
                    raise TypeMismatch
                kwargs[name] = _spelled(default, argument)
            except TypeMismatch:
                self.left[join(path, name)] = _described(default)
        return Call(call.name, kwargs, call.partial)

    def _tree(self, tree: Tree, slot: Slot, path: str) -> Tree:
        if isinstance(tree, Call):
            return self.call(tree, slot, path)
        try:
            if isinstance(tree, list):
                slots, _ = slot.of_elements(len(tree))
                return [self._tree(x, slots[i], join(path, i)) for i, x in enumerate(tree)]
            if isinstance(tree, dict):
                return {
                    key: self._tree(x, slot.of_entry(key), join(path, key))
                    for key, x in tree.items()
                }
        except TypeMismatch:  # the builder was given an object in place of this value
            pass
        return tree


def _spelled(default: Any, slot: Slot) -> Tree:
    """Returns the tree that a builder converts to a default; raises TypeMismatch."""
    if isinstance(default, str) and slot.takes_steps and quantity(default) is not None:
        return default  # '5%', which is converted in the same way
    if isinstance(default, list | tuple):
        # Floats that a config lists are inputs of the program; those of a default are not.
        if any(isinstance(x, float) for x in default):
            raise TypeMismatch
        slots, kind = slot.of_elements(len(default))
        if kind is not type(default):
            raise TypeMismatch
        return [_spelled(x, slots[i]) for i, x in enumerate(default)]
    if isinstance(default, Mapping):
        if type(default) is not dict or default:
            raise TypeMismatch
        slot.of_entry("")  # raises TypeMismatch if the argument does not take a dict
        return {}
    if default is not None and not isinstance(default, bool | int | float | str):
        raise TypeMismatch
    mask = slot.takes_mask and not (default is None or isinstance(default, bool))
    dtype = slot.takes_dtype and default is not None and not signatures.exists(default)
    if mask or dtype:
        raise TypeMismatch
    built = signatures.leaf(default, slot.hint, slot.default)
    # An integer in the place of a float would be converted, and be an input of the program. NaN,
    # which a config cannot contain, differs from itself.
    if type(built) is not type(default) or built != default:
        raise TypeMismatch
    return default


def _described(default: Any) -> str:
    """Returns a default as it stands in a comment, on one line."""
    name, text = getattr(default, "__qualname__", None), " ".join(repr(default).split())
    if name:
        text = f"{default.__module__}.{name}"
    elif _ADDRESS.search(text):
        text = f"an object of {type(default).__module__}.{type(default).__qualname__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
