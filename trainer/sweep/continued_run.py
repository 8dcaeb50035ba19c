"""Reads the run that the trials of a branch continue, and lays its state into their configs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from optim import Optimizer
from optim.factories import name_of
from optim.paths import flatten
from trainer import checkpoint
from trainer.config import Builder, Config, ConfigError, Source, load, replace
from trainer.engine.experiment import as_optimizer, units_of
from trainer.engine.program import load_located
from trainer.sweep.branch import Branch, PlannedBranch


class ContinuedRun:
    """The run of a branch, in `folder`; raises ConfigError if it cannot be continued."""

    # That is if the folder is not that of a run, it has no such checkpoint, or its config cannot be
    # built. `sweep` is the config of the sweep, for places in its file. `planned` is what the plan
    # keeps of the branch.

    def __init__(self, branch: Branch, folder: str, sweep: Config, vocabulary: Sequence[str] = ()):
        self._branch, self._sweep, self._vocabulary = branch, sweep, vocabulary
        self.config_file = str(Path(folder) / "config.yaml")
        if not Path(self.config_file).is_file():
            what = "is not the folder of a run: it has no config.yaml"
            what = what if Path(folder).is_dir() else "does not exist"
            self._refuse("run", f"branch continues the run in {folder}, which {what}.")
        try:
            digest = checkpoint.leaves_digest(folder, branch.at)
        except checkpoint.CorruptCheckpoint as error:
            what = f"The checkpoint of step {branch.at} in {folder} is damaged"
            self._refuse("at", f"{what}: {error}.")
        except (checkpoint.CheckpointError, OSError) as error:
            self._refuse("at", str(error))
        self.planned = PlannedBranch(folder, branch.at, digest)
        # Entries of warm_start that are those of the sweep in every arm.
        self._fixed = {"from": folder, "step": branch.at, "continue": True, "sha256": digest}
        try:
            self._config = load([self.config_file])
            program = load_located(self._config, vocabulary)
        except ConfigError as error:
            self._refuse("run", f"The config of the run in {folder} cannot be built: {error}")
        self._data = program.experiment.data
        self._params = program.abstract_state().params
        self._kind = _kind_of(program.experiment.optimizer, self._params)

    def _refuse(self, key: str, text: str) -> Any:
        raise ConfigError(text, self._source(key))

    def _source(self, key: str = "run") -> Source:
        sweep = self._sweep
        found = sweep.argument_source(f"branch.{key}") or sweep.argument_source("branch")
        return found or sweep.sources[""]

    def continue_with(self, config: Config) -> Config:
        """Returns the config of an arm, which continues the run; what `set` says comes later."""
        return replace(config, {"warm_start": dict(self._fixed)}, self._source())

    def choose_states(self, config: Config, title: str) -> Config:
        """Returns an arm's config with its optimizer's state, unless it says that itself."""
        # `title` is the arm as a subject of sentences. Raises ConfigError if it begins otherwise.
        start: Any = config.root.kwargs.get("warm_start")
        fixed = self._fixed
        if not isinstance(start, dict) or any(start.get(key) != x for key, x in fixed.items()):
            raise ConfigError(
                f"{title} sets another warm_start than the branch of the sweep: set only"
                " warm_start.optimizer and warm_start.follow, or remove branch.",
                config.argument_source("warm_start") or self._source(),
            )
        start = dict(start)
        if "optimizer" not in start:
            start["optimizer"] = "keep" if self._has_its_optimizer(config) else "reset"
        if start["optimizer"] == "reset" and "follow" not in start and self._branch.follow:
            start["follow"] = self._branch.follow
        changed = {f"warm_start.{key}": x for key, x in start.items() if key not in fixed}
        sources = config.sources
        for path, value in changed.items():
            source = sources.get(path) or self._source("follow" if "follow" in path else "run")
            config = replace(config, {path: value}, source)
        return config

    def check_space(self, title: str, places: Mapping[str, str]) -> None:
        """Raises ConfigError if the space of an arm has what the branch sets for all arms."""
        # `places` is path of the space -> its path in the config of the sweep.
        for path, place in places.items():
            if path in ("warm_start", *(f"warm_start.{key}" for key in self._fixed)):
                raise ConfigError(
                    f"{title} searches {path!r}, which the branch sets for all trials: remove it.",
                    self._sweep.argument_source(place),
                )

    def _has_its_optimizer(self, config: Config) -> bool:
        """Returns whether a config has the optimizer of the run, up to hyperparameters."""
        # That is one of the same functions in the same groups, with a state of the same arrays.
        try:
            units = units_of(config, self._data, lambda: optax.tree.size(self._params))
            built = Builder(config, self._vocabulary).build("optimizer", units=units)
            return _kind_of(as_optimizer(built), self._params) == self._kind
        except (TypeError, ValueError):  # the plan of the arm says what is wrong with it
            return False


def _kind_of(optimizer: Optimizer, params: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the function of each group, and the shape and dtype of each array of the state."""
    names = {name: name_of(group.optimizer) for name, group in optimizer.groups.items()}
    state = jax.eval_shape(optimizer.init, params)
    arrays = {path: f"{x.dtype}{x.shape}" for path, x in flatten(state, verbatim=True).items()}
    return names, arrays
