"""Replaces floats of a config while it is built, defaults included."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config.signatures import Function
from trainer.config.tree import join


class Floats(NamedTuple):
    """What to build with in the place of floats.

    Attributes:
        replace: called with the path of a float, such as "optimizer.clip_norm", its value and the
            annotation of its argument; returns what to use in its place, or the value itself.
        function: called with every function that the config names; returns the function to call in
            its place, or the function itself.
    """

    replace: Callable[[str, float, Any], Any]
    function: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call

    def within(
        self, function: Function, values: Mapping[str, Any], path: str
    ) -> tuple[Function, dict[str, Any]]:
        """Returns a function and its arguments, the defaults that were replaced among them.

        Args:
            function: the function of a call.
            values: its arguments by name, as the config has them, built.
            path: the path of the call.
        """
        found = dict(values)
        for name, parameter in function.parameters.items():
            default = parameter.default
            # A default that is a float is an input of the program as well: which floats are inputs
            # must not depend on whether the config repeats a default.
            if name not in values and type(default) is float:
                value = self.replace(join(path, name), default, parameter.hint)
                if value is not default:
                    found[name] = value
        return replace(function, call=self.function(function.call)), found
