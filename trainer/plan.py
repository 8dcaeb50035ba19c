"""Says what a config means for these parameters, before step 0 and without device work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import optim
from optim.checks import needing, needs_full_batch, wrong_float, wrong_schedule
from optim.paths import flatten
from optim.recipes import name_of
from trainer.config import Config, ConfigError, leaves
from trainer.flops import count_flops
from trainer.given import PartError, calling
from trainer.matrices import Matrices, find_matrices
from trainer.memory import too_large
from trainer.models.mode import describe_mode
from trainer.program import Program

Sampled = tuple[np.ndarray, np.ndarray]  # steps, values

_LARGEST = 2**63 - 1  # XLA keeps sizes as int64
_SAMPLES = 10_000  # the most steps at which a schedule is read to find its peak


@dataclass(frozen=True)
class Row:
    """One parameter: where it belongs and what moves it.

    Attributes:
        path: its path name.
        shape: its shape.
        dtype: the name of its dtype.
        group: the name of its group.
        optimizer: the name of the group's optimizer.
        peak_learning_rate: the largest learning rate of the run, layer-wise decay included (for
            stacked layers that of the last); None where the optimizer has none.
        weight_decay: as the optimizer takes it, at its largest; None where it takes none.
        sharding: the mesh axes that split it, such as "-, fsdp", or "" where none does.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    optimizer: str
    peak_learning_rate: float | None
    weight_decay: float | None
    sharding: str


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        rows: a row a parameter.
        groups: group name -> (parameters, bytes of optimizer state).
        state_bytes: bytes of the whole `State`.
        flops: floating-point operations of a step, all devices together.
        devices: such as "1 cpu".
        steps: updates of the run.
        batch_size: examples of a batch.
        mode: how the model is told whether it trains, a line; "" where the framework cannot know.
        schedules: group name -> (steps, learning rates), sampled over the run.
        matrices: what the optimizers of matrices work on.
    """

    rows: list[Row]
    groups: dict[str, tuple[int, int]]
    state_bytes: int
    flops: int
    devices: str
    steps: int
    batch_size: int
    mode: str
    schedules: dict[str, tuple[np.ndarray, np.ndarray]]
    matrices: Matrices


def make_plan(program: Program, config: Config | None = None) -> Plan:
    """Traces the program and reads off what each parameter will meet.

    Args:
        program: it is not compiled.
        config: where the program comes from, so that a mistake is told with its place.

    Returns:
        The plan.

    Raises:
        ConfigError: a parameter that no group takes, a group that takes none, a model or a metric
            that does not fit the data, an optimizer that cannot move what it is given, or a state
            that does not fit into memory.
    """
    experiment, optimizer = program.experiment, program.experiment.optimizer
    try:
        state = program.abstract_state()
        devices = list(program.mesh.local_devices)
        if (wrong := too_large(state, program.abstract_batch(), devices)) is not None:
            raise PartError("model", wrong)
        if not optimizer.trainable(state.params):
            raise optim.GroupError("Every parameter is frozen, and nothing would be trained.")
        _check_batches(program)
        sampled = _sample(optimizer, experiment.steps)
        matrices = find_matrices(optimizer, state.params)
        jaxpr = program.trace(state).jaxpr
        program.check_evaluation(state)
        with calling("model"):
            told = getattr(experiment.model, "mode", None)
            mode = describe_mode(told) if told is not None else ""
    except (ValueError, TypeError) as error:
        raise _located(error, config) from error
    named = flatten(state.params)
    labels = flatten(optimizer.label(state.params))
    scales = optimizer.layer_scales(state.params)
    rows = [
        _row(path, x, labels[path], optimizer, sampled, float(np.max(scales.get(path, 1.0))))
        for path, x in named.items()
    ]
    return Plan(
        rows=rows,
        groups={
            name: (
                sum(math.prod(r.shape) for r in rows if r.group == name),
                _bytes(state.opt_state.groups.get(name, ()))
                + _bytes([x for p, x in state.opt_state.master.items() if labels[p] == name]),
            )
            for name in optimizer.groups
        },
        state_bytes=_bytes(state),
        flops=count_flops(jaxpr),
        devices=f"{program.mesh.size} {program.mesh.devices.flat[0].platform}",
        steps=experiment.steps,
        batch_size=experiment.data.batch_size,
        mode=mode,
        schedules={
            name: values["learning_rate"]
            for name, values in sampled.items()
            if "learning_rate" in values
        },
        matrices=matrices,
    )


def _row(
    path: str,
    x: Any,
    name: str,
    optimizer: optim.Optimizer,
    sampled: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    scale: float,
) -> Row:
    group = optimizer.groups[name]
    peaks = {key: float(np.max(values)) for key, (_, values) in sampled[name].items()}
    spec = [str(axis or "-") for axis in x.sharding.spec]
    rate = peaks.get("learning_rate")
    return Row(
        path=path,
        shape=tuple(x.shape),
        dtype=x.dtype.name,
        group=name,
        optimizer=name_of(group.optimizer),
        peak_learning_rate=None if rate is None else rate * scale,
        weight_decay=max((x for key, x in peaks.items() if _is_decay(key)), default=None),
        sharding=", ".join(spec),
    )


def _is_decay(key: str) -> bool:
    return key.split(".")[-1] == "weight_decay"


def _sample(optimizer: optim.Optimizer, steps: int) -> dict[str, dict[str, Sampled]]:
    """Reads all float arguments over the run: group -> argument -> (steps, values)."""
    at = np.unique(np.linspace(0, steps - 1, min(steps, _SAMPLES)).astype(np.int32))
    given = {name: optimizer.schedules(name) for name in optimizer.groups}
    clip_norm = optimizer.clip_norm

    @jax.jit  # one program for all of them: a small one for each operation takes a second
    def scheduled(at: Any) -> Any:
        return {
            name: {key: jax.vmap(value)(at) for key, value in arguments.items() if callable(value)}
            for name, arguments in given.items()
        }, jax.vmap(clip_norm)(at) if callable(clip_norm) else 1.0

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        values, bounds = jax.device_get(scheduled(at))
    if (why := wrong_float("clip_norm", bounds)) is not None:
        message = f"The schedule of clip_norm goes wrong: it {why}"
        raise optim.GroupError(message, argument="clip_norm")
    for name, arguments in values.items():
        if (wrong := wrong_schedule(optimizer.groups[name].optimizer, arguments)) is not None:
            raise optim.GroupError(
                f"In group {name!r}, the schedule of {wrong[0]} goes wrong: it {wrong[1]}",
                name,
                f"optimizer.{wrong[0]}",
            )
    return {
        name: {
            key: (at, values[name].get(key, np.full(at.shape, 0.0 if callable(value) else value)))
            for key, value in arguments.items()
        }
        for name, arguments in given.items()
    }


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _located(error: Exception, config: Config | None) -> ConfigError:
    """Puts the place of a mistake before what a room said about it."""
    for path, value in leaves(config.root) if config else ():
        if isinstance(value, int) and value > _LARGEST:
            text = f"{path} is {value}, and a size in a program is at most 2**63 - 1: lower it."
            return ConfigError(text, config.sources[path] if config else None)
    places = ["model"]
    if isinstance(error, PartError):
        places = [error.part]
    elif isinstance(error, ConfigError):
        return error
    if isinstance(error, optim.GroupError):
        argument = error.argument or "optimizer"
        # Where the whole optimizer is one recipe, its arguments stand at the root.
        places = [*_upwards(f"optimizer.groups.{error.group}.{argument}"), *_upwards(argument)]
        places += _upwards(f"optimizer.{argument}")
        places = sorted(places, key=lambda place: -place.count("."))
    place = next((place for place in places if config and place in config.sources), None)
    source = config.accused(place, str(error)) if config and place is not None else None
    return ConfigError(str(error), source)


def _upwards(path: str) -> list[str]:
    """Lists a dotted path and the paths above it, the longest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _check_batches(program: Program) -> None:
    """Refuses minibatches to an optimizer that must see the same examples at every step."""
    data = program.experiment.data
    groups = program.experiment.optimizer.groups
    for group, name in needing(groups, needs_full_batch).items():
        if data.batch_size < data.num_examples:
            raise optim.GroupError(
                f"In group {group!r}, {name} needs the same examples at every step, and a batch "
                f"has {data.batch_size} of {data.num_examples}. Set batch_size to null (None in "
                f"Gin) for the whole split, or choose another optimizer.",
                group,
            )
