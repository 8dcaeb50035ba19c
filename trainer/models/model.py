"""A model as a pair of functions, and what models read from a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Model(NamedTuple):
    """The two functions of a `trainer.protocols.Model`.

    Args:
        init: the protocol's `init`.
        apply: the protocol's `apply`.
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
