"""The tree of calls of a config, and functions of such trees."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.messages import UserError

__all__ = ["Call", "ConfigError", "Key", "Source", "Tree"]

Key = str | int
Tree = Any
"""A str, int, float, bool or None; or a Call, a list, or a dict whose keys are Keys."""


@dataclass(frozen=True)
class Source:
    """A place in a config: a file, or an option of the command line, and the line in it.

    Attributes:
        file: the file as the user named it, or an option such as "--set steps=10".
        line: the line, counted from 1; 0 if there is only one.
    """

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class ConfigError(UserError):
    """A mistake in a config; its text is a complete message of at most seven lines.

    Args:
        message: whole sentences: what was given, what exists, what to do.
        source: the place of the mistake, with which the text begins; None if it has none.

    Attributes:
        source: the place of the mistake, or None.
    """

    def __init__(self, message: str, source: Source | None = None):
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


@dataclass(frozen=True, eq=False)
class Call:
    """A node of a config: a public function by name, and its arguments.

    Two calls are equal if their names, arguments and `partial` are equal. The order of a call's
    arguments does not matter; the order of a dict's keys does (the first group that matches wins).
    1, 1.0 and True are three different values.

    Attributes:
        name: the dotted name of the function, such as "optax.adamw".
        kwargs: the arguments, each a tree.
        partial: whether the call stands for the function with these arguments bound, instead of
            its result.

    Example:
        >>> Call("optax.adamw", {"learning_rate": Call("optax.cosine_decay_schedule", {})})
        optax.adamw(learning_rate=optax.cosine_decay_schedule())
        >>> Call("losses.huber", {"delta": 2.0}, partial=True)
        losses.huber.partial(delta=2.0)
    """

    name: str
    kwargs: Mapping[str, Tree] = field(default_factory=dict)
    partial: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and same(self, other)

    __hash__ = None  # type: ignore[assignment]  # kwargs is a dict

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
        return f"{self.name}{'.partial' if self.partial else ''}({arguments})"


def join(path: str, key: Key) -> str:
    """Returns the path of a child.

    Args:
        path: the path of the node; "" is the root.
        key: the key of its child.

    Example:
        >>> join(join("", "writers"), 0)
        'writers.0'
    """
    return f"{path}.{key}" if path else str(key)


def same(a: Tree, b: Tree) -> bool:
    """Returns whether two trees are equal, types included; see `Call`.

    Args:
        a: a tree.
        b: another tree.

    Example:
        >>> same([1, 2.0], [1, 2.0]), same(1, 1.0), same(0.0, -0.0)
        (True, False, False)
    """
    # 1 == 1.0 == True in Python, but they build different programs.
    if type(a) is not type(b):
        return False
    if isinstance(a, Call):
        if (a.name, a.partial, a.kwargs.keys()) != (b.name, b.partial, b.kwargs.keys()):
            return False
        return all(same(value, b.kwargs[key]) for key, value in a.kwargs.items())
    if isinstance(a, dict):
        # The first group that matches a parameter wins, so that the order of keys counts.
        if len(a) != len(b) or not all(same(x, y) for x, y in zip(a, b, strict=True)):
            return False
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    # 0.0 == -0.0, but their canonical YAML differs, and with it the config's digest.
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def child_trees(tree: Tree) -> Mapping[Any, Tree]:
    """Returns the children of a call, dict or list by key.

    Args:
        tree: any tree; a leaf has no children.
    """
    if isinstance(tree, Call):
        return dict(tree.kwargs)
    if isinstance(tree, list):
        return dict(enumerate(tree))
    return tree if isinstance(tree, dict) else {}


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the path and value of each leaf, in order.

    Args:
        tree: any tree. Empty lists, dicts and calls are leaves.
        path: the path of the tree, with which the paths begin.

    Example:
        >>> list(leaves(Call("experiment", {"steps": 100, "writers": ["console"]})))
        [('steps', 100), ('writers.0', 'console')]
    """
    items = child_trees(tree)
    if not items:
        yield path, tree
    for key, value in items.items():
        yield from leaves(value, join(path, key))


def hparams(root: "Call") -> dict[str, Tree]:
    """Returns the values of a config as a table has them: those of its leaves, and its functions.

    Args:
        root: the tree.

    Returns:
        Path -> value, or the name of a function; without values that are None.

    Example:
        >>> huber = Call("losses.huber", {"delta": 2.0})
        >>> hparams(Call("experiment", {"loss": huber, "mesh": None}))
        {'loss': 'losses.huber', 'loss.delta': 2.0}
    """
    return {path: value for path, value in _hparams(root, "") if path and value is not None}


def _hparams(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    items = child_trees(tree)
    if isinstance(tree, Call):
        yield path, tree.name
    elif not items:
        yield path, tree
    for key, value in items.items():
        yield from _hparams(value, join(path, key))


def split_path(tree: Tree, path: str) -> list[Key]:
    """Splits a path into keys of a tree.

    A key may contain dots; the longest matching key is taken.

    Args:
        tree: the tree.
        path: the keys from the root of the tree to a node, joined by dots.

    Raises:
        KeyError: the path does not exist.

    Example:
        >>> split_path({"blocks.0": {"width": 64}}, "blocks.0.width")
        ['blocks.0', 'width']
    """
    keys: list[Key] = []
    while path:
        items = child_trees(tree)
        found = longest_key(items, path)
        if found is None:
            raise KeyError(path)
        keys.append(found)
        tree = items[found]
        path = path[len(str(found)) + 1 :]
    return keys


def longest_key(keys: Iterable[Key], path: str) -> Key | None:
    """Returns the longest key that a path begins with, or None.

    Args:
        keys: the keys of a node.
        path: a path below the node.
    """
    fits = [key for key in keys if f"{path}.".startswith(f"{key}.")]
    return max(fits, key=lambda key: len(str(key)), default=None)
