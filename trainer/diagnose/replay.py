"""Repeats one step of a run, operation by operation, to find the first that is not finite."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from optim.paths import flatten
from trainer.checkpoint import CheckpointError, Checkpoints
from trainer.diagnose import nan_origin
from trainer.engine.contracts import Batch
from trainer.engine.data_fingerprint import digest_batch
from trainer.engine.loading import load
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import UserError
from trainer.train.batch_faults import find_fault
from trainer.train.nonfinite import NONFINITE_FILE, read_events
from trainer.train.restoring import check_fits, restore
from trainer.train.rollback import (
    MOST_ROLLBACKS,
    Counters,
    apply_rollback,
    counters_of,
    go_back,
    read_rollbacks,
)
from trainer.train.trained import read_run
from trainer.workdir import code, compare, read_record


def replay(
    workdir: str | Path, step: int | None = None, vocabulary: Sequence[str] = ()
) -> tuple[list[str], bool]:
    """Restores the nearest earlier checkpoint, advances to a step, and computes it with checks.

    The folder is not changed.

    Args:
        workdir: the run's folder.
        step: counted from 1; None for the last one in nonfinite.json.
        vocabulary: further packages whose functions the config names.

    Returns:
        Lines that describe the step, and whether all its values were finite.

    Raises:
        UserError: the folder is not that of a run, or the run does not have the step.
    """
    folder = Path(workdir)
    read = read_run(folder)
    events = read_events(folder)
    step = step or _last_recorded(folder, events)
    program = load(read, vocabulary)
    experiment = program.experiment
    if step > experiment.steps:
        raise UserError(f"--step={step} was given, and the run has {experiment.steps} steps.")
    newest = Checkpoints(folder / "checkpoints", read_only=True).latest()
    if newest is not None:
        check_fits(program, folder, newest, may_differ=False)
    event = next((e for e in reversed(events) if e["step"] == step), None)
    # The step from n to n + 1 takes the batch n + skipped_batches.
    skipped_batches = None if event is None else event["batch_number"] - (step - 1)
    try:
        state, lines = _state_before(program, folder, step, skipped_batches)
    except _EarlierNonFinite as earlier:
        asked, step, event = step, earlier.step, None
        state, lines = _state_before(program, folder, step, skipped_batches)
        lines.append(
            f"Step {step}, before step {asked}, is not finite: step {step} is shown instead."
        )
    batch_index = step - 1 + counters_of(state.run_state).skipped_batches
    if event is not None:
        batch_index = event["batch_number"]
    batch = next(experiment.batches(batch_index))
    if event is not None and event["batch_sha256"] != digest_batch(batch):
        lines.append("The batch is not the one that the run recorded: the data changed.")
    lines += _changed_code(folder, vocabulary)
    if (fault := find_fault(program, batch)) is not None:
        lines.append(f"{fault}.")
    found = _compute_with_checks(program, state, batch, step, batch_index)
    return lines + found[0], found[1]


class _EarlierNonFinite(Exception):
    """Raised if an earlier step, `step`, of a run that halts is not finite."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


def _changed_code(folder: Path, vocabulary: Sequence[str]) -> list[str]:
    """Returns lines about files of the user's packages that changed since the run."""
    record = read_record(folder / "run.json")
    old = None if record is None else record["fingerprint"].get("code")
    changes = [] if old is None else compare({"code": old}, {"code": code.hashes(vocabulary)})
    return [f"The code is not that of the run: {str(each).partition(': ')[2]}." for each in changes]


def _last_recorded(folder: Path, events: Sequence[Mapping[str, Any]]) -> int:
    if not events:
        raise UserError(f"{folder}/{NONFINITE_FILE} records no step. Name a step with --step=N.")
    return events[-1]["step"]


def _state_before(
    program: Program, folder: Path, step: int, skipped_batches: int | None
) -> tuple[State, list[str]]:
    """Restores the nearest checkpoint before a step and advances to the state before it.

    Args:
        program: the compiled experiment.
        folder: the run's folder.
        step: the step, from 1.
        skipped_batches: how many batches the run had skipped when it computed the step; None for
            as many as it skips now.

    Returns:
        The state, and lines about the checkpoints.
    """
    lines: list[str] = []
    start_line: list[str] = []
    checkpoints = Checkpoints(folder / "checkpoints", log=lines.append, read_only=True)

    def known(counters: Counters) -> bool:
        return skipped_batches is None or counters.skipped_batches <= skipped_batches

    def first(latest: int) -> State:
        for start in sorted((s for s in checkpoints.steps() if s <= latest), reverse=True):
            try:
                state = restore(program, checkpoints, start)
            except CheckpointError as error:
                lines.append(f"Checkpoint of step {start}: {error}")
                continue
            except ValueError as error:
                raise UserError(str(error)) from error
            if known(counters_of(state.run_state)):
                start_line.append(f"Started from the checkpoint of step {start}.")
                return state
        if program.experiment.warm_start:
            raise UserError(
                f"{folder} has no usable checkpoint of step {latest} or earlier. The run began "
                "with a warm start, so that its initial state cannot be computed again."
            )
        start_line.append("Started from the initial state.")
        return program.init()

    # Rollbacks after the event skipped batches that the run still used when it computed the step.
    rollbacks = {at: counters for at, counters in read_rollbacks(folder).items() if known(counters)}
    state = _advance(program, first, step - 1, rollbacks)
    if state is None:
        raise UserError(
            f"Step {step} cannot be reached: a step before it is not finite, and the run went back "
            f"{MOST_ROLLBACKS} times before that."
        )
    return state, [*dict.fromkeys(lines), start_line[-1]]


def _advance(
    program: Program, first: Callable[[int], State], end: int, rollbacks: dict[int, Counters]
) -> State | None:
    """Advances to `end` as the run did, including its rollbacks; None if it went back too often."""
    latest = end
    while True:
        state = first(latest)
        bad = None
        for at in range(int(state.step), end + 1):
            state = apply_rollback(state, rollbacks.get(at))
            if at == end:
                return state
            state, finite = _train_step(program, state, at)
            if not finite and program.experiment.on_nonfinite == "halt":
                raise _EarlierNonFinite(at + 1)
            if not finite and program.experiment.on_nonfinite == "rollback":
                bad = at + 1
                break
        if bad is None:
            return state
        back = go_back(counters_of(state.run_state), bad)
        if back is None:
            return None
        rollbacks = {at: c for at, c in rollbacks.items() if at < back.step}
        rollbacks[back.step] = back.counters
        latest = back.step


def _train_step(program: Program, state: State, at: int) -> tuple[State, bool]:
    """Trains one step; returns the state after it, and whether the step was finite."""
    experiment = program.experiment
    batch_index = at + counters_of(state.run_state).skipped_batches
    batch = next(experiment.batches(batch_index))
    state, metrics = program.step(state, program.feed.to_devices(batch))
    finite = bool(metrics["finite"])
    if experiment.on_nonfinite == "halt":
        finite = finite and bool(program.params_finite(state))
    return state, finite


def _compute_with_checks(
    program: Program, state: State, batch: Batch, step: int, batch_index: int
) -> tuple[list[str], bool]:
    """Computes a step operation by operation; returns lines about it, and whether it is finite."""
    # Every operation is a separate program, so one device suffices; the operations do not change.
    home = jax.local_devices()[0]
    state, placed = jax.device_put(jax.device_get((state, dict(batch))), home)
    # With "skip" the step would replace the values that are not finite.
    plain = Program(dataclasses.replace(program.experiment, on_nonfinite="halt"), program.inputs)
    # The parts of the state are named by their own paths, "params/...": it has no name itself.
    with jax.default_device(home):
        (_, metrics), origins = nan_origin.find(plain.traced_step, (state, placed), ("", "batch"))
    loss, norm = (float(metrics[name]) for name in ("train/loss", "grad_norm"))
    lines = [f"Step {step} with batch {batch_index}: train/loss {loss:.6g}, grad_norm {norm:.6g}."]
    if not origins:
        return [*lines, "Every result of the step is finite."], True
    # The step returns (state, metrics): 1 is the metrics. The loss first, because everything else
    # follows from it.
    wanted = [path for path in ("1/train/loss", "1/grad_norm") if path in origins]
    path = wanted[0] if wanted else next(iter(origins))
    origin = origins[path]
    reached = path.split("/", 1)[1]
    if origin.what == "input":
        cause = f"an input of the step is not finite: {origin.where} has {origin.result}"
        return [*lines, f"{reached} is not finite, because {cause}."], False
    lines.append(f"{reached} is not finite. The first operation that caused it:")
    lines.append(f"  {origin.what} at {origin.where}")
    if origin.scope:
        lines.append(f"  in {origin.scope}")
    lines += [
        f"  operand {_with_parameter_names(operand, state.params)}" for operand in origin.operands
    ]
    return [*lines, f"  returned {origin.result}"], False


def _with_parameter_names(operand: str, params: Mapping[str, Any]) -> str:
    """Appends the parameters of the same shape to the text of an operand without a name."""
    shape = re.match(r"\w+\[([\d,]+)\]", operand)
    if not shape:
        return operand
    alike = [path for path, x in flatten(params).items() if ",".join(map(str, x.shape)) == shape[1]]
    return f"{operand}, shaped like params/{' or params/'.join(alike[:3])}" if alike else operand
