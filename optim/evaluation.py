"""Finds averaged parameters for evaluation in the state of an optimizer."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from optim.dtypes import widen
from optim.transformations import SlowParams


def may_keep_averages(path: str) -> bool:
    """Returns whether a leaf may be one of those from which `eval_params` computes averages.

    Args:
        path: the path name of a leaf of an optimizer's state.

    Returns:
        Whether a part of the path is the name of a field that such a state has. If no leaf of a
        state has one, the parameters themselves are evaluated.
    """
    return bool({"z", "slow"} & set(path.split("/")))


def eval_params(state: optax.OptState, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the parameters that evaluation must use: averages from the state, if there are any.

    Schedule-free evaluates the average of its iterates, lookahead its slow parameters.

    Args:
        state: an optimizer's state.
        params: the parameters that are trained, path -> array.

    Returns:
        The averaged parameters, in the dtypes of `params`; `params` themselves for most optimizers.

    Raises:
        ValueError: if the averages have other paths than `params`.
    """
    kinds = (optax.contrib.ScheduleFreeState, SlowParams)
    found = dict(params)
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(node, kinds):
            continue
        held = node.slow if isinstance(node, SlowParams) else node.z
        # `z` and the slow parameters are shaped like the parameters that the optimizer received.
        if not isinstance(held, Mapping) or held.keys() != params.keys():
            raise ValueError(
                "It keeps averages for evaluation, but a wrapper such as optax.flatten changes the "
                "tree of parameters that it receives. Move it out of the wrapper."
            )
        # Inside optax.partition or optax.masked, other parameters are MaskedNodes.
        averages: Any = {p: x for p, x in held.items() if not isinstance(x, optax.MaskedNode)}
        if isinstance(node, optax.contrib.ScheduleFreeState):
            # optax computes (y - (1 - b1) * z) / b1, where z is at least float32.
            wide = widen({path: params[path] for path in averages})
            averages = optax.contrib.schedule_free_eval_params(node._replace(z=averages), wide)
        found |= {path: x.astype(params[path].dtype) for path, x in averages.items()}
    return found
