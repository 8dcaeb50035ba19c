"""Formats a plan as plain text, for the terminal and for plan.txt."""

import math
from collections.abc import Iterator

from trainer.engine.explanation import GRADIENTS, Compiled, Explanation, Held, Holdings
from trainer.engine.memory import in_words
from trainer.engine.plan import Plan
from trainer.messages import plural, printable, table


def render_plan(plan: Plan) -> str:
    """Formats a plan as two tables, of the parameters and of the groups, and the totals."""
    total = sum(count for count, _ in plan.groups.values())
    block = plan.block
    steps = "1 step" if block.steps == 1 else f"at most {block.steps} steps"
    lines = [
        *table(parameter_cells(plan)),
        "",
        *table(group_cells(plan), right=(1, 2)),
        "",
        f"{total:,} parameters; state {plan.state_bytes:,} bytes; {plan.flops:,} FLOPs a step "
        f"(matrix products and convolutions)",
        f"{steps_text(plan)}{_tokens(plan)} on {plan.devices}",
        f"blocks of {steps} ({block.form}): {block.why}",
        *filter(None, (plan.evaluations, _examples(plan), plan.classes)),
        *map(printable, plan.data),
        *filter(None, (plan.fingerprint, plan.mode)),
        *map(printable, plan.left_whole),
        *plan.matrices.lines,
        *_chains(plan),
        *map(printable, filter(None, (*plan.wrappers, *plan.precision, plan.diagnostics))),
        *_hyperparameters(plan),
        *_inputs(plan),
        *(f"warning: {printable(text)}" for text in plan.warnings),
    ]
    return "\n".join(lines) + "\n"


def parameter_cells(plan: Plan) -> list[tuple[str, ...]]:
    """Returns the table of the parameters; its first row is the heading."""
    head = ("parameter", "shape", "dtype", "group", "optimizer", "peak lr", "decay", "sharding")
    matrices = plan.matrices.cells
    body = [
        (
            row.path,
            "x".join(map(str, row.shape)) or "scalar",
            row.dtype,
            row.group,
            row.optimizer,
            _number(row.peak_learning_rate),
            _number(row.weight_decay),
            row.sharding or "-",
            *([matrices.get(row.path, "-")] if matrices else []),
        )
        for row in plan.rows
    ]
    return [(*head, "matrices") if matrices else head, *body]


def group_cells(plan: Plan) -> list[tuple[str, ...]]:
    """Returns the table of the groups; its first row is the heading."""
    groups = [(name, f"{count:,}", f"{size:,}") for name, (count, size) in plan.groups.items()]
    return [("group", "parameters", "optimizer bytes"), *groups]


def steps_text(plan: Plan) -> str:
    """Returns the steps of a plan and their batches, such as "800 steps of 16 examples"."""
    return f"{plural(plan.steps, 'step')} of {plural(plan.batch_size, 'example')}"


def explained_text(explanation: Explanation) -> str:
    """Formats the plan and, if the devices are not here, what each of them holds."""
    text = render_plan(explanation.plan)
    if (devices := explanation.elsewhere) is None:
        return text
    holdings = explanation.holdings
    mesh = dict(holdings.mesh)
    if math.prod(mesh.values()) < devices:
        text += f"\nThe mesh {mesh} uses {math.prod(mesh.values())} of the {devices} devices.\n"
    return f"{text}\n{holdings_text(holdings, explanation.memory.limit)}"


def compiled_text(explanation: Explanation) -> str:
    """Formats the compiled step of an explanation; "" if it was not compiled."""
    if (compiled := explanation.compiled) is None:
        return ""
    what = f"A block of {compiled.steps} steps" if compiled.steps > 1 else "A step"
    done = "refused by the compiler" if compiled.refused else "compiled"
    lines = [
        f"{what} was {done} for {explanation.plan.devices} in {compiled.seconds:.1f} s, and not"
        " run."
    ]
    if compiled.memory is not None:
        lines.append(compiled.memory.describe(explanation.memory))
        if compiled.platform != "cpu" and explanation.fits:
            lines[-1] += ": it fits"
    if math.prod(explanation.holdings.mesh.values()) > 1 and not compiled.refused:
        lines += _traffic(compiled)
    return "\n".join(lines) + "\n"


def _traffic(compiled: Compiled) -> Iterator[str]:
    """Yields a table of the collectives of a compiled step."""
    if not compiled.traffic:
        yield "The devices exchange nothing in a step."
        return
    yield ""
    yield "What the devices exchange in a step, by the axes of the mesh along which they do:"
    rows = [
        (each.kind, each.axes, f"{each.count:,}", f"{each.size:,}", in_words(each.size))
        for each in compiled.traffic
    ]
    head = ("collective", "axes", "count", "bytes of a device", "")
    yield from table([head, *rows], right=(2, 3, 4))
    of_cpu = (
        " This is the program of XLA's compiler for CPUs, which widens bfloat16 to float32, and"
        " does not combine collectives as those for GPUs and TPUs do."
    )
    yield (
        "Bytes are those of the results. Loops are counted as often as they run, one of unknown"
        f" length once, and of a condition both branches.{of_cpu * (compiled.platform == 'cpu')}"
    )


def holdings_text(holdings: Holdings, limit: int | None) -> str:
    """Formats what each device holds as tables; `limit` is a device's memory in bytes, or None."""
    count = math.prod(holdings.mesh.values())
    head = ("leaf", "dtype", "shape", "sharding", "on a device", "bytes", "its state", "gradient")
    rows = [(*_held(x.held), f"{x.state:,}", f"{x.gradient:,}") for x in holdings.parameters]
    rows += [(*_held(one), "", "") for one in (*holdings.apart, *holdings.batch)]
    dtypes = f" ({holdings.gradient_dtypes}, if split as their parameters)"
    totals = [
        (f"{name}{dtypes if name == GRADIENTS else ''}", f"{size:,}")
        for name, size in holdings.totals.items()
    ]
    total = sum(holdings.totals.values())
    lines = [
        f"What each of {plural(count, 'device')} holds (mesh {holdings.mesh_text}; a sharding has a"
        " word for each dimension):",
        *table([head, *rows], right=(5, 6, 7)),
        "",
        *table([*totals, ("sum, bytes of a device", f"{total:,}")], right=(1,)),
    ]
    if limit is not None:
        end = "they do not fit beside each other, unless the compiler frees gradients early."
        if total <= limit:
            end = f"{in_words(limit - total)} remain for activations and other temporary memory."
        lines.append(f"{in_words(total)} of the {in_words(limit)} of a device: {end}")
    return "\n".join(lines) + "\n"


def _held(one: Held) -> tuple[str, ...]:
    shapes = ["x".join(map(str, shape)) or "scalar" for shape in (one.shape, one.shard)]
    return one.path, one.dtype, shapes[0], one.split, shapes[1], f"{one.size:,}"


def _chains(plan: Plan) -> Iterator[str]:
    """Yields the parts of each chain, in the order in which they work."""
    for group, lines in plan.chains.items():
        yield f"Parts of the update of group {printable(group)!r}, in their order:"
        yield from (f"  {line}" for line in lines)


def _hyperparameters(plan: Plan) -> Iterator[str]:
    """Yields the values of the float arguments of each group: schedules, then constants."""
    for group, arguments in plan.hyperparameters.items():
        yield f"Hyperparameters of {f'group {printable(group)!r}' if group else 'all groups'}:"
        yield from (f"  {name}: {x}" for name, x in arguments.items() if not x.constant)
        constants = [f"{name} {_number(x.final)}" for name, x in arguments.items() if x.constant]
        if constants:
            yield f"  constant: {', '.join(constants)}"


def _inputs(plan: Plan) -> Iterator[str]:
    """Yields the floats that are inputs of the program, a line a call, and those that are not."""
    by_call: dict[str, list[str]] = {}
    for path, value in plan.inputs.items():
        call, _, name = printable(path).rpartition(".")
        by_call.setdefault(call, []).append(f"{name} {_number(value)}")
    if by_call:
        yield "Inputs of the program; another value needs no compilation:"
    for call, values in by_call.items():
        yield f"  {call}: {', '.join(values)}" if call else f"  {', '.join(values)}"
    if plan.constants:
        yield "Floats that are constants of the program; another value compiles it again:"
    for path, (x, why) in plan.constants.items():
        yield f"  {printable(path)} {_number(x)}: {why}"


def _tokens(plan: Plan) -> str:
    """Returns " of 128 tokens, 1,638,400 tokens in all," for a data set of texts."""
    if plan.tokens is None:
        return ""
    total = plan.steps * plan.batch_size * plan.tokens
    return f" of {plural(plan.tokens, 'token')}, {plural(total, 'token')} in all,"


def _examples(plan: Plan) -> str:
    """Returns "examples: train 1,294, validation 143, test 360; data_seed 3"."""
    sizes = [
        f"{split} {'of unknown number' if count is None else f'{count:,}'}"
        for split, count in plan.examples.items()
    ]
    seed = "" if plan.data_seed is None else f"; data_seed {plan.data_seed}"
    return f"examples: {', '.join(sizes)}{seed}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.4g}"
