"""The arguments, list elements and dict entries that the nodes of a tree are values of."""

import re
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import annotations, conversion
from trainer.config.signatures import Function
from trainer.config.tree import Key
from trainer.config.units import is_steps, names_steps, quantity

_FLOATS = ("learning_rate", "weight_decay")  # of optimizers, whatever their annotation


@dataclass(frozen=True)
class Slot:
    """The argument, list element or dict entry that a node is the value of.

    Attributes:
        hint: the annotation.
        default: the default of the parameter, if the node is an argument.
        owner: the name of the function that receives it.
        argument: the argument of the function, "writers", or an element or entry of it, as in
            "writers[0]" or "groups.rest".
        in_factory: the function is an optimizer factory, so a schedule may replace any float.
        counts_steps: whether integers are numbers of steps, by the argument's name or default.
    """

    hint: Any = Any
    default: Any = None
    owner: str = ""
    argument: str = ""
    in_factory: bool = False
    counts_steps: bool = False

    @property
    def takes_steps(self) -> bool:
        """Whether the value is a number of steps, which may have a unit."""
        named = self.counts_steps and annotations.takes_int(self.hint)
        return named or is_steps(self.hint)

    @property
    def takes_dtype(self) -> bool:
        """Whether the value is the name of a dtype; optax annotates few of them."""
        named = self.owner.startswith(("optax.", "optim.")) and "dtype" in self.argument.split("_")
        return named or annotations.takes_dtype(self.hint)

    @property
    def takes_mask(self) -> bool:
        """Whether the value is a mask of optax: a function of parameters, or booleans."""
        name = re.split(r"[.\[]", self.argument)[0]
        is_optax = annotations.takes_callable(self.hint) or self.owner.startswith("optax.")
        return (name == "mask" or name.endswith("_mask")) and is_optax

    def of_argument(self, function: Function, name: str, is_factory: bool) -> "Slot":
        """Returns the slot of an argument of a function that is called here.

        Args:
            function: the function.
            name: the name of the argument, one of its parameters.
            is_factory: whether the function is the factory of an optimizer; then `learning_rate`
                and `weight_decay` accept a float, whatever their annotation.
        """
        parameter = function.parameters[name]
        hint, default = (
            annotations.or_type_of_default(parameter.hint, parameter.default),
            parameter.default,
        )
        if is_factory and name in _FLOATS:
            hint = annotations.widen_to_float(parameter.hint, default)
        # A default such as '5%' also says that the argument counts steps.
        counts = names_steps(name) or isinstance(default, str) and quantity(default) is not None
        return Slot(hint, default, function.name, name, is_factory, counts)

    def of_elements(self, count: int) -> tuple[list["Slot"], type]:
        """Returns the slots of a list's elements, and the sequence type.

        Args:
            count: the length of the list.

        Raises:
            TypeMismatch: the annotation does not accept a list of this length.
        """
        found = conversion.items(self.hint, count)
        if found is None:
            raise conversion.TypeMismatch
        hints, kind = found
        slots: list[Slot] = [
            replace(self, hint=hint, default=None, argument=f"{self.argument}[{index}]")
            for index, hint in enumerate(hints)
        ]
        return slots, kind

    def of_keys(self) -> "Slot":
        """Returns the slot of the keys of a dict; raises TypeMismatch."""
        return replace(self, hint=self._entries()[0], default=None)

    def of_entry(self, key: Key) -> "Slot":
        """Returns the slot of a value of a dict.

        Args:
            key: the key of the value.

        Raises:
            TypeMismatch: the annotation does not accept a dict.
        """
        name = f"{self.argument}.{key}"
        return replace(self, hint=self._entries()[1], default=None, argument=name)

    def _entries(self) -> tuple[Any, Any]:
        found = conversion.entries(self.hint)
        if found is None:
            raise conversion.TypeMismatch
        return found
