"""The options of the command line. Imports nothing that takes long, so that --help is fast."""

import argparse

from trainer.cli import report_options, run_options, sweep_options, values, viewing_options
from trainer.parser import Parser


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m trainer`; its commands are functions in commands.py."""
    parser = Parser(
        prog="python -m trainer",
        description="Trains the model that a config file describes. The default command is train.",
        epilog="Exit codes: 0 done; 1 a failed run, or one whose metrics.jsonl lost rows; 2 a "
        "mistake in the config or the command line; 75 stopped by a signal after a saved "
        "checkpoint: start the same command again.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    config = _config()
    _train(commands.add_parser("train", parents=[config], help="train (the default)"))
    resolved = commands.add_parser(
        "config", parents=[config], help="print the resolved config as YAML"
    )
    instead = resolved.add_mutually_exclusive_group()
    instead.add_argument(
        "--full",
        action="store_true",
        help="with every argument of every call, the defaults too, as in config_full.yaml of a run",
    )
    instead.add_argument(
        "--unused",
        action="store_true",
        help="list instead the Gin bindings that change nothing, each with its place: those that"
        " others override, and those of included files for functions that are never called",
    )
    explain = commands.add_parser(
        "explain", parents=[config], help="print what the config means for every parameter"
    )
    viewing_options.add_figure(explain, "also draw the schedules into a file")
    explain.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step, which is not run, and print the time and the memory it takes",
    )
    viewing_options.add_plot(
        commands.add_parser("plot", help="draw a metric of runs, or of a sweep")
    )
    report_options.add(
        commands.add_parser("report", help="compare the arms of sweeps, or runs, on one page")
    )
    compare = commands.add_parser("compare", help="show how two configs or runs differ")
    viewing_options.add_compare(compare)
    _search_paths(compare)
    _vocabulary(compare)
    work = sweep_options.add(
        commands.add_parser(
            "sweep", parents=[_config(required=False)], help="compute many runs from one file"
        ),
        config,
    )
    _vocabulary(work)
    _verify(
        commands.add_parser(
            "verify",
            parents=[config],
            help="check that a killed and resumed run has the same bits",
        )
    )
    _replay(
        commands.add_parser(
            "replay", help="repeat one step and name the first operation whose result is not finite"
        )
    )
    export = run_options.add_checkpoint(
        commands.add_parser("checkpoint", help="list, check, compare or export checkpoints")
    )
    _vocabulary(export)
    schema = commands.add_parser(
        "schema", help="print a JSON schema of YAML configs, for editors that check and complete"
    )
    schema.add_argument(
        "--custom_tags",
        action="store_true",
        help="print instead the tags that a config may have, for yaml.customTags of the editor",
    )
    _vocabulary(schema)
    sample = commands.add_parser("sample", help="continue a text with the model of a run")
    run_options.add_sample(sample)
    _vocabulary(sample)
    return parser


def _config(required: bool = True) -> Parser:
    config = Parser(add_help=False)
    config.add_argument(
        "--config",
        "--gin_file",
        dest="files",
        action="append",
        metavar="FILE",
        required=required,
        default=[],
        help="a .gin or .yaml file; may be given several times, later files override",
    )
    _search_paths(config)
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
    _vocabulary(config)
    return config


def _search_paths(parser: argparse.ArgumentParser) -> None:
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


def _vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vocabulary",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package of yours whose functions the config may name",
    )


def _train(train: argparse.ArgumentParser) -> None:
    sweep_options.add_watched(train)
    train.add_argument(
        "--workdir",
        type=values.folder,
        help="the run's folder; default runs/<config>-<hash of the config>. "
        "If it has a run, the run resumes from its newest checkpoint",
    )
    train.add_argument(
        "--allow_changed",
        action="append",
        default=[],
        metavar="NAME",
        help="resume in a workdir although this differs, such as steps or data",
    )
    train.add_argument(
        "--take_over",
        action="store_true",
        help="take the workdir from a process whose host has failed",
    )
    train.add_argument(
        "--distributed",
        action="store_true",
        help="this process is one of several of the run, each of which is started by this command",
    )
    train.add_argument(
        "--join_timeout",
        type=values.positive,
        metavar="SECONDS",
        help="with --distributed: how long to wait for all processes to start; default 120",
    )
    train.add_argument(
        "--peer_timeout",
        type=values.positive,
        metavar="SECONDS",
        help="with --distributed: end if another process has sent no heartbeat for this long; "
        "default 60",
    )
    train.add_argument(
        "--until",
        type=values.positive,
        metavar="STEP",
        help="stop after this step as a signal would, and exit 75",
    )
    train.add_argument(
        "--profile",
        type=values.profiled,
        metavar="STEPS",
        help="write a profile of jax to WORKDIR/profile, and print the ten costliest operations: of"
        " so many steps after the first ten, as in 20, or of the first to the last, as in 100-120;"
        " it has the whole blocks of these steps",
    )
    train.add_argument(
        "--trace",
        action="store_true",
        help="compute one step at a time, and write the hashes of every batch and of every leaf to "
        "trace.jsonl",
    )
    # For verify: the same with blocks of steps, with the leaves at their ends.
    train.add_argument("--trace_blocks", action="store_true", help=argparse.SUPPRESS)
    train.add_argument(  # for verify: the process kills itself in the steps after a checkpoint
        "--kill_after", type=values.positive, help=argparse.SUPPRESS
    )


def _verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument(
        "--steps",
        type=values.positive,
        metavar="K",
        help="compare 2K single steps with K in blocks, a kill, and K more; default 10, or the "
        "steps of a block if these are more",
    )
    verify.add_argument(
        "--workdir",
        type=values.folder,
        help="where the two runs are kept; default a folder that is removed",
    )


def _replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("workdir", type=values.folder, metavar="WORKDIR", help="a run's folder")
    replay.add_argument(
        "--step",
        type=values.positive,
        metavar="N",
        help="counted from 1; default the last one in WORKDIR/nonfinite.json",
    )
    _vocabulary(replay)
