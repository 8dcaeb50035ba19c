"""The tree of calls that a config is, and where each part of it was written."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "Config", "ConfigError", "Key", "Node", "Source", "Tree"]

Key = str | int
Tree = Any
"""A str, int, float, bool or None; or a Call, a list, or a dict whose keys are Keys."""

MAX_DEPTH = 64
MAX_NODES = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_MAX_LINES = 7
_MAX_LINE = 400


@dataclass(frozen=True)
class Source:
    """A place in a config: a file, or an option of the command line, and the line in it.

    Attributes:
        file: the file as the user named it, or an option such as "--set steps=10".
        line: the line, counted from 1; 0 where there is but one.
    """

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class ConfigError(ValueError):
    """A mistake in a config; its text is a whole message, of at most seven lines.

    Args:
        message: whole sentences: what was given, what exists, what to do.
        source: where the mistake stands; the text then begins with it.

    Attributes:
        source: the same, or None.
    """

    def __init__(self, message: str, source: Source | None = None):
        text = f"{source}: {message}" if source else message
        lines = [_printable(line) for line in text.splitlines() if line.strip()]
        super().__init__("\n".join(lines[:_MAX_LINES]))
        self.source = source


@dataclass(frozen=True, eq=False)
class Call:
    """A node of a config: a public function by name, and its arguments.

    Two calls are equal if name, arguments and `partial` are. The order of a call's arguments means
    nothing, the order of a dict's keys does (the first group that matches wins), and 1, 1.0 and
    True are three values.

    Attributes:
        name: the dotted name, such as "optax.adamw".
        kwargs: a tree by argument.
        partial: the function itself is meant, with these arguments bound, and not its result.
    """

    name: str
    kwargs: Mapping[str, Tree] = field(default_factory=dict)
    partial: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and same(self, other)

    __hash__ = None  # type: ignore[assignment]  # the arguments are a dict


@dataclass(frozen=True)
class Config:
    """A resolved config.

    Attributes:
        root: the call of `experiment`.
        sources: where the value of each node was written, by path. A path is the keys from the
            root on, joined by dots: "optimizer.groups.rest.optimizer.learning_rate"; an element of
            a list goes by its index, and the root's path is "".
        named: where the argument or key of a node was written, for those (a macro, an alias) whose
            value stands elsewhere.
    """

    root: Call
    sources: Mapping[str, Source]
    named: Mapping[str, Source] = field(default_factory=dict)

    def argument_source(self, path: str) -> Source | None:
        """Returns where the argument or key at `path` was written."""
        return self.named.get(path) or self.sources.get(path)

    def at(self, path: str) -> Tree:
        """Returns the subtree at `path`; raises KeyError where there is none."""
        node = to_node(self)
        for key in locate(node, path):
            node = children(node)[key]
        return plain(node)


@dataclass(frozen=True)
class Node:
    """A tree whose parts know where they were written; only the readers see it.

    Attributes:
        value: a leaf, a Call, a list or a dict; the last three hold Nodes.
        source: where the value was written.
        named: where the argument or key that holds it was written, if elsewhere.
    """

    value: Any
    source: Source
    named: Source | None = None

    @property
    def argument_source(self) -> Source:
        return self.named or self.source


def join(path: str, key: Key) -> str:
    """Returns the path of the child `key` of the node at `path`."""
    return f"{path}.{key}" if path else str(key)


def same(a: Tree, b: Tree) -> bool:
    """Says whether two trees are equal, strictly; see `Call`."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Call):
        if (a.name, a.partial, a.kwargs.keys()) != (b.name, b.partial, b.kwargs.keys()):
            return False
        return all(same(value, b.kwargs[key]) for key, value in a.kwargs.items())
    if isinstance(a, dict):
        if len(a) != len(b) or not all(same(x, y) for x, y in zip(a, b, strict=True)):
            return False
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the path and value of each leaf, in order; of an empty list, dict or call, itself."""
    if isinstance(tree, Call):
        items: Iterable[tuple[Key, Tree]] = tree.kwargs.items()
    elif isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        items = ()
    empty = True
    for key, value in items:
        empty = False
        yield from leaves(value, join(path, key))
    if empty:
        yield path, tree


def children(node: Node) -> Mapping[Key, Node]:
    """Returns the children of a node by key; of a leaf, none."""
    value = node.value
    if isinstance(value, Call):
        return value.kwargs  # type: ignore[return-value]
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list) else {}


def with_children(node: Node, items: Mapping[Key, Node]) -> Node:
    """Returns the node with other children."""
    value = node.value
    if isinstance(value, Call):
        value = Call(value.name, {str(key): item for key, item in items.items()}, value.partial)
    else:
        value = list(items.values()) if isinstance(value, list) else dict(items)
    return Node(value, node.source, node.named)


def plain(node: Node) -> Tree:
    """Returns the tree without its sources."""
    value = node.value
    if isinstance(value, Call):
        return Call(value.name, {k: plain(v) for k, v in value.kwargs.items()}, value.partial)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def to_config(root: Node) -> Config:
    """Returns the config of a tree; raises ConfigError if it is too large, or a path not unique."""
    sources: dict[str, Source] = {}
    named: dict[str, Source] = {}
    budget = Budget()

    def visit(node: Node, path: str, depth: int) -> None:
        budget.spend(depth, node.source)
        if path in sources and path:
            raise ConfigError(
                f"Two values of this config have the path {path!r}: rename one of the keys.",
                node.source,
            )
        sources[path] = node.source
        if node.named is not None and node.named != node.source:
            named[path] = node.named
        for key, child in children(node).items():
            visit(child, join(path, key), depth + 1)

    visit(root, "", 0)
    return Config(plain(root), sources, named)


def to_node(config: Config) -> Node:
    """Returns the tree of a config with its sources; the inverse of `to_config`."""

    def visit(tree: Tree, path: str) -> Node:
        if isinstance(tree, Call):
            kwargs = {key: visit(item, join(path, key)) for key, item in tree.kwargs.items()}
            tree = Call(tree.name, kwargs, tree.partial)
        elif isinstance(tree, dict):
            tree = {key: visit(item, join(path, key)) for key, item in tree.items()}
        elif isinstance(tree, list):
            tree = [visit(item, join(path, key)) for key, item in enumerate(tree)]
        return Node(tree, config.sources[path], config.named.get(path))

    return visit(config.root, "")


def locate(node: Node, path: str) -> list[Key]:
    """Returns the keys that lead from a node to a path below it; raises KeyError if none do.

    A key may itself hold dots; the longest key that fits comes first.
    """
    keys: list[Key] = []
    while path:
        found = fitting(node, path)
        if found is None:
            raise KeyError(path)
        keys.append(found)
        node = children(node)[found]
        path = path[len(str(found)) + 1 :]
    return keys


def fitting(node: Node, path: str) -> Key | None:
    """Returns the longest key of a node with which the path begins, or None."""
    fits = [key for key in children(node) if f"{path}.".startswith(f"{key}.")]
    return max(fits, key=lambda key: len(str(key)), default=None)


def is_name(text: str) -> bool:
    """Says whether a text may be the dotted name of a function."""
    return _NAME.fullmatch(text) is not None


def check_argument(name: Key, source: Source) -> None:
    """Raises ConfigError for what cannot be the name of an argument."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"{brief(name)} is no name of an argument.", source)


def check_leaf(value: Any, source: Source) -> None:
    """Raises ConfigError for a leaf that no config may hold."""
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError("The value is not a number (NaN); a config holds none.", source)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError("The integer does not fit into 64 bits.", source)
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError("The string holds half a surrogate pair, which is no text.", source)
    if value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ConfigError(
            f"A config holds strings, numbers, booleans, null, lists and dicts, and no {kind}.",
            source,
        )


class Budget:
    """Bounds the size of a tree, so that no few lines of a config grow without end."""

    def __init__(self, limit: int = MAX_NODES):
        self._limit = limit
        self._left = limit

    def spend(self, depth: int, source: Source) -> None:
        """Counts one node; raises ConfigError where the tree is too deep or too large."""
        self._left -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"The config is nested deeper than {MAX_DEPTH} levels here: make it flatter.",
                source,
            )
        if self._left < 0:
            raise ConfigError(
                f"The config has more than {self._limit} values once its macros, references or"
                " aliases are written out: make it smaller.",
                source,
            )


def nearest(word: str, known: Iterable[Key]) -> str | None:
    """Returns the known name that is spelled most like `word`, or None if none is near."""
    names = {str(name).lower(): str(name) for name in known}
    close = difflib.get_close_matches(word[:100].lower(), names, n=1)
    return names[close[0]] if close else None


def known_names(word: str, known: Iterable[Key], there_is: str = "There is") -> str:
    """Returns a sentence that suggests the nearest known name, or lists what exists."""
    names = sorted(map(str, known))
    near = nearest(word, names)
    if near is not None:
        return f"Did you mean {near!r}?"
    return f"{there_is}: {listing(names)}." if names else ""


def listing(names: Sequence[str], most: int = 8) -> str:
    """Returns some names for a sentence, not too many."""
    shown = ", ".join(name[:100] for name in names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


def describe(tree: Tree) -> str:
    """Returns a few words for a value in a message: "the string 'fast'"."""
    if isinstance(tree, Call):
        return f"the function {tree.name}" if tree.partial else f"a call of {tree.name}"
    if tree is None:
        return "null"
    kinds: list[tuple[type, str]] = [
        (bool, "the boolean"),
        (int, "the integer"),
        (float, "the float"),
        (str, "the string"),
        (list, "the list"),
        (dict, "the dict"),
    ]
    kind = next((words for of, words in kinds if isinstance(tree, of)), "the value")
    return f"{kind} {brief(tree)}"


def brief(tree: Tree, most: int = 60) -> str:
    """Returns a value in one short line."""
    text = _brief(tree)
    return text if len(text) <= most else text[: most - 3] + "..."


def _brief(tree: Tree) -> str:
    if isinstance(tree, Call):
        sign = "@" if tree.partial else ""
        return f"{sign}{tree.name}({_items(tree.kwargs, '=', str)})"
    if isinstance(tree, dict):
        return "{" + _items(tree, ": ", repr) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_brief, tree[:9])) + "]"
    return repr(tree[:100]) if isinstance(tree, str) else repr(tree)


def _items(items: Mapping[Any, Tree], sign: str, spell: Callable[[Any], str]) -> str:
    some = list(items.items())[:9]
    return ", ".join(f"{spell(key)}{sign}{_brief(value)}" for key, value in some)


def _printable(line: str) -> str:
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE - 103]}...{line[-100:]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
