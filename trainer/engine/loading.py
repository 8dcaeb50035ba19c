"""Builds the program of a config."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from trainer.config import Config, ConfigError
from trainer.engine.contracts import ComponentError
from trainer.engine.experiment import build_experiment
from trainer.engine.inputs import find_inputs
from trainer.engine.program import Program


def load(
    config: Config,
    vocabulary: Sequence[str] = (),
    steps_per_call: int | None = None,
    declared: bool = False,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Builds the program of a config, not compiled; raises ConfigError with file and line."""
    # With `declared`, a data set that is not on this machine is replaced by its declared shapes;
    # such a program can be planned and compiled, but not run. So can one for `devices` that are not
    # here. `steps_per_call` replaces that of the config; None leaves it. Raises ValueError as
    # `Program`.
    experiment = build_experiment(config, vocabulary, declared)
    inputs = find_inputs(config, vocabulary, experiment)
    if steps_per_call is not None:
        experiment = dataclasses.replace(experiment, steps_per_call=steps_per_call)
    return Program(experiment, inputs, devices)


def load_located(
    config: Config,
    vocabulary: Sequence[str] = (),
    steps_per_call: int | None = None,
    declared: bool = False,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Builds a program as `load` does; every mistake is a ConfigError with its place."""
    try:
        return load(config, vocabulary, steps_per_call, declared, devices)
    except ValueError as error:
        if isinstance(error, ConfigError) and not isinstance(error, ComponentError):
            raise  # its message begins with its place
        component = getattr(error, "component", "")
        # A component may be a path, such as "model.num_heads", of which the config has a part.
        places = [component, component.partition(".")[0], "mesh", "data"]
        known = (path for path in places if path and path in config.sources)
        source = next((config.sources[path] for path in known), None)
        raise ConfigError(str(error), source) from error
