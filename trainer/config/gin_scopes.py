"""Resolves the scopes, macros and references of Gin bindings into one tree.

The rules are those of Gin. A call in the scope a/b takes the bindings without a scope, then those
of a, then those of a/b; later ones override. `@s/fn()` sets the scope of the call and of everything
below it; `@fn()` inherits the scope. A macro is a function of one argument: the value of the macro
is evaluated in a scope with the name of the macro. `@fn` is called by the function that receives
it, in the scope of that function.
"""

from collections.abc import Sequence
from functools import partial

from trainer.config.gin_reader import MACRO, Binding, Pairs, Reference
from trainer.config.gin_tables import Bindings, Calls, Scope, Statement, Table
from trainer.config.gin_unused import UnusedBindings
from trainer.config.languages import LANGUAGES, Language
from trainer.config.nodes import Budget, Node, check_key, plain
from trainer.config.resolved import Unused
from trainer.config.tree import Call, ConfigError, Key, Source
from trainer.config.wording import known_names, listing

# Gin defines this macro for values that another file or a binding must provide.
_REQUIRED = ("REQUIRED", "gin.REQUIRED")


def resolve(
    statements: Sequence[Statement], where: Source, language: Language
) -> tuple[Node, list[Unused]]:
    """Returns the tree of the statements, and the bindings that have no effect on it.

    Args:
        statements: the statements in the order of the text.
        where: the place to name if the root has no binding.
        language: the kind of the config, which has the name of the root.

    Raises:
        ConfigError: a macro is not defined, references form a cycle, or a binding without effect is
            a mistake; see `gin_unused`.
    """
    root_name = language.root
    bindings = Bindings(statements, root_name)
    table = bindings.at_end()
    bound = {each.content.name for each in table.in_force}
    if root_name not in bound:
        others = [each for each in LANGUAGES.values() if each.root in bound]
        found = "".join(f" It is the config of {x.what}: {x.command}." for x in others)
        raise ConfigError(
            f"The config binds no argument of {root_name}, so there is nothing to run: write"
            f" {language.example}, and so on.{found}",
            where,
        )
    resolver = _Resolver(table, root_name)
    root = resolver.root(where)
    unused_bindings = UnusedBindings(
        bindings, resolver.called, resolver.where, partial(_calls, root_name)
    )
    for statement in [*table.in_force, *bindings.blocks]:
        unused_bindings.refuse_ambiguous(statement)
    idle = [each for each in table.in_force if id(each.content) not in resolver.read]
    unused = [unused_bindings.classify(statement, table.in_force) for statement in idle]
    for block in bindings.blocks:
        unused_bindings.refuse_block(block)
    return root, unused


def _calls(root: str, table: Table) -> Calls:
    """Returns the calls that a config makes with the bindings of a table, up to the first error."""
    resolver = _Resolver(table, root)
    try:
        resolver.root(Source(""))
    except ConfigError:
        pass  # an early section alone need not be a complete config
    return resolver.called


class _Resolver:
    """Follows the references of one table from the root; calls no function."""

    def __init__(self, table: Table, root: str):
        self._table = table
        self._root = root
        self._budget = Budget()
        self._open: list[tuple[Scope, str]] = []
        self.read: set[int] = set()  # the ids of the bindings that were read
        self.called: dict[str, set[Scope]] = {}  # the scopes in which each function was called
        self.where: dict[str, Source] = {}  # where each function was called first

    def root(self, where: Source) -> Node:
        own = [
            each.content.source for each in self._table.in_force if each.content.name == self._root
        ]
        return self._call(Reference((), self._root, True), (), (), own[0] if own else where, 0)

    def _bound(self, name: str, scope: Scope) -> dict[str, Binding]:
        bound: dict[str, Binding] = {}
        # From the outermost scope to the innermost, which overrides.
        for length in range(len(scope) + 1):
            bound.update(self._table.bound(name, scope[:length]))
        self.called.setdefault(name, set()).add(scope)
        self.read.update(map(id, bound.values()))
        return bound

    def _call(
        self, reference: Reference, scope: Scope, caller: Scope, source: Source, depth: int
    ) -> Node:
        """Resolves a reference in the scope `scope`, which is an argument of a call in `caller`."""
        self._budget.spend(depth, source)
        scope = reference.scopes or (scope if reference.evaluate else caller)
        if (scope, reference.name) in self._open:
            raise ConfigError(self._cycle(scope, reference.name), source)
        self._open.append((scope, reference.name))
        self.where.setdefault(reference.name, source)
        if reference.name == MACRO:
            node = self._macro(reference, scope, caller, source, depth)
        else:
            kwargs = {}
            for argument, binding in self._bound(reference.name, scope).items():
                value = self._value(binding.value, scope, scope, depth + 1)
                kwargs[argument] = Node(value.value, value.source, binding.source)
            call = Call(reference.name, kwargs, not reference.evaluate)
            node = Node(call, source)
        self._open.pop()
        return node

    def _macro(
        self, reference: Reference, scope: Scope, caller: Scope, source: Source, depth: int
    ) -> Node:
        name = "/".join(scope)
        if not reference.evaluate:
            raise ConfigError(f"A macro is read with %{name}, not with @.", source)
        bound = self._bound(MACRO, scope)
        extra = [argument for argument in bound if argument != "value"]
        if extra:
            raise ConfigError(f"A macro has a value, not {extra[0]!r}.", bound[extra[0]].source)
        if bound:
            return self._value(bound["value"].value, scope, caller, depth + 1)
        if name in _REQUIRED:
            raise ConfigError("This value is required (%gin.REQUIRED): bind it.", source)
        macros = known_names(name, self._table.macros(), "Macros")
        raise ConfigError(
            f"The macro %{name} is not defined. {macros} Define it with a line {name} = value.",
            source,
        )

    def _value(self, node: Node, scope: Scope, caller: Scope, depth: int) -> Node:
        value = node.value
        if isinstance(value, Reference):
            return self._call(value, scope, caller, node.source, depth)
        self._budget.spend(depth, node.source)
        if isinstance(value, list):
            items = [self._value(item, scope, caller, depth + 1) for item in value]
            return Node(items, node.source)
        if isinstance(value, Pairs):
            return Node(self._dict(value, scope, caller, depth), node.source)
        return node

    def _dict(self, pairs: Pairs, scope: Scope, caller: Scope, depth: int) -> dict[Key, Node]:
        items: dict[Key, Node] = {}
        for key_node, value_node in pairs.items:
            # Only now: a key may be a macro, and two macros may have the same value.
            key = self._value(key_node, scope, caller, depth + 1).value
            at = key_node.source
            check_key(plain(Node(key, at)), at)
            if key in items:
                first = items[key].argument_source
                raise ConfigError(
                    f"The key {key!r} is given twice; the first is at {first}. Remove one.", at
                )
            value = self._value(value_node, scope, caller, depth + 1)
            items[key] = Node(value.value, value.source, at)
        return items

    def _cycle(self, scope: Scope, name: str) -> str:
        steps = self._open[self._open.index((scope, name)) :] + [(scope, name)]
        shown = [
            "%" + "/".join(scopes) if function == MACRO else "@" + "/".join([*scopes, function])
            for scopes, function in steps
        ]
        return f"The config contains a cycle: {listing(shown)}. Remove one of these references."
