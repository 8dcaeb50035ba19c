"""The command sweep: prints the plan of a sweep, or adds to one."""

import argparse
import warnings

from trainer.cli.loading import read_config, search_paths
from trainer.cli.terminal import show
from trainer.config.languages import SWEEP
from trainer.messages import DONE, UserError


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan of a sweep, or adds to one.

    Args:
        arguments: the parsed options of the command.

    Returns:
        DONE.

    Raises:
        UserError: the file has a mistake, or --dry_run is missing.
    """
    if arguments.action == "extend":
        from trainer.cli import extend_sweep

        return extend_sweep.run(arguments)
    if not arguments.files:
        raise UserError("No sweep is given: name its file with --config=sweep.yaml.")
    if not arguments.dry_run:
        raise UserError("Sweeps cannot be run yet: add --dry_run, which prints the plan of one.")
    from optim.declarations import OptimizerWarning
    from trainer.sweep.plan import make_plan
    from trainer.sweep.plan_text import render
    from trainer.sweep.programs import find_programs
    from trainer.sweep.reading import read_sweep

    warnings.simplefilter("ignore", OptimizerWarning)  # `explain` shows them for a config
    config = read_config(arguments, SWEEP)
    plan = make_plan(read_sweep(config, arguments.vocabulary, search_paths(arguments)))
    show(render(plan, find_programs(plan, arguments.vocabulary)), end="")
    return DONE
