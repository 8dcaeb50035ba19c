"""Reads the statements of a Gin file with gin-config's own parser, and executes nothing.

The parser (`gin.config_parser`) yields statements, and calls a delegate for references and macros.
`gin_scopes` combines the statements into a tree.
"""

import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gin import config_parser

from trainer.config import wording
from trainer.config.nodes import MAX_DEPTH, Node, check_argument, check_leaf, is_name
from trainer.config.tree import ConfigError, Source

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

    items: tuple[tuple[Node, Node], ...]


@dataclass(frozen=True)
class Binding:
    """`scope/name.argument = value`; a macro's definition binds the `value` of MACRO."""

    scopes: tuple[str, ...]
    name: str
    argument: str
    value: Node  # of leaves, References, lists of Nodes, and Pairs
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
        if self._depth > MAX_DEPTH:
            raise SyntaxError(f"values are nested deeper than {MAX_DEPTH} levels")
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
        check_argument(argument, at)
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


def _node(located: _Located, source: Source) -> Node:
    value, at = located.value, source.below(located.line - 1)
    while isinstance(value, _Located):  # a value in parentheses
        value = value.value
    if isinstance(value, list | tuple):
        value = [_node(item, source) for item in value]
    elif isinstance(value, dict):
        items = value.items()
        value = Pairs(tuple((_node(key, source), _node(item, source)) for key, item in items))
    elif not isinstance(value, Reference):
        check_leaf(value, at)
    elif not is_name(value.name):
        raise ConfigError(f"{value.name[:60]!r} is not the name of a function.", at)
    return Node(value, at)
