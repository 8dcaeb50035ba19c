"""Finds out which programs the trials of a sweep need, and checks that all of them build.

Trials whose configs differ only in inputs of the program, which are floats and seeds, are one
program. One trial of each program is built; the others are compared with it as trees. Start with
`find_programs`.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from optim.chain import PartNeeded
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
from trainer.engine.datasets import (
    LOOKED_FOR,
    split_metrics,
    whole_splits,
    wrong_mode,
)
from trainer.engine.experiment import Experiment, build_experiment, with_place
from trainer.engine.explanation import Elsewhere, explain, with_compiled
from trainer.engine.plan import find_matrices, make_plan
from trainer.engine.program import Program, load_located
from trainer.engine.vmapped import batched_kernels
from trainer.sweep.ablation import parts_needed
from trainer.sweep.confounders import unlike_loss
from trainer.sweep.definition import Goal
from trainer.sweep.halving import planned_steps
from trainer.sweep.ladder import rung_of
from trainer.sweep.plan import Plan, SharedProgram, Trial, check_kept, refuse_unequal
from trainer.sweep.reading import ArmConfig, Definition
from trainer.sweep.warning_text import merge_warnings
from trainer.train.continuation import begin_with
from trainer.writers.lines import PREFIXES

# Arguments of the root that are inputs of the program, or that do not change what it computes.
_NOT_STRUCTURE = ("seed", "data_seed", "steps_per_call")
# How the first state is made from that of another run, which is no part of the program.
_STARTS = ("warm_start.optimizer", "warm_start.follow")
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
class _Traced:
    """A program that was traced for one of its trials."""

    program: SharedProgram
    first: Trial  # the one that was traced
    structure: Call  # the config without the inputs of the program
    constants: Mapping[str, str]  # config path -> why this float is not an input of the program


def find_programs(
    definition: Definition,
    plan: Plan,
    vocabulary: Sequence[str] = (),
    elsewhere: Elsewhere | None = None,
) -> Plan:
    """Returns the plan with its programs; raises ConfigError if the trials do not fit."""
    # They do not if one does not build, an ablation takes out a part that another one needs, the
    # goal's metric is never written, losses that are compared are not one function, arms are equal
    # or have unequal budgets, or runs would keep too many bytes for claims. `elsewhere`
    # are the devices of a target; None for those of this machine.
    plan = dataclasses.replace(plan, vocabulary=tuple(vocabulary))
    by_arm: dict[str, list[_Traced]] = {}
    ablation, lacking = definition.sweep.ablate, {}
    for arm in definition.arms:
        try:
            found = _group(plan, arm, elsewhere)
        except ConfigError as error:
            if ablation is None or not by_arm or arm.name in ablation.settings:
                raise
            lacking[arm.name] = _why_lacking(error)
            continue
        by_arm[arm.name] = [_of_moved(arm, found)] if arm.moved else found
    if lacking:
        raise parts_needed(lacking, definition.config)
    _refuse_unlike_losses(definition, plan)
    _refuse_equal(definition, plan)
    programs = {name: [each.program for each in own] for name, own in by_arm.items()}
    _refuse_uneven_cuts(definition, programs)
    for what, of in (("steps", _steps), ("examples", _examples)):
        refuse_unequal(definition, what, {name: of(plan, name, x) for name, x in programs.items()})
    reasons = [line for arm in definition.arms for line in _reasons_within(arm, by_arm[arm.name])]
    merged = _merge([each for own in by_arm.values() for each in own])
    found = dataclasses.replace(
        plan,
        programs=tuple(each.program for each in merged),
        reasons=(*reasons, *_reasons_between(by_arm)),
    )
    check_kept(definition, found)
    return found


def _why_lacking(error: BaseException) -> str:
    """Returns what a part needs, or else the first sentence of the error, without its place."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PartNeeded):
        cause = cause.__cause__
    if cause is not None:
        return f"{cause.part} needs {cause.need.words}."
    first = error.__cause__ if isinstance(error.__cause__, ConfigError) else error
    text = str(first).removeprefix(f"{getattr(first, 'source', None)}: ")
    return text.partition(". ")[0].rstrip(".") + "."


def _of_moved(arm: ArmConfig, found: Sequence[_Traced]) -> _Traced:
    """Returns the program of the final runs of an arm whose hyperparameters a ladder moves."""
    # `found` are the programs of the points that may be moved. Raises ConfigError for several.
    if len(found) > 1:
        paths = [
            path
            for path in found[0].first.values
            if any(path not in each.program.inputs for each in found)
            or len({type(each.first.values[path]) for each in found}) > 1
        ]
        raise ConfigError(
            f"{arm.title} is not searched on the rung {rung_of(arm.name)}, and its space makes"
            f" {len(found)} programs, because of {listing(paths)}. Which of them a winner needs is"
            " not known before: search floats that are inputs of the program only, write one arm"
            " for each of the other values, or write rule: retuned.",
            arm.source("space"),
        )
    program = dataclasses.replace(found[0].program, trials=(), moved=(arm.name,))
    return dataclasses.replace(found[0], program=program)


def _refuse_unlike_losses(definition: Definition, plan: Plan) -> None:
    """Raises ConfigError if trials are compared by their losses, and these are not one function."""
    if plan.goal.metric != "loss":
        return
    configs: dict[str, Config] = {}
    searched: dict[str, Source] = {}
    for arm in definition.arms:
        first, *others = plan.examples_of(arm.name)
        configs[arm.name] = config_with_sources(arm, first)
        for path, value in first.values.items():
            if not all(same(trial.values[path], value) for trial in others):
                searched.setdefault(path, arm.source_of(path, value))
    trees = {name: complete(config, plan.vocabulary)[0] for name, config in configs.items()}
    if (found := unlike_loss(trees, searched)) is None:
        return
    # Name the place of a value that differs from the first arm's. A default has no place.
    usual = next(iter(found.values.values()), "")
    unusual = [arm for arm, value in found.values.items() if value != usual]
    places = [configs[arm].argument_source(found.path) for arm in (*unusual, *found.values)]
    source = searched.get(found.path) or next((place for place in places if place), None)
    raise ConfigError(found.text, source)


def _refuse_equal(definition: Definition, plan: Plan) -> None:
    """Raises ConfigError if two arms have equal trials, unless the file allows it."""
    seen: dict[tuple[str, str], ArmConfig] = {}
    for arm in definition.arms if "nothing" not in plan.differs else ():
        trials = plan.examples_of(arm.name)
        tree, _ = complete(trials[0].config, plan.vocabulary)
        key = dump(tree), repr(([trial.values for trial in trials], plan.arms[arm.name].asks))
        if (first := seen.setdefault(key, arm)) is not arm:
            raise ConfigError(
                f"The arms {first.name!r} and {arm.name!r} have the same config, space and trials:"
                " change or remove one. Write differs: [nothing] if equal arms are meant.",
                arm.source(),
            )


def _merge(every: Sequence[_Traced]) -> list[_Traced]:
    """Merges the programs of equal structure."""
    merged: dict[tuple, _Traced] = {}
    for each in every:
        key = dump(each.structure), each.program.inputs
        if key in merged:
            first = merged[key]
            program = dataclasses.replace(
                each.program,
                trials=(*first.program.trials, *each.program.trials),
                moved=(*(first.program.moved or ()), *(each.program.moved or ())) or None,
                warnings=merge_warnings([first.program.warnings, each.program.warnings]),
            )
            each = dataclasses.replace(each, program=program, first=first.first)
        merged[key] = each
    return list(merged.values())


def _steps(plan: Plan, arm: str, programs: Sequence[SharedProgram]) -> int:
    # An arm that a ladder moves has final runs only.
    moved = sum(program.updates for program in programs if program.moved)
    return moved or planned_steps(plan, arm, programs)


def _examples(plan: Plan, arm: str, programs: Sequence[SharedProgram]) -> int:
    if plan.arms[arm].cuts is not None:  # its programs have one batch size
        return _steps(plan, arm, programs) * programs[0].batch_size
    return sum(_steps(plan, arm, [each]) * each.batch_size for each in programs)


def _refuse_uneven_cuts(
    definition: Definition, programs: Mapping[str, Sequence[SharedProgram]]
) -> None:
    """Raises ConfigError if trials that are cut have unequal steps, or examples per step."""
    # Which of them go on is not known before, so that neither would be what they cost.
    cut = [arm for arm in definition.arms if arm.method.cuts is not None]
    for arm, what in itertools.product(cut, ("steps", "batch_size")):
        found = sorted({getattr(each, what) for each in programs[arm.name]})
        if len(found) > 1:
            raise ConfigError(
                f"{arm.title} searches {what} ({listing([f'{x:,}' for x in found])}), and"
                " method.halving compares trials after equal steps of equal size: search"
                f" {what} with another method, or write one arm for each value.",
                arm.source("space"),
            )


def _group(plan: Plan, arm: ArmConfig, elsewhere: Elsewhere | None) -> list[_Traced]:
    """Builds one trial of each program of an arm, and finds the trials that share it."""
    groups, vocabulary = [], plan.vocabulary
    rest = plan.examples_of(arm.name)
    check_types(arm, rest, vocabulary)
    while rest:
        first = rest[0]
        config = config_with_sources(arm, first)
        with _placed_in_sweep_file(arm, f"The trial {first.name}"):
            program = _load(config, vocabulary, elsewhere)
            traced = make_plan(program, config, None if elsewhere is None else elsewhere.memory)
        inputs = set(traced.inputs)
        warnings = [*traced.warnings, *check_goal(plan.goal, arm, program.experiment)]
        warnings += arm.whole_rates(inputs)
        _check_vmap(plan, arm, program)
        _check_cuts(arm, program.experiment)
        if place := program.experiment.checkpoints:
            raise ConfigError(
                f"{arm.title} saves checkpoints in {place}, and those of trials are in the folder"
                " of the sweep: write `checkpoints: null` under set.",
                arm.config.argument_source("checkpoints") or arm.source("space", "method"),
            )
        keys = [_structural(trial.values, inputs) for trial in rest]
        shared = [trial for trial, key in zip(rest, keys, strict=True) if key == keys[0]]
        rest = [trial for trial, key in zip(rest, keys, strict=True) if key != keys[0]]
        _check_starts(arm, program, shared, vocabulary)
        warnings += check_extremes(arm, shared, program.abstract_state().params, vocabulary)
        found = SharedProgram(
            trials=tuple(trial.name for trial in shared),
            inputs=tuple(traced.inputs),
            steps=traced.steps,
            first_step=program.experiment.first_step or None,
            batch_size=traced.batch_size,
            flops=traced.flops,
            state_bytes=traced.state_bytes,
            warnings=merge_warnings([{arm.name: tuple(warnings)}]),
        )
        structure = _without_inputs(first.config.root, inputs)
        constants = {path: why for path, (_, why) in traced.constants.items()}
        groups.append(_Traced(found, first, structure, constants))
    return _with_pending(plan, arm, _merge(groups))


def _with_pending(plan: Plan, arm: ArmConfig, groups: list[_Traced]) -> list[_Traced]:
    """Adds the trials whose values are not chosen yet; raises ConfigError if they may differ."""
    if (asks := plan.arms[arm.name].asks) is None:
        return groups
    if asks.lacking is not None:
        raise ConfigError(f"{arm.title}: {asks.lacking}", arm.source("method"))
    inputs = groups[0].program.inputs
    if others := [path for axis in asks.axes for path in axis if path not in inputs]:
        raise ConfigError(
            f"{arm.title} chooses points by results, and {listing(others)} is not an input of the"
            " program, so that it is not known before which programs the sweep needs: search"
            " floats of the optimizer only, write one arm for each of the other values, or use"
            " method.sobol.",
            arm.source("space"),
        )
    names = tuple(trial.name for trial in plan.of_arm(arm.name))
    program = dataclasses.replace(groups[0].program, trials=names)
    return [dataclasses.replace(groups[0], program=program)]


def _load(config: Config, vocabulary: Sequence[str], elsewhere: Elsewhere | None) -> Program:
    devices = elsewhere and elsewhere.devices
    return load_located(config, vocabulary, declared=elsewhere is not None, devices=devices)


def _check_vmap(plan: Plan, arm: ArmConfig, program: Program) -> None:
    if plan.vmap is None:
        return
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
    else:
        return
    raise ConfigError(f"{arm.title} {wrong}", arm.sweep.sources["vmap"])


def _check_cuts(arm: ArmConfig, experiment: Experiment) -> None:
    """Raises ConfigError if trials cannot be compared or continued at the cuts of their method."""
    if (cuts := arm.method.cuts) is None:
        return
    if cuts.steps[-1] >= experiment.steps:
        wrong = (
            f"a cut at step {cuts.steps[-1]:,}, and its runs have {experiment.steps:,} steps: a cut"
            " comes before the last step."
        )
    elif cuts.steps[0] <= experiment.first_step:
        wrong = (
            f"a cut at step {cuts.steps[0]:,}, and its runs begin at step"
            f" {experiment.first_step:,}: a cut comes after that."
        )
    elif missed := [step for step in cuts.steps if not experiment.evaluates(step)]:
        wrong = (
            f"a cut at step {missed[0]:,}, after which there is no evaluation"
            f" (eval_every is {experiment.eval_every}): put the cuts where trials are evaluated."
        )
    elif experiment.on_nonfinite == "rollback":
        wrong = (
            "cuts, and on_nonfinite: rollback, by which a run may go back behind a cut: write"
            " on_nonfinite: halt, or use another method."
        )
    else:
        return
    raise ConfigError(f"{arm.title} has {wrong}", arm.source("method.cuts", "method"))


def _check_starts(
    arm: ArmConfig, program: Program, trials: Sequence[Trial], vocabulary: Sequence[str]
) -> None:
    """Raises ConfigError if a state of another run, with which trials go on, does not fit them."""
    if not program.experiment.first_step:
        return
    checked: set[str] = set()
    for trial in trials:
        start: Any = trial.config.root.kwargs["warm_start"]
        if repr(start) in checked:
            continue
        checked.add(repr(start))
        config = config_with_sources(arm, trial)
        with _placed_in_sweep_file(arm, f"The trial {trial.name}"):
            begin_with(program.starting_with(start), config, vocabulary)


def _structural(values: Mapping[str, Tree], inputs: set[str]) -> str:
    """Returns a text that is equal for trials of an arm that share a program."""
    kept = {
        path: x
        for path, x in values.items()
        if path not in _STARTS and not (path in inputs and is_number(x))
    }
    return dump(Call("values", {"values": kept}))


def _without_inputs(tree: Tree, inputs: set[str], path: str = "") -> Any:
    """Returns a tree without the values of inputs."""
    # The arguments of calls are removed, because a default is an input as well: configs that differ
    # in whether they repeat a default are one program. Other values are replaced by a mark.
    if path in inputs and is_number(tree):
        return _INPUT
    items = {
        key: _without_inputs(child, inputs, join(path, key))
        for key, child in child_trees(tree).items()
    }
    if isinstance(tree, Call):
        left = _NOT_STRUCTURE if not path else ()
        kept = {key: x for key, x in items.items() if x != _INPUT and key not in left}
        if not path and isinstance(start := kept.get("warm_start"), dict):
            # Of where a run starts, only the step matters to what is computed.
            kept["warm_start"] = {k: x for k, x in start.items() if k in ("continue", "step")}
        return Call(tree.name, kept, tree.partial)
    return list(items.values()) if isinstance(tree, list) else items or tree


def _reasons_within(arm: ArmConfig, every: Sequence[_Traced]) -> Iterator[str]:
    """Says which paths of an arm make more than one program."""
    trials = [each.first for each in every]
    for path in trials[0].values if len(every) > 1 else ():
        values = {brief(trial.values[path]): trial.values[path] for trial in trials}
        constant = next((x.constants[path] for x in every if path in x.constants), None)
        numbers = all(map(is_number, values.values()))
        lifted = all(path in each.program.inputs for each in every)
        if len(values) < 2 or (lifted and numbers):
            continue
        shown = sorted(values, key=lambda text: values[text]) if numbers else list(values)
        why = _KINDS.get(type(next(iter(values.values()))), "part of the program")
        why += f" that is not an input of the program: {constant}" if constant else ""
        yield (
            f"{arm.title} needs {len(every)} programs because of {path}, {why} ({listing(shown)})."
        )


def _reasons_between(by_arm: Mapping[str, Sequence[_Traced]]) -> Iterator[str]:
    """Says where the programs of the arms differ from those of the first arm of their rung."""
    firsts: dict[str, str] = {}
    for name, theirs in by_arm.items():
        first = firsts.setdefault(rung_of(name), name)
        if changed := diff(by_arm[first][0].structure, theirs[0].structure):
            yield (
                f"The arms {first!r} and {name!r} have different programs: they differ in"
                f" {listing([line.partition(': ')[0] for line in changed], 4)}."
            )


def is_number(value: Tree) -> bool:
    """Returns whether a value is an integer or a float, and not a boolean."""
    return type(value) in (int, float)


def check_types(arm: ArmConfig, trials: Sequence[Trial], vocabulary: Sequence[str]) -> None:
    """Raises ConfigError if a value of a space does not fit the argument that it is for."""
    with _placed_in_sweep_file(arm, arm.title):
        Builder(arm.config, vocabulary).check()  # first, because a trial may replace the mistake
    # A listed value that no trial drew must fit as well.
    listed = [(path, value) for path, values in arm.listed.items() for value in values]
    drawn = [item for trial in trials for item in trial.values.items()]
    different: dict[tuple[str, str], Tree] = {}
    for path, value in [*listed, *drawn]:
        # Check one float of each path: all have the same type.
        different.setdefault((path, "float" if type(value) is float else repr(value)), value)
    for (path, _), value in different.items():
        config = replace(arm.config, {path: value}, arm.source_of(path, value))
        with _placed_in_sweep_file(arm, arm.title):
            Builder(config, vocabulary).check()


def check_extremes(
    arm: ArmConfig, trials: Sequence[Trial], params: Any, vocabulary: Sequence[str]
) -> list[str]:
    """Builds the trials with the smallest and the largest value of each path."""
    # The trials are those of one program, with `params`, a tree of `jax.ShapeDtypeStruct`. Returns
    # warnings about the matrices that their optimizers work on. Raises ConfigError if one does not
    # build, as for a number out of its range.
    chosen: dict[int, Trial] = {}
    for path in trials[0].values:
        if numbers := [trial for trial in trials if is_number(trial.values[path])]:
            for pick in (min, max):
                trial = pick(numbers, key=lambda trial: trial.values[path])
                chosen[trial.number] = trial
    warnings: list[str] = []
    for trial in chosen.values():
        config = config_with_sources(arm, trial)
        with _placed_in_sweep_file(arm, f"The trial {trial.name}"):
            experiment = build_experiment(config, vocabulary, declared=True)
            try:
                experiment.optimizer.bind(params).check()
                warnings += find_matrices(experiment.optimizer, params).warnings
            except (ValueError, TypeError) as error:
                raise with_place(error, config) from error
    return warnings


def config_with_sources(arm: ArmConfig, trial: Trial) -> Config:
    """Returns the config of a trial, in which each value has its place in the file of the sweep."""
    config = trial.config
    for path, value in trial.values.items():
        config = replace(config, {path: value}, arm.source_of(path, value))
    return config


@contextlib.contextmanager
def _placed_in_sweep_file(arm: ArmConfig, who: str) -> Iterator[None]:
    """Lets a ConfigError begin with a place in the file of the sweep."""
    # `who` is what does not build, such as "The arm 'muon'". The place of the error may be in a
    # config of the arm.
    try:
        yield
    except ConfigError as error:
        text, source = str(error), arm.source()
        if error.source and error.source.file in {x.file for x in arm.sweep.sources.values()}:
            text, source = text.removeprefix(f"{error.source}: "), error.source
        if "takes an integer for" in text and any("uniform" in x.text for x in arm.space.values()):
            text += " A space of integers is !space.integers, or !space.values {values: [16, 32]}."
        raise ConfigError(f"{who} does not build: {text}", source) from error


def check_goal(goal: Goal, arm: ArmConfig, experiment: Experiment) -> list[str]:
    """Raises ConfigError if an arm lacks the goal's metric, or its data set lacks the split."""
    # Returns sentences if the best trial by the goal is probably the worst, or if it is chosen on
    # the test split although there is another.
    places = [arm.sweep.sources.get(x) for x in ("goal.metric", "goal.select_on", "goal")]
    sizes = experiment.splits
    known = split_metrics(["loss", *experiment.metrics], goal.select_on, sizes)
    if goal.metric not in known:
        text = f"{arm.title} never writes the metric {goal.metric!r}. "
        prefix, _, bare = goal.metric.rpartition("/")
        if f"{prefix}/" in PREFIXES.values() and bare in known:
            text += f"Write metric: {bare}, without the split, which is select_on."
        else:
            text += known_names(goal.metric, known, "Its metrics are")
        raise ConfigError(text, next(filter(None, places), None))
    splits = whole_splits(sizes)
    if goal.select_on not in splits:
        (only,) = splits
        how = " (validation: 0.1 for those of Lockstep)" if goal.select_on == "validation" else ""
        raise ConfigError(
            f"{arm.title} has a data set without a {goal.select_on} split, on which trials are"
            f" compared. Write select_on: {only} in goal, which the report repeats, or give the"
            f" data set a {goal.select_on} split{how}.",
            next(filter(None, places[1:]), arm.source()),
        )
    found = []
    if goal.select_on == "test" and "validation" in splits:
        found.append(
            "The goal has select_on: test, so that values of winners on the test split are better"
            " than on other data. The data set has a validation split: leave select_on out."
        )
    if (wanted := wrong_mode(goal.metric, goal.better, experiment.metrics)) is not None:
        found.append(
            f"The goal has mode: {goal.better}, and {LOOKED_FOR[wanted]} values of {goal.metric}"
            f" are better: the worst trial would win. Write mode: {wanted} in goal ('{wanted}' in"
            " Gin)."
        )
    return found


_SHARE = 0.5  # the part of the memory that the states of a wave may take
_BLOCKS = 3  # how many are timed


def most_side_by_side(
    state_bytes: int, workers: int, temporary_bytes: int | None = None, room: int | None = None
) -> int:
    """Returns how many trials fit into memory side by side, at least 1."""
    # The workers share the memory of a host; each has a GPU of its own. `temporary_bytes` is that
    # of `Program`, which one trial at a time needs; None if it is not known. `room` is the memory
    # of a device that is not here; None for that of this machine's.
    device = jax.local_devices()[0]
    on_cpu = room is None and device.platform == "cpu"
    limit = memory.host_memory() if on_cpu else room or memory.device_memory(device)
    if limit is None:
        return 2**31
    own = limit / workers if on_cpu else limit
    states = min(_SHARE * own, own - (temporary_bytes or 0))
    # A host also has a copy of every state while it saves them.
    return max(1, int(states / ((2 if on_cpu else 1) * max(1, state_bytes))))


class ProgramCost(NamedTuple):
    """What a program needs on this machine, or on devices that are not here."""

    # of a step, without evaluations; None on devices that are not here
    step_seconds: float | None
    # of a step, or of its diagnosis, besides its state; None if the compiler does not tell
    temporary_bytes: int | None
    # the bytes that a device would need, where it has less; None if the program fits
    too_much: int | None = None


def measure(plan: Plan, shared: SharedProgram, elsewhere: Elsewhere | None = None) -> ProgramCost:
    """Compiles a program of a plan and, on this machine, times a few of its steps."""
    config = plan.example_of(shared).config
    program = _load(config, plan.vocabulary, elsewhere)
    if elsewhere is not None:
        found = with_compiled(explain(program, config, elsewhere), program)
        return ProgramCost(None, program.temporary_bytes, None if found.fits else found.needed)
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
    return ProgramCost(min(seconds[1:]), program.temporary_bytes)
