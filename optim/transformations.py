"""Adapts optax transformations to one interface: extra arguments, one tree of parameters."""

import inspect
from typing import Any, NamedTuple

import jax
import optax

from optim.descent import Updated


def standardize(made: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """Adapts what an optimizer factory returns to optax's interface, or raises ValueError."""
    # It may be a transformation, `optax.MultiSteps`, or a lookahead, whose slow parameters are
    # moved to its state (see `SlowParams`). Unknown extra arguments are ignored.
    if isinstance(made, optax.MultiSteps):
        made = made.gradient_transformation()
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"{name} returned an object of class {type(made).__name__}, but the optimizer of a "
            f"group must be an optax transformation. Groups cannot be nested."
        )
    # In this order: with_extra_args_support wraps `update`, and the annotation of the argument
    # `params`, by which a lookahead is recognized, would be lost.
    return with_known_extras(_with_slow_params(made))


def with_known_extras(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Drops extra arguments that a transformation does not know, and keeps its class."""
    # `optax.with_extra_args_support` does so for transformations that take none; `contrib.sam`
    # takes one, and raises at any other.
    given, tx = tx, optax.with_extra_args_support(tx)
    if tx is not given:  # a new function, whose name tells `optim.chain` what it wraps
        tx.update.__qualname__ = getattr(given.update, "__qualname__", "")  # type: ignore[attr-defined]
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return tx

    def update(updates: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        known = {name: value for name, value in extra.items() if name in parameters}
        return tx.update(updates, state, params, **known)

    return tx._replace(update=update)


class SlowParams(NamedTuple):
    """The state of an optimizer that trains fast parameters and evaluates slow ones."""

    slow: Any
    state: Any


def nodes_of(state: optax.OptState, kinds: type | tuple[type, ...]) -> list[Any]:
    """Returns the nodes of a state that are objects of some classes, such as `SlowParams`."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def _with_slow_params(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Moves the slow parameters of a lookahead to its state."""
    # The update of a lookahead takes and returns a pair of parameters, `optax.LookaheadParams`. It
    # is recognized by the annotation of its argument `params`.
    params_of = inspect.signature(tx.update).parameters.get("params")
    if params_of is None or params_of.annotation is not optax.LookaheadParams:
        return tx

    def init(params: optax.Params) -> SlowParams:
        pair: Any = optax.LookaheadParams(fast=params, slow=params)
        return SlowParams(params, tx.init(pair))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Updated:
        pair: Any = optax.LookaheadParams(fast=params, slow=state.slow)
        moves: Any
        moves, inner = tx.update(updates, state.state, pair)
        # The caller applies the first result; the slow parameters are in the state.
        return moves.fast, SlowParams(optax.apply_updates(state.slow, moves.slow), inner)

    return optax.GradientTransformation(init, update)
