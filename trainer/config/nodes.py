"""Trees whose every part knows where it was written, as the readers make them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.tree import Call, Config, ConfigError, Key, Source, Tree, branches, join
from trainer.config.wording import brief, describe

MAX_DEPTH = 64
MAX_NODES = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


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


def children(node: Node) -> Mapping[Key, Node]:
    """Returns the children of a node by key; of a leaf, none."""
    return branches(node.value)


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


def is_name(text: str) -> bool:
    """Says whether a text may be the dotted name of a function."""
    return _NAME.fullmatch(text) is not None


def check_argument(name: Key, source: Source) -> None:
    """Raises ConfigError for what cannot be the name of an argument."""
    if not isinstance(name, str) or not name.isidentifier():
        hint = " In YAML an argument is written name: value." if "=" in str(name) else ""
        raise ConfigError(f"{brief(name)} is no name of an argument.{hint}", source)


def check_key(key: Any, source: Source) -> None:
    """Raises ConfigError for what cannot be the key of a dict."""
    if type(key) not in (str, int):
        raise ConfigError(f"Keys are strings or integers, and this one is {describe(key)}.", source)
    check_leaf(key, source)


def check_leaf(value: Any, source: Source) -> None:
    """Raises ConfigError for a leaf that no config may hold."""
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError("The value is not a number (NaN); a config holds none.", source)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError("The integer does not fit into 64 bits.", source)
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError("The string holds half a surrogate pair, which is no text.", source)
    if value is not None and type(value) not in (str, int, float, bool):
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
