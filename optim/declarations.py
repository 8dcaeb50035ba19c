"""Lists, before the first step, the matrices of each parameter and doubts about them."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import optax

from optim.layouts import Layout, Rule, layouts

__all__ = ["Declaration", "OptimizerWarning", "declarations"]


class OptimizerWarning(UserWarning):
    """Warns that an optimizer's arguments are valid but probably not intended."""


class Declaration(NamedTuple):
    """The layouts that an optimizer of matrices uses.

    Attributes:
        optimizer: its name, such as "optim.muon".
        layouts: path name of a parameter -> its layout.
        doubts: sentences about probable mistakes, guessed from its arguments and from the names and
            shapes of its parameters.
    """

    optimizer: str
    layouts: dict[str, Layout]
    doubts: tuple[str, ...]


# Collects what optimizers declare at init; None outside of `declarations`.
_LISTENER: ContextVar[list[Declaration] | None] = ContextVar("_LISTENER", default=None)


def declare(
    params: optax.Params, known: list[Rule], optimizer: str, doubts: Sequence[str] = ()
) -> None:
    """Checks the parameters of an optimizer at init and reports them to `declarations`.

    Outside of `declarations`, each doubt becomes an `OptimizerWarning`.

    Args:
        params: a pytree of arrays.
        known: the rules that `optim.layouts.rules` returned.
        optimizer: the optimizer's name, such as "optim.muon".
        doubts: sentences about its other arguments.

    Raises:
        ValueError: see `optim.layouts.layouts`.
    """
    found = layouts(params, known, optimizer)
    unmatched = {path for path in found if not any(rule.takes(path) for rule in known)}
    doubts = (*doubts, *_doubts(found, unmatched, optimizer))
    listener = _LISTENER.get()
    if listener is not None:
        listener.append(Declaration(optimizer, found, doubts))
        return
    for doubt in doubts:
        warnings.warn(doubt, OptimizerWarning, stacklevel=4)


def declarations(init: Callable[[Any], Any], params: optax.Params) -> list[Declaration]:
    """Lists the matrices that the optimizers inside an init function work on.

    Args:
        init: the `init` of an optimizer, of a chain of them or of an `optim.Optimizer`.
        params: a pytree of arrays, or of shapes and dtypes; nothing is computed.

    Returns:
        One declaration for each optimizer of matrices.

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
        # A new function at every call: jax keeps traces by function, and a trace that it has kept
        # calls no `declare`.
        jax.eval_shape(lambda tree: init(tree), params)
    finally:
        _LISTENER.reset(token)
    return found


def _doubts(found: Mapping[str, Layout], unmatched: set[str], optimizer: str) -> Iterator[str]:
    """Yields a sentence for each kind of parameter whose matrices are probably wrong.

    Args:
        found: path -> layout, of all parameters of the optimizer.
        unmatched: the paths that no rule takes; their last two axes are the matrix.
        optimizer: its name.
    """
    kinds: dict[str, list[str]] = {}
    for path in found:
        if path in unmatched and (kind := _kind(path, found)) is not None:
            kinds.setdefault(kind, []).append(path)
    for kind, paths in kinds.items():
        shape = "x".join(map(str, found[paths[0]].shape))
        others = f" (and {len(paths) - 1} like it)" if len(paths) > 1 else ""
        yield (
            f"{optimizer} works on the last two axes of {paths[0]} [{shape}]{others}:"
            f" {counted(found[paths[0]])}. {kind.replace('<path>', repr(paths[0]))}"
        )


def counted(layout: Layout) -> str:
    """Returns the number and size of a parameter's matrices: "48 matrices of 64x64"."""
    count, rows, columns = layout.matrices
    return f"{count:,} {'matrix' if count == 1 else 'matrices'} of {rows}x{columns}"


_SMALL_WINDOWS = (3, 5, 7, 9, 11)


def _kind(path: str, found: Mapping[str, Layout]) -> str | None:
    """Describes a parameter whose last two axes are probably not its matrix, else None.

    The text has "<path>" in place of the path, so that equal layers have equal texts.
    """
    shape = found[path].shape
    # A raw nnx.State ends its paths in /value.
    keys = re.sub(r"/value$", "", path).lower().split("/")
    if keys[-1] in ("bias", "scale"):
        return (
            "A bias or a scale is not a matrix: put it in another group, for example by a pattern"
            " that ends in /kernel."
        )
    if _is_attention(path, found):
        return (
            "These look like flax's attention kernels, [in, heads, head_dim] and [heads, head_dim,"
            " out]. Set matrices to 'attention' for one matrix a kernel, to 'attention_per_head'"
            " for one a head, or to 'dense' if the last two axes are the matrix."
        )
    # A 1x1 convolution is left out, because its last two axes are its matrix. So is a fused kernel,
    # [layers, 3, in, out], which three layers give a square window.
    window = shape[-4:-2]
    looks_like_conv = any("conv" in key for key in keys) and len(shape) > 2 and shape[:-2] != (1, 1)
    square = window[:1] == window[1:] and window[:1] and window[0] in _SMALL_WINDOWS
    if looks_like_conv or square and len(shape) == 4 and "qkv" not in keys:
        return (
            "This looks like the kernel of a convolution, [height, width, in, out]. Set"
            " matrices={<path>: 'conv'}, whose keys are patterns, for one matrix of [height *"
            " width * in, out], as Muon's and Scion's authors do, or 'dense' if the last two axes"
            " are the matrix."
        )
    if len(shape) > 2 and max(shape[:-2]) > max(shape[-2:]):
        return (
            "A batch axis is larger than the matrices. Set which axes are rows and"
            " columns, as in matrices={<path>: 'in heads head_dim -> in (heads head_dim)'}, or"
            " set it to 'dense' if the last two are the matrix."
        )
    return None


def _is_attention(path: str, found: Mapping[str, Layout]) -> bool:
    """Returns whether a path is an attention kernel beside others with the same heads."""
    match = re.fullmatch(r"(|.*/)(query|key|value|out)(/kernel(?:/value)?)", path)
    if match is None:
        return False
    into, out = (found.get(f"{match[1]}{name}{match[3]}") for name in ("query", "out"))
    if into is None or out is None or len(into.shape) < 3 or len(out.shape) < 3:
        return False
    # Stacked kernels of Dense layers, [layers, in, out], have no axes of heads in common.
    return into.shape[-2:] == out.shape[-3:-1] and into.shape[:-3] == out.shape[:-3]
