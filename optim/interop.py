"""The groups as an optax transformation, whose state optax's own tools can read.

An `OptimizerState` is made for speed: flat dicts by path name, scalars packed. Here the same state
has optax's shape: each copy of the parameters is a tree like the parameters, with an
`optax.MaskedNode` for those of other groups, as in `optax.partition`; and a count is a scalar.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim.laws import init as init_group
from optim.packing import OptimizerState, pack, unpack
from optim.paths import as_arrays, flatten, names, unflatten


class TransformationState(NamedTuple):
    """The state of `Optimizer.tx`.

    Attributes:
        groups: group name -> the state of its optimizer; where that holds something for every
            parameter, a tree like the parameters with `optax.MaskedNode` for other groups'.
        skipped: the number of skipped updates, int32.
        step: the number of updates, int32.
        master: a tree like the parameters of float32 copies, likewise; empty but for
            low_precision="master".
    """

    groups: dict[str, Any]
    skipped: Any
    step: Any
    master: Any

    @property
    def b1(self) -> Any:
        """What `optax.contrib.schedule_free_eval_params` reads, where one group has it."""
        return self._schedule_free().b1

    @property
    def z(self) -> Any:
        """What `optax.contrib.schedule_free_eval_params` reads, where one group has it."""
        return self._schedule_free().z

    def _schedule_free(self) -> optax.contrib.ScheduleFreeState:
        kind = optax.contrib.ScheduleFreeState
        parts = jax.tree.leaves(self.groups, is_leaf=lambda x: isinstance(x, kind))
        found = [part for part in parts if isinstance(part, kind)]
        if len(found) != 1 or len(self.groups) != 1:
            raise AttributeError(
                "This state has no schedule-free average of all parameters. Use "
                "Optimizer.eval_params, which finds the averages of every group."
            )
        return found[0]


def transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Gives an optimizer as an optax transformation, updates in the parameters' dtypes.

    In low precision, parameters plus updates are rounded once more than what `Optimizer.update`
    gives.

    Args:
        optimizer: what `optim.optimizer` made.

    Returns:
        The transformation. Its state is a `TransformationState`; `update` also takes an
        `OptimizerState`, and then returns one.
    """

    def init(params: Any) -> TransformationState:
        if not jax.tree.leaves(params):  # optax.tree.map_params looks for where parameters go
            return _of_placeholder(optimizer, params)
        return to_trees(optimizer, optimizer.init(params), params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("Pass the parameters: tx.update(grads, state, params).")
        packed = to_paths(optimizer, state, params)
        new_params, new_state = optimizer.update(grads, packed, params, **extra)
        free, after = optimizer.trainable(params), flatten(new_params)
        moves = {
            path: after[path] - x if path in free else jnp.zeros_like(x)
            for path, x in flatten(as_arrays(params)).items()
        }
        is_tree = isinstance(state, TransformationState)
        out = to_trees(optimizer, new_state, params) if is_tree else new_state
        return unflatten(params, moves), out

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def to_trees(optimizer: Any, state: OptimizerState, params: Any) -> TransformationState:
    """Turns the state of an optimizer into that of its transformation.

    Args:
        optimizer: what `optim.optimizer` made.
        state: its state for these parameters.
        params: the parameters.
    """
    template = optimizer.template(params)
    called, structure = names(params), jax.tree.structure(params)

    def tree(named: Any) -> Any:
        return structure.unflatten([named.get(name, optax.MaskedNode()) for name in called])

    unpacked = unpack(state.scalars, state.groups, template)
    groups = {
        name: jax.tree.map(
            lambda x, own=own: tree(x) if _is_own(x, own) else x,
            unpacked["groups"][name],
            is_leaf=lambda x, own=own: _is_own(x, own),
        )
        for name, own in optimizer.split(params).items()
    }
    master = tree(state.master) if optimizer.low_precision == "master" else ()
    return TransformationState(groups, unpacked["skipped"], unpacked["step"], master)


def to_paths(optimizer: Any, state: Any, params: Any) -> OptimizerState:
    """Undoes `to_trees`; an `OptimizerState` is returned as it is."""
    if isinstance(state, OptimizerState):
        return state
    template = optimizer.template(params)
    called, structure = names(params), jax.tree.structure(params)

    def named(tree: Any, own: Any) -> dict[str, Any]:
        found = dict(zip(called, structure.flatten_up_to(tree), strict=True))
        return {name: found[name] for name in own}

    groups = {
        name: jax.tree.map(
            lambda like, x, own=own: named(x, own) if _is_own(like, own) else x,
            template["groups"][name],
            state.groups[name],
            is_leaf=lambda x, own=own: _is_own(x, own),
        )
        for name, own in optimizer.split(params).items()
    }
    scalars, tensors = pack({"groups": groups, "skipped": state.skipped, "step": state.step})
    low = optimizer.copies(params)
    return OptimizerState(scalars, tensors["groups"], named(state.master, low) if low else {})


def _is_own(x: Any, own: dict[str, Any]) -> bool:
    return isinstance(x, dict) and x.keys() == own.keys()


def _of_placeholder(optimizer: Any, params: Any) -> TransformationState:
    groups = {
        name: init_group(group.optimizer, params)
        for name, group in optimizer.groups.items()
        if not group.is_frozen
    }
    master = params if optimizer.low_precision == "master" else ()
    zero = jnp.zeros((), jnp.int32)
    return TransformationState(groups, zero, zero, master)
