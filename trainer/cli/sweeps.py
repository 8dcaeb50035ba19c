"""The command sweep: plans a sweep, starts its workers, and looks at its folder."""

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.loading import read_config, search_paths
from trainer.cli.terminal import show
from trainer.config.languages import SWEEP
from trainer.messages import DONE, UserError

if TYPE_CHECKING:
    from trainer.sweep.plan import SweepPlan


def run(arguments: argparse.Namespace) -> int:
    """Calls the action of the command.

    Args:
        arguments: the parsed options of the command.

    Returns:
        The exit code.

    Raises:
        UserError: the file has a mistake, or the folder cannot be used.
    """
    from trainer.train import runtime

    # Before jax starts its threads, which would get memory arenas of their own.
    runtime.keep_freed_memory()
    if arguments.action is None:
        return _start(arguments)
    return {"work": _work}[arguments.action](arguments)


def _start(arguments: argparse.Namespace) -> int:
    """Plans a sweep, and computes it."""
    from trainer.sweep.plan import make_plan
    from trainer.sweep.plan_file import check_same
    from trainer.sweep.reading import read_sweep

    if not arguments.files:
        raise UserError(
            "The file of the sweep is missing: name it with --gin_file=FILE or --config=FILE."
        )
    config = read_config(arguments, SWEEP)
    plan = make_plan(read_sweep(config, arguments.vocabulary, search_paths(arguments)))
    if arguments.dry_run:
        show(_check(arguments, plan), end="")
        return DONE
    stem = Path(arguments.files[0]).stem
    folder = Path(arguments.workdir or f"sweeps/{stem}-{plan.digest[:8]}").absolute()
    if not check_same(folder, plan):
        show(_check(arguments, plan, folder), end="")
    return _compute(folder, arguments)


def _check(arguments: argparse.Namespace, plan: "SweepPlan", folder: Path | None = None) -> str:
    """Builds the programs of a plan, writes it to a folder, and returns it as text."""
    from optim.declarations import OptimizerWarning
    from trainer.sweep.plan_file import write_plan
    from trainer.sweep.plan_text import render
    from trainer.sweep.programs import find_programs

    warnings.simplefilter("ignore", OptimizerWarning)  # `explain` shows them for a config
    programs = find_programs(plan, arguments.vocabulary)
    if folder is not None:
        write_plan(folder, plan, programs, arguments.vocabulary)
    return render(plan, programs)


def _work(arguments: argparse.Namespace) -> int:
    """Computes trials of a sweep that was begun, as one of its workers."""
    return _compute(Path(arguments.folder).absolute(), arguments)


def _compute(folder: Path, arguments: argparse.Namespace) -> int:
    from optim.declarations import OptimizerWarning
    from trainer.sweep.worker import Worker
    from trainer.train import runtime

    runtime.keep_compiled_programs()
    warnings.simplefilter("ignore", OptimizerWarning)
    worker = Worker(
        folder, arguments.workers, arguments.signals, lambda line: show(line, sys.stderr)
    )
    return worker.run()
