"""Finds the learning rates of a config, and replaces schedules by constants."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from trainer import config as configs
from trainer.config import Builder, Call, Config, Source, Tree, join
from trainer.config.tree import child_trees
from trainer.engine.experiment import Experiment, units_of

_MOST = 1_000_000  # steps of a schedule that are looked at


def _rates(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    for key, below in child_trees(tree).items():
        here = join(path, key)
        if isinstance(tree, Call) and key == "learning_rate":
            yield here, below
        else:
            yield from _rates(below, here)


def with_constant_rates(
    config: Config, experiment: Experiment, vocabulary: Sequence[str] = ()
) -> tuple[Config, dict[str, float]]:
    """Replaces each schedule of a learning rate by its largest value in the run.

    Args:
        config: the config.
        experiment: what was built from it.
        vocabulary: packages of the user whose functions the config may name.

    Returns:
        The config, and config path -> the constant that replaced a schedule.
    """
    builder, units = Builder(config, vocabulary), units_of(config, experiment.data)
    found: dict[str, float] = {}
    for path, tree in _rates(config.root.kwargs["optimizer"], "optimizer"):
        schedule = builder.build(path, units=units) if isinstance(tree, Call) else None
        if callable(schedule) and not isinstance(schedule, partial):
            steps = jnp.arange(min(experiment.steps, _MOST))
            found[path] = float(jnp.max(jnp.asarray(jax.vmap(schedule)(steps))))
    return configs.replace(config, found, Source("the largest value of the schedule")), found
