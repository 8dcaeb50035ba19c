"""Trees with the place of every value, as the two readers produce them."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.tree import Call, Config, ConfigError, Key, Source, Tree, child_trees, join
from trainer.config.wording import brief, describe

# PyYAML parses an alias bomb of a few lines in a millisecond; it explodes when it is copied.
MAX_DEPTH = 64
MAX_NODES = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True)
class Node:
    """A tree with the place of every value; used by the readers and by edits."""

    value: Any  # a leaf, or a Call, list or dict of Nodes
    source: Source
    # where the argument or key of the value was written, if in another place
    key_source: Source | None = None

    @property
    def argument_source(self) -> Source:
        """Where the argument or key was written."""
        return self.key_source or self.source


def children(node: Node) -> Mapping[Key, Node]:
    """Returns the children of a node by key; a leaf has none."""
    return child_trees(node.value)


def with_children(node: Node, items: Mapping[Key, Any]) -> Node:
    """Returns a copy of a node with other children; the keys of a list's are ignored."""
    value = node.value
    if isinstance(value, Call):
        value = Call(value.name, {str(key): item for key, item in items.items()}, value.partial)
    elif isinstance(value, list | dict):
        value = list(items.values()) if isinstance(value, list) else dict(items)
    return replace(node, value=value)


def plain(node: Node) -> Tree:
    """Returns the tree without its sources."""
    return with_children(node, {key: plain(x) for key, x in children(node).items()}).value


def to_config(root: Node) -> Config:
    """Converts the call at the root of a tree to a config."""
    sources: dict[str, Source] = {}
    key_sources: dict[str, Source] = {}
    budget = Budget()

    def visit(node: Node, path: str, depth: int) -> None:
        budget.spend(depth, node.source)
        # A key 'a.b' has the same path as a key 'b' inside of 'a'.
        if path in sources and path:
            raise ConfigError(
                f"Two values of this config have the path {path!r}: rename one of the keys.",
                node.source,
            )
        sources[path] = node.source
        if node.key_source is not None and node.key_source != node.source:
            key_sources[path] = node.key_source
        for key, child in children(node).items():
            visit(child, join(path, key), depth + 1)

    visit(root, "", 0)
    return Config(plain(root), sources, key_sources)


def to_node(config: Config) -> Node:
    """Returns the tree of a config with its sources, the inverse of `to_config`."""

    def visit(tree: Tree, path: str) -> Node:
        node = Node(tree, config.sources[path], config.key_sources.get(path))
        items = {key: visit(item, join(path, key)) for key, item in children(node).items()}
        return with_children(node, items)

    return visit(config.root, "")


def edited_config(config: Config, root: Node) -> Config:
    """Returns the config of an edited tree, with the list of files of the original."""
    return replace(to_config(root), files=config.files, unused=config.unused)


def with_calls(
    config: Config, names: Collection[str], inner: Mapping[str, str] | None = None
) -> Config:
    """Converts dicts that are arguments of the root to calls, which check their arguments."""
    # `names` are arguments of the root, each a call of the function of the same name; `inner` maps
    # an argument of the root to the function that each value of its dict is a call of.

    def call(node: Node, name: str) -> Node:
        if not isinstance(node.value, dict):
            return node
        return with_children(replace(node, value=Call(name)), node.value)

    root = to_node(config)
    items = dict(children(root))
    for name in names:
        if name in items:
            items[name] = call(items[name], name)
    for argument, name in (inner or {}).items():
        if argument in items and isinstance(items[argument].value, dict):
            calls = {key: call(item, name) for key, item in items[argument].value.items()}
            items[argument] = with_children(items[argument], calls)
    return edited_config(config, with_children(root, items))


def is_name(text: str) -> bool:
    """Returns whether a text can be the dotted name of a function."""
    return _NAME.fullmatch(text) is not None


def check_argument(name: Key, source: Source) -> None:
    """Raises ConfigError for a key that cannot name an argument: it must be an identifier."""
    if not isinstance(name, str) or not name.isidentifier():
        hint = " In YAML an argument is written name: value." if "=" in str(name) else ""
        raise ConfigError(f"{brief(name)} is not the name of an argument.{hint}", source)


def check_key(key: Any, source: Source) -> None:
    """Raises ConfigError for a key of a dict that is neither a string nor an integer."""
    if type(key) not in (str, int):
        raise ConfigError(f"Keys must be strings or integers, got {describe(key)}.", source)
    check_leaf(key, source)


def check_leaf(value: Any, source: Source) -> None:
    """Raises ConfigError for a leaf that a config cannot contain, such as NaN."""
    # NaN is not equal to itself: such a config would differ from its own config.yaml.
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError("The value is NaN, which a config cannot contain.", source)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError("The integer does not fit into 64 bits.", source)
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError("The string has half of a surrogate pair, which is not text.", source)
    # Not isinstance: PyYAML's safe dumper takes no subclasses, such as numpy.float64.
    if value is not None and type(value) not in (str, int, float, bool):
        kind = type(value).__name__
        raise ConfigError(
            f"A config contains strings, numbers, booleans, null, lists and dicts, not {kind}.",
            source,
        )


class Budget:
    """Limits the size of a tree, because a few lines with aliases could expand without end."""

    def __init__(self):
        self._left = MAX_NODES

    def spend(self, depth: int, source: Source) -> None:
        """Counts one node below `depth` others; raises ConfigError for a tree too deep or large."""
        self._left -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"The config is nested deeper than {MAX_DEPTH} levels here: make it flatter.",
                source,
            )
        if self._left < 0:
            raise ConfigError(
                f"The config has more than {MAX_NODES} values once its macros, references or"
                " aliases are written out: make it smaller.",
                source,
            )
