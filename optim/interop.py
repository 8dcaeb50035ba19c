"""Converts an optimizer to an optax transformation, whose state optax's tools can read.

An `OptimizerState` consists of flat dicts by path name, with scalars packed, which is fast. A
`TransformationState` has the structure of `optax.partition`: values for each parameter are a tree
like the parameters, with an `optax.MaskedNode` for parameters of other groups; a count is a scalar.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.adapter import init as init_group
from optim.bound import BoundOptimizer
from optim.descent import Updated
from optim.packing import OptimizerState, Unpacked, packed
from optim.paths import flatten, names, unflatten
from optim.transformations import nodes_of


class TransformationState(NamedTuple):
    """The state of `Optimizer.tx`."""

    # Values for each parameter are a tree like the parameters; `master`, `lookahead` and `readout`
    # are empty where they are not used.

    groups: dict[str, Any]  # name -> state; `optax.MaskedNode` for parameters of other groups
    skipped: Any  # the number of skipped updates, int32
    step: Any  # the number of updates, int32
    master: Any  # the float32 copies of low_precision="master"
    lookahead: Any = ()
    readout: Any = ()

    @property
    def b1(self) -> Any:
        """For `optax.contrib.schedule_free_eval_params`, if there is one such group."""
        return self._schedule_free().b1

    @property
    def z(self) -> Any:
        """For `optax.contrib.schedule_free_eval_params`, if there is one such group."""
        return self._schedule_free().z

    def _schedule_free(self) -> optax.contrib.ScheduleFreeState:
        found = nodes_of(self.groups, optax.contrib.ScheduleFreeState)
        if len(found) != 1 or len(self.groups) != 1:
            raise AttributeError(
                "This state has no schedule-free average of all parameters. Use "
                "Optimizer.eval_params, which finds the averages of every group."
            )
        return found[0]


def transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an `optim.Optimizer` as an optax transformation."""
    # Updates have the parameters' dtypes: in low precision, parameters plus updates are rounded
    # once more than the parameters that `Optimizer.update` returns. The state is a
    # `TransformationState`; `update` also takes an `OptimizerState`, and then returns one.

    def init(params: optax.Params) -> TransformationState:
        if not jax.tree.leaves(params):  # optax.tree.map_params passes a placeholder
            return _of_placeholder(optimizer, params)
        bound = optimizer.bind(params)
        return to_trees(bound, bound.init())

    def update(grads: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None:
            raise ValueError("Pass the parameters: tx.update(grads, state, params).")
        bound = optimizer.bind(params)
        skip, key = extra.pop("skip", None), extra.pop("key", None)
        new_params, new_state = bound.update(
            grads, to_paths(bound, state), skip=skip, key=key, extra=extra
        )
        trainable, after = bound.trainable(), flatten(new_params)
        moves = {
            path: after[path] - x if path in trainable else jnp.zeros_like(x)
            # Frozen parameters have an update, too: optax.apply_updates needs a tree like the
            # parameters.
            for path, x in flatten(bound.params).items()
        }
        out = to_trees(bound, new_state) if isinstance(state, TransformationState) else new_state
        return unflatten(params, moves), out

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def to_trees(bound: BoundOptimizer, state: OptimizerState) -> TransformationState:
    """Converts the state of a bound optimizer to the state of its transformation."""
    called, structure = names(bound.params), jax.tree.structure(bound.params)

    def tree(by_path: Any) -> Any:
        return structure.unflatten([by_path.get(name, optax.MaskedNode()) for name in called])

    unpacked = bound.unpacked(state)
    groups = {
        name: _map_dicts(tree, group_params, unpacked.groups[name])
        for name, group_params in bound.split(bound.trainable()).items()
    }
    master = tree(state.master) if bound.low_precision == "master" else ()
    wrappers = _map_dicts(tree, None, (unpacked.lookahead, unpacked.readout))
    return TransformationState(groups, unpacked.skipped, unpacked.step, master, *wrappers)


def to_paths(bound: BoundOptimizer, state: Any) -> OptimizerState:
    """Converts the state of a transformation back, for `Optimizer.update`."""
    # An `OptimizerState` is returned unchanged.
    if isinstance(state, OptimizerState):
        return state
    template = bound.template()
    called, structure = names(bound.params), jax.tree.structure(bound.params)

    def select(like: Any, tree: Any) -> dict[str, Any]:
        found = dict(zip(called, structure.flatten_up_to(tree), strict=True))
        return {name: found[name] for name in like}

    groups = {
        name: _map_dicts(select, group_params, template.groups[name], state.groups[name])
        for name, group_params in bound.split(bound.trainable()).items()
    }
    lookahead, readout = _map_dicts(
        select, None, (template.lookahead, template.readout), (state.lookahead, state.readout)
    )
    low = bound.copies()
    master = select(low, state.master) if low else {}
    return packed(Unpacked(groups, lookahead, readout, state.skipped, state.step), master)


def _map_dicts(change: Callable[..., Any], like: Mapping[str, Any] | None, *states: Any) -> Any:
    """Changes the dicts of a state that have the keys of `like`, or all of them."""
    # A dict whose keys are the paths of a group has values for its parameters. The state of an
    # optimizer may have other dicts, which stay as they are; all dicts of a lookahead and a readout
    # have values for parameters. Of several states, the first one has the dicts.

    def has_values(x: Any) -> bool:
        return isinstance(x, dict) and (like is None or x.keys() == like.keys())

    def one(x: Any, *others: Any) -> Any:
        return change(x, *others) if has_values(x) else (x, *others)[-1]

    return jax.tree.map(one, *states, is_leaf=has_values)


def _of_placeholder(optimizer: Any, params: optax.Params) -> TransformationState:
    groups = {
        name: init_group(group.optimizer, params)
        for name, group in optimizer.groups.items()
        if not group.is_frozen
    }
    master = params if optimizer.low_precision == "master" else ()
    zero = jnp.zeros((), jnp.int32)
    inits = [() if w is None else w.init({}) for w in (optimizer.lookahead, optimizer.readout)]
    wrappers = _map_dicts(lambda _: params, None, inits)
    return TransformationState(groups, zero, zero, master, *wrappers)
