"""Reads what arguments a function takes."""

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
    """A parameter that a config may name.

    Attributes:
        hint: its annotation, evaluated; `typing.Any` where there is none that can be.
        default: its default, or `inspect.Parameter.empty`.
        kind: as of `inspect.Parameter`; `VAR_POSITIONAL` takes a list.
    """

    hint: Any
    default: Any
    kind: Any

    @property
    def required(self) -> bool:
        variadic = self.kind is inspect.Parameter.VAR_POSITIONAL
        return self.default is inspect.Parameter.empty and not variadic


@dataclass(frozen=True)
class Function:
    """A function that a config may call.

    Attributes:
        name: its name in the config.
        call: the function itself, or a class.
        parameters: what a config may name.
        open_ended: it takes **kwargs, which widens nothing that a config may say.
        returns: the annotation of what it returns; Any for a class.
    """

    name: str
    call: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    open_ended: bool
    returns: Any

    def bind(self, values: Mapping[str, Any]) -> functools.partial:
        """Returns the function with its arguments, each passed the way it wants to be passed."""
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
    """Returns the name of the module that defines a function or class."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__module__", None) or ""


def read(name: str, call: Callable[..., Any], source: Source | None) -> Function:
    """Returns what a config may say to a function.

    Args:
        name: the name in the config.
        call: the function, or a class.
        source: where the config names it.

    Raises:
        ConfigError: it does not say which arguments it takes, as some builtins do.
    """
    # A metaclass such as nnx's hides what a class takes; its __init__ says it.
    made_by = type(call).__call__ if isinstance(call, type) else type.__call__
    try:
        signature = inspect.signature(call)
        if made_by is not type.__call__:
            signature = inspect.signature(functools.partial(call.__init__, None))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} does not say which arguments it takes, so a config cannot call it.", source
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
            hints.update(typing.get_type_hints(part, include_extras=True))
        except Exception:  # an annotation may be any expression; each is tried by itself later
            continue
    return hints


def _evaluated(hint: Any, call: Any) -> Any:
    if hint is inspect.Parameter.empty:
        return inspect.Parameter.empty
    if not isinstance(hint, str):
        return hint
    module = sys.modules.get(home(call))
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        names = dict(vars(module)) if module else {}
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # a name that exists for type checkers only
        return Any
