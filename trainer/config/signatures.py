"""Reads the signatures of functions."""

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.tree import ConfigError, Source

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameter:
    """A parameter that a config may set.

    Attributes:
        hint: its annotation, evaluated; `typing.Any` if it cannot be evaluated.
        default: its default, or `inspect.Parameter.empty`.
        kind: the kind of `inspect.Parameter`; a config sets `VAR_POSITIONAL` to a list.
    """

    hint: Any
    default: Any
    kind: Any

    @property
    def required(self) -> bool:
        """Whether a config must set the parameter."""
        variadic = self.kind is inspect.Parameter.VAR_POSITIONAL
        return self.default is inspect.Parameter.empty and not variadic


@dataclass(frozen=True)
class Function:
    """A function that a config may call.

    Attributes:
        name: its name in the config.
        call: the function or class.
        parameters: the parameters that a config may set, by name.
        open_ended: whether it takes **kwargs. A config may not use them.
        returns: the annotation of its result; Any for a class.
    """

    name: str
    call: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    open_ended: bool
    returns: Any

    def bind(self, values: Mapping[str, Any]) -> functools.partial:
        """Binds arguments to the function.

        Args:
            values: the arguments by name. The value of *args is a list.

        Returns:
            A partial of the function, in which positional-only arguments are in their positions.
        """
        # Python takes the values of *args only behind all positional arguments, so that these are
        # passed by position as well, their defaults included.
        spread = any(
            name in values and parameter.kind is inspect.Parameter.VAR_POSITIONAL
            for name, parameter in self.parameters.items()
        )
        args: list[Any] = []
        kwargs = dict(values)
        for name, parameter in self.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += kwargs.pop(name, [])
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
                spread and parameter.kind in _POSITIONAL
            ):
                if name in kwargs:
                    args.append(kwargs.pop(name))
                elif parameter.default is not inspect.Parameter.empty:
                    args.append(parameter.default)
        return functools.partial(self.call, *args, **kwargs)


def home(value: Any) -> str:
    """Returns the name of the module that defines a function or class.

    Args:
        value: the function or class, or a partial of it.

    Returns:
        The dotted name; "" if it is not known.
    """
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__module__", None) or ""


def read(name: str, call: Callable[..., Any], source: Source | None) -> Function:
    """Reads the signature of a function.

    Args:
        name: the name in the config.
        call: the function or class.
        source: where the config names it.

    Raises:
        ConfigError: it has no signature, like some builtins.
    """
    # A metaclass with __call__, such as that of nnx, hides the signature of __init__.
    made_by = type(call).__call__ if isinstance(call, type) else type.__call__
    try:
        signature = inspect.signature(call)
        if made_by is not type.__call__:
            signature = inspect.signature(functools.partial(call.__init__, None))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} has no signature that Python can read, so a config cannot call it.", source
        ) from None
    hints = _hints(call)
    parameters = {}
    open_ended = False
    for key, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            open_ended = True
            continue
        hint = _evaluated(hints.get(key, parameter.annotation), call)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            hint = Sequence[Any if hint is inspect.Parameter.empty else hint]
        parameters[key] = Parameter(hint, parameter.default, parameter.kind)
    returns = hints.get("return", signature.return_annotation)
    returns = Any if inspect.isclass(call) else _evaluated(returns, call)
    return Function(name, call, parameters, open_ended, returns)


def _hints(call: Any) -> dict[str, Any]:
    while isinstance(call, functools.partial):
        call = call.func
    hints: dict[str, Any] = {}
    for part in [call, call.__init__] if inspect.isclass(call) else [call]:
        try:
            # It raises for all annotations of a function if one of them cannot be evaluated.
            hints.update(typing.get_type_hints(part, include_extras=True))
        except Exception:  # an annotation may be any expression; see _evaluated
            continue
    return hints


def _evaluated(hint: Any, call: Any) -> Any:
    if hint is inspect.Parameter.empty:
        return inspect.Parameter.empty
    if not isinstance(hint, str):
        return hint
    module = sys.modules.get(home(call))
    # get_type_hints evaluates a string only as the annotation of an object.
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        names = dict(vars(module)) if module else {}
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # a name that is imported for type checkers only
        return Any
