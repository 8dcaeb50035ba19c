"""Any flax linen module as a Model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

from trainer.models.initial import one_draw
from trainer.models.mode import call_mode, mode_attributes
from trainer.models.model import Model, pick_inputs


def from_linen(
    module: nn.Module,
    inputs: str | Sequence[str] = "image",
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> Model:
    """Makes a Model of a flax linen module.

    The collection `params` becomes the parameters, every other collection (`batch_stats`, ...) the
    model state, which changes only in training.

    The module learns from arguments of its `__call__` whether it trains. Arguments with usual names
    are passed automatically (`trainer/models/mode.py` lists them): `train`, `training`,
    `is_training` and `enable_dropout` are True in training; `deterministic`,
    `use_running_average`, `eval`, `inference` and `test` are True in evaluation. Any other boolean
    argument must stand in `train_kwargs` and `eval_kwargs`. The plan shows what is passed. A field
    of the module, say `training=False`, keeps its value, which the plan shows too.

    Args:
        module: an instance of the module, its fields set.
        inputs: the batch's keys that are passed to `__call__` by position.
        train_kwargs: keyword arguments of `__call__` in training, such as {"stochastic": True}.
            They override the arguments above: {"use_running_average": True} trains with fixed
            statistics.
        eval_kwargs: keyword arguments of `__call__` in evaluation and initialisation, such as
            {"stochastic": False}.

    Raises:
        ValueError: what was given is not a linen module; its `__call__` has a boolean argument
            whose values are not known; `train_kwargs` or `eval_kwargs` names an argument that it
            lacks, or that the other does not name; or, at the first call, the batch lacks one of
            the inputs.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"models.from_linen takes an instance of a flax linen module, but got {module!r}. "
            "Call the class, as in `@my_lab.Net()`; an nnx module goes to models.from_nnx."
        )
    mode = call_mode(type(module), inputs, train_kwargs, eval_kwargs, "models.from_linen")
    fields = mode_attributes(module)

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

    return Model(init, apply, lambda train: {**fields, **mode(train)})


def from_our_linen(module: nn.Module, inputs: str | Sequence[str]) -> Model:
    """Makes a Model of a linen module of this package, initialised by a single PRNG program.

    Args:
        module: a module whose every variable is declared by a function of trainer.models.initial.
        inputs: as for `from_linen`.
    """
    model = from_linen(module, inputs)
    told = model.mode(False) if model.mode else {}

    def init(key: jax.Array, batch: Any) -> tuple[Any, Any]:
        declare = functools.partial(module.init, **told)
        variables = one_draw(dict(jax.eval_shape(declare, key, *pick_inputs(batch, inputs))), key)
        return variables.pop("params"), variables

    return model._replace(init=init, mode=model.mode if told else None)
