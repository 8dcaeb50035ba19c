"""The options of the command line. It imports nothing that takes long, so that --help is fast.

The options are those of options.txt, whose head says how an option is written.
"""

import argparse
import ast
import functools
import os
import re
from pathlib import Path
from typing import Any

from trainer.cli import values
from trainer.parser import Actions, Parser
from trainer.report import FORMATS


def parser() -> Parser:
    """Returns the parser of `python -m trainer`; its commands are functions in commands.py."""
    return _parser(os.environ.get("LOCKSTEP_VOCABULARY", ""))


@functools.cache  # it takes 25 ms
def _parser(vocabulary: str) -> Parser:
    parser = Parser(
        prog="python -m trainer",
        description="Trains the model that a config file describes. The default command is train.",
        epilog="Exit codes: 0 done; 1 a failed run or disk, or a metrics.jsonl that lost rows; 2 a "
        "mistake in the config or the command line; 75 stopped by a signal after a saved "
        "checkpoint: start the same command again.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    actions: dict[str, argparse._SubParsersAction] = {}  # by the command that they are below
    paragraphs, config = _paragraphs(), Parser(add_help=False)
    _add(config, paragraphs["@config"], vocabulary)
    for first, rows in paragraphs.items():
        if first.startswith("@"):
            continue
        name, said = re.split(r"\s\s+", first, maxsplit=1)
        above, _, name = name.rpartition(" ")
        parents = [config] if "@config" in rows else []
        own = [row for row in rows if row not in ("@config", "@actions")]
        among = actions[above] if above else commands
        added = among.add_parser(name, parents=parents, help=" ".join(said.split()))
        _add(added, own, vocabulary)
        if "@actions" in rows:
            # A command with options of its own does something without an action, too.
            kind: dict[str, Any] = {"action": Actions} if own else {"required": True}
            actions[name] = added.add_subparsers(dest="action", metavar="action", **kind)
    _accept_vocabulary(parser)
    return parser


def _paragraphs() -> dict[str, list[str]]:
    """Returns the first row of each paragraph of options.txt -> its other rows."""
    # A word that stands for rows of several commands is replaced by them, but for @config.
    text = Path(__file__).with_name("options.txt").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for paragraph in text.replace("<formats>", ", ".join(FORMATS)).split("\n\n")[1:]:
        first, *rows = _ROWS.findall(paragraph)
        known = {word: of_word for word, of_word in found.items() if word != "@config"}
        found[first] = [each for row in rows for each in known.get(row, [row])]
    return found


# A row begins at its line's first column, and may have several lines.
_ROWS = re.compile(r"^[^\s#].*(?:\n +.*)*", re.MULTILINE)
_ROW = re.compile(
    r"([\w-]+(?:, [\w-]+)*)"  # the names
    r"(?: ([^\s:]+)(?::(\w+))?)?"  # what stands for the value, and how it is converted
    r"(?: (\.\.\.|[?+*]))?"  # how often
    r"(?: = (\S+))?(?: as (\w+))?( required)?"
    r"(?:\s\s+(.+))?",  # the help
    re.DOTALL,
)


def _add(parser: Parser, rows: list[str], vocabulary: str) -> None:
    """Adds the options in rows to a parser."""
    group = None
    for row in rows:
        if row == "@vocabulary":
            parser.add_argument(
                "--vocabulary",
                action="extend",
                type=values.names,
                default=values.names(vocabulary),
                metavar="PACKAGE,...",
                help="packages of yours whose functions the config may name, besides those of the"
                " variable LOCKSTEP_VOCABULARY; may be given several times",
            )
            continue
        found = _ROW.fullmatch(row.removeprefix("| "))
        assert found, f"This is no row of an option: {row}"
        names, value, kind, often, default, dest, required, said = found.groups()
        choices = value.strip("{}").split(",") if value and value.startswith("{") else None
        given: dict[str, Any] = {
            "help": " ".join(said.split()) if said else argparse.SUPPRESS,
            "action": "store_true" if value is None else "append" if often == "..." else None,
            "choices": choices,
            "metavar": None if choices else value,
            "type": {"int": int, **vars(values)}[kind] if kind else None,
            "nargs": None if often == "..." else often,
            "default": ast.literal_eval(default) if default else None,
            "dest": dest,
            "required": True if required else None,
        }
        to = parser
        if row.startswith("| "):
            to = group = group or parser.add_mutually_exclusive_group()
        to.add_argument(*names.split(", "), **{k: x for k, x in given.items() if x is not None})


def _accept_vocabulary(parser: Parser) -> None:
    """Lets all commands take the option, also those that execute nothing of a package."""
    for each in parser.commands().values():
        _accept_vocabulary(each)
    if "--vocabulary" not in parser._option_string_actions:
        parser.add_argument("--vocabulary", dest="ignored", help=argparse.SUPPRESS)
