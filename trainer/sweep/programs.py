"""Finds out which programs the trials of a sweep need, and checks that all of them build.

Trials whose configs differ only in inputs of the program, which are floats and seeds, are one
program. One trial of each program is built; the others are compared with it as trees. Start with
`find_programs`.
"""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from trainer.config import (
    Builder,
    Call,
    Config,
    ConfigError,
    Source,
    Tree,
    diff,
    dump,
    join,
    replace,
)
from trainer.config.full import complete
from trainer.config.tree import child_trees, same
from trainer.config.wording import brief, known_names, listing
from trainer.engine import memory
from trainer.engine.experiment import Experiment, build_experiment
from trainer.engine.loading import load_located
from trainer.engine.plan import find_matrices, make_plan, with_place
from trainer.engine.program import Program
from trainer.engine.splits import smaller_is_better, split_sizes
from trainer.engine.vmapped import batched_kernels
from trainer.sweep.alike import unlike_loss
from trainer.sweep.definition import ArmConfig
from trainer.sweep.plan import SweepPlan, Trial, refuse_unequal
from trainer.sweep.warning_text import Warnings, merge_warnings
from trainer.writers.lines import PREFIXES

# Arguments of the root that are inputs of the program, or that do not change what it computes.
_NOT_STRUCTURE = ("seed", "data_seed", "steps_per_call")
_INPUT = "(an input of the program)"
_KINDS = {
    int: "an integer",
    float: "a float",
    str: "a string",
    bool: "a boolean",
    Call: "a call of a function",
    list: "a list",
}


@dataclass(frozen=True)
class ProgramGroup:
    """The trials of one program.

    Attributes:
        trials: the trials, in the order of the plan.
        inputs: the config paths of the floats that are inputs of the program, sorted.
        structure: the config without these inputs.
        constants: config path -> why this float is not an input of the program.
        steps: number of updates of each trial.
        batch_size: examples per batch.
        flops: floating-point operations of a step.
        state_bytes: bytes of the state of a trial, on each device.
        warnings: arm -> sentences about what is probably a mistake in its config.
    """

    trials: tuple[Trial, ...]
    inputs: tuple[str, ...]
    structure: Call
    constants: Mapping[str, str]
    steps: int
    batch_size: int
    flops: int
    state_bytes: int
    warnings: Warnings = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """The number of updates of all trials."""
        return self.steps * len(self.trials)


@dataclass(frozen=True)
class Programs:
    """The programs of a sweep.

    Attributes:
        groups: the programs, in the order of their first trials.
        reasons: sentences about what makes more than one program.
    """

    groups: tuple[ProgramGroup, ...]
    reasons: tuple[str, ...]

    @property
    def warnings(self) -> dict[str, tuple[str, ...]]:
        """The warnings of all programs: arm -> sentences."""
        return merge_warnings(group.warnings for group in self.groups)


def find_programs(plan: SweepPlan, vocabulary: Sequence[str] = ()) -> Programs:
    """Groups the trials of a sweep by their programs, and checks their configs.

    Raises ConfigError if a trial does not build, a value does not fit its argument, the goal's
    metric is never written, losses that are compared are not one function, or the arms' budgets are
    unequal.
    """
    by_arm: dict[str, list[ProgramGroup]] = {}
    titles = {arm.name: arm.title for arm in plan.definition.arms}
    for arm in plan.definition.arms:
        trials = plan.of_arm(arm.name)
        check_types(arm, trials, vocabulary)
        by_arm[arm.name] = _group(plan, arm, trials, vocabulary)
    _refuse_unlike_losses(plan, vocabulary)
    for what, of in (("steps", _steps), ("examples", _examples)):
        budgets = {name: sum(map(of, groups)) for name, groups in by_arm.items()}
        refuse_unequal(plan.definition, what, budgets)
    reasons = [line for name in by_arm for line in _reasons_within(titles[name], by_arm[name])]
    groups = _merge([group for groups in by_arm.values() for group in groups])
    return Programs(tuple(groups), (*reasons, *_reasons_between(by_arm)))


def _refuse_unlike_losses(plan: SweepPlan, vocabulary: Sequence[str]) -> None:
    """Raises ConfigError if trials are compared by their losses, and these are not one function."""
    if plan.definition.sweep.goal.metric != "loss":
        return
    configs: dict[str, Config] = {}
    searched: dict[str, Source] = {}
    for arm in plan.definition.arms:
        first, *others = plan.of_arm(arm.name)
        configs[arm.name] = config_with_sources(arm, first)
        for path, value in first.values.items():
            if not all(same(trial.values[path], value) for trial in others):
                searched.setdefault(path, arm.source_of(path, value))
    trees = {name: complete(config, vocabulary)[0] for name, config in configs.items()}
    found = unlike_loss(trees, searched)
    if found is None:
        return
    # Name the place of a value that differs from the first arm's. A default has no place.
    usual = next(iter(found.values.values()), "")
    unusual = [arm for arm, value in found.values.items() if value != usual]
    places = [configs[arm].argument_source(found.path) for arm in (*unusual, *found.values)]
    source = searched.get(found.path) or next((place for place in places if place), None)
    raise ConfigError(found.text, source)


def _merge(groups: Sequence[ProgramGroup]) -> list[ProgramGroup]:
    """Merges the groups of equal structure."""
    merged: dict[tuple, ProgramGroup] = {}
    for group in groups:
        key = dump(group.structure), group.inputs
        if key in merged:
            first = merged[key]
            group = dataclasses.replace(
                group,
                trials=(*first.trials, *group.trials),
                warnings=merge_warnings([first.warnings, group.warnings]),
            )
        merged[key] = group
    return list(merged.values())


def _steps(group: ProgramGroup) -> int:
    return group.total_steps


def _examples(group: ProgramGroup) -> int:
    return group.total_steps * group.batch_size


def _group(
    plan: SweepPlan, arm: ArmConfig, trials: Sequence[Trial], vocabulary: Sequence[str]
) -> list[ProgramGroup]:
    """Builds one trial of each program of an arm, and finds the trials that share it."""
    groups = []
    rest = list(trials)
    while rest:
        first = rest[0]
        config = config_with_sources(arm, first)
        try:
            program = load_located(config, vocabulary)
            traced = make_plan(program, config)
        except ConfigError as error:
            raise error_in_sweep_file(error, arm, f"The trial {first.name}") from error
        warnings = [*traced.warnings, *check_goal(plan, arm, program.experiment)]
        _check_vmap(plan, arm, program)
        inputs = set(traced.inputs)
        keys = [_structural(trial.values, inputs) for trial in rest]
        shared = [trial for trial, key in zip(rest, keys, strict=True) if key == keys[0]]
        rest = [trial for trial, key in zip(rest, keys, strict=True) if key != keys[0]]
        warnings += check_extremes(arm, shared, program.abstract_state().params, vocabulary)
        groups.append(
            ProgramGroup(
                trials=tuple(shared),
                inputs=tuple(traced.inputs),
                structure=_without_inputs(first.config.root, inputs),
                constants={path: why for path, (_, why) in traced.constants.items()},
                steps=traced.steps,
                batch_size=traced.batch_size,
                flops=traced.flops,
                state_bytes=traced.state_bytes,
                warnings=merge_warnings([{arm.name: tuple(warnings)}]),
            )
        )
    return _merge(groups)


def _check_vmap(plan: SweepPlan, arm: ArmConfig, program: Program) -> None:
    if plan.definition.sweep.vmap is None:
        return
    wrong = ""
    if program.mesh.size > 1:
        wrong = (
            f"has a mesh of {program.mesh.size} devices, and vmap computes trials on one: remove"
            " vmap or mesh."
        )
    elif kernels := batched_kernels(program):
        wrong = (
            "decomposes matrices of several trials at once under vmap (LAPACK's"
            f" {', '.join(kernels)}). On a CPU these kernels can wait for each other for ever:"
            " remove vmap, and the trials take turns."
        )
    if wrong:
        source = plan.definition.config.sources["vmap"]
        raise ConfigError(f"{arm.title} {wrong}", source)


def _structural(values: Mapping[str, Tree], inputs: set[str]) -> str:
    """Returns a text that is equal for trials of an arm that share a program."""
    kept = {path: x for path, x in values.items() if not (path in inputs and is_number(x))}
    return dump(Call("values", {"values": kept}))


def _without_inputs(tree: Tree, inputs: set[str], path: str = "") -> Any:
    """Returns a tree without the values of inputs.

    The arguments of calls are removed, because a default is an input as well: configs that differ
    in whether they repeat a default are one program. Other values are replaced by a mark.
    """
    items = {
        key: _without_inputs(child, inputs, join(path, key))
        for key, child in child_trees(tree).items()
    }
    if isinstance(tree, Call):
        left = _NOT_STRUCTURE if not path else ()
        kept = {key: x for key, x in items.items() if x != _INPUT and key not in left}
        return Call(tree.name, kept, tree.partial)
    if isinstance(tree, dict):
        return items
    if isinstance(tree, list):
        return list(items.values())
    return _INPUT if path in inputs and is_number(tree) else tree


def _reasons_within(name: str, groups: Sequence[ProgramGroup]) -> list[str]:
    """Says which paths of an arm make more than one program."""
    if len(groups) < 2:
        return []
    lines = []
    trials = [group.trials[0] for group in groups]
    for path in trials[0].values:
        values: dict[str, Tree] = {}
        for trial in trials:
            values.setdefault(brief(trial.values[path]), trial.values[path])
        constant = next((g.constants[path] for g in groups if path in g.constants), None)
        shown = list(values)
        if all(map(is_number, values.values())):
            shown = sorted(values, key=lambda text: values[text])
        first = next(iter(values.values()))
        lifted = all(path in group.inputs for group in groups)
        if len(values) < 2 or (lifted and all(map(is_number, values.values()))):
            continue
        why = _KINDS.get(type(first), "part of the program")
        why += f" that is not an input of the program: {constant}" if constant else ""
        lines.append(
            f"{name} needs {len(groups)} programs because of {path}, {why} ({listing(shown)})."
        )
    return lines


def _reasons_between(by_arm: Mapping[str, Sequence[ProgramGroup]]) -> list[str]:
    """Says where the programs of the arms differ from those of the first arm."""
    (first, groups), *others = by_arm.items()
    lines = []
    for name, theirs in others:
        changed = diff(groups[0].structure, theirs[0].structure)
        if changed:
            lines.append(
                f"The arms {first!r} and {name!r} have different programs: they differ in"
                f" {listing([line.partition(': ')[0] for line in changed], 4)}."
            )
    return lines


def is_number(value: Tree) -> bool:
    """Returns whether a value is an integer or a float, and not a boolean."""
    return type(value) in (int, float)


def check_types(arm: ArmConfig, trials: Sequence[Trial], vocabulary: Sequence[str]) -> None:
    """Raises ConfigError if a value of a space does not fit the argument that it is for."""
    try:
        Builder(arm.config, vocabulary).check()  # first, because a trial may replace the mistake
    except ConfigError as error:
        raise error_in_sweep_file(error, arm, arm.title) from error
    # A listed value that no trial drew must fit as well.
    listed = [(path, value) for path, values in arm.listed.items() for value in values]
    drawn = [item for trial in trials for item in trial.values.items()]
    seen: set[tuple[str, str]] = set()
    for path, value in [*listed, *drawn]:
        # Check one float of each path: all have the same type.
        key = path, "float" if type(value) is float else repr(value)
        if key in seen:
            continue
        seen.add(key)
        config = replace(arm.config, {path: value}, arm.source_of(path, value))
        try:
            Builder(config, vocabulary).check()
        except ConfigError as error:
            raise error_in_sweep_file(error, arm, arm.title) from error


def check_extremes(
    arm: ArmConfig, trials: Sequence[Trial], params: Any, vocabulary: Sequence[str]
) -> list[str]:
    """Builds the trials with the smallest and the largest value of each path.

    The trials are those of one program of the arm, which has the parameters `params`, a tree of
    `jax.ShapeDtypeStruct`. Returns the warnings about the matrices that their optimizers work on.
    Raises ConfigError if one does not build, as for a number out of its range.
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
        config = config_with_sources(arm, trial)
        try:
            experiment = build_experiment(config, vocabulary)
            try:
                experiment.optimizer.bind(params).check()
                warnings += find_matrices(experiment.optimizer, params).warnings
            except (ValueError, TypeError) as error:
                raise with_place(error, config) from error
        except ConfigError as error:
            raise error_in_sweep_file(error, arm, f"The trial {trial.name}") from error
    return warnings


def config_with_sources(arm: ArmConfig, trial: Trial) -> Config:
    """Returns the config of a trial, in which each value has its place in the file of the sweep."""
    config = trial.config
    for path, value in trial.values.items():
        config = replace(config, {path: value}, arm.source_of(path, value))
    return config


def error_in_sweep_file(error: ConfigError, arm: ArmConfig, who: str) -> ConfigError:
    """Returns an error that begins with a place in the file of the sweep.

    `who` is what does not build, such as "The arm 'muon'". The place of the given error may be in a
    config of the arm.
    """
    files = {source.file for source in arm.sweep.sources.values()}
    if error.source is not None and error.source.file in files:
        return ConfigError(f"{who} does not build: {_without_place(error)}", error.source)
    return ConfigError(f"{who} does not build: {error}", arm.source())


def _without_place(error: ConfigError) -> str:
    return str(error).removeprefix(f"{error.source}: ")


def check_goal(plan: SweepPlan, arm: ArmConfig, experiment: Experiment) -> list[str]:
    """Raises ConfigError if an arm lacks the metric of the goal, or its data set lacks the split.

    Returns a sentence if the best trial by the goal is probably the worst.
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


_SHARE = 0.5  # the part of the memory that the states of a wave may take
_BLOCKS = 3  # how many are timed


def most_side_by_side(state_bytes: int, workers: int) -> int:
    """Returns how many trials fit into memory side by side, at least 1.

    The workers share the memory of a host; each has a GPU of its own.
    """
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    limit = memory.host_memory() if on_cpu else memory.device_memory(device)
    if limit is None:
        return 2**31
    # A host also has a copy of every state while it saves them.
    share = _SHARE / (2 * workers if on_cpu else 1)
    return max(1, int(limit * share / max(1, state_bytes)))


class ProgramCost(NamedTuple):
    """What a program needs on this machine.

    Attributes:
        step_seconds: seconds of a step, without evaluations.
        temporary_bytes: memory of a step besides its state; None if the compiler does not tell.
    """

    step_seconds: float
    temporary_bytes: int | None


def measure(group: ProgramGroup, vocabulary: Sequence[str] = ()) -> ProgramCost:
    """Compiles a program and times a few of its steps."""
    program = load_located(group.trials[0].config, vocabulary)
    state = program.init()
    program.compile(state)
    steps = program.block_rule.steps
    batches = program.feed.batches(0)
    seconds = []
    for _ in range(_BLOCKS + 1):
        block = list(itertools.islice(batches, steps))
        start = time.perf_counter()
        state, _ = program.advance(state, block)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / steps)
    step = memory.compiled_memory(program.compiled)
    return ProgramCost(min(seconds[1:]), None if step is None else step.temporary)
