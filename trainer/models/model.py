"""The interface of a model: two pure functions over nested dicts of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A model as two pure functions, which transformations of jax can trace.

    Args:
        init: `init(key, batch) -> (params, model_state)`, both nested dicts of arrays. Only the
            shapes and dtypes of `batch` (a dict of arrays, leading axis the batch) matter.
        apply: `apply(params, model_state, batch, *, key, train) -> (outputs, model_state)`. `key`
            is the PRNG key of dropout and may be None if `train`, a Python bool, is False. With
            `train=False` the model state is returned unchanged.
        mode: `mode(train)` returns the mode arguments of the model's module, such as `train` and
            `deterministic`, by name, for the plan; None if the module has none.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]
    mode: Callable[[bool], Mapping[str, Any]] | None = None


def pick_inputs(batch: Mapping[str, Any], inputs: str | Sequence[str]) -> tuple[Any, ...]:
    """Returns the arrays of a batch that a model reads, in the order of its arguments.

    Args:
        batch: field name -> array.
        inputs: one key of the batch, or several.

    Raises:
        ValueError: the batch has no such key.
    """
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(
            f"The model reads {', '.join(map(repr, missing))} from the batch, but the data set "
            f"has {', '.join(map(repr, sorted(batch)))}. Set the model's argument `inputs`."
        )
    return tuple(batch[name] for name in names)
