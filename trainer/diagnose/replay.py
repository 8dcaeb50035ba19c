"""Repeats one step of a run, operation by operation, to find the first that is not finite.

The operations of the jaxpr are run one after the other. An operation that returns an infinity or
NaN for finite operands becomes the origin of that value, and results that it makes non-finite
inherit the origin. An infinity that does not reach an output, such as a masked -inf whose exp is 0,
is therefore not reported. Start with `replay`, which restores the state, and `find_origins`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # pyright: ignore[reportPrivateImportUsage]

from optim.paths import flatten
from trainer.checkpoint import CheckpointError, Checkpoints
from trainer.engine.contracts import Batch
from trainer.engine.datasets import digest_batch
from trainer.engine.program import Program, load_located
from trainer.engine.step import State
from trainer.messages import UserError
from trainer.train.nonfinite import NONFINITE_FILE, count_not_finite, find_fault, read_events
from trainer.train.rollback import (
    MOST_ROLLBACKS,
    Counters,
    apply_rollback,
    counters_of,
    read_rollbacks,
    rollback_target,
)
from trainer.train.trained import read_run, restore
from trainer.workdir import code, fingerprint_differences, read_record


def replay(
    workdir: str | Path, step: int | None = None, vocabulary: Sequence[str] = ()
) -> tuple[list[str], bool]:
    """Computes a step again with checks; returns lines, and whether all values were finite."""
    # It restores the nearest earlier checkpoint and advances; the folder is not changed. `step`
    # counts from 1; None is the last one in nonfinite.json. Raises UserError if the folder is not
    # that of a run, or the run does not have the step or cannot be repeated up to it.
    folder = Path(workdir)
    config = read_run(folder)
    events = read_events(folder)
    if not step and not events:
        raise UserError(f"{folder}/{NONFINITE_FILE} records no step. Name a step with --step=N.")
    step = step or int(events[-1]["step"])
    program = load_located(config, vocabulary)
    experiment = program.experiment
    if step > experiment.steps:
        raise UserError(f"--step={step} was given, and the run has {experiment.steps} steps.")
    event = next((e for e in reversed(events) if e["step"] == step), None)
    # The step from n to n + 1 takes the batch n + skipped_batches.
    skipped_batches = None if event is None else event["batch_number"] - (step - 1)
    try:
        state, lines = _state_before(program, folder, step, skipped_batches)
    except _EarlierNonFinite as earlier:
        asked, step, event = step, int(earlier.args[0]), None
        state, lines = _state_before(program, folder, step, skipped_batches)
        lines.append(
            f"Step {step}, before step {asked}, is not finite: step {step} is shown instead."
        )
    batch_index = step - 1 + counters_of(state.run_state).skipped_batches
    if event is not None:
        batch_index = event["batch_number"]
    batch = program.feed.batch(batch_index)
    if event is not None and event["batch_sha256"] != digest_batch(batch):
        lines.append("The batch is not the one that the run recorded: the data changed.")
    record = read_record(folder / "run.json") or {"fingerprint": {}}
    if (old := record["fingerprint"].get("code")) is not None:
        changes = fingerprint_differences({"code": old}, {"code": code.hashes(vocabulary)})
        said = "The code is not that of the run"
        lines += [f"{said}: {str(change).partition(': ')[2]}." for change in changes]
    if (fault := find_fault(program, batch)) is not None:
        lines.append(f"{fault}.")
    found = _compute_with_checks(program, state, batch, step, batch_index)
    return lines + found[0], found[1]


class _EarlierNonFinite(Exception):
    """Raised with a step before the requested one that is not finite, in a run that halts then."""


def _state_before(
    program: Program, folder: Path, step: int, skipped_batches: int | None
) -> tuple[State, list[str]]:
    """Returns the state before a step, from 1, and lines about the checkpoints used."""
    # `skipped_batches` is how many batches the run had skipped when it computed the step; None for
    # as many as it skips now.
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
        if step <= program.experiment.first_step:
            raise UserError(
                f"The run in {folder} continues another one from step"
                f" {program.experiment.first_step}, and has not computed step {step}: replay that"
                " step in the folder of the other run."
            )
        if program.experiment.warm_start:
            raise UserError(
                f"{folder} has no usable checkpoint of step {latest} or earlier. The run began "
                "with a warm start, so that its initial state cannot be computed again."
            )
        start_line.append("Started from the initial state.")
        return program.init()

    # Rollbacks after the event skipped batches that the run still used when it computed the step.
    rollbacks = {at: counters for at, counters in read_rollbacks(folder).items() if known(counters)}
    if (state := _advance(program, first, step - 1, rollbacks)) is None:
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
        for at in range(int(state.step), end + 1):
            state = apply_rollback(state, rollbacks.get(at))
            if at == end:
                return state
            batch = program.feed.batch(at + counters_of(state.run_state).skipped_batches)
            state, metrics = program.step(state, program.feed.to_devices(batch))
            finite, policy = bool(metrics["finite"]), program.experiment.on_nonfinite
            if policy == "halt" and not (finite and bool(program.params_finite(state))):
                raise _EarlierNonFinite(at + 1)
            if policy == "rollback" and not finite:
                break
        else:
            return state
        back = rollback_target(counters_of(state.run_state), at + 1, program.experiment.first_step)
        if back is None:
            return None
        rollbacks = {at: c for at, c in rollbacks.items() if at < back.step}
        rollbacks[back.step] = back.counters
        latest = back.step


def _compute_with_checks(
    program: Program, state: State, batch: Batch, step: int, batch_index: int
) -> tuple[list[str], bool]:
    """Computes a step operation by operation; returns lines about it, and whether it is finite."""
    # Every operation is a separate program, so one device suffices; the operations do not change.
    home = jax.local_devices()[0]
    state, placed = jax.device_put(jax.device_get((state, dict(batch))), home)
    # With "skip" the step would replace the values that are not finite.
    plain = Program(dataclasses.replace(program.experiment, on_nonfinite="halt"), program.inputs)
    # The state has the name "", so that its leaves have the names "params/...".
    with jax.default_device(home):
        (_, metrics), origins = find_origins(plain.traced_step, (state, placed), ("", "batch"))
    loss, norm = (float(metrics[name]) for name in ("train/loss", "grad_norm"))
    lines = [f"Step {step} with batch {batch_index}: train/loss {loss:.6g}, grad_norm {norm:.6g}."]
    if not origins:
        return [*lines, "Every result of the step is finite."], True
    # The step returns (state, metrics), so that the paths of metrics begin with 1. The loss comes
    # first, because everything else follows from it.
    path = next(path for path in ("1/train/loss", "1/grad_norm", *origins) if path in origins)
    origin = origins[path]
    reached = path.split("/", 1)[1]
    if origin.what == "input":
        cause = f"an input of the step is not finite: {origin.where} has {origin.result}"
        return [*lines, f"{reached} is not finite, because {cause}."], False
    lines.append(f"{reached} is not finite. The first operation that caused it:")
    lines.append(f"  {origin.what} at {origin.where}")
    if origin.scope:
        lines.append(f"  in {origin.scope}")
    lines += [f"  operand {_with_parameter_names(x, state.params)}" for x in origin.operands]
    return [*lines, f"  returned {origin.result}"], False


def _with_parameter_names(operand: str, params: Mapping[str, Any]) -> str:
    """Appends the parameters of the same shape to the text of an operand without a name."""
    if not (shape := re.match(r"\w+\[([\d,]+)\]", operand)):
        return operand
    alike = [path for path, x in flatten(params).items() if ",".join(map(str, x.shape)) == shape[1]]
    return f"{operand}, shaped like params/{' or params/'.join(alike[:3])}" if alike else operand


# Operations that only move, cast or repeat values: their result keeps the name of the input.
_KEEPS_NAME = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "pvary"),
    *("reduce_precision", "reshape", "sharding_constraint", "slice", "squeeze", "transpose"),
}


class Origin(NamedTuple):
    """The origin of a value that is not finite."""

    what: str  # the operation, such as "exp"; "input" for an input that is not finite
    where: str  # file and line of the code that called it; the name of an input
    scope: str  # the names of the surrounding modules, such as "jvp(Mlp)/head"
    operands: list[str]  # a line each: its name if it is an input, shape, dtype, range
    result: str  # such as "3 NaN of 640 values"


class _Value(NamedTuple):
    data: Any
    name: str = ""  # of the input that has these values
    origin: Origin | None = None


def find_origins(
    function: Callable[..., Any], arguments: Sequence[Any], names: Sequence[str]
) -> tuple[Any, dict[str, Origin]]:
    """Runs a function of pytrees, and traces outputs that are not finite to their origin."""
    # `names` has a name for each argument, with which the paths of its leaves begin. Returns the
    # results of the function; and output path -> origin, for outputs that are not finite.
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = []
    for name, argument in zip(names, arguments, strict=True):
        for inner, leaf in flatten(argument, verbatim=True).items():
            leaves.append(_input(leaf, "/".join(filter(None, (name, inner)))))
    values = _run(closed, leaves)
    results = jax.tree.unflatten(jax.tree.structure(shape), [value.data for value in values])
    paths = flatten(results, verbatim=True)
    return results, {p: v.origin for p, v in zip(paths, values, strict=True) if v.origin}


def _input(leaf: Any, name: str) -> _Value:
    if _finite(leaf):
        return _Value(leaf, name)
    return _Value(leaf, name, Origin("input", name, "", [], count_not_finite(leaf)))


def _run(closed: ClosedJaxpr, inputs: Sequence[_Value], place: str = "") -> list[_Value]:
    """Runs the operations; `place` is the location of those without one of their own."""
    jaxpr = closed.jaxpr
    known: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
        return _Value(atom.val) if isinstance(atom, Literal) else known[atom]

    known.update(zip(jaxpr.constvars, map(_Value, closed.consts), strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, _operation(eqn, operands, place), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operation(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs one operation; searches loops and calls only if their results are not finite."""
    parameters = eqn.primitive.get_bind_params(eqn.params)
    # What an operation does depends on the context in which it was traced, such as the mesh.
    with eqn.ctx.manager:
        data = eqn.primitive.bind(*[x.data for x in operands], **parameters)
    data = list(data) if eqn.primitive.multiple_results else [data]
    if all(map(_finite, data)):
        keeps = eqn.primitive.name in _KEEPS_NAME and bool(operands)
        return [_Value(x, operands[0].name if keeps else "") for x in data]
    place = source_info_util.summarize(eqn.source_info) or place
    if (inner := _RUNNERS.get(eqn.primitive.name, _run_call)(eqn, operands, place)) is not None:
        return [
            _Value(x, origin=None if _finite(x) else v.origin)
            for x, v in zip(data, inner, strict=True)
        ]
    # The origin of an operand is that of the result: this operation only passed it on.
    inherited = next((x.origin for x in operands if x.origin), None)

    def origin_of(result: Any) -> Origin:
        scope, told = str(eqn.source_info.name_stack), [_describe(x) for x in operands]
        return Origin(eqn.primitive.name, place, scope, told, count_not_finite(result))

    return [_Value(x, origin=None if _finite(x) else inherited or origin_of(x)) for x in data]


def _run_call(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value] | None:
    """Runs the body of a call (jit, custom_vjp, remat); None for an operation without a body."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if isinstance(body, ClosedJaxpr | Jaxpr):
            closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
            if len(closed.jaxpr.invars) == len(operands):
                return _run(closed, operands, place)
    return None


def _run_scan(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs the body of a scan for each of its steps."""
    body, p = eqn.params["jaxpr"], eqn.params
    if "num_consts" in p:
        fixed, carried = p["num_consts"], p["num_carry"]
    else:  # since jax 0.12
        consts, carry, _ = p["ft_in"].unpack()
        fixed, carried = len(consts), len(carry)
    # The operands of a scan are its constants, the first carry, and arrays [length, ...].
    consts, carry = operands[:fixed], operands[fixed : fixed + carried]
    stacked, pieces = operands[fixed + carried :], {}
    for step in range(p["length"]):
        index = p["length"] - 1 - step if p["reverse"] else step
        out = _run(body, [*consts, *carry, *(_piece(x, index) for x in stacked)], place)
        carry = out[:carried]
        for i, value in enumerate(out[carried:]):
            if value.origin is not None:
                # The earliest step of the loop in which an output is not finite is its origin.
                pieces.setdefault(i, value)
    # The caller has the data of the whole scan, and takes only the origins from here.
    return [*carry, *(pieces.get(i, _Value(None)) for i in range(len(eqn.outvars) - carried))]


def _piece(whole: _Value, index: int) -> _Value:
    data = whole.data[index]
    if whole.origin is None:
        return _input(data, f"{whole.name}[{index}]" if whole.name else "")
    return _Value(data, whole.name, None if _finite(data) else whole.origin)


def _run_while(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs the test and the body of a while loop until the test is false."""
    p = eqn.params
    cut = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    # The operands are constants of the test, constants of the body, and the carry.
    of_test, of_body, carry = operands[: cut[0]], operands[cut[0] : cut[1]], operands[cut[1] :]
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    while bool(_run(test, [*of_test, *carry])[0].data):
        carry = _run(body, [*of_body, *carry], place)
    return carry


def _run_cond(eqn: JaxprEqn, operands: list[_Value], place: str) -> list[_Value]:
    """Runs the branch of a cond that its first operand selects."""
    branches = eqn.params["branches"]
    branch = branches[int(np.clip(int(operands[0].data), 0, len(branches) - 1))]
    return _run(branch, operands[1:], place)


_RUNNERS: Mapping[str, Callable[[JaxprEqn, list[_Value], str], list[_Value] | None]] = {
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
}


def _finite(x: Any) -> bool:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    return bool(jnp.isfinite(x).all())


def _describe(value: _Value) -> str:
    x = jnp.asarray(value.data)
    text = f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
    if value.name:
        text = f"{value.name} {text}"
    if not x.size or not jnp.issubdtype(x.dtype, jnp.number):
        return text
    low, high = (float(f(x.astype(jnp.float32))) for f in (jnp.min, jnp.max))
    return f"{text} from {low:.4g} to {high:.4g}" if x.ndim else f"{text} = {low:.4g}"
