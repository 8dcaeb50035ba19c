"""Builds the program of a config."""

from collections.abc import Sequence

from trainer.config import Config
from trainer.engine.experiment import build_experiment
from trainer.engine.inputs import find_inputs
from trainer.engine.program import Program


def load(config: Config, vocabulary: Sequence[str] = ()) -> Program:
    """Builds the program of a config.

    Args:
        config: the config, from `trainer.config.load`.
        vocabulary: further packages whose public functions the config may name.

    Returns:
        The program, whose inputs are the floats of the config; it is not compiled.

    Raises:
        ConfigError: the config has a mistake; the message has its file and line.
        ValueError: see `Program`.
    """
    experiment = build_experiment(config, vocabulary)
    return Program(experiment, find_inputs(config, vocabulary, experiment))
