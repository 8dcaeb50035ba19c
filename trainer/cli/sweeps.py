"""The command sweep: prints the plan of a sweep."""

import argparse
import warnings

from trainer.cli.loading import read_config, search_paths
from trainer.cli.terminal import show
from trainer.config.languages import SWEEP
from trainer.messages import DONE, UserError
from trainer.sweep.slurm_settings import SlurmSettings, read_settings


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan of a sweep.

    Args:
        arguments: the parsed options of the command.

    Returns:
        DONE.

    Raises:
        UserError: the file has a mistake, or --dry_run is missing.
    """
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


def slurm_settings(arguments: argparse.Namespace) -> SlurmSettings | None:
    """Returns the settings of `--slurm_file` and `--slurm`; None for another launcher.

    Args:
        arguments: the parsed options of the command.

    Raises:
        UserError: a setting is wrong, or is given to another launcher.
    """
    if arguments.launcher == "slurm":
        return read_settings(arguments.slurm_file, arguments.slurm)
    if arguments.slurm or arguments.slurm_file is not None:
        raise UserError("--slurm and --slurm_file are read with --launcher=slurm only.")
    return None
