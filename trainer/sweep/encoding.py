"""The values of trials in JSON, which has no calls: those and other trees are written as YAML."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainer.config import Call, Source, Tree, dump

# The values of a trial whose point is chosen by results that are not known yet.
PENDING: Mapping[str, Tree] = MappingProxyType({})


def canonical(content: Any) -> str:
    """Returns JSON in ASCII on one line; equal contents in equal order have equal texts."""
    # The content must not have NaN or infinities.
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def encoded(values: Mapping[str, Tree]) -> dict[str, Any]:
    """Returns the values of a trial as JSON can have them; what it cannot, as {"yaml": text}."""
    # Those are lists, dicts, calls, NaN and infinities.
    found: dict[str, Any] = dict(values)
    for path, value in values.items():
        tree = isinstance(value, Call | Mapping | Sequence) and not isinstance(value, str)
        if tree or (isinstance(value, float) and not math.isfinite(value)):
            found[path] = {"yaml": dump(Call("value", {"value": value}))}
    return found


def decoded(content: Mapping[str, Any] | None) -> Mapping[str, Tree]:
    """Returns the values of a trial from what `encoded` returned; `PENDING` from None."""
    # Raises ConfigError if a text is not YAML, or has something that a config cannot contain;
    # KeyError or TypeError if the content has another form.
    if content is None:
        return PENDING
    return {
        path: _tree(value["yaml"]) if isinstance(value, dict) else value
        for path, value in content.items()
    }


@functools.lru_cache(10_000)  # the trials of a sweep have few different texts
def _tree(text: str) -> Tree:
    from trainer.config import yaml_reader
    from trainer.config.nodes import plain

    if (read := yaml_reader.read(text, Source("a value"))) is None:
        raise TypeError("a value is empty")
    return plain(read).kwargs["value"]
