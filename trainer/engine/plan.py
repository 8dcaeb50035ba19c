"""Makes a plan, which lists what a config means for each parameter, without device work.

Parameters with their groups and shapes, the values of every hyperparameter over the run, and the
matrices that optimizers such as Muon work on.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import optim
from optim.checks import FULL_BATCH, groups_needing, wrong_float, wrong_schedule
from optim.declarations import declarations
from optim.factories import bound, evaluate, name_of, takes_recipe
from optim.layouts import Layout
from optim.paths import flatten
from trainer.config import Config
from trainer.engine import contracts, datasets, plan_learning
from trainer.engine.block import BlockRule
from trainer.engine.diagnostics import OF_HALVES, names_computed
from trainer.engine.every import describe_changes
from trainer.engine.experiment import with_place
from trainer.engine.memory import Memory, memory_of, too_large
from trainer.engine.precision import describe_precision
from trainer.engine.program import Program
from trainer.engine.repeatable import unrepeatable
from trainer.engine.step import State
from trainer.engine.width import width_warnings
from trainer.messages import joined, plural
from trainer.models.model import describe_mode

Sampled = tuple[np.ndarray, np.ndarray]  # steps, values

# The values of hyperparameters over a run.

_SAMPLES = 10_000  # the most steps at which a schedule is evaluated to find its peak


class Hyperparameter(NamedTuple):
    """The values of a float argument of an optimizer over a run."""

    peak: float
    # the first with the peak, from 1 as in metrics.jsonl; of long runs, one of 10,000 samples
    peak_step: int
    first: float
    final: float
    constant: bool

    def __str__(self) -> str:
        """Returns "0.95 constant", or "peak 0.02 at step 100, final 0"."""
        if self.constant:
            return f"{self.final:.4g} constant"
        return f"peak {self.peak:.4g} at step {self.peak_step:,}, final {self.final:.4g}"


def _describe(sampled: Mapping[str, Mapping[str, Sampled]]) -> dict[str, dict[str, Hyperparameter]]:
    found: dict[str, dict[str, Hyperparameter]] = {}
    for group, arguments in sampled.items():
        for name, (steps, values) in arguments.items():
            peak = int(np.argmax(values))
            found.setdefault(group, {})[name] = Hyperparameter(
                peak=float(values[peak]),
                peak_step=int(steps[peak]) + 1,
                first=float(values[0]),
                final=float(values[-1]),
                constant=bool(np.all(values == values[0])),
            )
    return found


def sample_floats(program: Program) -> dict[str, dict[str, Sampled]]:
    """Samples all float arguments over the run, without compiling the program."""
    # Returns group -> argument -> (steps from 0, values); the group "" has `Optimizer.own_floats`.
    optimizer, steps = program.experiment.optimizer, program.experiment.steps
    at = np.unique(np.linspace(0, steps - 1, min(steps, _SAMPLES)).astype(np.int32))

    def arguments(optimizer: optim.Optimizer) -> dict[str, Mapping[str, Any]]:
        by_group = {name: optimizer.schedules(name) for name in optimizer.groups}
        return {**by_group, "": optimizer.own_floats()}

    given = arguments(optimizer)

    # One program, because compiling one for each operation takes a second; and with the inputs as
    # an argument, so that another learning rate does not compile it again.
    @jax.jit
    def scheduled(hyperparams: Any, at: Any) -> Any:
        optimizer = program.inputs.insert(program.experiment, hyperparams).optimizer
        return {
            name: {key: _at_steps(name, key, x, at) for key, x in own.items() if callable(x)}
            for name, own in arguments(optimizer).items()
        }

    # A plan uses no accelerator.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        values = jax.device_get(scheduled(program.inputs.pack(), at))
    for key, those in values[""].items():
        if (why := wrong_float(key, those)) is not None:
            raise optim.GroupError(f"The schedule of {key} goes wrong: it {why}", argument=key)
    for name in sorted(optimizer.groups):
        if (wrong := wrong_schedule(optimizer.groups[name].optimizer, values[name])) is not None:
            raise optim.GroupError(
                f"In group {name!r}, the schedule of {wrong[0]} goes wrong: it {wrong[1]}",
                name,
                f"optimizer.{wrong[0]}",
            )
    return {
        name: {
            key: (at, np.asarray(values[name][key]) if callable(x) else np.full(at.shape, x))
            for key, x in own.items()
        }
        for name, own in given.items()
    }


def _at_steps(group: str, name: str, schedule: Callable[[Any], Any], at: Any) -> Any:
    """Evaluates the schedule of an argument at steps; raises GroupError if it fails."""
    # `group` is "" for an argument of `optim.optimizer` itself.
    try:
        return jax.vmap(lambda step: evaluate(schedule, step, name))(at)
    except ValueError as error:
        if not group:
            raise optim.GroupError(str(error), argument=name) from error
        text = f"In group {group!r}: {error}"
        raise optim.GroupError(text, group, f"optimizer.{name}") from error


# The matrices that optimizers work on.

_UNNAMED = " *"


class PlannedMatrices(NamedTuple):
    """The matrices that the optimizers of a run work on; empty if they work element by element."""

    # path -> "12 of 64x64", inputs by outputs; with a star if the config does not name the axes
    cells: dict[str, str]
    lines: list[str]  # one for each optimizer, "In group 'hidden', optim.muon works on ..."
    warnings: list[str]  # on parameters whose matrices are not those of their layers


def find_matrices(optimizer: optim.Optimizer, params: Any, outputs: int = 0) -> PlannedMatrices:
    """Finds the matrices that each group's optimizer works on; `params` may be shapes."""
    # `outputs` is how many the model has for an example; 0 if that is not known.
    labels = flatten(optimizer.label(params))
    cells, lines, warnings = {}, [], []
    for one in declarations(optimizer.init, params):
        if not one.layouts:
            warnings += one.doubts
            continue
        # Wrappers such as optax's split_real_and_imaginary add to the paths.
        inner = f"{next(iter(one.layouts))}/"
        group = next((labels[path] for path in labels if inner.startswith(f"{path}/")), "?")
        for path, layout in one.layouts.items():
            unnamed = len(layout.shape) > 2 and path not in one.named
            cells[path] = _sizes([layout]) + (_UNNAMED if unnamed else "")
        count, _, rest = _sizes(one.layouts.values()).partition(" ")
        lines.append(
            f"In group {group!r}, {one.optimizer} works on {count} "
            f"{'matrix' if count == '1' else 'matrices'} {rest} (inputs by outputs)."
        )
        if last := [path for path, x in one.layouts.items() if x.shape[1:] == (outputs,)]:
            lines.append(
                f"{joined(last)} gives the {outputs:,} outputs of the model, and {one.optimizer}"
                " works on it as on a hidden layer. The authors of Muon leave the first and the"
                " last layer to AdamW: block.*/kernel takes neither of Lockstep's own models."
            )
        if one.wrong:
            raise contracts.ComponentError("optimizer", f"In group {group!r}, {one.wrong[0]}")
        warnings += [f"In group {group!r}, {doubt}" for doubt in one.doubts]
    if any(cell.endswith(_UNNAMED) for cell in cells.values()):
        lines.append(
            "* Not named by `matrices`: the last two axes are the matrix, and all axes before them"
            " are batch axes."
        )
    return PlannedMatrices(cells, list(dict.fromkeys(lines)), list(dict.fromkeys(warnings)))


def _sizes(layouts: Iterable[Layout]) -> str:
    """Counts matrices by their size: "16 of 64x64, 4 of 64x256"."""
    sizes: Counter[tuple[int, int]] = Counter()
    for layout in layouts:
        count, rows, columns = layout.matrices
        sizes[rows, columns] += count
    return ", ".join(f"{count:,} of {rows}x{columns}" for (rows, columns), count in sizes.items())


# The parts of chains, for a person who compares them with a paper.


def _chains(optimizer: optim.Optimizer) -> dict[str, list[str]]:
    """Lists the parts of each group's `optim.chain` in their order, without other optimizers."""
    # Each line has a part and its arguments: "parts.momentum: decay 0.95, nesterov true".
    found = {}
    for name, recipe in ((name, group.optimizer) for name, group in optimizer.groups.items()):
        if isinstance(recipe, partial) and recipe.func is optim.chain:
            given = bound(recipe).arguments
            before, after = (
                [line for part in given.get(side, ()) for line in _describe_part(part)]
                for side in ("before", "after")
            )
            found[name] = [*before, "times -learning_rate", *after]
    return found


def _describe_part(part: Any, indent: str = "") -> list[str]:
    if not isinstance(part, partial):
        return [indent + name_of(part)]
    given = bound(part)
    given.apply_defaults()
    inner = [x for key, x in given.arguments.items() if takes_recipe(part.func, key) and x]
    told = [
        f"{key} {_told(x)}"
        for key, x in given.arguments.items()
        if x is not None and not takes_recipe(part.func, key) and not key.startswith("eps")
    ]
    line = indent + name_of(part).removeprefix("optim.") + (f": {', '.join(told)}" if told else "")
    return [line, *(row for x in inner for row in _describe_part(x, f"{indent}  around "))]


def _told(x: Any) -> str:
    if callable(x):
        return "scheduled"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_told, x))}]"
    if isinstance(x, bool):
        return str(x).lower()
    return f"{x:.4g}" if isinstance(x, float) else str(x)


# The plan.


@dataclass(frozen=True)
class PlanRow:
    """One parameter, its group and its optimizer."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    optimizer: str
    # with layer-wise decay (of the last layer, if stacked); None if it has none
    peak_learning_rate: float | None
    weight_decay: float | None  # the largest of the run, as the argument; None if it has none
    sharding: str  # the mesh axes that split it, such as "-, fsdp"; "" if none does


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    rows: list[PlanRow]  # one per parameter
    groups: dict[str, tuple[int, int]]  # group name -> (parameters, bytes of optimizer state)
    state_bytes: int  # of the whole `State`
    flops: int  # floating-point operations of a step, over all devices
    devices: str  # such as "1 cpu"
    steps: int  # number of updates of the run
    batch_size: int  # examples per batch
    # the steps after which the run is evaluated, if their interval changes, else ""
    evaluations: str
    tokens: int | None  # per example of a data set of texts, else None
    # split -> number, "train" first; None if the data set does not say
    examples: dict[str, int | None]
    data_seed: int | None  # None if it is the seed of the run
    classes: str  # how many training examples each class has; "" if about as many
    data: Sequence[str]  # lines about the data set, such as what is read of the parts of a mixture
    # how a run notices that its data changed; "" if the data are not on this machine
    fingerprint: str
    mode: str  # the arguments that tell the model whether it trains; "" if they are not known
    # group name -> (steps, learning rates), sampled over the run
    schedules: dict[str, tuple[np.ndarray, np.ndarray]]
    # group name -> float argument -> its peak, first and final value; the name "" has those of
    # `optim.optimizer` itself, such as `clip_norm`, if there are any
    hyperparameters: Mapping[str, Mapping[str, Hyperparameter]]
    # lines about the lookahead and the readout of the optimizer, with their bytes
    wrappers: Sequence[str]
    precision: Sequence[str]  # the dtype of each role and the bytes; none if all are float32
    diagnostics: str  # their cost and their matrices; "" without any
    left_whole: Sequence[str]  # lines about parameters that no axis of the mesh divides
    block: BlockRule  # how many steps are computed at once, and in which form
    matrices: PlannedMatrices  # those that optimizers such as Muon work on
    chains: Mapping[str, Sequence[str]]  # group name -> the parts of its `optim.chain`, a line each
    warnings: Sequence[str]  # sentences about what is probably a mistake
    # config path -> value of the inputs of the program: another value needs no compilation
    inputs: Mapping[str, float]
    # config path -> (value, why it is not an input), for the config's other floats
    constants: Mapping[str, tuple[float, str]]


def make_plan(program: Program, config: Config | None = None, memory: Memory | None = None) -> Plan:
    """Traces a program, without compiling it, and makes its plan."""
    # Every mistake is a ConfigError. A `memory` of None is that of this process's devices.
    experiment, optimizer = program.experiment, program.experiment.optimizer
    try:
        state = program.abstract_state()
        here = memory is None
        _check(program, state, memory or memory_of(list(program.mesh.local_devices)))
        if here:  # it computes first parameters, which those of other devices may be too large for
            program.check_norms()
        hyperparameters = _describe(sampled := sample_floats(program))
        flops = program.flops  # traces the step
        diagnostics = _diagnostics(program)
        found = plan_learning.scan(program, state, first := program.evaluation.check(state))
        matrices = find_matrices(optimizer, state.params, found.outputs)
        with contracts.calling("model"):
            mode = describe_mode(getattr(experiment.model, "mode", None))
            widths = getattr(experiment.model, "width_scaling", None)
    except (ValueError, TypeError) as error:
        raise with_place(error, config) from error
    rows = list(_rows(optimizer, state.params, hyperparameters))
    return Plan(
        rows=rows,
        groups={name: _held(name, rows, state.opt_state) for name in optimizer.groups},
        state_bytes=_bytes(state),
        flops=flops,
        devices=f"{program.mesh.size} {program.mesh.devices.flat[0].platform}",
        steps=experiment.steps,
        batch_size=experiment.data.batch_size,
        evaluations=describe_changes(experiment.eval_every),
        tokens=contracts.tokens_per_example(experiment.data),
        examples={"train": experiment.data.num_examples, **datasets.split_sizes(experiment.data)},
        data_seed=None if experiment.seed_of_data == experiment.seed else experiment.seed_of_data,
        classes=found.classes,
        data=[*getattr(experiment.data, "plan_lines", ())],
        fingerprint=datasets.describe_fingerprint(experiment.data),
        mode=mode,
        schedules={name: x["learning_rate"] for name, x in sampled.items() if "learning_rate" in x},
        hyperparameters=hyperparameters,
        wrappers=_wrappers(optimizer, state.opt_state),
        precision=describe_precision(experiment.roles, optimizer, state, program.mesh),
        diagnostics=diagnostics,
        left_whole=program.sharding.left_whole(state.params),
        block=program.block_rule,
        matrices=matrices,
        chains=_chains(optimizer),
        warnings=[
            *found.warnings,
            *matrices.warnings,
            *(width_warnings(optimizer, state.params, widths) if widths else ()),
            *plan_learning.update_warnings(optimizer, state.params, sampled),
            *plan_learning.rate_warnings(sampled),
            *plan_learning.step_warnings(program, config),
            *plan_learning.mask_warnings(program, first),
            *datasets.ranking_warnings(experiment),
            *([] if here else _unchecked(optimizer, state.params)),
            *(unrepeatable(program.mesh) if here else ()),
        ],
        inputs=program.inputs.values,
        constants=program.inputs.constants,
    )


def _check(program: Program, state: State, room: Memory) -> None:
    """Raises an error if the program cannot train for its steps with so much memory."""
    if (wrong := too_large(state, program.feed.abstract_batch(), room)) is not None:
        raise contracts.ComponentError("model", wrong)
    optimizer = program.experiment.optimizer
    if not optimizer.trainable(state.params):
        raise optim.GroupError("Every parameter is frozen, and nothing would be trained.")
    _check_batches(program)
    contracts.check_observations(program.experiment.model, program.experiment.optimizer)
    for name, wrapper in (("lookahead", optimizer.lookahead), ("readout", optimizer.readout)):
        if wrapper and (wrong := wrapper.wrong_steps(program.experiment.steps)):
            raise optim.GroupError(wrong[1], argument=f"{name}.{wrong[0]}")


def _held(group: str, rows: Sequence[PlanRow], state: optim.OptimizerState) -> tuple[int, int]:
    """Returns the number of elements of a group, and the bytes of its state."""
    own = {row.path: math.prod(row.shape) for row in rows if row.group == group}
    master = [x for path, x in state.master.items() if path in own]
    return sum(own.values()), _bytes(state.groups.get(group, ())) + _bytes(master)


def _unchecked(optimizer: optim.Optimizer, params: Any) -> Iterator[str]:
    """Yields a sentence if first parameters decide about an error, and were not computed."""
    if jax.tree.leaves(jax.eval_shape(lambda p: optimizer.bind(p).kept_norms(), params)):
        yield (
            "The optimizer keeps the norms of matrices. Whether one is zero at the first step was "
            "not checked, because first parameters are not computed for other devices."
        )


def _rows(
    optimizer: optim.Optimizer, params: Any, found: Mapping[str, Mapping[str, Hyperparameter]]
) -> Iterator[PlanRow]:
    labels, scales = flatten(optimizer.label(params)), optimizer.layer_scales(params)
    for path, x in flatten(params).items():
        group = labels[path]
        peaks = {key: each.peak for key, each in found.get(group, {}).items()}
        rate, scale = peaks.get("learning_rate"), float(np.max(scales.get(path, 1.0)))
        decays = [peak for key, peak in peaks.items() if key.split(".")[-1] == "weight_decay"]
        spec = ["+".join(one) if isinstance(one, tuple) else one or "-" for one in x.sharding.spec]
        yield PlanRow(
            path=path,
            shape=tuple(x.shape),
            dtype=x.dtype.name,
            group=group,
            optimizer=name_of(optimizer.groups[group].optimizer),
            peak_learning_rate=None if rate is None else rate * scale,
            weight_decay=max(decays, default=None),
            sharding=", ".join(spec),
        )


def _wrappers(optimizer: optim.Optimizer, state: optim.OptimizerState) -> list[str]:
    """Returns a line about the lookahead, and one about the readout, if there are any."""
    return [
        f"{name}: {wrapper.describe()}; {_bytes(getattr(state, name)):,} bytes of state"
        for name in ("lookahead", "readout")
        if (wrapper := getattr(optimizer, name)) is not None
    ]


def _diagnostics(program: Program) -> str:
    """Returns a line about the diagnostics of a run, or "" if it has none."""
    experiment, asked = program.experiment, program.experiment.diagnostics
    if not asked:
        return ""
    every = f"diagnostics, every {plural(experiment.log_every, 'step')}, in "
    if not names_computed(asked):
        return f"{every}no time of their own: {', '.join(asked)}"
    labels = flatten(experiment.optimizer.label(program.abstract_state().params))
    by_group: dict[str, list[Layout]] = {}
    for path, layout in program.diagnosed_layouts.items():
        by_group.setdefault(labels[path], []).append(layout)
    names = "all" if asked == "all" else ", ".join(asked)
    matrices = [f"{_sizes(found)} in group {group!r}" for group, found in by_group.items()]
    time = "two steps" if set(asked) & set(OF_HALVES) else "a step"
    found = "; ".join(matrices) or "none"
    return f"{every}about the time of {time}: {names}; their matrices: {found}"


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def located_fingerprint(program: Program, config: Config) -> str:
    """Returns the fingerprint of a program's data; raises ConfigError with file and line."""
    try:
        return datasets.data_fingerprint(program.experiment.data)
    except contracts.ComponentError as error:
        raise with_place(error, config) from error


def _check_batches(program: Program) -> None:
    """Raises GroupError if an optimizer that needs the full batch gets minibatches."""
    data = program.experiment.data
    for group, name in groups_needing(program.experiment.optimizer.groups, FULL_BATCH).items():
        if data.batch_size < data.num_examples:
            raise optim.GroupError(
                f"In group {group!r}, {name} needs the same examples at every step, and a batch "
                f"has {data.batch_size} of {data.num_examples}. Set batch_size to null (None in "
                f"Gin) for the whole split, or choose another optimizer.",
                group,
            )
