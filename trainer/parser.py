"""An argparse parser with errors of two lines. Imports nothing that takes long."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import IO, Any, NoReturn

from trainer.messages import MISTAKE, printable


class Parser(argparse.ArgumentParser):
    """Prints errors in two lines, and escapes control characters."""

    # A parser of several commands keeps the name of the one that was given as `command`. A parser
    # with the option --help has --version, too.

    def __init__(self, *args: Any, add_help: bool = True, **kwargs: Any):
        super().__init__(*args, add_help=add_help, **kwargs)
        if add_help:
            text = "print the version of Lockstep and exit"
            self.add_argument("--version", action=Version, nargs=0, help=text)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses the arguments; for an unknown one, prints what to write and exits with 2."""
        # argparse's own parse_args only lists the unknown arguments, and suggests nothing.
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self._chosen(arguments)
            name = command.prog.removeprefix(self.prog).strip() or self.prog.split()[-1]
            elsewhere = {
                option: each
                for each, parser in self.commands().items()
                for option in parser._option_string_actions
            }
            command.error(_unknown(name, unknown, command._option_string_actions, elsewhere))
        return arguments

    def commands(self) -> "dict[str, Parser]":
        """Returns the parsers of the commands of this parser by their names."""
        groups = self._subparsers._group_actions if self._subparsers else []
        return {name: each for group in groups for name, each in (group.choices or {}).items()}  # type: ignore[attr-defined]

    def _chosen(self, arguments: argparse.Namespace) -> argparse.ArgumentParser:
        """Returns the parser of the command that was given, and of the action below it."""
        for group in self._subparsers._group_actions if self._subparsers else []:
            if chosen := self.commands().get(getattr(arguments, group.dest, "")):
                return chosen._chosen(arguments)
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError for a command that does not exist, with the nearest that does."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            return super()._check_value(action, value)
        near = difflib.get_close_matches(value, action.choices, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        what = action.metavar or "command"
        text = f"there is no {what} {value!r}. {hint}There are: {', '.join(action.choices)}."
        raise argparse.ArgumentError(None, text)

    def error(self, message: str) -> NoReturn:
        """Prints an error, given without a full stop, and exits with 2; omits the long usage."""
        self.exit(MISTAKE, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        super()._print_message(printable(message, keep="\n\t"), file)


class Actions(argparse._SubParsersAction):
    """Commands below one that has options of its own, which must not be given with one."""

    # argparse would take the options before the action, and then replace their values by defaults.

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Parses the arguments of an action; see `argparse.Action`."""
        for action in parser._actions:
            default = action.default
            if action.option_strings and getattr(namespace, action.dest, default) != default:
                parser.error(
                    f"{action.option_strings[0]} is given before {values[0]}: write it after"
                )
        super().__call__(parser, namespace, values, option_string)


class Version(argparse.Action):
    """Prints the version, which is read on demand because that takes long."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Prints the version and exits with 0."""
        import trainer

        parser._print_message(f"lockstep {trainer.__version__}\n", sys.stdout)
        parser.exit()


def _unknown(
    command: str, unknown: Sequence[str], options: Iterable[str], elsewhere: Mapping[str, str]
) -> str:
    """Returns an error message about unknown arguments, with what to write instead."""
    # They may be ["--steps=100"] or ["--steps", "100"]. `elsewhere` has the options of all
    # commands, and one that takes each.
    joined: list[str] = []
    for argument in unknown:
        before = joined[-1] if joined else ""
        if before.startswith("--") and "=" not in before and not argument.startswith("-"):
            joined[-1] += f"={argument}"  # "--steps 100"
        else:
            joined.append(argument)
    text = f"{command} does not take {' '.join(unknown)}."
    # Strict, because the default of 0.6 would take --steps for --set.
    near = [difflib.get_close_matches(each.partition("=")[0], options, 1, 0.85) for each in joined]
    if any(near):
        return f"{text} Did you mean {' and '.join(dict.fromkeys(sum(near, [])))}?"
    takers = [elsewhere.get(each.partition("=")[0]) for each in joined]
    known = dict.fromkeys(map(str, takers)) if all(takers) else {}
    there = f" It is an option of {' and '.join(known)}." if known else ""
    if "--set" in options and all("=" in each for each in joined):
        settings = " ".join(f"--set {quote(each.lstrip('-'))}" for each in joined)
        return f"{text}{there} To set a value of the config, write {settings}"
    if "--set" in options and not joined[0].startswith("-"):
        text += " A config is named by --config=FILE, and a setting is one word: --set steps=100."
    return f"{text}{there}"
