"""The tree of calls that a config is, and where each part of it was written."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "Config", "ConfigError", "ConfigFile", "Key", "Source", "Tree", "Unused"]

Key = str | int
Tree = Any
"""A str, int, float, bool or None; or a Call, a list, or a dict whose keys are Keys."""

_WORD = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?!\w|\.\w)(\s+is\b|=(?!=))?")
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
        lines = [_shown(line) for line in text.splitlines() if line.strip()]
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
class ConfigFile:
    """A file that a config was read from.

    Attributes:
        name: the file as it was found: as given on the command line, or beside the including file,
            in the current folder or in a search path.
        resolved: its absolute path, without symbolic links.
        sha256: the SHA-256 of its bytes, in hexadecimal.
        included: another file includes it; False for a file of the command line.
    """

    name: str
    resolved: str
    sha256: str
    included: bool


@dataclass(frozen=True)
class Unused:
    """A Gin binding that changes nothing, and is no mistake.

    Attributes:
        binding: what is bound, as the file spells it: "models.vit.width".
        function: the function to look up, which the config never calls; None where it is called
            and another binding overrides this one.
        argument: the argument that is bound.
        source: where the binding stands.
        why: why it changes nothing, a sentence.
    """

    binding: str
    function: str | None
    argument: str
    source: Source
    why: str


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
        files: the files that it was read from, in the order of reading.
        unused: the bindings that change nothing and are no mistake.
    """

    root: Call
    sources: Mapping[str, Source]
    named: Mapping[str, Source] = field(default_factory=dict)
    files: Sequence[ConfigFile] = ()
    unused: Sequence[Unused] = ()

    def argument_source(self, path: str) -> Source | None:
        """Returns where the argument or key at `path` was written."""
        return self.named.get(path) or self.sources.get(path)

    def accused(self, path: str, text: str) -> Source | None:
        """Returns where that was written which a message of the function at `path` speaks of.

        That is an argument whose name stands in the text, best as in "width is -4" or "width=-4",
        and best one that came by an option of the command line; without any, the call itself. The
        root speaks of the arguments of its optimizer too.
        """
        spoken: list[tuple[bool, bool, int, Source]] = []
        for place in (path,) if path else ("", "optimizer"):
            for match in _WORD.finditer(text):
                source = self.sources.get(join(place, match[1]))
                if source is not None:
                    by_option = source.file.startswith("--")
                    spoken.append((not match[2], not by_option, match.start(), source))
        return min(spoken, key=lambda each: each[:3])[3] if spoken else self.sources.get(path)

    def at(self, path: str) -> Tree:
        """Returns the subtree at `path`; raises KeyError where there is none."""
        tree: Tree = self.root
        for key in locate(tree, path):
            tree = branches(tree)[key]
        return tree


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


def branches(tree: Tree) -> Mapping[Any, Tree]:
    """Returns what a call, dict or list holds, by key; of a leaf, nothing."""
    if isinstance(tree, Call):
        return dict(tree.kwargs)
    if isinstance(tree, list):
        return dict(enumerate(tree))
    return tree if isinstance(tree, dict) else {}


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the path and value of each leaf, in order; of an empty list, dict or call, itself."""
    items = branches(tree)
    if not items:
        yield path, tree
    for key, value in items.items():
        yield from leaves(value, join(path, key))


def locate(tree: Tree, path: str) -> list[Key]:
    """Returns the keys that lead from a tree to a path below it; raises KeyError if none do.

    A key may itself hold dots; the longest key that fits comes first.
    """
    keys: list[Key] = []
    while path:
        items = branches(tree)
        found = fitting(items, path)
        if found is None:
            raise KeyError(path)
        keys.append(found)
        tree = items[found]
        path = path[len(str(found)) + 1 :]
    return keys


def fitting(keys: Iterable[Key], path: str) -> Key | None:
    """Returns the longest key with which the path begins, or None."""
    fits = [key for key in keys if f"{path}.".startswith(f"{key}.")]
    return max(fits, key=lambda key: len(str(key)), default=None)


def printable(text: str, keep: str = "") -> str:
    r"""Returns a text as a terminal may show it: what is not printable is written as in "\x1b".

    A name in a config may hold any character, also those that move the cursor of a terminal.

    Args:
        text: the text.
        keep: characters that stay as they are, such as "\n".
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def _shown(line: str) -> str:
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE - 103]}...{line[-100:]}"
    return printable(line)
