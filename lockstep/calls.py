"""`call`: writes the calls of a config in Python, without executing them."""

from collections.abc import Mapping
from typing import Any

from trainer.config import Call
from trainer.config.vocabulary import RUN
from trainer.messages import UserError


class Recorder:
    """A function, or its package, that a config names; a call of it is a node, and runs nothing.

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
        if name.startswith("__"):  # copy, pickle and notebooks look for such; no function has one
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}" if self._name else name)

    def __call__(self, *values: Any, **arguments: Any) -> Call:
        """Returns the call with its arguments, values or calls; UserError if one has no name."""
        if values:
            raise UserError(
                f"The arguments of a call in a config have names: write"
                f" ls.call.{self._name}(name={values[0]!r}) with the name of the argument."
            )
        return Call(self._name, {key: tree_of(value) for key, value in arguments.items()})

    def partial(self, **arguments: Any) -> Call:
        """Returns the node of the function itself, with some arguments bound."""
        # It is what `!partial:losses.huber {delta: 2.0}` is in YAML, and `@losses.huber` in Gin.
        return Call(self._name, {k: tree_of(v) for k, v in arguments.items()}, partial=True)

    def __dir__(self) -> list[str]:
        return [*RUN.modules] if not self._name else ["partial"]

    def __repr__(self) -> str:
        return f"ls.call.{self._name}" if self._name else "ls.call"


call = Recorder()


def tree_of(value: Any) -> Any:
    """Returns a value as a config can contain it: plain values, calls, lists and dicts of them."""
    # Tuples become lists, and scalars of numpy become numbers. Raises UserError for any other
    # value, such as a function.
    if isinstance(value, Call):
        return Call(value.name, {k: tree_of(v) for k, v in value.kwargs.items()}, value.partial)
    if isinstance(value, Mapping):
        return {key: tree_of(each) for key, each in value.items()}  # type: ignore[misc]
    if isinstance(value, list) or type(value) is tuple:
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
    """Returns what to write in place of a value that a config cannot contain."""
    if (name := getattr(value, "__qualname__", None)) is None:
        text = repr(value)
        return (
            f"A config cannot contain a value of the type {type(value).__name__}"
            f"{f', {text}' if len(text) <= 40 else ''}: it has texts, numbers, lists, dicts and"
            " calls. Write the call that makes the object, such as"
            " ls.call.optax.adamw(learning_rate=1e-3), which runs nothing."
        )
    module = getattr(value, "__module__", None) or ""
    outer, _, within = name.partition(".<locals>")
    if module == "__main__" or not outer.replace(".", "").isidentifier():
        return (
            f"A config names functions of modules, and {name} was defined in a notebook or script,"
            " or without a name: put it into a file, such as my_lab.py, and write"
            f" ls.call.my_lab.{outer if outer.isidentifier() else 'my_function'}() with"
            " vocabulary=['my_lab']."
        )
    path, options = _in_config(module, outer)
    if path is None:
        return f"A config cannot name {name}, a function of the module {module}."
    if within:  # defined within a function, which has returned it
        return (
            f"A config cannot contain a function that {path} returned: write the call itself,"
            f" ls.call.{path}(...){options}."
        )
    return (
        f"A config names functions, and {name} is a function itself: write ls.call.{path}(...), or"
        f" ls.call.{path}.partial() for the function in place of its result{options}."
    )


def _in_config(module: str, name: str) -> tuple[str | None, str]:
    """Returns the name of a function in a config, or None, and which vocabulary it needs."""
    steps = [step for step in module.removeprefix("trainer.").split(".") if step[0] != "_"]
    if steps[0] in RUN.modules:
        # optax and our packages have their public functions at the top.
        top = f"{steps[0]}.contrib" if steps[:2] == ["optax", "contrib"] else steps[0]
        return f"{top}.{name}", ""
    if module.partition(".")[0] in ("builtins", "trainer", "lockstep"):
        return None, ""
    return f"{module}.{name}", f", with vocabulary=[{steps[0]!r}]"
