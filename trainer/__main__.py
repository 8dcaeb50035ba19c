"""The command line: python -m trainer [COMMAND] ...; see options for what it takes."""

import argparse
import sys
from collections.abc import Sequence

from trainer import options
from trainer.streams import Console, show

# Nothing is imported here that takes long: `--help` and a misspelt option answer at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code.

    Args:
        argv: the arguments; None for the process's own.

    Returns:
        0 done, 1 a failed run, 2 a user's mistake, 75 stopped by a signal after a checkpoint.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "train")
    with Console() as console:
        arguments = options.parser().parse_args(given)
        code = _run(arguments)
    if console.error and code == 0 and arguments.command != "train":  # it was to print something
        show(f"error: what was printed is not whole: {console.error.strerror}.", sys.stderr)
        return 1
    return code


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command != "train":
        return _call(arguments)
    from trainer.signals import StopSignals

    with StopSignals() as arguments.signals:  # before anything that takes long
        return _call(arguments)


def _call(arguments: argparse.Namespace) -> int:
    from trainer import commands
    from trainer.config import ConfigError

    try:
        return getattr(commands, arguments.command)(arguments)
    except ConfigError as error:
        show(f"error: {error}", sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
