"""`call`: writes the calls of a config in Python, without executing them."""

from collections.abc import Mapping
from typing import Any

from trainer.config import Call
from trainer.config.languages import RUN
from trainer.messages import UserError


class Recorder:
    """A function that a config names; calling it returns a node of a config, and runs nothing.

    Args:
        name: the dotted name of the function or of its package, such as "models.gpt".

    Example:
        >>> import lockstep as ls
        >>> ls.call.models.gpt(width=128, depth=2)
        models.gpt(width=128, depth=2)
        >>> ls.call.losses.huber.partial(delta=2.0)
        losses.huber.partial(delta=2.0)
    """

    def __init__(self, name: str = ""):
        self._name = name

    def __getattr__(self, name: str) -> "Recorder":
        if name.startswith("__"):  # asked by copy, pickle and notebooks, and no function's name
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}" if self._name else name)

    def __call__(self, *values: Any, **arguments: Any) -> Call:
        """Returns the call with its arguments, which are values or other calls.

        Raises:
            UserError: an argument has no name.
        """
        if values:
            raise UserError(
                f"The arguments of a call in a config have names: write"
                f" ls.call.{self._name}(name={values[0]!r}) with the name of the argument."
            )
        return Call(self._name, {key: tree_of(value) for key, value in arguments.items()})

    def partial(self, **arguments: Any) -> Call:
        """Returns the node of the function itself, with some arguments bound.

        It is what `!partial:losses.huber {delta: 2.0}` is in YAML, and `@losses.huber` in Gin.
        """
        return Call(self._name, {k: tree_of(v) for k, v in arguments.items()}, partial=True)

    def __dir__(self) -> list[str]:
        return [*RUN.modules] if not self._name else ["partial"]

    def __repr__(self) -> str:
        return f"ls.call.{self._name}" if self._name else "ls.call"


call = Recorder()


def tree_of(value: Any) -> Any:
    """Returns a value as a config can contain it.

    Args:
        value: a text, number, boolean or None; a call; a list, tuple or dict of such values; or a
            scalar of numpy.

    Raises:
        UserError: the value is something else, such as a function.
    """
    if isinstance(value, Call):
        return Call(value.name, {k: tree_of(v) for k, v in value.kwargs.items()}, value.partial)
    if isinstance(value, Mapping):
        return {key: tree_of(each) for key, each in value.items()}  # type: ignore[misc]
    if isinstance(value, list | tuple):
        return [tree_of(each) for each in value]  # type: ignore[misc]
    if isinstance(value, Recorder):
        raise UserError(f"{value!r} is not called. Write {value!r}(), or {value!r}.partial().")
    if value is None or type(value) in (bool, int, float, str):
        return value
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():  # numpy's float64 is a float
        return item()
    raise UserError(_refusal(value))


def _refusal(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None:
        return (
            f"A config cannot contain {value!r}, a {type(value).__name__}: it has texts, numbers,"
            " lists, dicts and calls, which ls.call writes."
        )
    module = getattr(value, "__module__", "")
    if module in ("__main__", "builtins") or "<" in name:
        return (
            f"A config names functions of modules, and {name} was defined in a notebook or script:"
            " put it into a file, such as my_lab.py, and write"
            f" ls.call.my_lab.{name.split('.')[-1]}() with vocabulary=['my_lab']."
        )
    return (
        f"A config names functions, and {name} is a function itself: write"
        f" ls.call.{module}.{name}(), with vocabulary=[{module.split('.')[0]!r}]."
    )
