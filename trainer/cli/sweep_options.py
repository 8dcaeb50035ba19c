"""The options of the command sweep and of its actions."""

import argparse

from trainer.cli import values
from trainer.parser import Actions, Parser


def add(sweep: argparse.ArgumentParser, config: Parser) -> argparse.ArgumentParser:
    """Adds the options and actions of `sweep`; returns the parser of `work`, without --vocabulary.

    `config` has the options of a config, for actions that take one.
    """
    instead = sweep.add_mutually_exclusive_group()
    instead.add_argument(
        "--check",
        action="store_true",
        help="check the file, the config of each arm and the values of its space in seconds, and"
        " start nothing",
    )
    instead.add_argument(
        "--dry_run",
        action="store_true",
        help="print the arms, the programs, the cost and the first runs, and start nothing;"
        " compiles and times each program, which may take minutes",
    )
    sweep.add_argument(
        "--workdir",
        type=values.folder,
        help="the folder of the sweep; default sweeps/<file>-<hash of the plan>. If it has the same"
        " sweep, what is missing is computed",
    )
    sweep.add_argument(
        "--pilot",
        type=values.folder,
        metavar="SWEEP",
        help="a finished sweep with several searches and the same goal: the plan then says in units"
        " of the metric which difference it finds",
    )
    _workers(sweep)
    _locks(sweep)
    _allow_changed(sweep)
    _launcher(sweep)
    # This command starts itself with --plan_only, to plan a sweep in a process of its own.
    sweep.add_argument("--plan_only", action="store_true", help=argparse.SUPPRESS)
    add_watched(sweep)
    actions = sweep.add_subparsers(dest="action", metavar="action", action=Actions)
    work = actions.add_parser("work", help="compute trials of a sweep that was begun")
    work.add_argument("folder", type=values.folder, metavar="DIR", help="the folder of the sweep")
    _workers(work)
    _locks(work)
    _allow_changed(work)
    add_watched(work)  # for the workers of one command, which shows how far they are
    extend = actions.add_parser(
        "extend", parents=[config], help="add trials, seeds, arms or a wider space to a sweep"
    )
    extend.add_argument("folder", type=values.folder, metavar="DIR", help="the folder of the sweep")
    _locks(extend)
    _allow_changed(extend)
    extend.add_argument("--dry_run", action="store_true", help="print it, and write nothing")
    status = actions.add_parser("status", help="print what a sweep has computed")
    status.add_argument("folder", type=values.folder, metavar="DIR", help="the folder of the sweep")
    trial = actions.add_parser("show", help="print the config and the result of a trial")
    trial.add_argument("folder", type=values.folder, metavar="DIR", help="the folder of the sweep")
    trial.add_argument(
        "trial", metavar="TRIAL", help="ARM/NUMBER, ARM/NUMBER/SEED, final/ARM or final/ARM/SEED"
    )
    check = actions.add_parser(
        "check",
        help="name the files of a sweep that disagree with its ledger or with each other; the exit"
        " code is 2 if there are any",
    )
    check.add_argument("folder", type=values.folder, metavar="DIR", help="the folder of the sweep")
    return work


def _workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=values.workers,
        default=1,
        metavar="N",
        help="how many processes share the trials; default 1",
    )


def _locks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--locks",
        choices=("flock", "heartbeat"),
        default="flock",
        help="what keeps two processes from the same trials: locks of the file system (flock, the"
        " default), or files in which each process counts up (heartbeat), where these locks are"
        " missing or seen by one machine only; the same for all workers of a sweep",
    )


def _allow_changed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow_changed",
        action="append",
        choices=("code",),
        default=[],
        help="go on although files of the --vocabulary packages differ from those with which the"
        " sweep ran before; its ledger and its report then say which trials ran after the change",
    )


def _launcher(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="start the workers on this machine (the default), or submit them to Slurm",
    )
    sweep.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --launcher=slurm: a long option of sbatch, such as partition=gpu, or"
        " warning=SECONDS, the time before the time limit at which workers save and stop; default"
        " 120. May be given several times",
    )
    sweep.add_argument(
        "--slurm_file",
        metavar="FILE",
        help="with --launcher=slurm: a YAML file of such settings, which --slurm overrides, and of"
        " setup, lines of bash that run before each worker",
    )


def add_watched(parser: argparse.ArgumentParser) -> None:
    """Adds --watched: the process ends, after a checkpoint, when the one that started it has ended.

    The process that starts it must give it a pipe as its standard input.
    """
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
