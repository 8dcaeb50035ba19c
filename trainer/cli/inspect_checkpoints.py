"""Lists, checks and compares the checkpoints of a run."""

import argparse
import datetime

from trainer import checkpoint
from trainer.cli.terminal import show
from trainer.messages import DONE, FAILED, UserError, table


def run(arguments: argparse.Namespace) -> int:
    """Runs `checkpoint ls|check|diff`.

    Args:
        arguments: the parsed options.

    Returns:
        The exit code: FAILED if a checkpoint is damaged or two differ, otherwise DONE.

    Raises:
        UserError: the checkpoint does not exist.
    """
    try:
        return {"ls": _ls, "check": _check, "diff": _diff}[arguments.action](arguments)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _ls(arguments: argparse.Namespace) -> int:
    rows = [("step", "saved", "bytes", "leaves", "metric")]
    problems = []
    for info in checkpoint.ls(arguments.workdir):
        saved = datetime.datetime.fromtimestamp(info.saved).isoformat(" ", "seconds")
        metric = "-" if info.metric is None else f"{info.metric:.6g}"
        rows.append((str(info.step), saved, f"{info.nbytes:,}", str(info.leaves), metric))
        if info.problem:
            problems.append(f"step {info.step}: damaged: {info.problem}")
    show("\n".join([*table(rows, right=range(len(rows[0]))), *problems]))
    return FAILED if problems else DONE


def _check(arguments: argparse.Namespace) -> int:
    found = checkpoint.check(arguments.workdir, arguments.step)
    for step, problems in found.items():
        show(f"step {step}: {'damaged' if problems else 'intact'}")
        for problem in problems:
            show(f"  {problem}")
    return FAILED if any(found.values()) else DONE


def _diff(arguments: argparse.Namespace) -> int:
    other = arguments.other or arguments.workdir
    ours = [info.step for info in checkpoint.ls(arguments.workdir)]
    theirs = [info.step for info in checkpoint.ls(other)]
    a = max(ours) if arguments.step is None else arguments.step
    b = arguments.other_step
    if b is None:
        # Within one run, the checkpoint before; in another run, any.
        before = [step for step in theirs if arguments.other or step < a]
        if not before:
            raise UserError(
                f"{arguments.workdir} has no checkpoint before step {a} to compare it with; there "
                f"are {ours}. Name another WORKDIR, or a step with --other_step."
            )
        b = max(before)
    lines = checkpoint.diff(arguments.workdir, a, b, other=other)
    show(f"step {a} of {arguments.workdir}, step {b} of {other}:")
    show("".join(f"  {line}\n" for line in lines) or "  equal, bit for bit\n", end="")
    return FAILED if lines else DONE
