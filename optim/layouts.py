"""Defines which axes of a parameter are the rows, the columns and the batch of its matrices.

A layer computes y = x W. The rows of W are the inputs, which are summed over (optax's reduction
axes), the columns are the outputs, and every other axis is batch: matrices that are independent of
each other. A spec defines the axes in the notation of einops: in

    "in heads head_dim -> in (heads head_dim)"

the left side names the last axes of the parameter, and the last two items of the right side are
the rows and the columns. Items before them, and axes of the parameter that the left side does not
name, such as a leading axis of stacked layers, are batch.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from optim.paths import did_you_mean, flatten, fullmatch, nearest_paths

MatrixSpec = str | Mapping[str, str] | None

_QUERY = "in heads head_dim -> in (heads head_dim)"
_QUERY_PER_HEAD = "in heads head_dim -> heads in head_dim"
_OUT = "heads head_dim out -> (heads head_dim) out"
_OUT_PER_HEAD = "heads head_dim out -> heads head_dim out"
_QUERY_PATH = r"(.*/)?(query|key|value)/kernel(/value)?"  # a raw nnx.State ends paths in /value
_OUT_PATH = r"(.*/)?out/kernel(/value)?"

# The layers of flax (linen and nnx have the same axes), and the fused kernel of models.vit.
PRESETS: Mapping[str, str | Mapping[str, str]] = {
    "dense": "in out -> in out",
    "embedding": "entries features -> entries features",
    "conv": "height width in out -> (height width in) out",
    "conv1d": "length in out -> (length in) out",
    "conv3d": "depth height width in out -> (depth height width in) out",
    "attention": {_QUERY_PATH: _QUERY, _OUT_PATH: _OUT},
    "attention_per_head": {_QUERY_PATH: _QUERY_PER_HEAD, _OUT_PATH: _OUT_PER_HEAD},
    **dict.fromkeys(("attention_query", "attention_key", "attention_value"), _QUERY),
    "attention_out": _OUT,
    **{f"attention_{one}_per_head": _QUERY_PER_HEAD for one in ("query", "key", "value")},
    "attention_out_per_head": _OUT_PER_HEAD,
    "qkv": "part in out -> part in out",
    "qkv_joint": "part in out -> in (part out)",
}


class Layout(NamedTuple):
    """The axes of one parameter, seen as a batch of matrices."""

    shape: tuple[int, ...]  # the shape of the parameter
    batch: tuple[int, ...]  # the axes that are batch
    rows: tuple[int, ...]  # the axes that are flattened into the rows, the inputs of the layer
    columns: tuple[int, ...]  # the axes that are flattened into the columns, its outputs

    @property
    def order(self) -> tuple[int, ...]:
        """All axes: batch, rows, columns."""
        return self.batch + self.rows + self.columns

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The number of matrices, their rows and their columns."""
        count, rows, columns = (self._size(axes) for axes in self[1:])
        return count, rows, columns

    @property
    def window(self) -> int:
        """The number of positions in a convolution's window: the row axes except the last."""
        return self._size(self.rows[:-1])

    def _size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[axis] for axis in axes)


class MatrixRule(NamedTuple):
    """One entry of `matrices`: the patterns that a path must match, and the names of the axes."""

    patterns: tuple[re.Pattern[str], ...]
    spec: str
    axes: tuple[str, ...]
    batch: tuple[str, ...]  # it and the next two are the last fields: `_layout` slices them
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def takes(self, path: str) -> bool:
        """Returns whether all patterns match a path name."""
        return all(fullmatch(pattern, path) for pattern in self.patterns)


def rules(matrices: MatrixSpec) -> list[MatrixRule]:
    """Reads the argument `matrices`; raises ValueError if it is invalid."""
    # It is a preset's name, a spec, or a mapping of path pattern to either. The first rule that
    # takes a path applies; None has no rules.
    if matrices is None:
        return []
    if not isinstance(matrices, Mapping):
        known = PRESETS.get(matrices, matrices) if isinstance(matrices, str) else matrices
        return rules(known) if isinstance(known, Mapping) else [_parse(known)]
    found = []
    for pattern, value in matrices.items():
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"In matrices, the pattern {pattern!r} is not a regular expression: {error}."
            ) from None
        if not isinstance(value, str):
            raise _unreadable(value)
        # A path must match this pattern and, if the value is a preset such as 'attention', its own.
        found += [rule._replace(patterns=(compiled, *rule.patterns)) for rule in rules(value)]
    return found


def _parse(spec: Any) -> MatrixRule:
    if not isinstance(spec, str):
        raise _unreadable(spec)
    left, _, right = spec.partition("->")
    axes = left.split()
    # An item is a name or names in brackets: "heads", "(heads head_dim)".
    items = re.findall(r"\([^()]*\)|[^\s()]+", right)
    if axes[:1] == items[:1] == ["..."]:
        axes, items = axes[1:], items[1:]
    groups = [tuple(item.strip("()").split()) for item in items]
    names = [name for group in groups for name in group]
    brackets = sum(item.startswith("(") for item in items)
    if (
        # Rows and columns; brackets in pairs, not nested, not empty; each name once on each side.
        len(groups) < 2
        or right.count("(") != brackets
        or right.count(")") != brackets
        or not all(groups)
        or not all(name.isidentifier() for name in axes)
        or sorted(names) != sorted(axes)
        or len(set(axes)) < len(axes)
    ):
        raise _unreadable(spec)
    batch = tuple(name for group in groups[:-2] for name in group)
    return MatrixRule((), spec, tuple(axes), batch, groups[-2], groups[-1])


def _unreadable(spec: Any) -> ValueError:
    hint = did_you_mean(spec, PRESETS) if isinstance(spec, str) else ""
    return ValueError(
        f"matrices has {spec!r}.{hint} It must be one of "
        f"{', '.join(PRESETS)}; or a spec like {_QUERY!r}, where the left side names the last axes "
        "of a parameter, each once, and the last two items of the right side are the rows (inputs) "
        "and the columns (outputs) of its matrices; or a dict {pattern of paths: name or spec}."
    )


def layouts(params: Any, known: list[MatrixRule], optimizer: str) -> dict[str, Layout]:
    """Returns path name -> layout of every parameter's matrices, in the order of the leaves."""
    # `params` may be shapes. Those that none of the `known` rules takes use their last two axes.
    by_path = flatten(params)
    found = {path: _layout(path, x, known, optimizer) for path, x in by_path.items()}
    for rule in known:
        if rule.patterns and not any(rule.takes(path) for path in by_path):
            texts = [pattern.pattern for pattern in rule.patterns]
            raise ValueError(
                f"In matrices of {optimizer}, the pattern {' and '.join(map(repr, texts))} "
                f"matches none of its parameters. A pattern matches a whole path; the nearest are "
                f"{nearest_paths(texts[-1], by_path)}. Correct the pattern, or remove it."
            )
    return found


def _layout(path: str, x: Any, known: list[MatrixRule], optimizer: str) -> Layout:
    shape = tuple(jnp.shape(x))
    if len(shape) < 2:
        raise ValueError(
            f"{optimizer} updates matrices, but the parameter {path!r} has shape {shape}: put it in"
            " another group, for example one with optax.adamw."
        )
    if jnp.iscomplexobj(x):
        raise ValueError(
            f"{optimizer} updates real matrices, but the parameter {path!r} has dtype {x.dtype}:"
            " put it in another group, for example one with optax.adamw."
        )
    rule = next((rule for rule in known if rule.takes(path)), None) or _parse(PRESETS["dense"])
    # The axes that the spec does not name; they come first and are batch.
    if (lead := len(shape) - len(rule.axes)) < 0:
        raise ValueError(
            f"In matrices of {optimizer}, the spec of {path!r} has the axes"
            f" {' '.join(rule.axes)!r}, but its shape {shape} has fewer axes. Give it another"
            " spec, by a separate pattern: matrices={pattern: spec}."
        )
    # From names to positions among the axes of the parameter.
    batch, rows, columns = (tuple(lead + rule.axes.index(x) for x in names) for names in rule[3:])
    return Layout(shape, (*range(lead), *batch), rows, columns)
