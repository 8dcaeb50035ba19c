"""How options are written as rows of a text, and the options that several commands take.

A row has the name of an option, what stands for its value, and, after two spaces, its help:

    --trace  compute one step at a time, and write the hashes of every batch and of every leaf to
        trace.jsonl
    --seed N:seed = 0  default 0
    --set PATH=VALUE ... = [] as sets  edits one leaf of the resolved config

The first takes no value. That of the second is converted by `values.seed`, and is 0 if none is
given. The third may be given several times, and a command finds it as `arguments.sets`. Choices
stand as `{a,b}` in place of a value; `required` is an option that must be given, and one without
help is for processes of ours. A name without "--" is an argument, which takes `?` if it may be
left out, and `+` if there may be several.
"""

import argparse
import ast
import os
import re
from collections.abc import Sequence
from typing import Any

from trainer.cli import values
from trainer.parser import Parser

# The process saves and ends when the one that started it has ended; that one must give it a pipe as
# its standard input.
WATCHED = "--watched"

SEARCH_PATHS = """
--gin_search_paths FOLDER,...:folders ... = [] as search_paths  folders where a config and what it
    includes are looked for, after the folder of the including file and the current one; may be
    given several times
"""

_CONFIG = f"""
--config, --gin_file FILE ... = [] as files  a .gin or .yaml file; may be given several times, later
    files override
{SEARCH_PATHS}
--gin_bindings, --gin_binding BINDING ... = [] as bindings  Gin statements that override the files,
    such as 'optax.adamw.b2 = 0.95'
--set PATH=VALUE ... = [] as sets  edits one leaf of the resolved config, such as steps=100
"""

_ROW = re.compile(
    r"([\w-]+(?:, [\w-]+)*)"  # the names
    r"(?: ([^\s:]+)(?::(\w+))?)?"  # what stands for the value, and how it is converted
    r"(?: (\.\.\.|[?+]))?"  # how often
    r"(?: = (\S+))?(?: as (\w+))?( required)?"
    r"(?:\s\s+(.+))?",  # the help
    re.DOTALL,
)
_TYPES = {"int": int, **vars(values)}


def command(
    commands: argparse._SubParsersAction, text: str, parents: Sequence[Parser] = ()
) -> Parser:
    """Adds a command, or an action of one: the first row of a text has its name and its help."""
    first, *options = _rows(text)
    name, said = re.split(r"\s\s+", first, maxsplit=1)
    parser = commands.add_parser(name, parents=parents, help=" ".join(said.split()))
    add(parser, "\n".join(options))
    return parser


def add(parser: argparse._ActionsContainer, text: str) -> None:
    """Adds the options in the rows of a text to a parser, or to a group of one."""
    for row in _rows(text):
        found = _ROW.fullmatch(row)
        assert found, f"This is no row of an option: {row}"
        names, value, kind, often, default, dest, required, said = found.groups()
        given: dict[str, Any] = {"help": " ".join(said.split()) if said else argparse.SUPPRESS}
        if value is None:
            given["action"] = "store_true"
        elif value.startswith("{"):
            given["choices"] = value.strip("{}").split(",")
        else:
            given["metavar"] = value
        if kind:
            given["type"] = _TYPES[kind]
        if often == "...":
            given["action"] = "append"
        elif often:
            given["nargs"] = often
        if default:
            given["default"] = ast.literal_eval(default)
        if dest:
            given["dest"] = dest
        if required:
            given["required"] = True
        parser.add_argument(*names.split(", "), **given)


def _rows(text: str) -> list[str]:
    """Returns the rows of a text: each begins at its line's first column, and may have several."""
    return re.findall(r"^\S.*(?:\n +.*)*", text, re.MULTILINE)


def config_parser() -> Parser:
    """Returns the options of a config, as the parent of a command's parser."""
    config = Parser(add_help=False)
    add(config, _CONFIG)
    vocabulary(config)
    return config


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
