"""Reads the signatures of functions, and converts values of a config to their annotated types."""

import collections.abc
import functools
import inspect
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import annotations
from trainer.config.annotations import LISTS, MAPPINGS, accepts_anything, is_literal, union_members
from trainer.config.tree import ConfigError, Key, Source, Tree
from trainer.config.units import is_steps, names_steps, quantity

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameter:
    """A parameter that a config may set."""

    hint: Any  # evaluated; `typing.Any` if it cannot be evaluated
    default: Any  # or `inspect.Parameter.empty`
    kind: Any  # that of `inspect.Parameter`; a config sets `VAR_POSITIONAL` to a list

    @property
    def required(self) -> bool:
        """Whether a config must set the parameter."""
        variadic = self.kind is inspect.Parameter.VAR_POSITIONAL
        return self.default is inspect.Parameter.empty and not variadic


@dataclass(frozen=True)
class Function:
    """A function that a config may call."""

    name: str  # in the config
    call: Callable[..., Any]
    parameters: Mapping[str, Parameter]  # those that a config may set
    open_ended: bool  # whether it takes **kwargs; a config may not use them
    returns: Any  # the annotation of its result; Any for a class

    def bind(self, values: Mapping[str, Any]) -> functools.partial:
        """Returns a partial with arguments bound by name; the value of *args is a list."""
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


def defining_module(value: Any) -> str:
    """Returns the module that defines a function, class or partial; "" if it is not known."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__module__", None) or ""


def read_signature(name: str, call: Callable[..., Any], source: Source | None) -> Function:
    """Reads the signature of a function or class; raises ConfigError for a builtin without one."""
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
    parameters, open_ended = {}, False
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
            # Raises for all annotations of a function if one of them cannot be evaluated.
            hints.update(typing.get_type_hints(part, include_extras=True))
        except Exception:  # an annotation may be any expression; see _evaluated
            continue
    return hints


def _evaluated(hint: Any, call: Any) -> Any:
    if hint is inspect.Parameter.empty:
        return inspect.Parameter.empty
    if not isinstance(hint, str):
        return hint
    module = sys.modules.get(defining_module(call))
    # get_type_hints evaluates a string only as the annotation of an object.
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        names = dict(vars(module)) if module else {}
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:  # a name that is imported for type checkers only
        return Any


_FLOATS = ("learning_rate", "weight_decay")  # of optimizers, whatever their annotation


@dataclass(frozen=True)
class Slot:
    """The argument, list element or dict entry that a node is the value of."""

    hint: Any = Any  # the annotation
    default: Any = None  # of the parameter, if the node is an argument
    owner: str = ""  # the name of the function that receives it
    # "writers", or an element or entry of it, as in "writers[0]" or "groups.rest"
    argument: str = ""
    # the function is an optimizer factory, so a schedule may replace any float
    in_factory: bool = False
    # whether integers are numbers of steps, by the argument's name or default
    counts_steps: bool = False

    @property
    def takes_steps(self) -> bool:
        """Whether the value is a number of steps, which may have a unit."""
        return is_steps(self.hint) or (self.counts_steps and annotations.takes_int(self.hint))

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
        """Returns the slot of an argument of a function that is called here."""
        parameter = function.parameters[name]
        default = parameter.default
        hint = annotations.or_type_of_default(parameter.hint, default)
        if is_factory and name in _FLOATS:
            hint = annotations.widen_to_float(parameter.hint, default)
        # A default such as '5%' also says that the argument counts steps.
        counts = names_steps(name) or isinstance(default, str) and quantity(default) is not None
        return Slot(hint, default, function.name, name, is_factory, counts)

    def of_elements(self, count: int) -> tuple[list["Slot"], type]:
        """Returns the slots of a list's elements, and its sequence type; raises TypeMismatch."""
        hints, kind = items(self.hint, count)
        slots: list[Slot] = [
            replace(self, hint=hint, default=None, argument=f"{self.argument}[{index}]")
            for index, hint in enumerate(hints)
        ]
        return slots, kind

    def of_entry(self, key: Key) -> "Slot":
        """Returns the slot of a value of a dict; raises TypeMismatch if a dict is not accepted."""
        name = f"{self.argument}.{key}"
        return replace(self, hint=entries(self.hint)[1], default=None, argument=name)


class TypeMismatch(Exception):
    """A value does not fit an annotation."""


def leaf(value: Tree, hint: Any, default: Any = None) -> Any:
    """Converts a leaf to the annotated type, 3 to 3.0, a string to a Path; raises TypeMismatch.

    Example:
        >>> leaf(3, float | None)
        3.0
    """
    parts = union_members(hint)
    if accepts_anything(hint) or collections.abc.Hashable in parts:  # every leaf is hashable
        return value
    for part in parts:
        # 1 == 1.0 == True in Python, so that the types are compared as well.
        if is_literal(part) and any(
            type(value) is type(choice) and value == choice for choice in typing.get_args(part)
        ):
            return value
    if value is None and type(None) in parts:
        return value
    # Before the numbers: True is an instance of int.
    if isinstance(value, bool):
        # jax.typing.ArrayLike accepts bool, but a config that writes true for a float is mistaken
        if bool in parts and float not in parts:
            return value
    elif isinstance(value, int | float):
        arrays = ("Array", "ndarray", "number", "Real", "Number")
        is_float = float in parts or any(getattr(x, "__name__", "") in arrays for x in parts)
        # optax annotates floats as ArrayLike, which includes int. A 1 in the place of 0.9 becomes
        # 1.0, because only floats follow schedules and are inputs of the program.
        if isinstance(value, int) and int in parts and not isinstance(default, float):
            return value
        if isinstance(value, int) and is_float:
            return float(value)
        if isinstance(value, float) and (is_float or complex in parts):
            return value
    elif isinstance(value, str):
        # jax takes a dtype by its name.
        if str in parts or annotations.takes_dtype(hint):
            return value
        if any((typing.get_origin(part) or part) in (pathlib.Path, os.PathLike) for part in parts):
            return pathlib.Path(value)
    raise TypeMismatch


def items(hint: Any, count: int) -> tuple[list[Any], type]:
    """Returns the annotations of a list's elements, and its type; raises TypeMismatch."""
    if accepts_anything(hint):
        return [Any] * count, list
    elements: list[Any] = []
    kinds: list[type] = []
    for part in union_members(hint):
        origin = typing.get_origin(part) or part
        args = typing.get_args(part)
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(args) == count:
                return list(args), tuple
        elif origin in LISTS:
            kind = list if origin in (list, collections.abc.MutableSequence) else tuple
            kind = origin if origin in (set, frozenset) else kind
            kinds.append(frozenset if origin is collections.abc.Set else kind)
            elements.append(args[0] if args else Any)
    if not elements:
        raise TypeMismatch
    return [typing.Union[tuple(elements)]] * count, kinds[0]  # noqa: UP007


def entries(hint: Any) -> tuple[Any, Any]:
    """Returns the annotations of a dict's keys and values; raises TypeMismatch.

    Example:
        >>> entries(dict[str, float] | None)
        (<class 'str'>, <class 'float'>)
    """
    if accepts_anything(hint):
        return Any, Any
    found = [
        (str, Any) if typing.is_typeddict(part) else typing.get_args(part) or (Any, Any)
        for part in union_members(hint)
        if (typing.get_origin(part) or part) in MAPPINGS or typing.is_typeddict(part)
    ]
    if not found:
        raise TypeMismatch
    keys, values = zip(*found, strict=True)
    return typing.Union[keys], typing.Union[values]  # noqa: UP007  # the number of members varies
