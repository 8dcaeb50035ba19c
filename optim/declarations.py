"""Lists, before the first step, the matrices of each parameter and doubts about them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.doubts import DEPTHWISE, Doubt, ModelShapes
from optim.layouts import Layout, MatrixRule, layouts, rules
from optim.paths import flatten


class OptimizerWarning(UserWarning):
    """Warns that an optimizer's arguments are valid but probably not intended."""


class Declaration(NamedTuple):
    """The layouts that an optimizer of matrices uses, or a doubt about another one's arguments."""

    optimizer: str  # its name, such as "optim.muon"
    layouts: dict[str, Layout]  # by path name; empty for an optimizer without matrices
    named: frozenset[str]  # whose layout the user named; of others the last two axes are the matrix
    # sentences about probable mistakes, guessed from arguments and from names and shapes
    doubts: tuple[str, ...]
    wrong: tuple[str, ...] = ()  # those of them that are no guesses


# Collects what optimizers declare at init; None outside of `declarations`.
_LISTENER: ContextVar[list[Declaration] | None] = ContextVar("_LISTENER", default=None)

# The shapes of all parameters of the model, of which an optimizer gets those of its group.
_MODEL: ContextVar[Mapping[str, tuple[int, ...]] | None] = ContextVar("_MODEL", default=None)


def declare(
    params: optax.Params,
    known: list[MatrixRule],
    optimizer: str,
    doubts: Sequence[str] = (),
    length: Callable[[Layout], float] | None = None,
    again: bool = True,
) -> None:
    """Checks an optimizer's parameters at init and reports them to `declarations`."""
    # Outside of it, each doubt becomes an `OptimizerWarning`, if `again`: whether to repeat reports
    # of an earlier part of a chain. Raises ValueError as `layouts` does. `length` is an update's
    # Frobenius norm for learning rate 1 and equal singular values; None if gradients decide.
    found = layouts(params, known, optimizer)
    listener = _LISTENER.get()
    if not again and (listener is None or any(found == one.layouts for one in listener)):
        return
    named = frozenset(path for path in found if any(rule.takes(path) for rule in known))
    of_matrices = dict(_doubts(found, named, optimizer, length))
    doubts = (*doubts, *of_matrices)
    wrong = tuple(text for text, certain in of_matrices.items() if certain)
    _report(Declaration(optimizer, found, named, doubts, wrong))


def doubt(optimizer: str, sentence: str) -> None:
    """Reports, in an optimizer's `init`, a sentence about arguments that concern no parameter."""
    _report(Declaration(optimizer, {}, frozenset(), (sentence,)))


def _report(declaration: Declaration) -> None:
    if (listener := _LISTENER.get()) is not None:
        listener.append(declaration)
        return
    for sentence in declaration.doubts:
        warnings.warn(sentence, OptimizerWarning, stacklevel=5)


@contextmanager
def model_of(params: optax.Params) -> Iterator[None]:
    """Makes all parameters of a model known while the optimizers of its groups start."""
    # Doubts about a group's parameters depend on the others.
    token = _MODEL.set({path: tuple(jnp.shape(x)) for path, x in flatten(params).items()})
    try:
        yield
    finally:
        _MODEL.reset(token)


def declarations(init: Callable[[Any], Any], params: optax.Params) -> list[Declaration]:
    """Lists the matrices and doubts of the optimizers inside an init function; computes nothing.

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
        # A new function at every call: jax keeps traces by function, and they call no `declare`.
        jax.eval_shape(lambda tree: init(tree), params)
    finally:
        _LISTENER.reset(token)
    return found


def _doubts(
    found: Mapping[str, Layout],
    named: Set[str],
    optimizer: str,
    length: Callable[[Layout], float] | None,
) -> Iterator[tuple[str, bool]]:
    """Yields a sentence for each kind of wrong matrices, and whether that is certain."""
    # A rule takes the paths of `named`; of the others, the last two axes are the matrix.
    whole = _MODEL.get()
    shapes = {path: layout.shape for path, layout in found.items()}
    model = ModelShapes({**(whole or {}), **shapes}, whole is not None)
    kinds: dict[str, list[tuple[str, Doubt]]] = {}
    for path, layout in found.items():
        if 0 in layout.shape:
            continue
        if path not in named:
            doubt = model.doubt(path)
        else:
            summed = tuple(layout.shape[axis] for axis in layout.rows)
            doubt = DEPTHWISE if layout.window > 1 and model.is_depthwise(path, summed) else None
        if doubt is not None:
            kinds.setdefault(doubt.text, []).append((path, doubt))
    for text, those in kinds.items():
        path, doubt = those[0]
        axes = "the matrix" if path in named else "the last two axes"
        others = f" (and {len(those) - 1} like it)" if len(those) > 1 else ""
        count, rows, columns = found[path].matrices
        said = (
            f"{optimizer} works on {axes} of {path} [{'x'.join(map(str, found[path].shape))}]"
            f"{others}: {count:,} {'matrix' if count == 1 else 'matrices'} of {rows}x{columns}."
            f" {text.replace('<path>', repr(path))}"
            f"{_longer(path, found[path], doubt.spec, length)}"
        )
        yield said, doubt.certain


def _longer(
    path: str, layout: Layout, spec: str | None, length: Callable[[Layout], float] | None
) -> str:
    """Compares the lengths of a parameter's update under its layout and another."""
    if spec is None or length is None:
        return ""
    [right] = layouts(jax.ShapeDtypeStruct(layout.shape, "float32"), rules(spec), "").values()
    long, usual = length(layout), length(right)
    if abs(long - usual) <= 0.05 * usual:
        return ""
    return f" Updates of {path} are about {long / usual:.3g} times as long as with {spec!r}."
