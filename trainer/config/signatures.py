"""Reads the signatures of functions, and converts values of a config to their annotated types.

Annotations are interpreted first: which values and results fit, and how messages describe them. A
parameter `hint` is any annotation; a `part` is one that is not a union (see `union_members`).
"""

import collections.abc
import functools
import inspect
import os
import pathlib
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.tree import ConfigError, Key, Source, Tree, same
from trainer.config.units import COUNTS_STEPS, is_steps, quantity
from trainer.config.wording import nearest

LISTS = (
    *(list, tuple, set, frozenset, collections.abc.Set),
    *(collections.abc.Sequence, collections.abc.MutableSequence),
    *(collections.abc.Iterable, collections.abc.Collection),
)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_OPTIMIZERS = ("GradientTransformation", "GradientTransformationExtraArgs")


def or_type_of_default(hint: Any, default: Any) -> Any:
    """Returns the annotation of a parameter, or the type of its default; Any if neither says it.

    Example:
        >>> or_type_of_default(inspect.Parameter.empty, 0.9)
        <class 'float'>
    """
    if hint is not inspect.Parameter.empty:
        return hint
    # The type of a function would refuse a partial and a class.
    is_list = isinstance(default, list | tuple) and not callable(default)
    return type(default) if is_list or type(default) in (bool, int, float, str, dict) else Any


def widen_to_float(hint: Any, default: Any) -> Any:
    """Returns an annotation that also accepts a float."""
    # Union, because `float | hint` raises TypeError if the hint is a string.
    if hint is not inspect.Parameter.empty:
        return hint if takes_float(hint) else typing.Union[float, hint]  # noqa: UP007
    scheduled = float | collections.abc.Callable[..., Any]
    return scheduled | None if default is None else scheduled


def union_members(hint: Any) -> list[Any]:
    """Returns the annotations that a union consists of, without aliases and Annotated.

    Example:
        >>> union_members(typing.Annotated[int | str, "steps"] | None)
        [<class 'int'>, <class 'str'>, <class 'NoneType'>]
    """
    while True:
        if (origin := typing.get_origin(hint)) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif isinstance(hint, typing.TypeVar):
            hint = hint.__bound__ or Any
        elif type(hint).__name__ == "TypeAliasType":  # a `type` statement of Python 3.12
            hint = hint.__value__
        elif origin in (typing.Final, typing.ClassVar) or str(origin) == "typing.Required":
            hint = (typing.get_args(hint) or (Any,))[0]
        else:
            break
    if origin in (typing.Union, types.UnionType):
        return [part for each in typing.get_args(hint) for part in union_members(each)]
    return [type(None) if hint is None else hint]


def accepts_anything(hint: Any) -> bool:
    """Returns whether an annotation accepts any value, or cannot be evaluated."""
    return any(
        part in (Any, object, inspect.Parameter.empty) or isinstance(part, str | typing.ForwardRef)
        for part in union_members(hint)
    )


def takes_optimizer(hint: Any) -> bool:
    """Returns whether an annotation accepts an optax transformation or a partial of one."""
    # The builder passes the optimizer as a factory (a partial), called when the step is traced.
    return any(names_optimizer(part) for part in union_members(hint))


def names_optimizer(part: Any) -> bool:
    """Returns whether an annotation names an optimizer: an optax transformation or a partial."""
    # By name: this package imports none of the packages whose functions a config names.
    part = typing.get_origin(part) or part
    if part is functools.partial:
        return True
    module = getattr(part, "__module__", None) or ""
    return module.split(".")[0] == "optax" and getattr(part, "__name__", "") in _OPTIMIZERS


def takes_callable(hint: Any) -> bool:
    """Returns whether an annotation accepts a function, as Callable[..., Any] does."""
    return any(
        (typing.get_origin(part) or part) is collections.abc.Callable
        for part in union_members(hint)
    )


def takes_float(hint: Any) -> bool:
    """Returns whether an annotation accepts a float."""
    return accepts_anything(hint) or float in union_members(hint)


def takes_int(hint: Any) -> bool:
    """Returns whether an annotation accepts an integer but not a float."""
    parts = union_members(hint)
    return int in parts and float not in parts and not accepts_anything(hint)


def takes_dtype(hint: Any) -> bool:
    """Returns whether an annotation accepts a dtype, as `jax.typing.DTypeLike` does."""
    # numpy.dtype is one of the members of jax.typing.DTypeLike.
    return any(getattr(part, "__name__", "") == "dtype" for part in union_members(hint))


def takes_function(hint: Any) -> bool:
    """Returns whether an annotation accepts a function itself, not only its result."""
    return accepts_anything(hint) or any(_takes_function(part) for part in union_members(hint))


def _takes_function(part: Any) -> bool:
    origin = typing.get_origin(part) or part
    if origin in (type, collections.abc.Callable, functools.partial) or names_optimizer(part):
        return True
    if not inspect.isclass(origin):
        return not is_literal(part)
    # dir(), because hasattr(origin, '__call__') is true of every class: its metaclass has one.
    return is_protocol(origin) or "__call__" in dir(origin) and not is_scalar(origin)


def is_protocol(part: Any) -> bool:
    """Returns whether an annotation is a Protocol, which any class may implement."""
    return getattr(part, "_is_protocol", False)


def is_scalar(part: Any) -> bool:
    """Returns whether an annotation names a number, a string, a boolean or None."""
    return part in (bool, int, float, complex, str, type(None)) or is_literal(part)


def is_literal(part: Any) -> bool:
    """Returns whether an annotation is a Literal."""
    return typing.get_origin(part) is typing.Literal


def choices(hint: Any) -> list[str]:
    """Returns the strings that an annotation lists with Literal.

    Example:
        >>> choices(typing.Literal["nearest", "master"] | None)
        ['nearest', 'master']
    """
    literals = [part for part in union_members(hint) if is_literal(part)]
    return [each for part in literals for each in typing.get_args(part) if isinstance(each, str)]


_WORDS: dict[Any, str] = {
    **{bool: "true or false", int: "an integer", float: "a float", str: "a string"},
    **{type(None): "null", type: "a class", collections.abc.Callable: "a function"},
    **dict.fromkeys(LISTS, "a list"),
    **dict.fromkeys(MAPPINGS, "a dict"),
}


def describe_annotation(hint: Any) -> str:
    """Describes in a message what an annotation accepts.

    Example:
        >>> describe_annotation(float | None)
        'a float or null'
    """
    found: list[str] = ["a number of steps"] if is_steps(hint) else []
    for part in union_members(hint):
        if is_steps(hint) and part in (int, str):
            continue
        origin = typing.get_origin(part) or part
        if origin in _WORDS:
            word = _WORDS[origin]
        elif is_literal(part):
            word = " or ".join(map(repr, typing.get_args(part)))
        elif part is functools.partial and takes_callable(hint):
            continue
        elif names_optimizer(part):
            word = "an optimizer"
        else:
            name = getattr(origin, "__name__", str(origin))
            word = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
        found.append(word)
    if "a float" in found:  # jax.typing.ArrayLike is a long union
        found = [word for word in found if word in ("a float", "null", "a function", "a string")]
    return " or ".join(dict.fromkeys(found))


def takes_result(hint: Any, returns: Any) -> bool:
    """Returns whether the result of a function may fit an annotation."""
    # Only numbers, strings, booleans and optimizers are compared: other objects are accepted for
    # what they do, not for their class.
    parts = union_members(hint)
    if accepts_anything(hint) or accepts_anything(returns):
        return True
    if all(names_optimizer(part) for part in union_members(returns)):
        # Arguments that take an optimizer are left to `returns_optimizer`.
        return any(is_protocol(part) for part in parts)
    if not all(is_scalar(part) for part in parts):
        return True
    # As for Python's own annotations, an int fits a float.
    return any(part in parts or (part is int and float in parts) for part in union_members(returns))


def returns_optimizer(hint: Any, returns: Any) -> bool:
    """Returns whether a function may return an optimizer, or another value that fits."""
    if accepts_anything(returns):
        return True
    wanted = tuple(part for part in union_members(hint) if inspect.isclass(part))
    if any(is_protocol(part) for part in wanted):
        return True
    return any(
        names_optimizer(part) or (inspect.isclass(part) and issubclass(part, wanted))
        for part in union_members(returns)
    )


def returns_factory(hint: Any, returns: Any) -> bool:
    """Returns whether a function must be called to get a value that fits an annotation."""
    # This is the case if the annotation accepts a class, or a function that does not itself return
    # a function, and the function is annotated to return a function or a class.
    wanted = [part for part in union_members(hint) if _is_function(part)]
    if accepts_anything(hint) or accepts_anything(returns) or not wanted:
        return False
    makes_functions = all(map(_is_function, union_members(returns)))
    return makes_functions and not any(map(_may_return_function, wanted))


def _may_return_function(wanted: Any) -> bool:
    if (typing.get_origin(wanted) or wanted) is type:
        return False
    result = (typing.get_args(wanted) or (Any,))[-1]
    return accepts_anything(result) or any(_is_function(part) for part in union_members(result))


def _is_function(part: Any) -> bool:
    origin = typing.get_origin(part) or part
    if is_protocol(origin):
        return "__call__" in dir(origin)
    return origin in (collections.abc.Callable, type)


# The names that messages list; jax takes others as well, such as "half" and "f4".
DTYPE_NAMES = (
    *("bfloat16", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "complex64", "complex128"),
)
_SHORT = re.compile(r"(bf|fp|f)_?(\d+)")  # spellings of other libraries, such as bf16


def exists(value: Any) -> bool:
    """Returns whether a value is the name of a dtype that jax supports.

    Example:
        >>> exists("bfloat16"), exists("bf16")
        (True, False)
    """
    import jax
    import jax.numpy as jnp

    if not isinstance(value, str):
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # about float64 if x64 is disabled
            # jnp.dtype alone also accepts 'datetime64' and 'U8', of which jax has no arrays.
            jax.eval_shape(lambda: jnp.zeros((), jnp.dtype(value)))
    except TypeError:
        return False
    return True


def dtype_advice(value: Any) -> str:
    """Returns advice for a value that is not the name of a dtype: the nearest one, and all."""
    text = str(value).lower()
    if short := _SHORT.fullmatch(text):
        text = ("bfloat" if short[1] == "bf" else "float") + short[2]
    near = text if text in DTYPE_NAMES else nearest(text, DTYPE_NAMES)
    names = f"The dtypes are {', '.join(DTYPE_NAMES)}, and float8 types such as float8_e4m3fn."
    return f"Did you mean {near!r}? {names}" if near else names


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
        by_position = _POSITIONAL if spread else _POSITIONAL[:1]
        args: list[Any] = []
        kwargs = dict(values)
        for name, parameter in self.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += kwargs.pop(name, [])
            elif parameter.kind in by_position and (name in kwargs or not parameter.required):
                args.append(kwargs.pop(name, parameter.default))
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
        return is_steps(self.hint) or (self.counts_steps and takes_int(self.hint))

    @property
    def takes_dtype(self) -> bool:
        """Whether the value is the name of a dtype; optax annotates few of them."""
        named = self.owner.startswith(("optax.", "optim.")) and "dtype" in self.argument.split("_")
        return named or takes_dtype(self.hint)

    @property
    def takes_mask(self) -> bool:
        """Whether the value is a mask of optax: a function of parameters, or booleans."""
        name = re.split(r"[.\[]", self.argument)[0]
        is_optax = takes_callable(self.hint) or self.owner.startswith("optax.")
        return (name == "mask" or name.endswith("_mask")) and is_optax

    def of_argument(self, function: Function, name: str, is_factory: bool) -> "Slot":
        """Returns the slot of an argument of a function that is called here."""
        parameter = function.parameters[name]
        default = parameter.default
        hint = or_type_of_default(parameter.hint, default)
        if is_factory and name in _FLOATS:
            hint = widen_to_float(parameter.hint, default)
        # A default such as '5%' also says that the argument counts steps.
        counts = COUNTS_STEPS.fullmatch(name) is not None
        counts = counts or isinstance(default, str) and quantity(default) is not None
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
    literals = [each for part in parts if is_literal(part) for each in typing.get_args(part)]
    if any(same(value, each) for each in literals) or (value is None and type(None) in parts):
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
        if str in parts or takes_dtype(hint):
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
