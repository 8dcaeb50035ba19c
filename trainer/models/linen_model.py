"""Adapts flax linen modules to `Model`."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from optim.dtypes import widen
from trainer.models.attention import Qkv
from trainer.models.layers import KERNEL_INPUTS, Linear, one_draw
from trainer.models.model import Model, call_mode, check_real, mode_attributes, pick_inputs


def from_linen(
    module: nn.Module,
    inputs: str | Sequence[str] = "image",
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> Model:
    """Converts a flax linen module to a Model.

    The collection `params` becomes the parameters. All other collections, such as `batch_stats`,
    become the model state, which changes only in training.

    Arguments of the module's `__call__` say whether it trains. Those with common names are passed
    automatically (`trainer/models/model.py` lists them): `train`, `training`,
    `is_training` and `enable_dropout` are True in training; `deterministic`,
    `use_running_average`, `eval`, `inference` and `test` are True in evaluation. Any other boolean
    argument must be in `train_kwargs` and `eval_kwargs`. Fields of the module with such names, for
    example `training=False`, keep their values. The plan lists these arguments and fields.

    A part of an optimizer may read "kernel_inputs": of each kernel [inputs, outputs] of `nn.Dense`,
    the mean of x x^T, [inputs, inputs], over its inputs x, padded ones too, added over the calls of
    a layer. An `nn.scan` of yours needs this name in `variable_axes`.

    Args:
        module: an instance of a module.
        inputs: keys of the batch whose arrays are passed to `__call__` by position.
        train_kwargs: keyword arguments of `__call__` in training, such as {"stochastic": True}.
            They override the arguments above: {"use_running_average": True} trains with fixed
            statistics.
        eval_kwargs: keyword arguments of `__call__` in evaluation and initialization, such as
            {"stochastic": False}.

    Raises:
        ValueError: `module` is not an instance of a linen module; its `__call__` has a boolean
            argument whose values are not known; or `train_kwargs` or `eval_kwargs` has an argument
            that `__call__` or the other does not have. The functions of the Model raise it if the
            batch has no array for one of the inputs.

    Example:
        >>> import flax.linen as nn
        >>> import jax
        >>> from trainer import models
        >>> model = models.from_linen(nn.Dense(3), inputs="x")
        >>> batch = {"x": jax.numpy.ones((8, 2))}
        >>> params, model_state = model.init(jax.random.key(0), batch)
        >>> params["kernel"].shape
        (2, 3)
        >>> outputs, _ = model.apply(params, model_state, batch, key=None, train=False)
        >>> outputs.shape
        (8, 3)
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"models.from_linen takes an instance of a flax linen module, but got {module!r}. "
            "Call the class, as in `@my_lab.Net()`. For an nnx module use models.from_nnx."
        )
    mode = call_mode(type(module), inputs, train_kwargs, eval_kwargs, "models.from_linen")
    fields = mode_attributes(module)

    def init(key: jax.Array, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        params_key, dropout_key = jax.random.split(key)
        rngs = {"params": params_key, "dropout": dropout_key}
        # Boxes, such as those of partitioned parameters, are not part of a state.
        variables = dict(nn.unbox(module.init(rngs, *pick_inputs(batch, inputs), **mode(False))))
        return variables.pop("params", {}), variables

    def apply(
        params: Any, model_state: Any, batch: Any, *, key: Any, train: bool, observe: Any = ()
    ) -> tuple[Any, ...]:
        variables = {"params": params, **model_state}
        arguments = pick_inputs(batch, inputs)
        # Without a key, a module whose dropout is active raises.
        rngs = None if key is None else {"dropout": key}
        # What a module observes of its parameters is in a collection of the observation's name.
        mutable = [*(model_state if train else ()), *observe]
        if not mutable:
            return module.apply(variables, *arguments, rngs=rngs, **mode(train)), model_state
        with nn.intercept_methods(_observe_inputs):
            outputs, changed = module.apply(
                variables, *arguments, rngs=rngs, mutable=mutable, **mode(train)
            )
        after = {**model_state, **nn.unbox(changed)}
        seen = {name: flatten_dict(after.pop(name, {}), sep="/") for name in observe}
        return (outputs, after, seen) if observe else (outputs, after)

    def capture(params: Any, model_state: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        outputs, seen = module.apply(
            {"params": params, **model_state},
            *pick_inputs(batch, inputs),
            **mode(False),
            # In evaluation, dropout returns its argument.
            capture_intermediates=lambda module, method: (
                method == "__call__" and not isinstance(module, nn.Dropout)
            ),
            mutable=["intermediates"],
        )
        tree: Any = seen.get("intermediates", {})
        return outputs, _by_module(tree)

    model = Model(init, apply, lambda train: {**fields, **mode(train)}, module=module)
    return model._replace(capture=capture, observations={KERNEL_INPUTS: jnp.mean})


def _observe_inputs(call: Any, arguments: Any, keywords: Any, context: Any) -> Any:
    """Calls a method; of a linear layer, it adds the mean of x x^T over all inputs x."""
    module, outputs = context.module, call(*arguments, **keywords)
    linear = context.method_name == "__call__" and isinstance(module, nn.Dense | Linear | Qkv)
    if linear and module.is_mutable_collection(KERNEL_INPUTS):
        x = widen(arguments[0]).reshape(-1, arguments[0].shape[-1])
        *stack, inputs, _ = module.get_variable("params", "kernel").shape  # a stack of `Qkv`
        moment = jnp.broadcast_to(x.T @ x / len(x), (*stack, inputs, inputs))
        module.sow(KERNEL_INPUTS, "kernel", moment, reduce_fn=jnp.add, init_fn=lambda: 0.0)
    return outputs


def _by_module(tree: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, ...]]:
    """Returns path of a module -> its results; other values that modules have sown are left out."""
    found = {path: tree["__call__"]} if path and "__call__" in tree else {}
    for name, below in tree.items():
        if isinstance(below, Mapping):
            found |= _by_module(below, f"{path}/{name}" if path else name)
    return found


def from_our_linen(module: nn.Module, inputs: str | Sequence[str]) -> Model:
    """Converts a linen module of this package to a Model, initialized by one PRNG program."""
    # All variables of the module must use initializers of `trainer.models.layers`. For `inputs`,
    # see `from_linen`.
    model = from_linen(module, inputs)
    # The modules of this package have mode arguments and no mode fields.
    eval_arguments = model.mode(False) if model.mode else {}

    def init(key: jax.Array, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        check_real(batch, inputs)
        declare = functools.partial(module.init, **eval_arguments)
        # Only shapes, means and deviations come from flax: the module computes nothing here.
        variables = one_draw(dict(jax.eval_shape(declare, key, *pick_inputs(batch, inputs))), key)
        return variables.pop("params"), variables

    return model._replace(init=init, mode=model.mode if eval_arguments else None)
