"""Prints what is in the checkpoints of a run: ls, check, diff."""

import argparse
import datetime

from trainer import checkpoint
from trainer.config import ConfigError
from trainer.streams import show


def run(arguments: argparse.Namespace) -> int:
    """Runs `checkpoint ls|check|diff`.

    Args:
        arguments: what `options` parsed.

    Returns:
        0; 1 where a checkpoint is damaged, or two differ.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    try:
        return {"ls": _ls, "check": _check, "diff": _diff}[arguments.action](arguments)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _ls(arguments: argparse.Namespace) -> int:
    rows = [("step", "saved", "bytes", "leaves", "metric")]
    problems = []
    for info in checkpoint.ls(arguments.workdir):
        saved = datetime.datetime.fromtimestamp(info.saved).isoformat(" ", "seconds")
        metric = "-" if info.metric is None else f"{info.metric:.6g}"
        rows.append((str(info.step), saved, f"{info.nbytes:,}", str(info.leaves), metric))
        if info.problem:
            problems.append(f"step {info.step}: damaged: {info.problem}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        show("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    show("".join(f"{line}\n" for line in problems), end="")
    return 1 if problems else 0


def _check(arguments: argparse.Namespace) -> int:
    found = checkpoint.check(arguments.workdir, arguments.step)
    for step, problems in found.items():
        show(f"step {step}: {'damaged' if problems else 'whole'}")
        for problem in problems:
            show(f"  {problem}")
    return 1 if any(found.values()) else 0


def _diff(arguments: argparse.Namespace) -> int:
    other = arguments.other or arguments.workdir
    ours = [info.step for info in checkpoint.ls(arguments.workdir)]
    theirs = [info.step for info in checkpoint.ls(other)]
    a = max(ours) if arguments.step is None else arguments.step
    b = arguments.other_step
    if b is None:
        before = [step for step in theirs if arguments.other or step < a]
        if not before:
            raise ConfigError(
                f"{arguments.workdir} has no checkpoint before step {a} to compare it with; there "
                f"are {ours}. Name another WORKDIR, or a step with --other_step."
            )
        b = max(before)
    lines = checkpoint.diff(arguments.workdir, a, b, other=other)
    show(f"step {a} of {arguments.workdir}, step {b} of {other}:")
    show("".join(f"  {line}\n" for line in lines) or "  equal, bit for bit\n", end="")
    return 1 if lines else 0
