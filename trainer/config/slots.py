"""What the place of a node in a tree asks for."""

import re
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import annotations, conversion
from trainer.config.signatures import Function
from trainer.config.tree import Key
from trainer.config.units import is_steps, names_steps, quantity

_FLOATS = ("learning_rate", "weight_decay")  # of an optimizer, whatever their annotation


@dataclass(frozen=True)
class Slot:
    """What the place of a node asks for.

    Attributes:
        hint: the annotation.
        default: the default of the parameter, where the node is an argument.
        owner: the name of the function that receives it.
        argument: the function's argument that the node is, "writers", or the part of one, as in
            "writers[0]" or "groups.rest".
        in_recipe: this function is a recipe, so that a schedule may stand for any float.
        counts_steps: the argument's name or default says that its integers are numbers of steps.
    """

    hint: Any = Any
    default: Any = None
    owner: str = ""
    argument: str = ""
    in_recipe: bool = False
    counts_steps: bool = False

    @property
    def takes_steps(self) -> bool:
        """Says whether a number of steps is asked for, so that it may have a unit."""
        named = self.counts_steps and annotations.takes_int(self.hint)
        return named or is_steps(self.hint)

    @property
    def takes_mask(self) -> bool:
        """Says whether a mask of optax's is asked for: a function of parameters, or booleans."""
        name = re.split(r"[.\[]", self.argument)[0]
        is_optax = annotations.takes_callable(self.hint) or self.owner.startswith("optax.")
        return (name == "mask" or name.endswith("_mask")) and is_optax

    def of_argument(self, function: Function, name: str, is_recipe: bool) -> "Slot":
        """Returns what an argument of the function that stands here asks for."""
        parameter = function.parameters[name]
        hint, default = annotations.of(parameter.hint, parameter.default), parameter.default
        if is_recipe and name in _FLOATS:
            hint = annotations.with_float(parameter.hint, default)
        counts = names_steps(name) or isinstance(default, str) and quantity(default) is not None
        return Slot(hint, default, function.name, name, is_recipe, counts)

    def of_elements(self, count: int) -> tuple[list["Slot"], type]:
        """Returns what each element of a list asks for, and the type of it; raises Misfit."""
        found = conversion.items(self.hint, count)
        if found is None:
            raise conversion.Misfit
        hints, kind = found
        slots: list[Slot] = [
            replace(self, hint=hint, default=None, argument=f"{self.argument}[{index}]")
            for index, hint in enumerate(hints)
        ]
        return slots, kind

    def of_keys(self) -> "Slot":
        """Returns what the keys of a dict ask for; raises Misfit."""
        return replace(self, hint=self._entries()[0], default=None)

    def of_entry(self, key: Key) -> "Slot":
        """Returns what the value of a key asks for; raises Misfit."""
        name = f"{self.argument}.{key}"
        return replace(self, hint=self._entries()[1], default=None, argument=name)

    def _entries(self) -> tuple[Any, Any]:
        found = conversion.entries(self.hint)
        if found is None:
            raise conversion.Misfit
        return found
