"""What the parser of the command line has beside options. Imports nothing that takes long."""

import argparse
import sys
from typing import Any, NoReturn


class Actions(argparse._SubParsersAction):
    """Commands below a command that has options of its own, which must not be given with one.

    argparse would take the options before the action, and then replace their values by defaults.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
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
