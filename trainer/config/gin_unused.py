"""Finds the bindings of a Gin config that nothing reads, and decides which of them are mistakes.

A binding that another one overrides is not a mistake. Neither is a binding in an included file for
a function that the config never calls. A binding is a mistake if it is in a file of the command
line, or in an option, and its function is never called; if its function is called, but never in
its scope; or if it defines a macro that no binding names.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

from trainer.config.gin_reader import MACRO, Binding
from trainer.config.gin_tables import Bindings, Calls, Scope, Statement, Table, references, suffixes
from trainer.config.resolved import Unused
from trainer.config.tree import ConfigError, Source
from trainer.config.wording import known_names, listing, nearest


class UnusedBindings:
    """Classifies the bindings of a config that no call reads.

    Args:
        bindings: all bindings.
        called: the scopes of the calls that the config makes, by function.
        where: the place of the first call of each function.
        calls_of: returns the calls that the config would make with another table.
    """

    def __init__(
        self,
        bindings: Bindings,
        called: Calls,
        where: dict[str, Source],
        calls_of: Callable[[Table], Calls],
    ):
        self._bindings = bindings
        self._called = called
        self._where = where
        self._calls_of = calls_of
        self._functions: dict[str, list[str]] = {name: [name] for name in bindings.full}
        for name in sorted(called):
            for short in suffixes(name):
                if short not in bindings.full:
                    self._functions.setdefault(short, []).append(name)

    def refuse_ambiguous(self, statement: Statement) -> None:
        """Checks that the name of a function stands for one function.

        Args:
            statement: a binding, or the head of a block.

        Raises:
            ConfigError: the name is short, and matches several functions that the config calls.
        """
        functions = self._functions.get(statement.content.name, [])
        if len(functions) > 1:
            raise ConfigError(
                f"{statement.content.name} may be any of {listing(functions)}, which this config"
                " calls. Write the name in full.",
                statement.content.source,
            )

    def refuse_block(self, statement: Statement) -> None:
        """Checks that the function of a block is called, whether or not the block has bindings.

        Args:
            statement: the head of the block.

        Raises:
            ConfigError: the function is never called, and the block is not in an included file.
        """
        name = statement.content.name
        if not statement.included and not self._scopes_since(statement):
            raise ConfigError(self._never_called(name), statement.content.source)

    def classify(self, statement: Statement, in_force: Sequence[Statement]) -> Unused:
        """Returns why a binding without effect is not a mistake.

        Args:
            statement: a binding that no call reads.
            in_force: the bindings in force at the end of the text, which may override it.

        Returns:
            The binding and the reason.

        Raises:
            ConfigError: the binding is a mistake.
        """
        binding = statement.content
        assert isinstance(binding, Binding)
        name, why, unknown = binding.name, "", None
        if name == MACRO:
            if binding.scopes not in self._named_macros:
                raise ConfigError(self._why_macro(binding), binding.source)
            why = "Only bindings without effect read it."
        elif any(_covers(binding.scopes, scope) for scope in self._scopes(name)):
            why = f"{self._overriding(binding, in_force)} it wherever {self._full(name)} is called."
        elif any(_covers(binding.scopes, scope) for scope in self._scopes_since(statement)):
            why = "A later file or binding replaces the call that would read it."
        elif self._scopes(name):
            # Called, but in no scope that would take this binding: most likely a misspelt scope,
            # also if the file is included.
            raise ConfigError(self._why_scope(binding), binding.source)
        elif statement.included:
            why, unknown = f"This config never calls {name}.", name
        else:
            raise ConfigError(self._never_called(name), binding.source)
        return Unused(str(binding), unknown, binding.argument, binding.source, why)

    # The calls of the config.

    def _full(self, name: str) -> str:
        """Returns the full name of a called function."""
        return self._functions.get(name, [name])[0]

    def _scopes(self, name: str) -> set[Scope]:
        return self._called.get(self._full(name), set())

    def _scopes_since(self, statement: Statement) -> set[Scope]:
        """Returns the scopes of the calls, including calls that later sections replaced."""
        earlier = [calls for section, calls in self._earlier if section >= statement.section]
        name = statement.content.name
        return self._scopes(name).union(*(calls.get(name, ()) for calls in earlier))

    @cached_property
    def _earlier(self) -> list[tuple[int, Calls]]:
        """Returns, for each section but the last, the calls of the config up to it, by spelling."""
        earlier = []
        for section, table in self._bindings.before():
            calls: dict[str, set[Scope]] = {}
            for name, scopes in self._calls_of(table).items():
                for spelling in [name, *suffixes(name)]:
                    calls.setdefault(spelling, set()).update(scopes)
            earlier.append((section, calls))
        return earlier

    @cached_property
    def _named_macros(self) -> set[Scope]:
        """Returns the macros that bindings of functions name, and those that these macros name."""
        macros: dict[Scope, list[Binding]] = {}
        waiting: list[Binding] = []
        for each in self._bindings.bindings:
            assert isinstance(each.content, Binding)
            is_macro = each.content.name == MACRO
            (macros.setdefault(each.content.scopes, []) if is_macro else waiting).append(
                each.content
            )
        named: set[Scope] = set()
        while waiting:  # each macro is popped below, so that a cycle of macros ends
            for reference in references(waiting.pop().value):
                # A macro %a/b also reads the value of %a, because its scope is inside of a.
                for length in range(1, len(reference.scopes) + 1 if reference.name == MACRO else 0):
                    named.add(reference.scopes[:length])
                    waiting += macros.pop(reference.scopes[:length], [])
        return named

    # Messages.

    def _overriding(self, binding: Binding, in_force: Sequence[Statement]) -> str:
        others = [
            str(each.content.source)
            for each in in_force
            if isinstance(each.content, Binding)
            and each.content is not binding
            and each.content.argument == binding.argument
            and self._full(each.content.name) == self._full(binding.name)
            and _covers(binding.scopes, each.content.scopes)
        ]
        return f"{listing(others, 3)} override{'s' if len(others) == 1 else ''}"

    def _never_called(self, name: str) -> str:
        names = sorted(set(self._called) - {MACRO})
        last = name.rpartition(".")[2]
        tails = [each for each in names if each.rpartition(".")[2] == last]  # optix.adamw
        near = nearest(name, names) or next(iter(tails), None)
        hint = known_names(name, names, "It calls")
        if near is not None:
            hint = f"It calls {near} ({self._where[near]}): is one of the two misspelled?"
        return f"This config never calls {name}, so nothing reads this. {hint}"

    def _why_macro(self, binding: Binding) -> str:
        used = ["/".join(scopes) for scopes in self._called.get(MACRO, ()) if scopes]
        macro = "/".join(binding.scopes)
        near = known_names(macro, used, "Macros that are used")
        return f"Nothing reads {binding}. Use it as %{macro}, or remove it. {near}"

    def _why_scope(self, binding: Binding) -> str:
        within = sorted(self._scopes(binding.name))
        shown = listing([repr("/".join(called)) if called else "no scope" for called in within])
        words = "/".join(binding.scopes)
        every = {"/".join(called[:n]) for called in within for n in range(1, len(called) + 1)}
        hint = known_names(words, every) if nearest(words, every) else ""
        return (
            f"Nothing reads {binding}: {self._full(binding.name)} is never called in the scope"
            f" {words!r}; it is called in {shown}. {hint}"
        )


def _covers(outer: Scope, inner: Scope) -> bool:
    """Returns whether a call in the scope `inner` takes the bindings of the scope `outer`."""
    return inner[: len(outer)] == outer
