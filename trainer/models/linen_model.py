"""Any flax linen module as a Model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from trainer.models.initial import one_draw
from trainer.models.model import Model, pick_inputs


def from_linen(module: nn.Module, inputs: str | Sequence[str] = "image") -> Model:
    """Makes a Model of a flax linen module.

    The collection `params` becomes the parameters, every other collection (`batch_stats`, ...) the
    model state, which changes only in training. If the module's `__call__` names an argument
    `train`, `deterministic` or `use_running_average`, it is told whether it trains.

    Args:
        module: an instance of the module, its fields set.
        inputs: the batch's keys that are passed to `__call__` by position.

    Raises:
        ValueError: what was given is no linen module; or, at the first call, the batch lacks one of
            the inputs.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"models.from_linen takes an instance of a flax linen module, but got {module!r}. "
            "Call the class, as in `@my_lab.Net()`; an nnx module goes to models.from_nnx."
        )
    mode = _mode_arguments(module)

    def init(key: jax.Array, batch: Any) -> tuple[Any, Any]:
        params_key, dropout_key = jax.random.split(key)
        rngs = {"params": params_key, "dropout": dropout_key}
        variables = dict(nn.unbox(module.init(rngs, *pick_inputs(batch, inputs), **mode(False))))
        return variables.pop("params", {}), variables

    def apply(
        params: Any, model_state: Any, batch: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        variables = {"params": params, **model_state}
        arguments = pick_inputs(batch, inputs)
        rngs = None if key is None else {"dropout": key}
        if not train or not model_state:
            return module.apply(variables, *arguments, rngs=rngs, **mode(train)), model_state
        outputs, changed = module.apply(
            variables, *arguments, rngs=rngs, mutable=list(model_state), **mode(train)
        )
        return outputs, {**model_state, **nn.unbox(changed)}

    return Model(init, apply)


def from_our_linen(module: nn.Module, inputs: str | Sequence[str]) -> Model:
    """Makes a Model of a linen module of this package, initialised by a single PRNG program.

    Args:
        module: a module whose every variable is declared by a function of trainer.models.initial.
        inputs: as for `from_linen`.
    """
    mode = _mode_arguments(module)

    def init(key: jax.Array, batch: Any) -> tuple[Any, Any]:
        declare = functools.partial(module.init, **mode(False))
        variables = one_draw(dict(jax.eval_shape(declare, key, *pick_inputs(batch, inputs))), key)
        return variables.pop("params"), variables

    return from_linen(module, inputs)._replace(init=init)


def _mode_arguments(module: nn.Module) -> Callable[[bool], dict[str, Any]]:
    """Returns train -> the keyword arguments that tell this module whether it trains."""
    names = inspect.signature(type(module).__call__).parameters

    def mode(train: bool) -> dict[str, Any]:
        told = {"train": train, "deterministic": not train, "use_running_average": not train}
        return {name: value for name, value in told.items() if name in names}

    return mode
