"""Builds the program of a config."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from trainer.config import Config
from trainer.engine.experiment import build_experiment
from trainer.engine.inputs import find_inputs
from trainer.engine.plan import with_place
from trainer.engine.program import Program


def load_located(
    config: Config,
    vocabulary: Sequence[str] = (),
    steps_per_call: int | None = None,
    declared: bool = False,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Builds a program, not compiled; every mistake is a ConfigError with its place."""
    # For `declared`, see `build_experiment`. A program for `devices` that are not here can be
    # planned and compiled, but not run. A `steps_per_call` of None is that of the config.
    try:
        experiment = build_experiment(config, vocabulary, declared)
        inputs = find_inputs(config, vocabulary, experiment)
        if steps_per_call is not None:
            experiment = dataclasses.replace(experiment, steps_per_call=steps_per_call)
        return Program(experiment, inputs, devices)
    except ValueError as error:
        if (located := with_place(error, config, ["mesh", "data"])) is error:
            raise  # its message begins with its place
        raise located from error
