"""The options of commands that read a config."""

import argparse
import os

from trainer.cli import values
from trainer.parser import Parser


def config_parser() -> Parser:
    """Returns the options of a config, as the parent of a command's parser."""
    config = Parser(add_help=False)
    config.add_argument(
        "--config",
        "--gin_file",
        dest="files",
        action="append",
        metavar="FILE",
        default=[],
        help="a .gin or .yaml file; may be given several times, later files override",
    )
    search_paths(config)
    config.add_argument(
        "--gin_bindings",
        "--gin_binding",
        dest="bindings",
        action="append",
        default=[],
        metavar="BINDING",
        help="Gin statements that override the files, such as 'optax.adamw.b2 = 0.95'",
    )
    config.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="edits one leaf of the resolved config, such as steps=100",
    )
    vocabulary(config)
    return config


def search_paths(parser: argparse.ArgumentParser) -> None:
    """Adds the option --gin_search_paths."""
    parser.add_argument(
        "--gin_search_paths",
        dest="search_paths",
        action="append",
        type=values.folders,
        default=[],
        metavar="FOLDER,...",
        help="folders where a config and what it includes are looked for, after the folder of the"
        " including file and the current one; may be given several times",
    )


def vocabulary(parser: argparse.ArgumentParser) -> None:
    """Adds the option --vocabulary."""
    parser.add_argument(
        "--vocabulary",
        action="extend",
        type=values.packages,
        default=values.packages(os.environ.get("LOCKSTEP_VOCABULARY", "")),
        metavar="PACKAGE,...",
        help="packages of yours whose functions the config may name, besides those of the variable"
        " LOCKSTEP_VOCABULARY; may be given several times",
    )


def accept_vocabulary(parser: Parser) -> None:
    """Lets all commands take the option, also those that execute nothing of a package."""
    for each in parser.commands().values():
        accept_vocabulary(each)
    if "--vocabulary" not in parser._option_string_actions:
        parser.add_argument("--vocabulary", dest="ignored", help=argparse.SUPPRESS)
