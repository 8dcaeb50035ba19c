"""The values among which a sweep searches; a config names them as space.log_uniform and so on.

The values of trials are written in JSON, which has no calls: those and other trees are in YAML.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainer.config import Call, Source, Tree, dump
from trainer.config.tree import same
from trainer.config.wording import brief

__all__ = ["integers", "log_uniform", "uniform", "values", "zip"]


@dataclass(frozen=True)
class Space:
    """The values that a path, or several paths together, take in a sweep."""

    at: Callable[[float], Tree]  # the value at a coordinate in [0, 1), which a method chose
    grid: tuple[Tree, ...] | None  # in order; None if the space has no grid
    size: int | None  # the number of different values; None for floats of an interval
    text: str  # one line, such as "log_uniform 0.001 to 0.1"
    # the function that returned the space, as "kind", and its arguments: `of_record` returns the
    # space from it again; empty for a zip
    record: Mapping[str, Any] = field(default_factory=dict)
    # path -> space, if the values are dicts from path to value; None if the space is for the path
    # that it is written for
    parts: Mapping[str, "Space"] | None = None


@dataclass(frozen=True)
class Bounds:
    """The ends of an interval of numbers."""

    kind: str  # "log_uniform", "uniform" or "integers"
    low: float
    high: float

    @property
    def log(self) -> bool:
        """Whether the logarithms of the values have equal probability."""
        return self.kind == "log_uniform"


_BOUNDED = re.compile(r"(log_uniform|uniform|integers) (\S+) to (\S+)")


def bounds(text: str) -> Bounds | None:
    """Returns the ends of an interval from the text that plan.json has of it.

    None for a space that is not an interval.

    Example:
        >>> bounds(log_uniform(1e-4, 1e-2).text)
        Bounds(kind='log_uniform', low=0.0001, high=0.01)
        >>> bounds(values([0.9, 0.95]).text) is None
        True
    """
    found = _BOUNDED.fullmatch(text)
    return Bounds(found[1], float(found[2]), float(found[3])) if found else None


def uniform(low: float, high: float, points: int | None = None) -> Space:
    """Returns the floats of an interval, with equal probability.

    Values are rounded to eight significant digits, so that they are the same on every machine.

    Args:
        low: the smallest value.
        high: the largest value.
        points: for `method.grid`, how many values with equal distances, both ends included.

    Raises:
        ValueError: `low` is not below `high`, or `points` is below 2.

    Example:
        >>> uniform(0.0, 0.2).at(0.25), uniform(0.0, 0.2, points=3).grid
        (0.05, (0.0, 0.1, 0.2))
    """
    return _interval(low, high, points, "uniform", lambda x: x, lambda x: x)


def log_uniform(low: float, high: float, points: int | None = None) -> Space:
    """Returns the floats of an interval, whose logarithms have equal probability.

    The value at the coordinate u is low * (high / low)**u, rounded as in `uniform`.

    Args:
        low: the smallest value, above 0.
        high: the largest value.
        points: for `method.grid`, how many values with equal ratios, both ends included.

    Raises:
        ValueError: `low` is not above 0 or not below `high`, or `points` is below 2.

    Example:
        >>> log_uniform(1e-4, 1e-2).at(0.5), log_uniform(1e-4, 1e-2, points=3).grid
        (0.001, (0.0001, 0.001, 0.01))
    """
    if not low > 0:
        raise ValueError(
            f"low is {low:g}, which has no logarithm: it must be above 0. For an interval that"
            " includes 0, use space.uniform."
        )
    return _interval(low, high, points, "log_uniform", math.log, math.exp)


def integers(low: int, high: int) -> Space:
    """Returns the integers of an interval, with equal probability; a grid has all of them.

    Args:
        low: the smallest value.
        high: the largest value, which is included.

    Raises:
        ValueError: `low` is not below `high`.

    Example:
        >>> integers(1, 4).at(0.99), integers(1, 4).grid
        (4, (1, 2, 3, 4))
    """
    _check_order(low, high)
    size = high - low + 1
    # A grid of more would be refused for its number of trials.
    grid = tuple(range(low, high + 1)) if size <= 10**6 else None
    record = {"kind": "integers", "low": low, "high": high}
    return Space(lambda u: low + _index(u, size), grid, size, f"integers {low} to {high}", record)


def values(values: Sequence[Any]) -> Space:
    """Returns some values, with equal probability; a grid has all of them, in this order.

    Args:
        values: numbers, strings, lists or calls, all different.

    Raises:
        ValueError: there is no value, or two are equal.

    Example:
        >>> values([0.9, 0.95, 0.99]).at(0.5)
        0.95
    """
    if not values:
        raise ValueError("values is empty: list the values that the path takes.")
    for index, value in enumerate(values):
        for earlier in values[:index]:
            if _equal(value, earlier):
                raise ValueError(
                    f"values has {brief(value)} twice, which would repeat trials: remove one. Equal"
                    " trials with several seeds are set by seeds."
                )
    size, record = len(values), {"kind": "values", "values": [*values]}
    text = f"values {brief([*values])}"
    return Space(lambda u: values[_index(u, size)], tuple(values), size, text, record)


def zip(spaces: Mapping[str, Space]) -> Space:
    """Returns the values of several paths that move together.

    All of them take the same coordinate: two `log_uniform` with equal ends have equal values, and
    the first of `values` meets the first of the others. The key of a zip in the file of a sweep is
    a name for it.

    Args:
        spaces: path -> its space, at least two. Those with a number of values must have equal
            numbers, and so must those with a grid.

    Raises:
        ValueError: there are fewer than two, or the numbers of values differ.

    Example:
        >>> rates = zip({"a": values([1, 2, 3]), "b": values([10, 20, 30])})
        >>> rates.at(0.5)
        {'a': 2, 'b': 20}
    """
    if len(spaces) < 2:
        raise ValueError(f"spaces has {len(spaces)} entries; a zip has at least two paths.")
    for path, space in spaces.items():
        if not isinstance(space, Space) or space.parts is not None:
            raise ValueError(f"The entry {path!r} of spaces must be a space that is not a zip.")
    sizes = {path: space.size for path, space in spaces.items()}
    lengths = {path: None if x.grid is None else len(x.grid) for path, x in spaces.items()}
    for found in (sizes, lengths):
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{path}: {number or 'any'}" for path, number in found.items())
            raise ValueError(f"The spaces of a zip have different numbers of values ({shown}).")
    first = next(iter(spaces.values()))

    def together(pick: Callable[[Space], Tree]) -> dict[str, Tree]:
        return {path: pick(space) for path, space in spaces.items()}

    grid = None
    if first.grid is not None:
        grid = tuple(together(lambda x, i=i: (x.grid or ())[i]) for i in range(len(first.grid)))
    text = "; ".join(f"{path}: {space.text}" for path, space in spaces.items())
    return Space(lambda u: together(lambda x: x.at(u)), grid, first.size, text, parts=spaces)


def _interval(
    low: float,
    high: float,
    points: int | None,
    name: str,
    forth: Callable[[float], float],
    back: Callable[[float], float],
) -> Space:
    """Returns an interval whose values have equal distances after the function `forth`."""
    if not math.isfinite(low) or not math.isfinite(high):
        raise ValueError(f"low is {low:g} and high is {high:g}, but both must be finite.")
    _check_order(low, high)
    if points is not None and not 2 <= points <= 10**6:
        raise ValueError(f"points is {points}, but must be at least 2 and at most 10**6.")
    start, length = forth(low), forth(high) - forth(low)

    def at(u: float) -> float:
        # exp and log differ in their last bits between machines, and a plan must not.
        return min(max(float(f"{back(start + u * length):.8g}"), low), high)

    grid = None
    if points is not None:
        grid = (low, *(at(index / (points - 1)) for index in range(1, points - 1)), high)
    record = {"kind": name, "low": low, "high": high}
    return Space(at, grid, None, f"{name} {low:g} to {high:g}", record)


def of_record(record: Mapping[str, Any]) -> Space:
    """Returns the space that has a record; a grid is not in it."""
    functions = {each.__name__: each for each in (uniform, log_uniform, integers, values)}
    return functions[record["kind"]](**{k: x for k, x in record.items() if k != "kind"})


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low is {low:g}, which is not below high, {high:g}.")


def _index(u: float, size: int) -> int:
    return min(int(u * size), size - 1)


def _equal(a: Tree, b: Tree) -> bool:
    """Returns whether two values build the same: 1 and 1.0 do for an argument that is a float."""
    return a == b if all(type(x) in (int, float) for x in (a, b)) else same(a, b)


# The values of a trial whose point is chosen by results that are not known yet.
PENDING: Mapping[str, Tree] = MappingProxyType({})


def canonical(content: Any) -> str:
    """Returns JSON in ASCII on one line; equal contents in equal order have equal texts."""
    # The content must not have NaN or infinities.
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def encoded(values: Mapping[str, Tree]) -> dict[str, Any]:
    """Returns the values of a trial as JSON can have them; what it cannot, as {"yaml": text}."""
    # Those are lists, dicts, calls, NaN and infinities.
    found: dict[str, Any] = dict(values)
    for path, value in values.items():
        tree = isinstance(value, Call | Mapping | Sequence) and not isinstance(value, str)
        if tree or (isinstance(value, float) and not math.isfinite(value)):
            found[path] = {"yaml": dump(Call("value", {"value": value}))}
    return found


def decoded(content: Mapping[str, Any] | None) -> Mapping[str, Tree]:
    """Returns the values of a trial from what `encoded` returned; `PENDING` from None."""
    # Raises ConfigError if a text is not YAML, or has something that a config cannot contain;
    # KeyError or TypeError if the content has another form.
    if content is None:
        return PENDING
    return {
        path: _tree(value["yaml"]) if isinstance(value, dict) else value
        for path, value in content.items()
    }


@functools.lru_cache(10_000)  # the trials of a sweep have few different texts
def _tree(text: str) -> Tree:
    from trainer.config import yaml_reader
    from trainer.config.nodes import plain

    if (read := yaml_reader.read(text, Source("a value"))) is None:
        raise TypeError("a value is empty")
    return plain(read).kwargs["value"]
