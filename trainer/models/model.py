"""What the rest of the framework knows of a model: two pure functions over nested dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Model(NamedTuple):
    """Holds the two pure functions that a model is; any transformation of jax can trace them.

    Args:
        init: `init(key, batch) -> (params, model_state)`, both nested dicts of arrays. Only the
            shapes and dtypes of `batch` (a dict of arrays, leading axis the batch) matter.
        apply: `apply(params, model_state, batch, *, key, train) -> (outputs, model_state)`. `key`
            feeds dropout and may be None where `train` is False, a Python bool. With `train=False`
            the model state comes back as it went in.
        mode: `mode(train)`, the arguments that tell the module behind the model whether it trains,
            by name, for the plan to show; None where there is no such module.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]
    mode: Callable[[bool], Mapping[str, Any]] | None = None


def pick_inputs(batch: Mapping[str, Any], inputs: str | Sequence[str]) -> tuple[Any, ...]:
    """Returns the arrays of a batch that a model reads, in the order it takes them.

    Args:
        batch: a dict of arrays.
        inputs: one key of the batch, or several.

    Raises:
        ValueError: the batch has no such key.
    """
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(
            f"The model reads {', '.join(map(repr, missing))} from the batch, but the data set "
            f"gives {', '.join(map(repr, sorted(batch)))}. Name what to read in its `inputs`."
        )
    return tuple(batch[name] for name in names)
