"""A resolved config: the tree of calls, and the places of its values."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.config.tree import Call, Source, Tree, child_trees, join, split_path

__all__ = ["Config", "ConfigFile", "Unused"]

# A word that is not a part of a dotted name. Group 2 is set in "width is", "width of 8" and
# "width=", which name an argument with more certainty than the bare word.
_WORD = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?!\w|\.\w)(\s+is\b|\s+of\s+-?\d|=(?!=))?")


@dataclass(frozen=True)
class ConfigFile:
    """A file that a config was read from.

    Attributes:
        name: the path by which it was found: as on the command line, or in the folder of the
            including file, the current folder or a search path.
        resolved: its absolute path, without symbolic links.
        sha256: the SHA-256 of its bytes, in hexadecimal.
        included: whether another file includes it; False for a file of the command line.
    """

    name: str
    resolved: str
    sha256: str
    included: bool


@dataclass(frozen=True)
class Unused:
    """A Gin binding that has no effect and is not a mistake.

    Attributes:
        binding: the function and argument as the file spells them: "models.vit.width".
        function: the function if the config never calls it; None if it is called, but another
            binding overrides this one.
        argument: the argument that is bound.
        source: the place of the binding.
        why: a sentence that explains why it has no effect.
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
        sources: where the value of each node was written, by path. A path consists of the keys from
            the root to the node, joined by dots: "optimizer.groups.rest.optimizer.learning_rate".
            The key of a list element is its index, and the path of the root is "".
        key_sources: where the argument or key of a node was written, by path, for nodes whose value
            was written somewhere else (a macro, an alias).
        files: the files that it was read from, in the order of reading.
        unused: the bindings that have no effect and are not mistakes.
    """

    root: Call
    sources: Mapping[str, Source]
    key_sources: Mapping[str, Source] = field(default_factory=dict)
    files: Sequence[ConfigFile] = ()
    unused: Sequence[Unused] = ()

    def argument_source(self, path: str) -> Source | None:
        """Returns where the argument or key of a node was written.

        Args:
            path: the path of the node; see `sources`.

        Returns:
            The place, or None if the config has no such node.
        """
        return self.key_sources.get(path) or self.sources.get(path)

    def source_of_error(self, path: str, text: str) -> Source | None:
        """Returns the place of the value that an error message of a function is about.

        This is an argument whose name occurs in the message, preferably as in "width is -4",
        "width of -4" or "width=-4"; or a string whose value occurs in it, preferably one that is
        more than a word, such as a path. Among several, values from the command line are preferred.
        If no value matches, it is the place of the call. For the root, the arguments of its
        optimizer are searched too.

        Args:
            path: the path of the call.
            text: the message.
        """
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
        """Returns the options that changed an argument of a call of a file, as "--set width=8".

        Args:
            path: the path of the call; see `sources`.

        Returns:
            The options without repetition; none if the call was written in an option itself.
        """
        call = self.sources.get(path)
        if call is None or call.file.startswith("--"):
            return []
        below = [self.sources.get(join(path, key)) for key in child_trees(self.at(path))]
        return list(dict.fromkeys(str(x) for x in below if x and x.file.startswith("--")))

    def at(self, path: str) -> Tree:
        """Returns the subtree at a path.

        Args:
            path: the path of the node; see `sources`.

        Raises:
            KeyError: the path does not exist.
        """
        tree: Tree = self.root
        for key in split_path(tree, path):
            tree = child_trees(tree)[key]
        return tree


def _position(value: Tree, text: str) -> int | None:
    """Returns the position of a string of a config in a text, as a whole word, or None.

    A message may contain "/users/ann/data" if the config has "~/data" or "./data/".
    """
    if not isinstance(value, str) or len(word := value.removeprefix("~").strip("./")) < 2:
        return None
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    return found and found.start()
