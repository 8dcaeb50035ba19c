"""What the bindings of Gin mean together: scopes, macros and references become one tree.

The rules are Gin's own. A call in the scope a/b takes the bindings without a scope, then those of
a, then those of a/b; later ones override. `@s/fn()` replaces the scope for all that is below it,
`@fn()` inherits it. A macro is a function of one argument: what it holds is called in the scope of
the macro's name. `@fn` is called by whoever receives it, in the receiver's scope.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config.gin_reader import MACRO, Binding, Block, Pairs, Reference
from trainer.config.nodes import Budget, Node, check_key, plain
from trainer.config.tree import Call, ConfigError, Key, Source
from trainer.config.wording import known_names, listing, nearest

Scope = tuple[str, ...]
ROOT = "experiment"
_REQUIRED = ("REQUIRED", "gin.REQUIRED")


@dataclass(frozen=True)
class Statement:
    """A binding or the head of a block, and the number of the stretch of text it stands in.

    A new stretch begins with each file, include, end of an include, and option; within one the
    bindings are written by one hand, across two the later overrides the earlier.
    """

    content: Binding | Block
    stretch: int


def resolve(statements: Sequence[Statement], where: Source) -> Node:
    """Returns the tree that the statements mean; raises ConfigError for what none of it reads.

    Args:
        statements: in the order of the text.
        where: the place to name where there is no binding of `experiment` at all.
    """
    tables = _Tables(statements)
    table = tables.at_end()
    if not any(name == ROOT for _, name in table):
        raise ConfigError(
            "The config binds no argument of experiment, so there is nothing to run: write"
            " experiment.model = @models.vit(), and so on.",
            where,
        )
    resolver = _Resolver(table)
    root = resolver.root(where)
    _refuse_unread(tables, table, resolver)
    return root


Table = Mapping[tuple[Scope, str], Mapping[str, Binding]]


class _Tables:
    """The bindings in force after each stretch of the text."""

    def __init__(self, statements: Sequence[Statement]):
        self._bindings = [
            (each.content, each.stretch) for each in statements if isinstance(each.content, Binding)
        ]
        self.blocks = [each.content for each in statements if isinstance(each.content, Block)]
        self.bindings = [binding for binding, _ in self._bindings]

    def at_end(self) -> dict[tuple[Scope, str], dict[str, Binding]]:
        return self._until(None)

    def before(self) -> list[Table]:
        """Returns the tables after each stretch but the last, the latest first."""
        stretches = sorted({stretch for _, stretch in self._bindings})
        return [self._until(stretch) for stretch in reversed(stretches[:-1])]

    def _until(self, last: int | None) -> dict[tuple[Scope, str], dict[str, Binding]]:
        table: dict[tuple[Scope, str], dict[str, Binding]] = {}
        for binding, stretch in self._bindings:
            if last is None or stretch <= last:
                at = (binding.scopes, binding.name)
                table.setdefault(at, {})[binding.argument] = binding
        return table


class _Resolver:
    """Calls nothing: follows the references of one table from the root."""

    def __init__(self, table: Table):
        self._table = table
        self._budget = Budget()
        self._open: list[tuple[Scope, str]] = []
        self.read: set[int] = set()  # the ids of the bindings that were read
        self.called: dict[str, set[Scope]] = {}  # the scopes in which each function was called
        self.where: dict[str, Source] = {}  # where each function was called first

    def root(self, where: Source) -> Node:
        own = [args for (_, name), args in self._table.items() if name == ROOT]
        first = next(iter(own[0].values())).source if own else where
        return self._call(Reference((), ROOT, True), (), (), first, 0)

    def _bound(self, name: str, scope: Scope) -> dict[str, Binding]:
        bound: dict[str, Binding] = {}
        for length in range(len(scope) + 1):
            bound.update(self._table.get((scope[:length], name), {}))
        self.called.setdefault(name, set()).add(scope)
        self.read.update(map(id, bound.values()))
        return bound

    def _call(
        self, reference: Reference, scope: Scope, caller: Scope, source: Source, depth: int
    ) -> Node:
        """Resolves a reference that stands in `scope`, in an argument of a call in `caller`."""
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
            raise ConfigError(f"A macro has a value, and no {extra[0]!r}.", bound[extra[0]].source)
        if bound:
            return self._value(bound["value"].value, scope, caller, depth + 1)
        if name in _REQUIRED:
            raise ConfigError("This value is required (%gin.REQUIRED): bind it.", source)
        names = ["/".join(scopes) for scopes, function in self._table if function == MACRO]
        raise ConfigError(
            f"The macro %{name} is not defined. {known_names(name, names, 'Macros')}"
            f" Define it with a line {name} = value.",
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
        return f"The config goes round in a circle: {listing(shown)}. Cut it somewhere."


def _refuse_unread(tables: _Tables, table: Table, resolver: _Resolver) -> None:
    """Raises ConfigError for the first binding that nothing reads.

    What a later file or option put out of use is no mistake, so that an override may replace a
    model whose arguments another file binds: a binding counts as read if it is read in the tree of
    some stretch of the text.
    """
    read = set(resolver.read)
    called = set(resolver.called)
    for earlier in [] if _unread(tables, read, called) is None else tables.before():
        older = _Resolver(earlier)
        try:
            older.root(Source(""))
        except ConfigError:
            pass  # the text up to here is no whole config
        read |= older.read
        called |= older.called.keys()
    culprit = _unread(tables, read, called)
    if isinstance(culprit, Block):
        raise ConfigError(_never_called(culprit.name, resolver), culprit.source)
    if culprit is not None:
        raise ConfigError(_why_unread(culprit, table, resolver), culprit.source)


def _unread(tables: _Tables, read: set[int], called: set[str]) -> Binding | Block | None:
    in_force = {id(b) for args in tables.at_end().values() for b in args.values()}
    for binding in tables.bindings:
        if id(binding) in in_force and id(binding) not in read:
            return binding
    return next((block for block in tables.blocks if block.name not in called), None)


def _never_called(name: str, resolver: _Resolver) -> str:
    names = sorted(set(resolver.called) - {MACRO})
    last = name.rpartition(".")[2]
    tails = [each for each in names if each.rpartition(".")[2] == last]  # adamw: optax.adamw
    near = nearest(name, names) or next(iter(tails), None)
    hint = known_names(name, names, "It calls")
    if near is not None:
        hint = f"It calls {near} ({resolver.where[near]}): is one of the two misspelled?"
    return f"This config never calls {name}, so nothing reads this. {hint}"


def _why_unread(binding: Binding, table: Table, resolver: _Resolver) -> str:
    scope, name, argument = binding.key
    if name == MACRO:
        used = ["/".join(scopes) for scopes in resolver.called.get(MACRO, ()) if scopes]
        macro = "/".join(scope)
        near = known_names(macro, used, "Macros that are used")
        return f"Nothing reads {binding}. Use it as %{macro}, or remove it. {near}"
    if name not in resolver.called:
        return _never_called(name, resolver)
    within = sorted(resolver.called[name])
    if all(called[: len(scope)] != scope for called in within):
        shown = listing([repr("/".join(called)) if called else "no scope" for called in within])
        words = "/".join(scope)
        every = {"/".join(called[:n]) for called in within for n in range(1, len(called) + 1)}
        return (
            f"Nothing reads {binding}: {name} is never called in the scope {words!r}, but in"
            f" {shown}. {known_names(words, every) if nearest(words, every) else ''}"
        )
    winners = [
        args[argument].source
        for (scopes, function), args in table.items()
        if function == name and argument in args and len(scopes) > len(scope)
    ]
    return (
        f"Nothing reads {binding}: wherever {name} is called, a binding of an inner scope wins"
        f" ({listing(list(map(str, winners)))}). Remove one of them."
    )
