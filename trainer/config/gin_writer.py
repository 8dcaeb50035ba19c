"""Writes a tree as Gin."""

import collections
import re

from trainer.config.tree import Call, Key, Tree, functions


def dump_gin(root: Call) -> str:
    """Returns the Gin file of a tree; loading it gives an equal tree.

    Example:
        >>> loss = Call("losses.huber", {"delta": 2.0})
        >>> print(dump_gin(Call("experiment", {"loss": loss, "steps": 100})), end="")
        experiment:
          loss = @losses.huber()
          steps = 100
        <BLANKLINE>
        losses.huber.delta = 2.0
    """
    # A function that the tree calls several times gets a scope for each call, named after its key.
    return "\n".join(_text(*block) for block in _Writer(root).blocks if block[1])


def _text(selector: str, lines: list[str]) -> str:
    if len(lines) == 1:
        return f"{selector}.{lines[0]}\n"
    return f"{selector}:\n" + "".join(f"  {line}\n" for line in lines)


class _Writer:
    """The bindings of each call by its selector, in the order in which the calls are named."""

    def __init__(self, root: Call):
        self._counts = collections.Counter(functions(root))
        self._scopes: set[str] = set()
        self.blocks: list[tuple[str, list[str]]] = []
        self._block(root, root.name)

    def _block(self, call: Call, selector: str) -> None:
        lines: list[str] = []
        self.blocks.append((selector, lines))  # before those of the calls inside
        lines += [f"{name} = {self._value(value, name)}" for name, value in call.kwargs.items()]

    def _value(self, value: Tree, key: Key) -> str:
        if isinstance(value, Call):
            selector = value.name
            if self._counts[value.name] > 1:
                selector = f"{self._scope(key)}/{value.name}"
            self._block(value, selector)
            return f"@{selector}" if value.partial else f"@{selector}()"
        if isinstance(value, dict):
            items = (f"{each!r}: {self._value(inner, each)}" for each, inner in value.items())
            return "{" + ", ".join(items) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(self._value(inner, key) for inner in value) + "]"
        return repr(value)

    def _scope(self, key: Key) -> str:
        """Returns a new scope that is named after the key of a call."""
        name = re.sub(r"\W", "_", str(key), flags=re.ASCII)
        name = name if re.match(r"[A-Za-z_]", name) else f"scope_{name}"
        found, number = name, 1
        while found in self._scopes:
            number += 1
            found = f"{name}{number}"
        self._scopes.add(found)
        return found
