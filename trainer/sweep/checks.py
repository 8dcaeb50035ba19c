"""Checks the trials of a sweep by what their configs build, before any of them runs."""

from collections.abc import Sequence
from typing import Any

from trainer.config import Builder, Config, ConfigError, Tree, replace
from trainer.config.wording import known_names
from trainer.engine.experiment import Experiment, build_experiment
from trainer.engine.plan import located
from trainer.engine.plan_matrices import find_matrices
from trainer.engine.splits import smaller_is_better, split_sizes
from trainer.sweep.plan import SweepPlan, Trial
from trainer.sweep.reading import ArmConfig
from trainer.writers.lines import PREFIXES


def is_number(value: Tree) -> bool:
    """Returns whether a value is an integer or a float, and not a boolean."""
    return type(value) in (int, float)


def check_types(arm: ArmConfig, trials: Sequence[Trial], vocabulary: Sequence[str]) -> None:
    """Checks that the values of a space fit the arguments that they are for.

    Args:
        arm: the arm.
        trials: its trials.
        vocabulary: further packages whose public functions the configs may name.

    Raises:
        ConfigError: a value does not fit.
    """
    try:
        Builder(arm.config, vocabulary).check()  # first, because a trial may replace the mistake
    except ConfigError as error:
        raise placed(error, arm, arm.title) from error
    # Values of a space that no trial drew are mistakes as well, if they do not fit.
    listed = [(path, value) for path, values in arm.listed.items() for value in values]
    drawn = [item for trial in trials for item in trial.values.items()]
    seen: set[tuple[str, str]] = set()
    for path, value in [*listed, *drawn]:
        # Of the floats of an interval one is enough: all have the same type.
        key = path, "float" if type(value) is float else repr(value)
        if key in seen:
            continue
        seen.add(key)
        config = replace(arm.config, {path: value}, arm.source_of(path, value))
        try:
            Builder(config, vocabulary).check()
        except ConfigError as error:
            raise placed(error, arm, arm.title) from error


def check_extremes(
    arm: ArmConfig, trials: Sequence[Trial], params: Any, vocabulary: Sequence[str]
) -> list[str]:
    """Builds the trials with the smallest and the largest value of each path.

    Args:
        arm: the arm.
        trials: the trials of one program of the arm.
        params: the parameters of the program, a tree of `jax.ShapeDtypeStruct`.
        vocabulary: further packages whose public functions the configs may name.

    Returns:
        The warnings about the matrices that their optimizers work on.

    Raises:
        ConfigError: one does not build, as for a number out of its range.
    """
    chosen: dict[int, Trial] = {}
    for path in trials[0].values:
        numbers = [trial for trial in trials if is_number(trial.values[path])]
        if numbers:
            for pick in (min, max):
                trial = pick(numbers, key=lambda trial: trial.values[path])
                chosen[trial.number] = trial
    warnings: list[str] = []
    for trial in chosen.values():
        config = with_places(arm, trial)
        try:
            experiment = build_experiment(config, vocabulary)
            try:
                experiment.optimizer.bind(params).check()
                warnings += find_matrices(experiment.optimizer, params).warnings
            except (ValueError, TypeError) as error:
                raise located(error, config) from error
        except ConfigError as error:
            raise placed(error, arm, f"The trial {trial.name}") from error
    return warnings


def with_places(arm: ArmConfig, trial: Trial) -> Config:
    """Returns the config of a trial, in which each value has its place in the file of the sweep.

    Args:
        arm: the arm of the trial.
        trial: the trial.
    """
    config = trial.config
    for path, value in trial.values.items():
        config = replace(config, {path: value}, arm.source_of(path, value))
    return config


def placed(error: ConfigError, arm: ArmConfig, who: str) -> ConfigError:
    """Returns an error that begins with a place in the file of the sweep.

    Args:
        error: the error, whose place may be in a config of the arm.
        arm: the arm.
        who: what does not build, such as "The arm 'muon'".
    """
    files = {source.file for source in arm.sweep.sources.values()}
    if error.source is not None and error.source.file in files:
        return ConfigError(f"{who} does not build: {_without_place(error)}", error.source)
    return ConfigError(f"{who} does not build: {error}", arm.source())


def _without_place(error: ConfigError) -> str:
    return str(error).removeprefix(f"{error.source}: ")


def check_goal(plan: SweepPlan, arm: ArmConfig, experiment: Experiment) -> list[str]:
    """Checks that an arm writes the metric of the goal.

    Args:
        plan: the plan of the sweep.
        arm: the arm.
        experiment: one of the experiments of the arm.

    Returns:
        A sentence if the best trial by the goal is probably the worst.

    Raises:
        ConfigError: the experiment has no such metric, or the data set no such split.
    """
    goal, config = plan.definition.sweep.goal, plan.definition.config
    places = ("goal.metric", "goal.select_on", "goal")
    known = ["loss", *experiment.metrics]
    if goal.metric not in known:
        text = f"{arm.title} never writes the metric {goal.metric!r}. "
        prefix, _, bare = goal.metric.rpartition("/")
        if f"{prefix}/" in PREFIXES.values() and bare in known:
            text += f"Write metric: {bare}, without the split, which is select_on."
        else:
            text += known_names(goal.metric, known, "Its metrics are")
        source = next((config.sources[x] for x in places if x in config.sources), None)
        raise ConfigError(text, source)
    splits = split_sizes(experiment.data)
    if goal.select_on not in splits:
        source = next((config.sources[x] for x in places[1:] if x in config.sources), None)
        (only,) = splits
        how = " (validation: 0.1 for those of Lockstep)" if goal.select_on == "validation" else ""
        raise ConfigError(
            f"{arm.title} has a data set without a {goal.select_on} split, on which trials are"
            f" compared. Write select_on: {only} in goal, which the report repeats, or give the"
            f" data set a {goal.select_on} split{how}.",
            source or arm.source(),
        )
    if goal.better == "max" and smaller_is_better(goal.metric, experiment.metrics):
        return [
            f"The goal is the largest {goal.metric}, of which smaller values are better: the worst"
            " trial would win. Write mode: min in goal ('min' in Gin)."
        ]
    return []
