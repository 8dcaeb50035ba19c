"""Reads YAML: a strict dialect with one form of tag, `!optax.adamw {learning_rate: 1e-3}`."""

import bisect
import math
import re

import yaml
from yaml.nodes import MappingNode, ScalarNode, SequenceNode
from yaml.scanner import ScannerError
from yaml.tokens import TagToken

from trainer.config import wording
from trainer.config.nodes import Budget, Node, check_argument, check_leaf, is_name
from trainer.config.tree import Call, ConfigError, Key, Source

PARTIAL = "partial:"
_STANDARD = "tag:yaml.org,2002:"
_BLANK = "\0 \t\r\n\x85\u2028\u2029"
_DIGITS = "[0-9]+(_[0-9]+)*"

# The scalars that are not strings. YAML 1.1 reads 1e-3 as a string, `no` as false, 010 as 8 and
# 12:30:00 as 45000. Here numbers are written as in Python, and everything else is a string.
# Each is (kind, pattern, first characters), where \0 stands for an empty scalar.
SCALARS = [
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)", "-+0123456789"),
    (
        "float",
        rf"[-+]?({_DIGITS}\.({_DIGITS})?|\.{_DIGITS})([eE][-+]?[0-9]+)?"
        rf"|[-+]?{_DIGITS}[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
]


class Loader(yaml.SafeLoader):
    """Parses YAML into nodes, with the scalars and tags of this dialect; constructs no objects."""

    yaml_implicit_resolvers = {}

    def scan_tag(self) -> TagToken:
        """Scans a tag, which ends before a comma or bracket of a flow collection."""
        # PyYAML's own method takes commas and brackets as parts of a tag: in [!a, !b] it reads the
        # tags "a," and "b]".
        start = self.get_mark()
        length = 0
        ends = _BLANK + (",[]{}" if self.flow_level else "")
        while self.peek(length) not in ends:
            length += 1
        text = self.prefix(length)
        self.forward(length)
        handle, name = ("!!", text[2:]) if text.startswith("!!") else ("!", text[1:])
        if not name or not re.fullmatch(r"[\w.:/-]+", name, re.ASCII):
            raise ScannerError("", start, f"{text[:60]!r} is not a tag; a tag is !name.of.function")
        if self.flow_level and self.peek() in "[{":
            raise ScannerError("", start, f"a space is missing after the tag {text[:60]!r}")
        return TagToken((handle, name), start, self.get_mark())


for _kind, _pattern, _first in SCALARS:
    Loader.add_implicit_resolver(
        _STANDARD + _kind,
        re.compile(rf"(?:{_pattern})\Z"),
        [*_first.replace("\0", ""), *([""] if "\0" in _first else [])],
    )


def read(text: str, source: Source) -> Node | None:
    """Reads one document into a tree, or None if it is empty; raises ConfigError."""
    # Lines are counted from that of `source`; if it is 0, all values get this place.
    # A `yaml.Mark` has a line too, but PyYAML also ends lines at U+0085, U+2028 and U+2029.
    ends = [match.start() for match in re.finditer("\n", text)]
    try:
        document = Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = bisect.bisect_left(ends, mark.index) if mark else 0
        words = ", ".join(filter(None, [error.context, error.problem]))
        message = f"This is not valid YAML: {words}. {_hint(error, text, line)}".rstrip()
        raise ConfigError(message, source.below(line)) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", error)  # of a character that YAML forbids; it has no mark
        raise ConfigError(f"This is not valid YAML: {reason}.", source) from None
    except RecursionError:
        raise ConfigError("This YAML is nested too deeply: make it flatter.", source) from None
    return None if document is None else _Reader(source, ends).node(document, None, 0)


def _hint(error: yaml.MarkedYAMLError, text: str, line: int) -> str:
    if "cannot start any token" not in (error.problem or ""):
        return wording.in_yaml(text, line)
    if r"'\t'" in (error.problem or ""):
        return "Write spaces in place of this tab: YAML neither indents nor separates with tabs."
    return (
        "Put a string that begins with such a character in quotes; a call is written"
        " !optax.adamw {learning_rate: 1e-3}, not @optax.adamw()."
    )


class _Reader:
    """Converts the nodes of PyYAML to `Node`, with a copy for each alias."""

    def __init__(self, source: Source, ends: list[int]):
        self._source = source
        self._ends = ends  # of the lines of an editor
        self._budget = Budget()
        self._open: set[int] = set()

    def node(self, node: yaml.Node, key_source: Source | None, depth: int) -> Node:
        source = self._at(node)
        self._budget.spend(depth, source)
        if id(node) in self._open:
            raise ConfigError("This alias is inside its own anchor, so it never ends.", source)
        self._open.add(id(node))
        value = self._value(node, source, depth)
        self._open.remove(id(node))
        return Node(value, source, key_source)

    def _at(self, node: yaml.Node) -> Source:
        return self._source.below(bisect.bisect_left(self._ends, node.start_mark.index))

    def _value(self, node: yaml.Node, source: Source, depth: int):
        if node.tag.startswith("!") and node.tag != "!":
            return self._call(node, source, depth)
        kind = node.tag.removeprefix(_STANDARD)
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.node(item, None, depth + 1) for item in node.value]
        if isinstance(node, MappingNode) and kind == "map":
            return self._items(node, depth)
        if isinstance(node, ScalarNode):
            return _scalar(kind, node.value, source)
        raise ConfigError(_unknown_tag(node.tag), source)

    def _call(self, node: yaml.Node, source: Source, depth: int) -> Call:
        name = node.tag[1:]
        partial = name.startswith(PARTIAL)
        name = name.removeprefix(PARTIAL)
        if not is_name(name):
            raise ConfigError(_unknown_tag(node.tag), source)
        # A tag alone is a call without arguments; `!f ''`, whose style is a quote, is a string.
        if isinstance(node, ScalarNode) and not node.value and not node.style:
            return Call(name, {}, partial)
        if isinstance(node, SequenceNode):
            raise ConfigError(wording.list_for_call(node.tag), source)
        if not isinstance(node, MappingNode):
            raise ConfigError(
                f"{node.tag} takes its arguments by name, as in {node.tag} {{argument: value}}, and"
                f" was given {node.value[:60]!r}.",
                source,
            )
        kwargs = self._items(node, depth)
        for key, item in kwargs.items():
            check_argument(key, item.argument_source)
        return Call(name, kwargs, partial)  # type: ignore[arg-type]

    def _items(self, node: MappingNode, depth: int) -> dict[Key, Node]:
        merged: dict[Key, Node] = {}
        own: dict[Key, Node] = {}
        for key_node, value_node in node.value:
            at = self._at(key_node)
            if key_node.tag == _STANDARD + "merge":
                self._merge(merged, value_node, node.tag, depth)
                continue
            if (key := self._key(key_node, at)) in own:
                first = own[key].argument_source
                raise ConfigError(
                    f"The key {key!r} is given twice; the first is at {first}. Remove one.", at
                )
            own[key] = self.node(value_node, at, depth + 1)
        # As YAML 1.1 says of <<: own keys override merged ones, in any order.
        return {**merged, **own}

    def _merge(self, into: dict[Key, Node], value: yaml.Node, tag: str, depth: int) -> None:
        at = self._at(value)
        for node in value.value if isinstance(value, SequenceNode) else [value]:
            if not isinstance(node, MappingNode) or node.tag not in (_STANDARD + "map", tag):
                raise ConfigError("<< merges plain mappings, or arguments of one function.", at)
            self._budget.spend(depth, at)
            if id(node) in self._open:
                raise ConfigError("This merge is inside its own anchor, so it never ends.", at)
            self._open.add(id(node))
            for key, item in self._items(node, depth + 1).items():
                into.setdefault(key, item)  # of several mappings, the earlier one overrides
            self._open.remove(id(node))

    def _key(self, node: yaml.Node, source: Source) -> Key:
        kind = node.tag.removeprefix(_STANDARD)
        if isinstance(node, ScalarNode) and kind in ("str", "int"):
            return _scalar(kind, node.value, source)  # type: ignore[return-value]
        given = repr(node.value[:60]) if isinstance(node, ScalarNode) else "a collection"
        if isinstance(node, ScalarNode) and node.tag.startswith("!") and node.value:
            tag = node.tag[:60]
            raise ConfigError(
                f"Write arguments in braces, as in {tag} {{{node.value[:60]}: ...}}, or on lines of"
                f" their own below {tag}.",
                source,
            )
        raise ConfigError(
            f"Keys must be strings or integers, got {given} ({kind[:40]}):"
            " write it in quotes if it is a name.",
            source,
        )


def _scalar(kind: str, text: str, source: Source) -> str | int | float | bool | None:
    value: str | int | float | bool | None = text
    try:
        if kind == "null":
            value = None
        elif kind == "bool":
            value = {"true": True, "false": False}[text.lower()]
        elif kind == "int":
            value = int(text)
        elif kind == "float":
            word = text.lower().lstrip("+-") in (".inf", ".nan")
            value = float(text.lower().replace(".", "") if word else text)
            # float() silently makes an infinity of 1e999.
            if math.isinf(value) and not word:
                raise ConfigError(
                    f"{text[:60]!r} is larger than any float; infinity is .inf.", source
                )
        elif kind not in ("str", "merge"):
            raise ConfigError(_unknown_tag(_STANDARD + kind), source)
    except (KeyError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{text[:60]!r} is not a valid {kind}.", source) from None
    check_leaf(value, source)
    return value


def _unknown_tag(tag: str) -> str:
    shown = tag.replace(_STANDARD, "!!")[:60]
    return (
        f"The tag {shown!r} does not name a function. Write a call with the public name of a"
        " function, as in !optax.adamw {learning_rate: 1e-3}."
    )
