"""Tells, before the first step, what optimizers of matrices work on, and where that looks wrong."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from optim.layouts import Layout, Rule, layouts

__all__ = ["Declaration", "OptimizerWarning", "declarations"]


class OptimizerWarning(UserWarning):
    """An optimizer does as it was told, and that is plainly not what was meant."""


class Declaration(NamedTuple):
    """What an optimizer of matrices works on.

    Attributes:
        optimizer: its name, such as "optim.muon".
        layouts: path name of a parameter -> its layout.
        doubts: a sentence for each kind of mistake that its arguments or its parameters' names and
            shapes suggest.
    """

    optimizer: str
    layouts: dict[str, Layout]
    doubts: tuple[str, ...]


# Where `declarations` listens, what optimizers declare at init; None where nobody does.
_LISTENER: ContextVar[list[Declaration] | None] = ContextVar("_LISTENER", default=None)


def declare(params: Any, known: list[Rule], optimizer: str, doubts: Sequence[str] = ()) -> None:
    """Checks, at init, what an optimizer will work on, and tells `declarations`.

    Where nobody listens, each doubt is an `OptimizerWarning`.

    Args:
        params: a pytree of arrays.
        known: what `optim.layouts.rules` read.
        optimizer: the optimizer's name, such as "optim.muon".
        doubts: sentences about its other arguments.

    Raises:
        ValueError: see `optim.layouts.layouts`.
    """
    found = layouts(params, known, optimizer)
    free = {path for path in found if not any(rule.takes(path) for rule in known)}
    doubts = (*doubts, *_doubts(found, free, optimizer))
    listener = _LISTENER.get()
    if listener is not None:
        listener.append(Declaration(optimizer, found, doubts))
        return
    for doubt in doubts:
        warnings.warn(doubt, OptimizerWarning, stacklevel=4)


def declarations(init: Callable[[Any], Any], params: Any) -> list[Declaration]:
    """Lists what the optimizers of matrices inside an init function work on.

    Args:
        init: the `init` of an optimizer, of a chain of them or of an `optim.Optimizer`.
        params: a pytree of arrays, or of shapes and dtypes; nothing is computed.

    Returns:
        One declaration for each optimizer of matrices; none where there is no such optimizer.

    Example:
        >>> import jax, optim
        >>> tx = optim.muon(0.02, matrices="attention")
        >>> [one] = declarations(tx.init, {
        ...     "query": {"kernel": jax.ShapeDtypeStruct((64, 4, 16), "float32")},
        ...     "out": {"kernel": jax.ShapeDtypeStruct((4, 16, 64), "float32")},
        ... })
        >>> one.optimizer, one.layouts["query/kernel"].matrices
        ('optim.muon', (1, 64, 64))
    """
    found: list[Declaration] = []
    token = _LISTENER.set(found)
    try:
        jax.eval_shape(lambda tree: init(tree), params)
    finally:
        _LISTENER.reset(token)
    return found


def _doubts(found: Mapping[str, Layout], free: set[str], optimizer: str) -> Iterator[str]:
    """Yields a sentence for each kind of parameter whose matrices are plainly not its layer's.

    Args:
        found: path -> layout, of all parameters of the optimizer.
        free: the paths of those that no rule takes, whose last two axes are the matrix.
        optimizer: its name.
    """
    kinds: dict[str, list[str]] = {}
    for path in found:
        if path in free and (kind := _kind(path, found)) is not None:
            kinds.setdefault(kind, []).append(path)
    for kind, paths in kinds.items():
        shape = "x".join(map(str, found[paths[0]].shape))
        others = f" (and {len(paths) - 1} like it)" if len(paths) > 1 else ""
        yield (
            f"{optimizer} works on the last two axes of {paths[0]} [{shape}]{others}:"
            f" {counted(found[paths[0]])}. {kind.replace('<path>', repr(paths[0]))}"
        )


def counted(layout: Layout) -> str:
    """Spells how many matrices of which size a parameter is: "48 matrices of 64x64"."""
    count, rows, columns = layout.matrices
    return f"{count:,} {'matrix' if count == 1 else 'matrices'} of {rows}x{columns}"


_SMALL_WINDOWS = (3, 5, 7, 9, 11)


def _kind(path: str, found: Mapping[str, Layout]) -> str | None:
    """Says what a parameter seems to be, where its last two axes are not its matrix.

    The text has "<path>" in place of the path, so that equal layers have equal texts.
    """
    shape = found[path].shape
    parts = re.sub(r"/value$", "", path).lower().split("/")
    if parts[-1] in ("bias", "scale"):
        return (
            "A bias or a scale is no matrix: give it to another group, for example by a pattern"
            " that ends in /kernel."
        )
    if _is_attention(path, found):
        return (
            "These look like flax's attention kernels, [in, heads, head_dim] and [heads, head_dim,"
            " out]. Set matrices to 'attention' for one matrix a kernel, to 'attention_per_head'"
            " for one a head, or to 'dense' where the last two axes are meant."
        )
    window = shape[-4:-2]
    named = any("conv" in part for part in parts) and len(shape) > 2 and shape[:-2] != (1, 1)
    square = window[:1] == window[1:] and window[:1] and window[0] in _SMALL_WINDOWS
    if named or square and len(shape) == 4 and "qkv" not in parts:
        return (
            "This looks like the kernel of a convolution, [height, width, in, out]. Set"
            " matrices={<path>: 'conv'}, whose keys are patterns, for one matrix of [height *"
            " width * in, out], as Muon's and Scion's authors have it, or 'dense' where the last"
            " two axes are meant."
        )
    if len(shape) > 2 and max(shape[:-2]) > max(shape[-2:]):
        return (
            "They are smaller than an axis that only counts them. Say which axes are rows and"
            " columns, as in matrices={<path>: 'in heads head_dim -> in (heads head_dim)'}, or"
            " set it to 'dense' where the last two are meant."
        )
    return None


def _is_attention(path: str, found: Mapping[str, Layout]) -> bool:
    """Tells whether query, key, value and out stand side by side, with the same heads."""
    match = re.fullmatch(r"(|.*/)(query|key|value|out)(/kernel(?:/value)?)", path)
    if match is None:
        return False
    into, out = (found.get(f"{match[1]}{name}{match[3]}") for name in ("query", "out"))
    if into is None or out is None or len(into.shape) < 3 or len(out.shape) < 3:
        return False
    # Stacked kernels of Dense layers, [layers, in, out], have no axes of heads in common.
    return into.shape[-2:] == out.shape[-3:-1] and into.shape[:-3] == out.shape[:-3]
