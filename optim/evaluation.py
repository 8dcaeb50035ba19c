"""Finds the parameters that evaluation must use, where an optimizer trains others."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from optim.laws import widen
from optim.transformations import SlowParams


def eval_params(state: Any, params: Any) -> Any:
    """Finds the parameters that evaluation must use: averages that an optimizer keeps in its state.

    Schedule-free evaluates the average of its iterates, lookahead its slow parameters.

    Args:
        state: an optimizer's state.
        params: the parameters that are trained, path -> array.

    Returns:
        The averaged parameters, in the dtypes of `params`; `params` themselves for most optimizers.

    Raises:
        ValueError: the averages are not those of `params`.
    """
    kinds = (optax.contrib.ScheduleFreeState, SlowParams)
    found = dict(params)
    for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(part, kinds):
            continue
        held = part.slow if isinstance(part, SlowParams) else part.z
        if not isinstance(held, Mapping) or held.keys() != params.keys():
            raise ValueError(
                "It keeps averages for the evaluation, and something around it changes the tree of "
                "parameters that it sees (optax.flatten does). Put it outside of that."
            )
        # Inside optax.partition or optax.masked it sees some parameters, and MaskedNodes.
        own: Any = {p: x for p, x in held.items() if not isinstance(x, optax.MaskedNode)}
        if isinstance(part, optax.contrib.ScheduleFreeState):
            wide = widen({path: params[path] for path in own})
            own = optax.contrib.schedule_free_eval_params(part._replace(z=own), wide)
        found |= {path: x.astype(params[path].dtype) for path, x in own.items()}
    return found
