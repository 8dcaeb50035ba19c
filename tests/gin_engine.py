"""The real gin engine, as an oracle: what it calls for a config, as a tree of ours."""

from collections.abc import Sequence
from typing import Any

import gin

from trainer.config import Call, Tree

FUNCTIONS = (
    "experiment lib.f lib.g lib.h lib.k models.vit models.mlp optim.optimizer optim.group"
    " optim.muon optax.adamw schedules.warmup_cosine"
).split()


def _called(value: Any) -> Tree:
    """Returns what a function received, and calls the functions in it within its own scope."""
    if isinstance(value, list | tuple):
        return [_called(item) for item in value]
    if isinstance(value, dict):
        return {key: _called(item) for key, item in value.items()}
    if callable(value):
        inner = value()
        return Call(inner.name, inner.kwargs, partial=True)
    return value


def _register(name: str) -> None:
    """Makes a function known to the engine that records how it is called."""

    def recorder(**kwargs: Any) -> Call:
        return Call(name, {key: _called(value) for key, value in kwargs.items()})

    gin.external_configurable(recorder, name=name)


for _name in FUNCTIONS:
    _register(_name)


def engine(files: Sequence[str] = (), bindings: Sequence[str] = ()) -> Tree:
    """Returns the tree of the calls that the real engine makes, from the root on."""
    gin.clear_config()
    for file in files:
        gin.parse_config_file(file)
    for text in bindings:
        gin.parse_config(text)
    return gin.get_configurable("experiment")()
