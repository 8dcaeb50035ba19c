"""Resolves the options of a command: the config, the program, and the folder of the run."""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import config as configs
from trainer.cli import values
from trainer.config.files import SHIPPED
from trainer.config.vocabulary import RUN, Language
from trainer.messages import UserError

_LONGEST_STEM = 60  # characters; the name of a folder has at most 255 bytes

if TYPE_CHECKING:
    from trainer.engine.program import Program


def read_config(arguments: argparse.Namespace, language: Language = RUN) -> configs.Config:
    """Reads the config that the options name."""
    if not arguments.files:  # not refused by the parser, which would not suggest --config then
        raise UserError(f"The config of {language.what} is missing: name it with --config=FILE.")
    folders = search_paths(arguments)
    return configs.load(arguments.files, arguments.bindings, arguments.sets, folders, language)


def search_paths(arguments: argparse.Namespace) -> list[str]:
    """Returns the folders of `--gin_search_paths`."""
    return [folder for each in arguments.search_paths for folder in each]


def make_program(
    config: configs.Config,
    vocabulary: Sequence[str],
    steps_per_call: int | None = None,
    declared: bool = False,
    devices: Sequence[Any] | None = None,
) -> "Program":
    """Builds the experiment of a config, and the program that trains it, not yet compiled."""
    # `vocabulary` has the user's packages whose functions the config may name; `steps_per_call`
    # replaces that of the config, unless it is None. If `declared`, a data set that is not on this
    # machine is replaced by its declared shapes: the program can then be planned and compiled, but
    # not run. `devices` are those of a target; None for those that jax finds.
    from trainer.engine.program import load_located

    ignore_optimizer_warnings()  # the plan has each of them once
    return load_located(config, vocabulary, steps_per_call, declared, devices)


def ignore_optimizer_warnings() -> None:
    """Ignores the warnings of optimizers when they are built; the plan of `explain` has them."""
    from optim.declarations import OptimizerWarning

    warnings.simplefilter("ignore", OptimizerWarning)


def config_options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of the config, for a subprocess that runs a command."""
    given = {
        "--config": arguments.files,
        "--gin_search_paths": [",".join(folders) for folders in arguments.search_paths],
        "--gin_bindings": arguments.bindings,
        "--set": arguments.sets,
        "--vocabulary": arguments.vocabulary,
    }
    return [f"{name}={value}" for name, values in given.items() for value in values]


def default_workdir(files: Sequence[str], config: configs.Config) -> str:
    """Returns the folder of a run without --workdir, such as runs/muon_vit-1a2b3c4d."""
    # It is named after the first file and the digest of the config: a changed config gets another
    # folder, and the same command resumes. Raises UserError if the current folder no longer exists.
    if not values.current_folder_exists():
        raise UserError(
            f"Without --workdir the run's folder is created in the current one, but {values.GONE}."
        )
    return f"runs/{folder_name(files, configs.digest(config.root))}"


def folder_name(files: Sequence[str], digest: str) -> str:
    """Returns the name of a folder from its first config file and a digest: muon_vit-1a2b3c4d."""
    stem = Path(files[0].removeprefix(SHIPPED)).stem[:_LONGEST_STEM]
    return f"{stem}-{digest[:8]}"
