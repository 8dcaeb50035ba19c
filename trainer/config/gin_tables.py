"""Looks up which Gin binding applies to a function in a scope."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.gin_reader import MACRO, Binding, Block, Pairs, Reference
from trainer.config.nodes import Node
from trainer.config.tree import ConfigError

Scope = tuple[str, ...]
Calls = Mapping[str, set[Scope]]
"""The scopes in which each function is called. The key MACRO has the macros that are read."""


@dataclass(frozen=True)
class Statement:
    """A binding or the head of a block, and its position.

    Attributes:
        content: the binding, or the head of a block.
        section: the number of the section. Each file, include, end of an include, and option
            begins a new section; a binding overrides those of earlier sections.
        included: whether the file is included by another file.
    """

    content: Binding | Block
    section: int
    included: bool = False


def references(value: Node) -> Iterator[Reference]:
    """Yields the references and macros in the value of a binding.

    Args:
        value: the value; references inside its lists and dicts are found as well.
    """
    if isinstance(value.value, Reference):
        yield value.value
    elif isinstance(value.value, list):
        for item in value.value:
            yield from references(item)
    elif isinstance(value.value, Pairs):
        for pair in value.value.items:
            for item in pair:
                yield from references(item)


def suffixes(name: str) -> Iterator[str]:
    """Yields the shorter spellings of a dotted name.

    Args:
        name: the full name of a function.

    Example:
        >>> list(suffixes("optax.contrib.muon"))
        ['contrib.muon', 'muon']
    """
    while "." in name:
        name = name.partition(".")[2]
        yield name


class Bindings:
    """All bindings of a config, in the order of the text.

    Args:
        statements: the statements in the order of the text.
        root: the name of the call at the root of the tree.

    Attributes:
        bindings: the statements that are bindings.
        blocks: the statements that are heads of blocks.
        full: the names that a reference spells in full. A binding of another name applies to the
            called function whose name ends with it.
    """

    def __init__(self, statements: Sequence[Statement], root: str):
        self.bindings = [each for each in statements if isinstance(each.content, Binding)]
        self.blocks = [each for each in statements if isinstance(each.content, Block)]
        self.full = {root, MACRO}
        for each in self.bindings:
            assert isinstance(each.content, Binding)
            self.full |= {reference.name for reference in references(each.content.value)}

    def at_end(self) -> "Table":
        """Returns the bindings in force at the end of the text."""
        return Table(self, None)

    def before(self) -> list[tuple[int, "Table"]]:
        """Returns the bindings in force before each later section, the latest first.

        The table of a section holds for each argument the last binding up to that section, or else
        the first one after it.
        """
        sections = sorted({each.section for each in self.bindings})
        return [(section, Table(self, section)) for section in reversed(sections[:-1])]


class Table:
    """The bindings that are in force; see `Bindings`.

    Attributes:
        in_force: the statements of these bindings, in the order of the text. Two bindings that
            spell the name of one function differently are both listed, though only one is read.
    """

    def __init__(self, all_bindings: Bindings, last: int | None):
        self._full = all_bindings.full
        self._entries: dict[tuple[Scope, str], dict[str, tuple[int, Statement]]] = {}
        for position, each in enumerate(all_bindings.bindings, 1):
            binding = each.content
            assert isinstance(binding, Binding)
            # The highest rank wins. Up to the section `last` that is the last binding; later ones
            # have negative ranks, of which the first is the highest, and count only if there is no
            # earlier one.
            rank = position if last is None or each.section <= last else -position
            entries = self._entries.setdefault((binding.scopes, binding.name), {})
            if binding.argument not in entries or rank > entries[binding.argument][0]:
                entries[binding.argument] = rank, each
        ranked = [entry for entries in self._entries.values() for entry in entries.values()]
        self.in_force = [each for _, each in sorted(ranked, key=lambda entry: abs(entry[0]))]
        self._names = {name for _, name in self._entries}
        self._spellings: dict[str, list[str]] = {}

    def bound(self, name: str, scope: Scope) -> dict[str, Binding]:
        """Returns the bindings of a function in exactly one scope.

        A binding may spell only the last parts of the function's name, as in adamw.b2.

        Args:
            name: the full name of the function.
            scope: the scope; bindings of outer scopes are not included.

        Returns:
            Argument -> binding.

        Raises:
            ConfigError: two bindings of one section bind the same argument.
        """
        if name not in self._spellings:
            short = [each for each in suffixes(name) if each not in self._full]
            self._spellings[name] = [each for each in [name, *short] if each in self._names]
        found: dict[str, tuple[int, Statement]] = {}
        for spelling in self._spellings[name]:
            for argument, entry in self._entries.get((scope, spelling), {}).items():
                if argument in found:
                    first, second = sorted([found[argument], entry], key=lambda each: each[0])
                    # In a later section, another spelling of the same argument overrides this one.
                    if first[1].section == second[1].section:
                        raise ConfigError(
                            f"This binds {argument!r} of {name} for the second time; the first is"
                            f" {first[1].content} at {first[1].content.source}. Remove one.",
                            second[1].content.source,
                        )
                    entry = second
                found[argument] = entry
        return {argument: _binding(each) for argument, (_, each) in found.items()}

    def macros(self) -> list[str]:
        """Returns the names of the macros that are defined."""
        return ["/".join(scopes) for scopes, function in self._entries if function == MACRO]


def _binding(statement: Statement) -> Binding:
    assert isinstance(statement.content, Binding)
    return statement.content
