"""The command line: python -m trainer [train|config|explain|plot] --gin_file=FILE ..."""

import argparse
import os
import sys
from collections.abc import Sequence

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
    arguments = _parser().parse_args(given)
    from trainer import commands
    from trainer.config import ConfigError

    try:
        return getattr(commands, arguments.command)(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `... explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Trains what a config file describes. Without a command: train.",
        epilog="Exit codes: 0 done; 1 a failed run; 2 a mistake in the config or the command line; "
        "75 stopped by a signal after a saved checkpoint: start the same command again.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    config = argparse.ArgumentParser(add_help=False)
    config.add_argument(
        "--gin_file",
        "--config",
        dest="files",
        action="append",
        metavar="FILE",
        required=True,
        help="a .gin or .yaml file; may be given several times, later files override",
    )
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
    config.add_argument(
        "--vocabulary",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package of yours whose functions the config may name",
    )
    train = commands.add_parser("train", parents=[config], help="train (the default)")
    train.add_argument(
        "--workdir",
        help="the run's folder; default runs/<config>-<hash of the config>. "
        "A run found there goes on from its newest checkpoint",
    )
    train.add_argument(
        "--allow_changed",
        action="append",
        default=[],
        metavar="NAME",
        help="go on in a workdir although this differs, such as steps or data",
    )
    train.add_argument(
        "--take_over",
        action="store_true",
        help="take the workdir from a process on a host that cannot be asked any more",
    )
    commands.add_parser("config", parents=[config], help="print the resolved config as YAML")
    explain = commands.add_parser(
        "explain", parents=[config], help="print what the config means for every parameter"
    )
    explain.add_argument("--png", metavar="FILE", help="also draw the schedules into a PNG")
    plot = commands.add_parser("plot", help="draw a metric of one run or several")
    plot.add_argument("workdirs", nargs="+", metavar="WORKDIR")
    plot.add_argument("--metric", default="train/loss", help="default train/loss")
    plot.add_argument("--png", metavar="FILE", help="draw into a PNG instead of the terminal")
    return parser


if __name__ == "__main__":
    sys.exit(main())
