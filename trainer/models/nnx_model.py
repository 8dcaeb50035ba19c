"""Any flax nnx module as a Model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from trainer.models.model import Model, pick_inputs


def from_nnx(
    constructor: functools.partial | Callable[..., Any], inputs: str | Sequence[str] = "image"
) -> Model:
    """Makes a Model of a flax nnx module.

    Variables of type `nnx.Param` become the parameters; random streams are rebuilt from the step's
    key at every call, so they are in no state; what is sown (`nnx.Intermediate`) is dropped; all
    other variables (BatchNorm's statistics, ...) become the model state, which changes only in
    training. The module is put in training or evaluation mode by `module.train()` and
    `module.eval()`; if its `__call__` names an argument `train`, it is told too. Integer keys of a
    list of layers become strings, so that paths read `layers/0/kernel`.

    Args:
      constructor: called as `constructor(rngs=...)` with an `nnx.Rngs`, returns the module. In a
        config: `@my_lab.Net` with its other arguments bound.
      inputs: the batch's keys that are passed to `__call__` by position.

    Raises:
      ValueError: at the first call, if the batch lacks one of the inputs.
    """
    if not callable(constructor):
        raise ValueError(
            f"models.from_nnx takes a function that builds the module from rngs, but got "
            f"{constructor!r}. Give the class itself, as in `@my_lab.Net` without parentheses."
        )
    from flax import nnx  # here, so that nobody who has no nnx model pays for the import

    kinds = (nnx.Param, nnx.RngState, nnx.Intermediate, ...)

    @functools.cache
    def structure() -> tuple[Any, ...]:
        return nnx.split(nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0))), *kinds)

    def init(key: jax.Array, batch: Any) -> tuple[Any, Any]:
        pick_inputs(batch, inputs)
        params_key, other_key = jax.random.split(key)
        module = constructor(rngs=nnx.Rngs(other_key, params=params_key))
        _, params, _, _, rest = nnx.split(module, *kinds)
        return _to_dict(params), _to_dict(rest)

    def apply(
        params: Any, model_state: Any, batch: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        graph, some_params, streams, sown, some_rest = structure()
        key = jax.random.key(0) if key is None else key
        module = nnx.merge(
            graph, _fill(some_params, params), _reseed(streams, key), sown, _fill(some_rest, model_state)
        )
        module.train() if train else module.eval()
        told = {"train": train} if "train" in inspect.signature(module.__call__).parameters else {}
        outputs = module(*pick_inputs(batch, inputs), **told)
        if not train:
            return outputs, model_state
        return outputs, _to_dict(nnx.split(module, *kinds)[4])

    return Model(init, apply)


def _to_dict(state: Any) -> Any:
    """Turns an nnx State into nested dicts of plain arrays with strings as keys."""
    from flax import nnx

    def named(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {str(key): named(value) for key, value in tree.items()}
        return tree

    return named(nnx.to_pure_dict(state))


def _fill(state: Any, values: Any) -> Any:
    """Puts the arrays of nested dicts into an nnx State of the same structure."""
    leaves = []
    for path, _ in state.flat_state():
        value = values
        for key in path:
            value = value[str(key)]
        leaves.append((path, value))
    return _replaced(state, leaves)


def _reseed(streams: Any, key: jax.Array) -> Any:
    """Gives every random stream a key of its own, derived from one, and sets it to its start."""
    import jax.numpy as jnp
    from flax import nnx

    leaves = []
    for number, (path, variable) in enumerate(streams.flat_state()):
        is_key = issubclass(variable.type, nnx.RngKey)
        start = jnp.zeros(variable.shape, variable.dtype) if not is_key else None
        leaves.append((path, jax.random.fold_in(key, number) if is_key else start))
    return _replaced(streams, leaves)


def _replaced(state: Any, leaves: list[tuple[Any, Any]]) -> Any:
    from flax import nnx

    flat = []
    for (path, variable), (_, value) in zip(state.flat_state(), leaves, strict=True):
        flat.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
    return nnx.State.from_flat_path(flat)
