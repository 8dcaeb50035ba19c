"""Reads and writes the JSON files of runs and sweeps, and checks the types of what it reads.

A file may be cut off by a loss of power, edited by hand, or replaced by a folder. Every reader
states the types that it needs as annotations, so that later code meets no others. A dataclass
describes a file: a new field is written, checked and read once it is declared (`as_json`,
`as_dataclass`). Such a field may say more in its metadata: `name`, its name in the file, if not
that of the attribute; `required`, True if it must be in the file although it has a default;
`omit_none`, True if it is left out of the file, and not null, where it is None.
"""

import errno
import functools
import json
import math
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar, Union

from trainer.config.wording import brief
from trainer.messages import UserError
from trainer.writers.files import read_regular

T = TypeVar("T")

# A float that may be infinite or NaN, which is written as one of _TEXTS.
AnyFloat = Annotated[float, "any"]
_TEXTS = ("nan", "inf", "-inf")

# Errors that would occur again at a later attempt; all others are errors of the disk.
_PERMANENT_ERRORS = {errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}
_NAMES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a text",
    types.NoneType: "null",
}


class DamagedFile(UserError):
    """Raised for a file that is not as a run or a sweep writes it."""

    # The message is the fault and the advice: a sentence that begins with a small letter. `fault`
    # is what is wrong with the file, as a sentence without its full stop.

    def __init__(self, file: Path, fault: str, advice: str):
        super().__init__(f"{fault}: {advice}")
        self.file, self.fault = file, fault


def damaged(file: Path, why: str, advice: str) -> DamagedFile:
    """Returns the error for a file whose content cannot be used.

    Example:
        >>> print(damaged(Path("run.json"), "it is empty", "remove it."))
        run.json is damaged (it is empty): remove it.
    """
    return DamagedFile(file, f"{file} is damaged ({why})", advice)


def read_json(file: Path, kind: type[T], advice: str) -> T:
    """Reads a JSON file, and checks its types; raises FileNotFoundError, DamagedFile or OSError."""
    # `kind` is a TypedDict or a dataclass, of which it returns one, or any combination of
    # dict[str, ...], list[...], int, float, AnyFloat, str, bool, None, unions of them, and Any for
    # content that is not checked. Objects may have further keys. Integers have 64 bits; floats are
    # finite, and may be integers. DamagedFile also says that the file cannot be opened or is not a
    # regular one; OSError that the disk cannot be read.
    try:
        text = read_regular(file)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from error
    except OSError as error:
        if error.errno not in _PERMANENT_ERRORS:
            raise
        raise damaged(file, error.strerror or str(error), advice) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(file, _why(error, text), advice) from error
    return check_json(content, kind, file, advice)


def as_json(value: Any) -> Any:
    """Converts a dataclass, or mappings and lists of dataclasses, to what JSON can store."""
    # Floats that are not finite become texts.
    if is_dataclass(value):
        found = [(each, getattr(value, each.attribute)) for each in _fields(type(value))]
        return {each.name: as_json(x) for each, x in found if not (each.omit_none and x is None)}
    if isinstance(value, Mapping):
        return {name: as_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_json(content: Any, kind: type[T], file: Path, advice: str) -> T:
    """Returns what `read_json` does of content; raises DamagedFile if it has not the type."""
    try:
        return _read(content, kind, "")
    except ValueError as error:
        raise damaged(file, str(error), advice) from error


def _why(error: Exception, text: bytes) -> str:
    if not text.strip():
        return "it is empty"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return f"it is not JSON: {error}"
    return "a number is out of range"  # it has thousands of digits


def as_dataclass(content: Any, kind: Any) -> Any:
    """Returns the value that was given to `as_json`; raises ValueError for another type."""
    # A Sequence becomes a list. A part of another type, such as an array, stays as JSON has it.
    return _read(content, kind, "", within_range=False)


def _read(value: Any, kind: Any, place: str, within_range: bool = True) -> Any:
    """Returns a value of JSON as a type has it; ValueError if it does not have that type."""
    options, origin = typing.get_args(kind), typing.get_origin(kind)
    read = functools.partial(_read, within_range=within_range)
    if origin in (Union, types.UnionType):
        fitting = [each for each in options if _plain(each) is _kind_of(value, each)]
        if not fitting:
            raise _mistake(value, options, place)
        return read(value, fitting[0], place)
    if kind is AnyFloat:
        if value in _TEXTS:
            return float(value)
        if type(value) is str:
            raise ValueError(f"{place} is {brief(value)}, not a number")
        kind = float
    if (plain := _plain(kind)) not in _NAMES:
        return value
    _check(value, kind, place, within_range)
    if plain is list and options or _is_named_tuple(kind):
        kinds = [each.kind for each in _fields(kind)] if not options else options
        if origin is not tuple and options or options[-1:] == (Ellipsis,):
            kinds = options[:1] * len(value)
        pairs = enumerate(zip(value, kinds, strict=False))
        found = [read(x, of, f"{place}[{n}]") for n, (x, of) in pairs]
        return kind(*found) if not options else tuple(found) if origin is tuple else found
    if typing.is_typeddict(kind) or is_dataclass(kind):
        given = {}
        for each in _fields(kind):
            if each.name in value:
                inner = f"{place}.{each.name}" if place else each.name
                given[each.attribute] = read(value[each.name], each.kind, inner)
            elif each.required:
                raise ValueError(f"{place or 'it'} has no {each.name!r}")
        made: Any = kind
        return made(**given) if is_dataclass(kind) else value  # with keys that are not known
    if plain is dict and options:
        return {name: read(x, options[1], f"{place}[{name!r}]") for name, x in value.items()}
    return float(value) if plain is float else value


def _check(value: Any, kind: Any, place: str, within_range: bool) -> None:
    """Raises ValueError for another type, a number that is too large, or half a surrogate pair."""
    plain = _plain(kind)
    if _kind_of(value, kind) is not plain:
        raise _mistake(value, (kind,), place)
    if not within_range:
        return
    # A comparison, because an integer may be too large to become a float.
    finite = plain is not float or abs(value) <= sys.float_info.max
    if plain is int and not -(2**63) <= value < 2**63 or not finite:
        raise ValueError(f"{place or 'its content'} is a number out of range")
    if plain is str:
        value.encode()


def _plain(kind: Any) -> type:
    """Returns the type that json.loads returns for a type, such as dict for dict[str, int]."""
    if typing.is_typeddict(kind) or is_dataclass(kind):
        return dict
    if _is_named_tuple(kind):
        return list
    origin = typing.get_origin(kind) or kind
    return {Mapping: dict, Sequence: list, tuple: list}.get(origin, origin)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


class _Field(NamedTuple):
    """A field of a file: its name there, its type, and how a dataclass declares it."""

    name: str
    kind: Any
    required: bool
    attribute: str
    omit_none: bool = False


@functools.cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        return tuple(
            _Field(
                name=each.metadata.get("name", each.name),
                kind=hints[each.name],
                required=each.metadata.get("required", False)
                or (each.default is MISSING and each.default_factory is MISSING),
                attribute=each.name,
                omit_none=each.metadata.get("omit_none", False),
            )
            for each in fields(kind)
        )
    # __required_keys__ is wrong in modules whose annotations are strings.
    optional = {name for name, of in hints.items() if typing.get_origin(of) is NotRequired}
    return tuple(
        _Field(name, typing.get_args(of)[0] if name in optional else of, name not in optional, name)
        for name, of in hints.items()
    )


def _kind_of(value: Any, kind: Any) -> type:
    """Returns the type of a value; float for an integer where a float is expected."""
    return float if kind is float and type(value) is int else type(value)


def _mistake(value: Any, kinds: tuple[Any, ...], place: str) -> ValueError:
    names = " or ".join(_NAMES[_plain(kind)] for kind in kinds)
    return ValueError(f"{place or 'its content'} is {brief(value)}, and not {names}")
