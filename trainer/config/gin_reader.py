"""Reads Gin files with gin-config's own parser, and executes nothing.

The parser (`gin.config_parser`) yields statements, and calls a delegate for references and macros.
The scopes, macros and references of the statements are then resolved into one tree.

The rules are those of Gin. A call in the scope a/b takes the bindings without a scope, then those
of a, then those of a/b; later ones override. `@s/fn()` sets the scope of the call and of everything
below it; `@fn()` inherits the scope. A macro is a function of one argument: the value of the macro
is evaluated in a scope with the name of the macro. `@fn` is called by the function that receives
it, in the scope of that function.

A binding that nothing reads is not a mistake if another one overrides it, or if it is in an
included file and for a function that the config never calls. It is a mistake if it is in a file of
the command line, or in an option, and its function is never called; if its function is called, but
never in its scope; or if it defines a macro that no binding names.
"""

import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gin import config_parser

from trainer.config import nodes, wording
from trainer.config.tree import Call, ConfigError, Key, Source, Unused
from trainer.config.vocabulary import LANGUAGES, Language
from trainer.config.wording import known_names, listing, nearest

MACRO = "gin.macro"  # Gin's own name of the function that a macro calls
_MAX_STRINGS = 1000


@dataclass(frozen=True)
class Reference:
    """`@scope/name()`, or `@scope/name` if `evaluate` is false; `%name` refers to MACRO."""

    scopes: tuple[str, ...]
    name: str
    evaluate: bool


@dataclass(frozen=True)
class Pairs:
    """The items of a dict before its keys, which may be macros, are resolved."""

    items: tuple[tuple[nodes.Node, nodes.Node], ...]


@dataclass(frozen=True)
class Binding:
    """`scope/name.argument = value`; a macro's definition binds the `value` of MACRO."""

    scopes: tuple[str, ...]
    name: str
    argument: str
    value: nodes.Node  # of leaves, References, lists of Nodes, and Pairs
    source: Source
    # each file, include, end of an include, and option begins a new section; a binding overrides
    # those of earlier sections
    section: int = 0
    included: bool = False  # by another file

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        """What the statement binds; a later statement with the same key replaces this one."""
        return self.scopes, self.name, self.argument

    def __str__(self) -> str:
        if self.name == MACRO:
            return f"the macro {'/'.join(self.scopes)}"
        return "/".join([*self.scopes, f"{self.name}.{self.argument}"])


@dataclass(frozen=True)
class Include:
    """`include 'file.gin'`."""

    file: str
    source: Source


@dataclass(frozen=True)
class BlockHead:
    """The head of an indented block, `scope/name:`, whose bindings follow."""

    name: str
    source: Source
    section: int = 0  # as of a Binding
    included: bool = False


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, name = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), MACRO if name == "macro" else name, evaluate)

    def macro(self, macro_name: str) -> Reference:
        return Reference(tuple(macro_name.split("/")), MACRO, True)


@dataclass(frozen=True, eq=False)  # equal only to itself, so that equal keys of a dict stay apart
class _Located:
    value: Any
    line: int


class _Parser(config_parser.ConfigParser):
    """Gin's parser, with a line number for each value, also inside lists and dicts."""

    _depth = 0
    _strings = 0

    def _advance_one_token(self) -> None:
        super()._advance_one_token()
        kind = self.current_token.type if self.current_token else None
        if kind == tokenize.STRING:
            self._strings += 1
        elif kind not in (tokenize.NL, tokenize.COMMENT):
            self._strings = 0
        if self._strings > _MAX_STRINGS:  # the parser evaluates 'a' 'b' 'c' again for each string
            raise SyntaxError(f"there are more than {_MAX_STRINGS} strings in a row")

    def parse_value(self) -> _Located:
        line = _line(self)
        self._depth += 1
        if self._depth > nodes.MAX_DEPTH:
            raise SyntaxError(f"values are nested deeper than {nodes.MAX_DEPTH} levels")
        value = super().parse_value()
        self._depth -= 1
        return _Located(value, line)


def read_statements(text: str, source: Source) -> Iterator[Binding | Include | BlockHead]:
    """Yields the statements of a Gin text in order; raises ConfigError."""
    parser = None
    while True:
        line = _line(parser)
        try:
            with warnings.catch_warnings(action="ignore"):  # about '\d', which patterns need
                # The constructor reads the first token, and may raise as well.
                parser = parser or _Parser(text, _Delegate())
                statement = parser.parse_statement()
        except tokenize.TokenError as error:
            message, (line, _) = error.args
            raise _unreadable(message, line, text, source) from None
        except SyntaxError as error:
            at = error.lineno or _line(parser)
            raise _unreadable(error.msg or "", at, text, source) from None
        except Exception as error:  # gin's parser may raise anything for such a text
            raise _unreadable(f"{type(error).__name__}: {error}", line, text, source) from None
        if statement is None:
            return
        yield _statement(statement, source)


def _line(parser: config_parser.ConfigParser | None) -> int:
    token = parser.current_token if parser else None
    return token.start[0] if token else 1


def _unreadable(reason: str, line: int, text: str, source: Source) -> ConfigError:
    lines = text.split("\n")
    shown = lines[min(line, len(lines)) - 1].strip()[:80]
    reason, hint = wording.in_gin(shown, " ".join(reason.split())[:200].rstrip("."))
    message = f"Gin cannot read {shown!r}: {reason}. {hint}".rstrip()
    return ConfigError(message, source.below(line - 1))


def _statement(statement: Any, source: Source) -> Binding | Include | BlockHead:
    at = source.below(statement.location.line_num - 1)
    if isinstance(statement, config_parser.BindingStatement):
        scope, name, argument, located, _ = statement
        scopes = tuple(scope.split("/")) if scope else ()
        if not argument:
            # `name = value` is Gin's spelling of `name/gin.macro.value = value`.
            scopes, name, argument = (*scopes, name), MACRO, "value"
        elif name == "macro":
            name = MACRO
        nodes.check_argument(argument, at)
        return Binding(scopes, name, argument, _node(located, source), at)
    if isinstance(statement, config_parser.IncludeStatement):
        return Include(statement.filename, at)
    if isinstance(statement, config_parser.BlockDeclaration):
        return BlockHead(statement.selector, at)
    raise ConfigError(
        f"A config cannot import ({statement.format()!r}), and need not: functions of optim, optax,"
        " schedules, models, data, losses, metrics, hooks and parts are known. For a package"
        " of yours, remove the line and add --vocabulary=your.package to the command.",
        at,
    )


def _node(located: _Located, source: Source) -> nodes.Node:
    value, at = located.value, source.below(located.line - 1)
    while isinstance(value, _Located):  # a value in parentheses
        value = value.value
    if isinstance(value, list | tuple):
        value = [_node(item, source) for item in value]
    elif isinstance(value, dict):
        items = value.items()
        value = Pairs(tuple((_node(key, source), _node(item, source)) for key, item in items))
    elif not isinstance(value, Reference):
        nodes.check_leaf(value, at)
    elif not nodes.is_name(value.name):
        raise ConfigError(f"{value.name[:60]!r} is not the name of a function.", at)
    return nodes.Node(value, at)


Scope = tuple[str, ...]
Calls = Mapping[str, set[Scope]]
"""The scopes in which each function is called. The key MACRO has the macros that are read."""


def references_in(value: nodes.Node) -> Iterator[Reference]:
    """Yields the references and macros in the value of a binding, also inside lists and dicts."""
    if isinstance(value.value, Reference):
        yield value.value
    elif isinstance(value.value, list):
        for item in value.value:
            yield from references_in(item)
    elif isinstance(value.value, Pairs):
        for pair in value.value.items:
            for item in pair:
                yield from references_in(item)


def suffixes(name: str) -> Iterator[str]:
    """Yields the shorter spellings of a dotted name.

    Example:
        >>> list(suffixes("optax.contrib.muon"))
        ['contrib.muon', 'muon']
    """
    while "." in name:
        name = name.partition(".")[2]
        yield name


class BindingTable:
    """The bindings that are in force up to a section, and else the first of those after it."""

    # The section None is the end of the text. `root` names the call at the root of the config, and
    # `full` has the names that a reference spells in full. A binding of another name applies to the
    # called function whose name ends with it. `in_force` is in the order of the text. Two bindings
    # that spell the name of one function differently are both listed, though only one is read.

    def __init__(self, bindings: Sequence[Binding], root: str, last: int | None = None):
        self.bindings, self.root = bindings, root
        named = {found.name for each in bindings for found in references_in(each.value)}
        self.full = {root, MACRO, *named}
        self._entries: dict[tuple[Scope, str], dict[str, tuple[int, Binding]]] = {}
        for position, binding in enumerate(bindings, 1):
            # The highest rank wins. Up to the section `last` that is the last binding; later ones
            # have negative ranks, of which the first is the highest, and count only if there is no
            # earlier one.
            rank = position if last is None or binding.section <= last else -position
            entries = self._entries.setdefault((binding.scopes, binding.name), {})
            if binding.argument not in entries or rank > entries[binding.argument][0]:
                entries[binding.argument] = rank, binding
        ranked = [entry for entries in self._entries.values() for entry in entries.values()]
        self.in_force = [each for _, each in sorted(ranked, key=lambda entry: abs(entry[0]))]
        self._names = {name for _, name in self._entries}
        self._spellings: dict[str, list[str]] = {}

    def bound(self, name: str, scope: Scope) -> dict[str, Binding]:
        """Returns the bindings of a function in exactly one scope: argument -> binding."""
        # Bindings of outer scopes are not included. A binding may spell only the last parts of the
        # function's name, as in adamw.b2. Raises ConfigError if two bindings of one section bind
        # the same argument.
        if name not in self._spellings:
            short = [each for each in suffixes(name) if each not in self.full]
            self._spellings[name] = [each for each in [name, *short] if each in self._names]
        found: dict[str, tuple[int, Binding]] = {}
        for spelling in self._spellings[name]:
            for argument, entry in self._entries.get((scope, spelling), {}).items():
                if argument in found:
                    first, second = sorted([found[argument], entry], key=lambda each: each[0])
                    # In a later section, another spelling of the same argument overrides this one.
                    if first[1].section == second[1].section:
                        raise ConfigError(
                            f"This binds {argument!r} of {name} for the second time; the first is"
                            f" {first[1]} at {first[1].source}. Remove one.",
                            second[1].source,
                        )
                    entry = second
                found[argument] = entry
        return {argument: binding for argument, (_, binding) in found.items()}

    def macros(self) -> list[str]:
        """Returns the names of the macros that are defined."""
        return ["/".join(scopes) for scopes, function in self._entries if function == MACRO]


# Gin defines this macro for values that another file or a binding must provide.
_REQUIRED = ("REQUIRED", "gin.REQUIRED")


def resolve(
    statements: Sequence[Binding | BlockHead], where: Source, language: Language
) -> tuple[nodes.Node, list[Unused]]:
    """Returns the tree of the statements, and the bindings that have no effect on it."""
    # `where` is the place to name if the root has no binding.
    table = BindingTable([x for x in statements if isinstance(x, Binding)], language.root)
    bound = {each.name for each in table.in_force}
    if language.root not in bound:
        others = [each for each in LANGUAGES.values() if each.root in bound]
        found = "".join(f" It is the config of {x.what}: {x.command}." for x in others)
        raise ConfigError(
            f"The config binds no argument of {language.root}, so there is nothing to run: write"
            f" {language.example}, and so on.{found}",
            where,
        )
    resolver = _Resolver(table)
    root = resolver.resolve(where)
    unused_bindings = UnusedBindings(resolver)
    blocks = [each for each in statements if isinstance(each, BlockHead)]
    for statement in [*table.in_force, *blocks]:
        unused_bindings.refuse_ambiguous(statement)
    idle = [each for each in table.in_force if id(each) not in resolver.read]
    unused = [unused_bindings.classify(binding) for binding in idle]
    for block in blocks:
        unused_bindings.refuse_block(block)
    return root, unused


class _Resolver:
    """Follows the references of one table from the root; calls no function."""

    def __init__(self, table: BindingTable):
        self.table = table
        self._budget = nodes.Budget()
        self._open: list[tuple[Scope, str]] = []
        self.read: set[int] = set()  # the ids of the bindings that were read
        self.called: dict[str, set[Scope]] = {}  # the scopes in which each function was called
        self.where: dict[str, Source] = {}  # where each function was called first

    def resolve(self, where: Source) -> nodes.Node:
        root = self.table.root
        own = (each.source for each in self.table.in_force if each.name == root)
        return self._call(Reference((), root, True), (), (), next(own, where), 0)

    def _bound(self, name: str, scope: Scope) -> dict[str, Binding]:
        bound: dict[str, Binding] = {}
        # From the outermost scope to the innermost, which overrides.
        for length in range(len(scope) + 1):
            bound.update(self.table.bound(name, scope[:length]))
        self.called.setdefault(name, set()).add(scope)
        self.read.update(map(id, bound.values()))
        return bound

    def _call(
        self, reference: Reference, scope: Scope, caller: Scope, source: Source, depth: int
    ) -> nodes.Node:
        """Resolves a reference in the scope `scope`, which is an argument of a call in `caller`."""
        self._budget.spend(depth, source)
        scope = reference.scopes or (scope if reference.evaluate else caller)
        if (scope, reference.name) in self._open:
            steps = self._open[self._open.index((scope, reference.name)) :]
            shown = [
                "%" + "/".join(scopes) if name == MACRO else "@" + "/".join([*scopes, name])
                for scopes, name in [*steps, steps[0]]
            ]
            cycle = f"The config contains a cycle: {listing(shown)}"
            raise ConfigError(f"{cycle}. Remove one of these references.", source)
        self._open.append((scope, reference.name))
        self.where.setdefault(reference.name, source)
        if reference.name == MACRO:
            node = self._macro(reference, scope, caller, source, depth)
        else:
            kwargs = {}
            for argument, binding in self._bound(reference.name, scope).items():
                value = self._value(binding.value, scope, scope, depth + 1)
                kwargs[argument] = nodes.Node(value.value, value.source, binding.source)
            node = nodes.Node(Call(reference.name, kwargs, not reference.evaluate), source)
        self._open.pop()
        return node

    def _macro(
        self, reference: Reference, scope: Scope, caller: Scope, source: Source, depth: int
    ) -> nodes.Node:
        name = "/".join(scope)
        if not reference.evaluate:
            raise ConfigError(f"A macro is read with %{name}, not with @.", source)
        bound = self._bound(MACRO, scope)
        if extra := [argument for argument in bound if argument != "value"]:
            raise ConfigError(f"A macro has a value, not {extra[0]!r}.", bound[extra[0]].source)
        if bound:
            return self._value(bound["value"].value, scope, caller, depth + 1)
        if name in _REQUIRED:
            raise ConfigError("This value is required (%gin.REQUIRED): bind it.", source)
        macros = known_names(name, self.table.macros(), "Macros")
        raise ConfigError(
            f"The macro %{name} is not defined. {macros} Define it with a line {name} = value.",
            source,
        )

    def _value(self, node: nodes.Node, scope: Scope, caller: Scope, depth: int) -> nodes.Node:
        value = node.value
        if isinstance(value, Reference):
            return self._call(value, scope, caller, node.source, depth)
        self._budget.spend(depth, node.source)
        if isinstance(value, list):
            items = [self._value(item, scope, caller, depth + 1) for item in value]
            return nodes.Node(items, node.source)
        if isinstance(value, Pairs):
            return nodes.Node(self._dict(value, scope, caller, depth), node.source)
        return node

    def _dict(self, pairs: Pairs, scope: Scope, caller: Scope, depth: int) -> dict[Key, nodes.Node]:
        items: dict[Key, nodes.Node] = {}
        for key_node, value_node in pairs.items:
            # Compared once resolved: a key may be a macro, and two macros may have the same value.
            key = self._value(key_node, scope, caller, depth + 1).value
            at = key_node.source
            nodes.check_key(nodes.plain(nodes.Node(key, at)), at)
            if key in items:
                first = items[key].argument_source
                raise ConfigError(
                    f"The key {key!r} is given twice; the first is at {first}. Remove one.", at
                )
            value = self._value(value_node, scope, caller, depth + 1)
            items[key] = nodes.Node(value.value, value.source, at)
        return items


class UnusedBindings:
    """Classifies the bindings of a config that no call reads, after a resolver followed it."""

    def __init__(self, resolver: _Resolver):
        self._table = resolver.table
        self._called: Calls = resolver.called
        self._resolver = resolver
        self._functions: dict[str, list[str]] = {name: [name] for name in self._table.full}
        for name in sorted(self._called):
            for short in suffixes(name):
                if short not in self._table.full:
                    self._functions.setdefault(short, []).append(name)

    def refuse_ambiguous(self, statement: Binding | BlockHead) -> None:
        """Raises ConfigError for a short name that several functions have that the config calls."""
        functions = self._functions.get(statement.name, [])
        if len(functions) > 1:
            raise ConfigError(
                f"{statement.name} may be any of {listing(functions)}, which this config calls."
                " Write the name in full.",
                statement.source,
            )

    def refuse_block(self, block: BlockHead) -> None:
        """Raises ConfigError for a block, even an empty one, of a function never called."""
        # A block of an included file may be for a function that the config does not call.
        if not block.included and not self._scopes_since(block):
            raise ConfigError(self._never_called(block.name), block.source)

    def classify(self, binding: Binding) -> Unused:
        """Returns why a binding that no call reads is no mistake; raises ConfigError if it is."""
        name, why, unknown = binding.name, "", None
        if name == MACRO:
            if binding.scopes not in self._named_macros:
                used = ["/".join(scopes) for scopes in self._called.get(MACRO, ()) if scopes]
                macro = "/".join(binding.scopes)
                near = known_names(macro, used, "Macros that are used")
                text = f"Nothing reads {binding}. Use it as %{macro}, or remove it. {near}"
                raise ConfigError(text, binding.source)
            why = "Only bindings without effect read it."
        elif any(_covers(binding.scopes, scope) for scope in self._scopes(name)):
            why = f"{self._overriding(binding)} it wherever {self._full_name(name)} is called."
        elif any(_covers(binding.scopes, scope) for scope in self._scopes_since(binding)):
            why = "A later file or binding replaces the call that would read it."
        elif self._scopes(name):
            # Called, but in no scope that would take this binding: most likely a misspelt scope,
            # also if the file is included.
            raise ConfigError(self._why_scope(binding), binding.source)
        elif binding.included:
            why, unknown = f"This config never calls {name}.", name
        else:
            raise ConfigError(self._never_called(name), binding.source)
        return Unused(str(binding), unknown, binding.argument, binding.source, why)

    # The calls of the config.

    def _full_name(self, name: str) -> str:
        """Returns the full name of a called function."""
        return self._functions.get(name, [name])[0]

    def _scopes(self, name: str) -> set[Scope]:
        return self._called.get(self._full_name(name), set())

    def _scopes_since(self, statement: Binding | BlockHead) -> set[Scope]:
        """Returns the scopes of the calls, including calls that later sections replaced."""
        earlier = [calls for section, calls in self._earlier if section >= statement.section]
        name = statement.name
        return self._scopes(name).union(*(calls.get(name, ()) for calls in earlier))

    @cached_property
    def _earlier(self) -> list[tuple[int, Calls]]:
        """Returns, for each section but the last, the calls of the config up to it, by spelling."""
        earlier = []
        bindings, root = self._table.bindings, self._table.root
        for section in sorted({each.section for each in bindings})[:-1]:
            resolver = _Resolver(BindingTable(bindings, root, section))
            with suppress(ConfigError):  # an early section alone need not be a complete config
                resolver.resolve(Source(""))
            calls = defaultdict[str, set[Scope]](set)
            for name, scopes in resolver.called.items():
                for spelling in [name, *suffixes(name)]:
                    calls[spelling] |= scopes
            earlier.append((section, calls))
        return earlier

    @cached_property
    def _named_macros(self) -> set[Scope]:
        """Returns the macros that bindings of functions name, and those that these macros name."""
        macros = defaultdict[Scope, list[Binding]](list)
        waiting: list[Binding] = []
        for each in self._table.bindings:
            (macros[each.scopes] if each.name == MACRO else waiting).append(each)
        named: set[Scope] = set()
        while waiting:  # each macro is popped below, so that a cycle of macros ends
            for reference in references_in(waiting.pop().value):
                # A macro %a/b also reads the value of %a, because its scope is inside of a.
                for length in range(1, len(reference.scopes) + 1 if reference.name == MACRO else 0):
                    named.add(reference.scopes[:length])
                    waiting += macros.pop(reference.scopes[:length], [])
        return named

    # Messages.

    def _overriding(self, binding: Binding) -> str:
        others = [
            str(each.source)
            for each in self._table.in_force
            if each is not binding
            and each.argument == binding.argument
            and self._full_name(each.name) == self._full_name(binding.name)
            and _covers(binding.scopes, each.scopes)
        ]
        return f"{listing(others, 3)} override{'s' if len(others) == 1 else ''}"

    def _never_called(self, name: str) -> str:
        names = sorted(set(self._called) - {MACRO})
        last = name.rpartition(".")[2]
        tails = [each for each in names if each.rpartition(".")[2] == last]  # as of optix.adamw
        near = nearest(name, names) or next(iter(tails), None)
        hint = known_names(name, names, "It calls")
        if near is not None:
            hint = f"It calls {near} ({self._resolver.where[near]}): is one of the two misspelled?"
        return f"This config never calls {name}, so nothing reads this. {hint}"

    def _why_scope(self, binding: Binding) -> str:
        within = sorted(self._scopes(binding.name))
        shown = listing([repr("/".join(called)) if called else "no scope" for called in within])
        words = "/".join(binding.scopes)
        every = {"/".join(called[:n]) for called in within for n in range(1, len(called) + 1)}
        hint = known_names(words, every) if nearest(words, every) else ""
        return (
            f"Nothing reads {binding}: {self._full_name(binding.name)} is never called in the scope"
            f" {words!r}; it is called in {shown}. {hint}"
        )


def _covers(outer: Scope, inner: Scope) -> bool:
    """Returns whether a call in the scope `inner` takes the bindings of the scope `outer`."""
    return inner[: len(outer)] == outer
