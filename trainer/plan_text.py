"""Writes a plan as plain text, for the terminal and for plan.txt."""

from trainer.config import printable
from trainer.plan import Plan


def render(plan: Plan) -> str:
    """Writes a plan as plain text: a row a parameter, then a row a group, then the totals.

    Args:
        plan: what `make_plan` made.

    Returns:
        Lines of text; the last ends with a newline.
    """
    head = ("parameter", "shape", "dtype", "group", "optimizer", "peak lr", "decay", "sharding")
    matrices = plan.matrices
    head += ("matrices",) if matrices.cells else ()
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
            *([matrices.cells.get(row.path, "-")] if matrices.cells else []),
        )
        for row in plan.rows
    ]
    groups = [(name, f"{count:,}", f"{size:,}") for name, (count, size) in plan.groups.items()]
    total = sum(count for count, _ in plan.groups.values())
    lines = [
        *_table([head, *body]),
        "",
        *_table([("group", "parameters", "optimizer bytes"), *groups], right=(1, 2)),
        "",
        f"{total:,} parameters; state {plan.state_bytes:,} bytes; {plan.flops:,} FLOPs a step "
        f"(matrix products and convolutions)",
        f"{plan.steps:,} steps of {plan.batch_size:,} examples on {plan.devices}",
        *([plan.mode] if plan.mode else []),
        *matrices.lines,
        *(f"warning: {printable(text)}" for text in matrices.warnings),
    ]
    return "\n".join(lines) + "\n"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.4g}"


def _table(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    rows = [tuple(map(printable, row)) for row in rows]  # plan.txt is printed by others
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
