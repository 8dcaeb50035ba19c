"""Finds the learning rates of a config, and replaces schedules by constants."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from trainer import config as configs
from trainer.config import Builder, Call, Config, Source, Tree, join
from trainer.config.full import complete
from trainer.config.tree import child_trees
from trainer.config.wording import known_names
from trainer.engine.experiment import Experiment, units_of
from trainer.messages import UserError, joined

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
    """Replaces each schedule of a learning rate by its largest value; also returns them by path."""
    builder, units = Builder(config, vocabulary), units_of(config, experiment.data)
    found: dict[str, float] = {}
    for path, tree in _rates(config.root.kwargs["optimizer"], "optimizer"):
        schedule = builder.build(path, units=units) if isinstance(tree, Call) else None
        if callable(schedule) and not isinstance(schedule, partial):
            steps = jnp.arange(min(experiment.steps, _MOST))
            found[path] = float(jnp.max(jnp.asarray(jax.vmap(schedule)(steps))))
    return configs.replace(config, found, Source("the largest value of the schedule")), found


def rate_of_group(config: Config, group: str | None, vocabulary: Sequence[str] = ()) -> str:
    """Returns the config path of the rate of a group, None for the only one; or UserError."""
    # It is an error that there is no such group, or that it has no learning rate or several.
    root = _completed(config, vocabulary)
    optimizer = root.kwargs.get("optimizer")
    groups = child_trees(optimizer).get("groups") if isinstance(optimizer, Call) else None
    if not isinstance(groups, dict):
        if group not in (None, "all"):
            raise UserError(
                f"--group={group}: the config's optimizer has no groups; it is one for all"
                " parameters. Leave --group out."
            )
        above = "optimizer"
    else:
        names = [str(name) for name in groups]
        if group is None and len(names) > 1:
            raise UserError(
                f"The config's optimizer has the groups {joined(names)}. Name one, as in"
                f" --group={names[0]}."
            )
        group = names[0] if group is None else group
        if group not in names:
            known = known_names(group, names, "It has the groups")
            raise UserError(f"--group={group}: the config's optimizer has no such group. {known}")
        above = f"optimizer.groups.{group}"
    found = [path for path, _ in _rates(root, "") if f"{path}.".startswith(f"{above}.")]
    if len(found) == 1:
        return found[0]
    which = f"the group {group!r}" if isinstance(groups, dict) else "the optimizer"
    if not found:
        raise UserError(f"No argument learning_rate is in {which}, so that none can rise.")
    raise UserError(
        f"{which.capitalize()} has several learning rates: {joined(found, 4)}. The test raises one:"
        " name it by its path, as in --rate_path=" + found[0] + "."
    )


def rate_at(config: Config, path: str, vocabulary: Sequence[str] = ()) -> str:
    """Returns a config path if a learning rate is there; raises UserError if not."""
    known = [found for found, _ in _rates(_completed(config, vocabulary), "")]
    if path not in known:
        rates = joined(known, 4) or "none"
        raise UserError(f"--rate_path={path}: no learning rate is there. The config has {rates}.")
    return path


def _completed(config: Config, vocabulary: Sequence[str]) -> Call:
    Builder(config, vocabulary).check()
    return complete(config, vocabulary)[0]
