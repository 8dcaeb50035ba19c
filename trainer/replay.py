"""Makes one step of a run again, operation by operation, to find what was not finite first."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from optim.paths import flatten
from trainer import config as configs
from trainer import culprit
from trainer.batch_faults import find_fault
from trainer.checkpoint import CheckpointError, Checkpoints
from trainer.config import ConfigError
from trainer.experiment import build_experiment
from trainer.nonfinite import (
    FILE,
    Counters,
    NonFinite,
    counters_of,
    digest_batch,
    go_back,
    read_events,
    read_turns,
    turned,
)
from trainer.program import Program
from trainer.step import State
from trainer.workdir import check_files, code, compare, read_record


def replay(
    workdir: str | Path, step: int | None = None, vocabulary: Sequence[str] = ()
) -> tuple[list[str], bool]:
    """Goes from the nearest earlier checkpoint to a step, and makes that step with checks.

    Nothing in the folder is changed.

    Args:
        workdir: the run's folder.
        step: counted from 1; None for the last one in nonfinite.json.
        vocabulary: packages beyond ours whose functions the config names.

    Returns:
        Lines that tell what happened in the step; and whether all of it was finite.

    Raises:
        ConfigError: the folder holds no run, or the step is not one of its.
    """
    folder = Path(workdir)
    check_files(folder)
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds no config.yaml: it is not the folder of a run.")
    events = read_events(folder)
    step = step or _last_recorded(folder, events)
    experiment = build_experiment(configs.load([folder / "config.yaml"]), vocabulary)
    if step > experiment.steps:
        raise ConfigError(f"--step={step} is not a step of a run of {experiment.steps} steps.")
    program = Program(experiment)
    event = next((e for e in reversed(events) if e["step"] == step), None)
    left_out = None if event is None else event["batch_number"] - (step - 1)
    state, lines = _state_before(program, folder, step, left_out)
    number = step - 1 + counters_of(state.hyper).left_out
    if event is not None:
        number = event["batch_number"]
    batch = next(iter(experiment.data.train(number, experiment.seed)))
    if event is not None and event["batch_sha256"] != digest_batch(batch):
        lines.append("The batch is not the one that the run recorded: the data changed.")
    lines += _other_code(folder, vocabulary)
    if (fault := find_fault(program, batch)) is not None:
        lines.append(f"{fault}.")
    found = _look(program, state, batch, step, number)
    return lines + found[0], found[1]


def _other_code(folder: Path, vocabulary: Sequence[str]) -> list[str]:
    """Tells where the user's packages are not what the run was made with."""
    record = read_record(folder / "run.json")
    old = None if record is None else record["fingerprint"].get("code")
    changes = [] if old is None else compare({"code": old}, {"code": code.hashes(vocabulary)})
    return [f"The code is not that of the run: {str(each).partition(': ')[2]}." for each in changes]


def _last_recorded(folder: Path, events: Sequence[Mapping[str, Any]]) -> int:
    if not events:
        raise ConfigError(f"{folder}/{FILE} names no step. Say which one with --step=N.")
    return events[-1]["step"]


def _state_before(
    program: Program, folder: Path, step: int, left_out: int | None
) -> tuple[State, list[str]]:
    """Restores the nearest checkpoint before a step and goes on to it.

    left_out: how many batches the run had left out when it made the step; None for those that it
    leaves out now.
    """
    lines: list[str] = []
    begun: list[str] = []
    checkpoints = Checkpoints(folder / "checkpoints", log=lines.append, read_only=True)

    def known(counters: Counters) -> bool:
        return left_out is None or counters.left_out <= left_out

    def first(latest: int) -> State:
        for start in sorted((s for s in checkpoints.steps() if s <= latest), reverse=True):
            try:
                state = checkpoints.restore(program.abstract_state(), start)
            except CheckpointError as error:
                lines.append(f"Checkpoint of step {start}: {error}")
                continue
            except ValueError as error:
                raise ConfigError(str(error)) from error
            if known(counters_of(state.hyper)):
                begun.append(f"From the checkpoint of step {start}.")
                return state
        if program.experiment.warm_start:
            raise ConfigError(
                f"{folder} has no checkpoint of step {latest} or before that can be used. The run "
                "began with a warm start, so that its first state cannot be made again."
            )
        begun.append("From the first state.")
        return program.init()

    turns = {at: counters for at, counters in read_turns(folder).items() if known(counters)}
    try:
        state = _forward(program, first, step - 1, turns)
    except NonFinite as error:
        raise ConfigError(f"The run did not come to step {step}: {error}") from error
    return state, [*dict.fromkeys(lines), begun[-1]]


def _forward(
    program: Program, first: Callable[[int], State], end: int, turns: dict[int, Counters]
) -> State:
    """Steps to `end` as the run did, where it went back as well."""
    latest = end
    while True:
        state = first(latest)
        bad = None
        for at in range(int(state.step), end + 1):
            state = turned(state, turns.get(at))
            if at == end:
                return state
            state, finite = _one_step(program, state, at)
            if program.experiment.on_nonfinite == "rollback" and not finite:
                bad = at + 1
                break
        if bad is None:
            return state
        target, counters = go_back(counters_of(state.hyper), bad)
        turns = {at: turn for at, turn in turns.items() if at < target} | {target: counters}
        latest = target


def _one_step(program: Program, state: State, at: int) -> tuple[State, bool]:
    experiment = program.experiment
    number = at + counters_of(state.hyper).left_out
    batch = next(iter(experiment.data.train(number, experiment.seed)))
    state, metrics = program.step(state, program.put(batch))
    return state, bool(metrics["finite"])


def _look(
    program: Program, state: State, batch: Any, step: int, number: int
) -> tuple[list[str], bool]:
    # On one device: the operations are the same, and each is a program of its own.
    home = jax.local_devices()[0]
    state, put = jax.device_put(jax.device_get((state, dict(batch))), home)
    # One that skips would hide what it skipped.
    plain = Program(dataclasses.replace(program.experiment, on_nonfinite="halt"))
    with jax.default_device(home):
        (_, metrics), origins = culprit.find(plain.traced_step, (state, put), ("", "batch"))
    loss, norm = (float(metrics[name]) for name in ("train/loss", "grad_norm"))
    lines = [f"Step {step} with batch {number}: train/loss {loss:.6g}, grad_norm {norm:.6g}."]
    if not origins:
        return [*lines, "Every value that the step gives is finite."], True
    wanted = [path for path in ("1/train/loss", "1/grad_norm") if path in origins]
    path = wanted[0] if wanted else next(iter(origins))
    origin = origins[path]
    reached = path.split("/", 1)[1]
    if origin.what == "input":
        lines.append(f"What came in was not finite already: {origin.where}, {origin.result}.")
        return [*lines, f"It reached {reached}."], False
    lines.append(f"The first operation that is not finite, and reached {reached}:")
    lines.append(f"  {origin.what} at {origin.where}")
    if origin.scope:
        lines.append(f"  in {origin.scope}")
    lines += [f"  given {_named(operand, state.params)}" for operand in origin.operands]
    return [*lines, f"  gave {origin.result}"], False


def _named(operand: str, params: Mapping[str, Any]) -> str:
    """Adds which parameters an operand has the shape of, where it has no name of its own."""
    shape = re.match(r"\w+\[([\d,]+)\]", operand)
    if not shape:
        return operand
    alike = [path for path, x in flatten(params).items() if ",".join(map(str, x.shape)) == shape[1]]
    return f"{operand}, shaped like params/{' or params/'.join(alike[:3])}" if alike else operand
