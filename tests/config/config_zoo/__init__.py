"""A package of a user's, whose functions the tests of the config language name."""

import functools
import math  # noqa: F401  # another package that must not be reached through this one
import os  # noqa: F401
import pathlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd  # noqa: F401  # a function that is not ours
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

import optax

from config_zoo import _hidden

if TYPE_CHECKING:
    from fractions import Fraction as ForCheckersOnly

__all__ = ["listed_partial", "listed_print"]
__all__ += ["Thing", "make"]

listed_print = print
listed_partial = functools.partial(math.gcd, 6)
number = 3
private = _hidden


class Made(NamedTuple):
    """What `make` returns, so that tests see what was passed."""

    args: tuple
    kwargs: dict


class Typed(TypedDict):
    """A dict whose keys have names."""

    a: int


def __getattr__(name: str) -> Any:
    """Finds some names when they are asked for, as lazy packages do."""
    if name == "lazy":
        return a_number
    if name == "lazy_and_broken":
        raise ImportError("no module named torch")
    raise AttributeError(name)


def make(**kwargs: Any) -> Made:
    """Takes **kwargs, which widens nothing that a config may say."""
    return Made((), kwargs)


def anything(x=None, y: Any = None) -> Made:
    return Made((), {"x": x, "y": y})


def scalars(
    f: float = 0.0,
    i: int = 0,
    s: str = "",
    b: bool = False,
    n: int | None = None,
    o: float | None = None,
    u: int | float = 0,
    text_or_int: int | str = 0,
    choice: Literal["a", "b", 3] = "a",
    path: pathlib.Path | None = None,
    annotated: Annotated[float, "positive"] = 1.0,
) -> Made:
    return Made((), dict(locals()))


def containers(
    floats: Sequence[float] = (),
    ints: list[int] | None = None,
    pair: tuple[int, str] = (0, ""),
    many: tuple[float, ...] = (),
    names: Mapping[str, float] | None = None,
    table: dict[int, float] | None = None,
    nested: Sequence[Mapping[str, Sequence[int]]] = (),
    some: Iterable[str] = (),
    unique: frozenset[int] = frozenset(),
    one_or_many: int | Sequence[int] = 0,
    either: Sequence[int] | Sequence[str] | Mapping[str, int] | Mapping[int, str] = (),
    typed: Typed | None = None,
    hashed: Mapping[Hashable, int] | None = None,
) -> Made:
    return Made((), dict(locals()))


def unannotated(f=1.0, i=1, s="a", b=True, t=(1, 2), d=None):
    return Made((), dict(locals()))


def stringly(
    f: "float" = 0.0,
    known: "Made | None" = None,
    unknown: "ForCheckersOnly" = 3,  # type: ignore[assignment]
) -> "Made":
    return Made((), {"f": f, "known": known, "unknown": unknown})


def needs(a: int, b: int, *, c: int) -> Made:
    return Made((), {"a": a, "b": b, "c": c})


def positional(a: int, /, b: int, *rest: float, c: int = 0) -> Made:
    return Made((a, b, *rest), {"c": c})


def a_number(value: float = 2.0) -> float:
    return value


def unsaid(x=0):
    return x


def a_word() -> str:
    return "word"


def a_function() -> Callable[[float], float]:
    return lambda x: x + 1


def takes_function(f: Callable[[float], float], g: Callable | None = None) -> Made:
    return Made((), {"f": f, "g": g})


def halves(step: int) -> float:
    return 0.5**step


def quarters(step):
    return 0.25**step


def takes_factory(make: Callable[[], Callable[..., Any]], loose: Callable | None = None) -> Made:
    return Made((), {"make": make, "loose": loose})


class HasApply(Protocol):
    def apply(self) -> int: ...


def takes_made(made: Made, other: HasApply | None = None, kind: type[Made] | None = None) -> Made:
    return Made((), {"made": made, "other": other, "kind": kind})


Steps = Annotated[int | str, "steps"]


def steps(
    count: Annotated[int, "steps"],
    every: int | str = "10%",
    warmup: int = "50%",  # type: ignore[assignment]
    boundaries: Sequence[int] = (),
    table: dict[Steps, float] | None = None,
    name: str = "20%",
    hold_steps: int | None = None,
    ns_steps: int = 5,
    marked: Steps | None = None,
) -> Made:
    return Made((), dict(locals()))


def raises(kind: str = "value", x: float = 0.0) -> Made:
    if kind == "parse":
        return float(f"{x:.0f}kg")  # pyright: ignore[reportReturnType]
    if kind == "syntax":  # as of a module that is imported here
        compile("x = (\n", "broken.py", "exec")
    error = {"value": ValueError, "type": TypeError, "key": KeyError, "empty": ValueError}[kind]
    raise error("" if kind == "empty" else f"x is {x},\n  which is no good.")


def gradient_step(learning_rate: float, momentum: float = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum)


def wrapped(
    inner: optax.GradientTransformation,
    rest: Sequence[optax.GradientTransformation] = (),
    by_name: Mapping[str, functools.partial] | None = None,
    scale: float = 1.0,
    decay: Callable[[int], float] | None = None,
) -> Made:
    return Made((), dict(locals()))


@dataclass(frozen=True)
class Thing:
    """A class: its fields are its arguments."""

    width: int
    rate: float = 0.5
    name: "str" = "thing"
    hidden: int = field(default=0, init=False)
    inner: "Thing | None" = None

    def grow(self) -> "Thing":
        return self


Alias = Thing
optimizer = functools.partial(gradient_step, momentum=0.5)
