"""Interprets type annotations: which values and results fit, and how messages describe them.

A parameter `hint` is any annotation; a `part` is one that is not a union (see `union_members`). The
last functions are about the names of dtypes.
"""

import collections.abc
import functools
import inspect
import re
import types
import typing
import warnings
from typing import Any

from trainer.config.units import is_steps
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
