"""The tree of calls of a config, functions of such trees, and the places of its values."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.messages import UserError

Key = str | int
Tree = Any
"""A str, int, float, bool or None; or a Call, a list, or a dict whose keys are Keys."""


@dataclass(frozen=True)
class Source:
    """A place in a config: a file, or an option of the command line, and the line in it."""

    file: str  # as the user named it, or an option such as "--set steps=10"
    line: int = 0  # counted from 1; 0 if there is only one

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def below(self, lines: int) -> "Source":
        """Returns the place some lines below; the same if it has no line."""
        return Source(self.file, self.line + lines) if self.line else self


class ConfigError(UserError):
    """A mistake in a config; its text is a complete message of at most twelve lines."""

    def __init__(self, message: str, source: Source | None = None):
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


@dataclass(frozen=True, eq=False)
class Call:
    """A node of a config: a public function by name, and its arguments; compared by `same`.

    Example:
        >>> Call("optax.adamw", {"learning_rate": Call("optax.cosine_decay_schedule", {})})
        optax.adamw(learning_rate=optax.cosine_decay_schedule())
        >>> Call("losses.huber", {"delta": 2.0}, partial=True)
        losses.huber.partial(delta=2.0)
    """

    name: str  # with dots, such as "optax.adamw"
    kwargs: Mapping[str, Tree] = field(default_factory=dict)
    # whether it stands for the function with these arguments bound, and not for its result
    partial: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and same(self, other)

    __hash__ = None  # type: ignore[assignment]  # kwargs is a dict

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
        return f"{self.name}{'.partial' if self.partial else ''}({arguments})"


def join(path: str, key: Key) -> str:
    """Returns the path of a child, by the path of the node and its key.

    Example:
        >>> join(join("", "writers"), 0)
        'writers.0'
    """
    return f"{path}.{key}" if path else str(key)


def same(a: Tree, b: Tree) -> bool:
    """Returns whether two trees are equal, types included; see `Call`.

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
        return same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    # 0.0 == -0.0, but their canonical YAML differs, and with it the config's digest.
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def child_trees(tree: Tree) -> Mapping[Any, Tree]:
    """Returns the children of a call, dict or list by key; a leaf has none."""
    if isinstance(tree, Call):
        return dict(tree.kwargs)
    if isinstance(tree, list):
        return dict(enumerate(tree))
    return tree if isinstance(tree, dict) else {}


def walk(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the path and the tree of each part, the whole first, in order."""
    yield path, tree
    for key, child in child_trees(tree).items():
        yield from walk(child, join(path, key))


def functions(tree: Tree) -> Iterator[str]:
    """Yields the names of the functions that a tree calls, in order."""
    return (part.name for _, part in walk(tree) if isinstance(part, Call))


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the path and value of each leaf, in order; empty lists, dicts and calls are leaves.

    Example:
        >>> list(leaves(Call("experiment", {"steps": 100, "writers": ["console"]})))
        [('steps', 100), ('writers.0', 'console')]
    """
    return ((at, part) for at, part in walk(tree, path) if not child_trees(part))


def hparams(root: "Call") -> dict[str, Tree]:
    """Returns path -> value of a leaf or name of a function, without values that are None.

    Example:
        >>> huber = Call("losses.huber", {"delta": 2.0})
        >>> hparams(Call("experiment", {"loss": huber, "mesh": None}))
        {'loss': 'losses.huber', 'loss.delta': 2.0}
    """
    return {
        path: part.name if isinstance(part, Call) else part
        for path, part in walk(root)
        if path and part is not None and (isinstance(part, Call) or not child_trees(part))
    }


def split_path(tree: Tree, path: str) -> list[Key]:
    """Splits a path into keys of a tree, the longest that match; KeyError if it does not exist.

    Example:
        >>> split_path({"blocks.0": {"width": 64}}, "blocks.0.width")
        ['blocks.0', 'width']
    """
    keys: list[Key] = []
    while path:
        items = child_trees(tree)
        if (found := longest_key(items, path)) is None:
            raise KeyError(path)
        keys.append(found)
        tree = items[found]
        path = path[len(str(found)) + 1 :]
    return keys


def longest_key(keys: Iterable[Key], path: str) -> Key | None:
    """Returns the longest key that a path begins with, or None."""
    fits = [key for key in keys if f"{path}.".startswith(f"{key}.")]
    return max(fits, key=lambda key: len(str(key)), default=None)


# A word that is not a part of a dotted name. Group 2 is set in "width is", "width of 8" and
# "width=", which name an argument with more certainty than the bare word.
_WORD = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?!\w|\.\w)(\s+is\b|\s+of\s+-?\d|=(?!=))?")


@dataclass(frozen=True)
class ConfigFile:
    """A file that a config was read from."""

    # the path by which it was found: as on the command line, or in the folder of the including
    # file, the current folder or a search path
    name: str
    resolved: str  # its absolute path, without symbolic links
    sha256: str  # of its bytes, in hexadecimal
    included: bool  # by another file; False for a file of the command line


@dataclass(frozen=True)
class Unused:
    """A Gin binding that has no effect and is not a mistake."""

    binding: str  # the function and argument as the file spells them: "models.vit.width"
    function: str | None  # if the config never calls it; None if another binding overrides this one
    argument: str
    source: Source
    why: str  # a sentence that explains why it has no effect


@dataclass(frozen=True)
class Config:
    """A resolved config."""

    # A path consists of the keys from the root to the node, joined by dots, such as
    # "optimizer.groups.rest.optimizer.learning_rate". The key of a list element is its index, and
    # the path of the root is "".

    root: Call  # of `experiment` or `sweep`
    sources: Mapping[str, Source]  # where the value of each node was written, by path
    # where the argument or key of a node was written, by path, for nodes whose value was written
    # somewhere else (a macro, an alias)
    key_sources: Mapping[str, Source] = field(default_factory=dict)
    files: Sequence[ConfigFile] = ()  # that it was read from, in the order of reading
    unused: Sequence[Unused] = ()

    def argument_source(self, path: str) -> Source | None:
        """Returns where the argument or key of a node was written; None if there is no node."""
        return self.key_sources.get(path) or self.sources.get(path)

    def source_of_error(self, path: str, text: str) -> Source | None:
        """Returns the place of the value that an error message of the call at a path is about."""
        # This is an argument whose name occurs in the message, preferably as in "width is -4",
        # "width of -4" or "width=-4"; or a string whose value occurs in it, preferably one that is
        # more than a word, such as a path. Among several, values from the command line are
        # preferred. If no value matches, it is the place of the call. For the root, the arguments
        # of its optimizer are searched too.
        # (rank, not from the command line, position in the message, place): the least counts.
        spoken: list[tuple[int, bool, int, Source]] = []

        def add(rank: int, start: int, at: str) -> None:
            if (source := self.sources.get(at)) is not None:
                spoken.append((rank, not source.file.startswith("--"), start, source))

        for place in (path,) if path else ("", "optimizer"):
            for match in _WORD.finditer(text):
                add(0 if match[2] else 2, match.start(), join(place, match[1]))
        for key, value in child_trees(self.at(path)).items():
            if (start := _position(value, text)) is not None:
                add(2 if value.isidentifier() else 1, start, join(path, key))
        return min(spoken, key=lambda each: each[:3])[3] if spoken else self.sources.get(path)

    def overridden(self, path: str) -> list[str]:
        """Returns the options, such as "--set width=8", that changed arguments of a file's call."""
        call = self.sources.get(path)
        if call is None or call.file.startswith("--"):
            return []
        below = [self.sources.get(join(path, key)) for key in child_trees(self.at(path))]
        return list(dict.fromkeys(str(x) for x in below if x and x.file.startswith("--")))

    def at(self, path: str) -> Tree:
        """Returns the subtree at a path; raises KeyError if it does not exist."""
        tree: Tree = self.root
        for key in split_path(tree, path):
            tree = child_trees(tree)[key]
        return tree


def _position(value: Tree, text: str) -> int | None:
    """Returns the position of a config's string in a text, as a whole word, or None."""
    # A message may contain "/users/ann/data" if the config has "~/data" or "./data/".
    if not isinstance(value, str) or len(word := value.removeprefix("~").strip("./")) < 2:
        return None
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    return found and found.start()
