"""A JSON schema of YAML configs, for editors, from the annotations and docstrings of functions.

An editor drops the tag of a node such as `!optim.muon {weight_decay: 0.1}` before it validates the
mapping. The schema therefore accepts in each place the arguments of any function that fits there.
"""

import collections.abc
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.config import signatures
from trainer.config.signatures import Function, Parameter, Slot
from trainer.config.units import UNITS
from trainer.config.vocabulary import LANGUAGES, SWEEP, Language, Vocabulary
from trainer.config.wording import listing
from trainer.config.yaml_reader import PARTIAL

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
# YAML 1.2, which editors read, takes numbers with underscores for strings.
_DIGITS = "[0-9]+(_[0-9]+)*"
_UNDERSCORES = {
    "type": "string",
    "pattern": rf"^[-+]?[0-9]+(_[0-9]+)+(\.({_DIGITS})?)?([eE][-+]?[0-9]+)?$",
}
_STEPS = {"type": "string", "pattern": rf"^\s*{_DIGITS}(\.[0-9]+)?({UNITS})\s*$"}
_NOTHING = {"enum": [None, ""]}  # what is left of `!metrics.accuracy` without its tag
_INCLUDE = {
    "description": "One or several files over which this one is laid.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
# The functions that fit an argument of the root, where its annotation admits any object.
_KIND_OF = {
    "model": "models",
    "data": "data",
    "loss": "losses",
    "metrics": "metrics",
    "train_metrics": "metrics",
    "hooks": "hooks",
    "method": "method",
}
# The definitions that other schemas refer to; the underscores are those of Python's numbers.
_BASIC = {
    "an_integer": {"anyOf": [{"type": "integer"}, _UNDERSCORES]},
    "a_float": {"anyOf": [{"type": "number"}, _UNDERSCORES]},
    "a_number_of_steps": {"anyOf": [{"type": "integer"}, _UNDERSCORES, _STEPS]},
}
_SCALARS: dict[Any, dict[str, Any]] = {
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"$ref": "#/$defs/an_integer"},
    float: {"$ref": "#/$defs/a_float"},
    complex: {"$ref": "#/$defs/a_float"},
    str: {"type": "string"},
}
_OPTIMIZER, _SCHEDULE = "optimizer", "schedule"


def schema(vocabulary: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a JSON schema, draft 2020-12, of the YAML files of all kinds of configs."""
    # A file is not that of a run if it has a key that only another kind has. No key is required,
    # because a file may be laid over another one. Raises ConfigError if a package of
    # `vocabulary` cannot be imported.
    kinds = [_Schemas(vocabulary, language) for language in LANGUAGES.values()]
    found, *others = roots = [each.root() for each in kinds]
    for root in others:
        found = _either(root, found, *(each for each in roots if each is not root))
    definitions = {name: x for each in kinds for name, x in each.definitions.items()}
    return {
        "$schema": _DRAFT,
        "title": "A config of Lockstep",
        "type": "object",
        **found,
        "$defs": dict(sorted(definitions.items())),
    }


def _either(root: dict[str, Any], other: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a file that is of one kind if it has a key that `others` lack."""
    only = sorted(set(root["properties"]).difference(*(each["properties"] for each in others)))
    return {"if": {"anyOf": [{"required": [key]} for key in only]}, "then": root, "else": other}


def schema_text(vocabulary: Sequence[str] = ()) -> str:
    """Returns the schema as a file has it: a line for each argument of a root and each function."""
    return _lines(schema(vocabulary), "", 3) + "\n"


def _lines(node: Any, indent: str, levels: int) -> str:
    if not levels or not isinstance(node, dict) or not node:
        return json.dumps(node, ensure_ascii=False)
    more = f"{indent} "
    items = (f"{json.dumps(k)}: {_lines(x, more, levels - 1)}" for k, x in node.items())
    return "{\n" + ",\n".join(f"{more}{item}" for item in items) + f"\n{indent}}}"


def custom_tags(vocabulary: Sequence[str] = ()) -> str:
    """Returns the tags of all functions as a JSON list, for `yaml.customTags` of an editor."""
    tags = []
    for name, function in sorted(_Schemas(vocabulary, SWEEP).functions().items()):
        tags += [f"!{name} mapping"]
        if not any(each.required for each in function.parameters.values()):
            tags += [f"!{name} scalar"]
        tags += [f"!{PARTIAL}{name} mapping", f"!{PARTIAL}{name} scalar"]
    return json.dumps(tags, indent=1) + "\n"


class _Schemas:
    """The schemas of one kind of config; `definitions` has those of its functions and kinds."""

    def __init__(self, packages: Sequence[str], language: Language):
        self.definitions: dict[str, Any] = dict(_BASIC)
        self._vocabulary = Vocabulary(packages, language)
        self._root = self._vocabulary.function(language.root)
        self._of_user = list(self._functions_of(packages))
        parts = {name: list(self._functions_of([name])) for name in language.modules}
        parts["nodes"] = [self._vocabulary.function(each) for each in language.nodes]
        every = [each for part in parts.values() for each in part]
        every += list(self._functions_of(["optax.contrib"]))
        kinds = {name: parts[name] for name in _KIND_OF.values() if name in parts}
        kinds[_OPTIMIZER] = [each for each in every if is_optimizer(each)]
        kinds[_SCHEDULE] = [each for each in every if signatures.takes_callable(each.returns)]
        self._ours = [each for each in every if not each.name.startswith("optax.")]
        self.kinds = {
            name: functions + [each for each in self._of_user if _may_be(each, name)]
            for name, functions in kinds.items()
        }

    def _functions_of(self, packages: Sequence[str]) -> Iterator[Function]:
        for package in packages:
            for name in self._vocabulary.names(package):
                yield self._vocabulary.function(name)

    def functions(self) -> dict[str, Function]:
        """Returns the functions that the schema knows, by their names."""
        known = [*self._ours, *self._of_user, *(x for kind in self.kinds.values() for x in kind)]
        return {each.name: each for each in known if "." in each.name}

    def root(self) -> dict[str, Any]:
        """Returns the schema of a file."""
        found = self._arguments(self._root, _KIND_OF)
        found["properties"] = {"include": _INCLUDE, **found["properties"]}
        return found

    def _arguments(
        self, function: Function, kinds: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Returns the schema of the arguments of a function, some of which are of known kinds."""
        # Without the texts of optax, which its own pages have.
        described = {} if function.name.startswith("optax.") else argument_docs(function.call)
        properties = {}
        for name, parameter in function.parameters.items():
            slot = Slot().of_argument(function, name, is_optimizer(function))
            value = self._value(slot, (kinds or {}).get(name, ""))
            about = {"description": described[name]} if name in described else {}
            properties[name] = {**about, **value, **_default(parameter)}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def _value(self, slot: Slot, kind: str) -> dict[str, Any]:
        """Returns the schema of the value of an argument, a list's element or a dict's entry."""
        options = self._options(slot, kind)
        unique = list({json.dumps(each, sort_keys=True): each for each in options}.values())
        if {} in unique:
            return {}
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _options(self, slot: Slot, kind: str) -> Iterator[dict[str, Any]]:
        if slot.takes_dtype:
            yield {"type": ["string", "null"], "examples": list(signatures.DTYPE_NAMES)}
            return
        if signatures.accepts_anything(slot.hint) or slot.takes_mask:
            yield self._calls(kind) if kind else {}
            return
        if slot.takes_steps:
            yield {"$ref": "#/$defs/a_number_of_steps"}
        if slot.in_factory and signatures.takes_float(slot.hint):
            yield self._calls(_SCHEDULE)
        for part in signatures.union_members(slot.hint):
            yield from self._member(part, slot, kind)

    def _member(self, part: Any, slot: Slot, kind: str) -> Iterator[dict[str, Any]]:
        """Yields schemas of the values that fit a member of a union."""
        origin = typing.get_origin(part) or part
        here = replace(slot, hint=part)
        if part in (int, str) and slot.takes_steps:
            return
        if part in _SCALARS:
            # The annotation of an array includes bool, but true is not a float.
            others = signatures.union_members(slot.hint) if part in (bool, int) else ()
            if float not in others:
                yield _SCALARS[part]
        elif signatures.is_literal(part):
            yield {"enum": list(typing.get_args(part))}
        elif origin in signatures.LISTS:
            yield self._list(here, kind)
        elif origin in signatures.MAPPINGS or typing.is_typeddict(part):
            yield {"type": "object", "additionalProperties": self._value(here.of_entry(""), kind)}
        elif kind:
            yield self._calls(kind)
        elif signatures.names_optimizer(part):
            yield self._calls(_OPTIMIZER)
        elif float in signatures.union_members(slot.hint):
            # A function in the place of a float is a schedule; optax also admits arrays.
            if origin is collections.abc.Callable:
                yield self._calls(_SCHEDULE)
        else:
            yield self._object(origin)

    def _list(self, slot: Slot, kind: str) -> dict[str, Any]:
        arguments = typing.get_args(slot.hint)
        is_tuple = typing.get_origin(slot.hint) is tuple
        fixed = is_tuple and bool(arguments) and arguments[-1] is not Ellipsis
        elements, _ = slot.of_elements(len(arguments) if fixed else 1)
        items = [self._value(each, kind) for each in elements]
        limits = {"minItems": len(items), "maxItems": len(items)} if fixed else {}
        same = all(each == items[0] for each in items)
        return {"type": "array", "items": items[0] if same else {"anyOf": items}, **limits}

    def _object(self, kind: Any) -> dict[str, Any]:
        """Returns the schema of a call whose result is of a class, or of any object."""
        # A protocol says what an object can do, and not whose result it is.
        known = inspect.isclass(kind) and kind is not collections.abc.Callable
        if known and not signatures.is_protocol(kind):
            if fitting := [each for each in self._ours if _returns(each, kind)]:
                return self._any_of(f"any_{kind.__name__}", fitting + self._of_user)
        # A function or an array, such as the dtype of a layer or its initializer.
        return {"type": ["object", "null", "string", "number", "array"]}

    def _calls(self, kind: str) -> dict[str, Any]:
        """Returns the schema of the calls of a kind of functions, with their tags dropped."""
        return self._any_of(f"any_{kind}", self.kinds[kind])

    def _any_of(self, name: str, functions: Sequence[Function]) -> dict[str, Any]:
        if name not in self.definitions:
            names = [f"!{each.name}" for each in functions]
            refs = [{"$ref": f"#/$defs/{each.name}"} for each in functions]
            about = f"One of {listing(names, len(names))}."
            self.definitions[name] = {"description": about, "anyOf": [_NOTHING, *refs]}
            for each in functions:
                self._define(each)
        return {"$ref": f"#/$defs/{name}"}

    def _define(self, function: Function) -> None:
        if function.name in self.definitions:  # or begun: a function may take its own result
            return
        self.definitions[function.name] = {}
        about = {"title": f"!{function.name}"}
        if not function.name.startswith("optax."):
            summary = (inspect.getdoc(function.call) or "").partition("\n\n")[0]
            about["description"] = " ".join(summary.split())
        kinds = None if "." in function.name else _KIND_OF  # of a part of a sweep
        self.definitions[function.name] = {**about, **self._arguments(function, kinds)}


def is_optimizer(function: Function) -> bool:
    """Returns whether a function returns an optimizer; classes, such as optax's states, do not."""
    return function.name == "optim.optimizer" or signatures.takes_optimizer(function.returns)


def _returns(function: Function, kind: type) -> bool:
    result = function.call if inspect.isclass(function.call) else function.returns
    return inspect.isclass(result) and issubclass(result, kind)


def _may_be(function: Function, kind: str) -> bool:
    """Returns whether a function of the user may be of a kind, by its annotation."""
    if function.returns in (Any, inspect.Parameter.empty):
        return True
    return is_optimizer(function) == (kind == _OPTIMIZER)


def _default(parameter: Parameter) -> dict[str, Any]:
    """Returns the default of a parameter for an editor; {} if JSON cannot express it."""
    value = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}


_SECTION = re.compile(r"^(Args|Attributes|Arguments):\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^\*{0,2}(\w+)(?: \(.*?\))?: *((?:.*\n)(?:(?: +.*)?\n)*)", re.MULTILINE)


def argument_docs(call: Any) -> Mapping[str, str]:
    """Returns what a docstring in Google's style says of each argument, by its name."""
    return {
        name: " ".join(about.split())
        for section in _SECTION.finditer(f"{inspect.getdoc(call) or ''}\n")
        for name, about in _ENTRY.findall(textwrap.dedent(section[2]))
    }
