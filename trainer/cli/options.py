"""The options of the command line. It imports nothing that takes long, so that --help is fast."""

import argparse

from trainer.cli import study_options, values
from trainer.cli.config_options import accept_vocabulary, config_parser, search_paths, vocabulary
from trainer.parser import Actions, Parser
from trainer.report import FORMATS


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m trainer`; its commands are functions in commands.py."""
    parser = Parser(
        prog="python -m trainer",
        description="Trains the model that a config file describes. The default command is train.",
        epilog="Exit codes: 0 done; 1 a failed run or disk, or a metrics.jsonl that lost rows; 2 a "
        "mistake in the config or the command line; 75 stopped by a signal after a saved "
        "checkpoint: start the same command again.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    config = config_parser()
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
    _explain(
        commands.add_parser(
            "explain", parents=[config], help="print what the config means for every parameter"
        )
    )
    _plot(commands.add_parser("plot", help="draw a metric of runs, or of a sweep"))
    _report(commands.add_parser("report", help="compare the arms of sweeps, or runs, on one page"))
    study_options.add(commands, config)
    compare = commands.add_parser("compare", help="show how two configs or runs differ")
    _compare(compare)
    search_paths(compare)
    vocabulary(compare)
    _sweep(
        commands.add_parser("sweep", parents=[config], help="compute many runs from one file"),
        config,
    )
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
    _checkpoint(
        commands.add_parser("checkpoint", help="list, check, compare or export checkpoints")
    )
    schema = commands.add_parser("schema", help="print a JSON schema of YAML configs, for editors")
    schema.add_argument(
        "--custom_tags",
        action="store_true",
        help="print instead the tags that a config may have, for yaml.customTags of the editor",
    )
    vocabulary(schema)
    _optimizers(
        commands.add_parser(
            "optimizers", help="list what a config can name as an optimizer, or describe one"
        )
    )
    _sample(commands.add_parser("sample", help="continue a text with the model of a run"))
    accept_vocabulary(parser)
    return parser


def _train(train: argparse.ArgumentParser) -> None:
    _watched(train)
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
    # For verify: as --trace, but with blocks of steps, and the leaves at the end of each.
    train.add_argument("--trace_blocks", action="store_true", help=argparse.SUPPRESS)
    train.add_argument(  # for verify: the process kills itself in the steps after a checkpoint
        "--kill_after", type=values.positive, help=argparse.SUPPRESS
    )


def _explain(explain: argparse.ArgumentParser) -> None:
    """Adds the options of `explain`."""
    _figure(explain, "also draw the schedules into a file")
    explain.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step, which is not run, and print the time and the memory it takes;"
        " with several devices, also what they send each other",
    )
    explain.add_argument(
        "--devices",
        type=values.devices,
        metavar="N",
        help="plan the run for N devices that are not here, and print what each of them holds",
    )
    explain.add_argument(
        "--device_memory",
        type=values.memory,
        metavar="SIZE",
        help="with --devices: the memory of each, such as 80GB or 79.6GiB; a plan whose state and"
        " batch are larger is refused",
    )
    explain.add_argument(
        "--devices_figure",
        metavar="FILE",
        help="with --devices: draw which parameter lies where: .png, .pdf or .svg, by its suffix",
    )
    explain.add_argument("--explanation", metavar="FILE", help=argparse.SUPPRESS)
    _watched(explain)


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
    vocabulary(replay)


def _checkpoint(checkpoint: argparse.ArgumentParser) -> None:
    actions = checkpoint.add_subparsers(dest="action", metavar="action", required=True)
    listing = actions.add_parser("ls", help="list the checkpoints of a run")
    check = actions.add_parser("check", help="read every leaf and compare its checksum")
    check.add_argument(
        "--step", type=values.step, metavar="N", help="only the checkpoint of this step"
    )
    diff = actions.add_parser("diff", help="name the leaves in which two checkpoints differ")
    export = actions.add_parser("export", help="write parameters as a safetensors file")
    for action in (listing, check, diff, export):
        action.add_argument("workdir", type=values.folder, metavar="WORKDIR", help="a run's folder")
    diff.add_argument(
        "other", nargs="?", type=values.folder, metavar="OTHER", help="default the same WORKDIR"
    )
    diff.add_argument(
        "--step", type=values.step, metavar="N", help="in WORKDIR; default the newest"
    )
    diff.add_argument(
        "--other_step",
        type=values.step,
        metavar="N",
        help="in OTHER; default the newest there, or in WORKDIR the one before",
    )
    export.add_argument("file", metavar="FILE.safetensors", help="the config becomes FILE.yaml")
    _step(export)
    export.add_argument(
        "--raw",
        action="store_true",
        help="the parameters that are trained, and not their averages, which are evaluated",
    )
    export.add_argument("--force", action="store_true", help="replace files that exist")
    vocabulary(export)


def _optimizers(optimizers: argparse.ArgumentParser) -> None:
    """Adds the options of `optimizers`."""
    optimizers.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="such as optim.muon, muon or parts.floor: print its update rule, arguments, memory and"
        " FLOPs, paper, a config to paste and a search space; default the list of all",
    )
    vocabulary(optimizers)


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step",
        type=values.checkpoint_step,
        default="latest",
        metavar="best|latest|N",
        help="which checkpoint; best by the best_metric of the config; default latest",
    )


def _sample(sample: argparse.ArgumentParser) -> None:
    """Adds the options of `sample`."""
    sample.add_argument("workdir", type=values.folder, metavar="RUN", help="a run's folder")
    text = sample.add_mutually_exclusive_group()
    text.add_argument(
        "--prompt",
        default="",
        help="the beginning of the text; - reads it from stdin, without one newline at its end; "
        "default ''",
    )
    text.add_argument(
        "--prompt_file",
        metavar="FILE",
        help="reads the prompt from a file in UTF-8, without one newline at its end",
    )
    sample.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="the most tokens to add; a text may end before; default 200, or as many as fit"
        " the model and the sequences that it was trained on",
    )
    sample.add_argument(
        "--temperature",
        type=values.number,
        default=0.8,
        metavar="T",
        help="divides the logits; 0 takes the most probable token; default 0.8",
    )
    sample.add_argument(
        "--top_k", type=int, metavar="K", help="draw from the K most probable tokens; default all"
    )
    sample.add_argument("--seed", type=values.seed, default=0, metavar="N", help="default 0")
    sample.add_argument(
        "--num_samples",
        type=values.positive,
        default=1,
        metavar="N",
        help="how many texts; default 1",
    )
    _step(sample)
    vocabulary(sample)


def _report(report: argparse.ArgumentParser) -> None:
    """Adds the options of `report`."""
    report.add_argument(
        "folders",
        nargs="+",
        type=values.folder,
        metavar="FOLDER",
        help="sweeps, each of which is a workload; or runs or folders with runs, of which those"
        " whose configs differ in their seeds only are one arm",
    )
    report.add_argument(
        "--output",
        type=values.folder,
        metavar="DIR",
        help="the folder of the report; default SWEEP/report for one sweep, or else report",
    )
    report.add_argument(
        "--formats",
        type=values.report_formats,
        metavar="NAME,...",
        help=f"which files are written: {', '.join(FORMATS)}; default all",
    )
    report.add_argument(
        "--target",
        type=values.number,
        metavar="VALUE",
        help="a value of the metric: how many steps and how much time runs need to reach it;"
        " default that of the sweep's file",
    )
    report.add_argument(
        "--metric",
        metavar="NAME",
        help="what is compared: of single runs, default loss; of sweeps, a second outcome beside"
        " that of the goal, by which winners were selected",
    )
    report.add_argument(
        "--mode",
        choices=("min", "max"),
        help="whether small or large values of --metric are better; not needed for loss",
    )


def _figure(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds the option --figure to a parser; `purpose` is a part of its help."""
    parser.add_argument(
        "--figure", "--png", metavar="FILE", help=f"{purpose}: .png, .pdf or .svg, by its suffix"
    )


def _plot(plot: argparse.ArgumentParser) -> None:
    """Adds the options of `plot`."""
    plot.add_argument(
        "workdirs",
        nargs="+",
        type=values.folder,
        metavar="WORKDIR",
        help="a run, a folder with runs, or a sweep, of which the best trial of each arm is drawn",
    )
    plot.add_argument("--metric", default="train/loss", help="default train/loss")
    plot.add_argument(
        "--x",
        default="step",
        metavar="NAME",
        help="what the x axis shows: step (the default), epochs, examples, tokens, perf/seconds, or"
        " another name in metrics.jsonl",
    )
    plot.add_argument("--log_x", action="store_true", help="draw a logarithmic x axis")
    plot.add_argument("--log_y", action="store_true", help="draw a logarithmic y axis")
    plot.add_argument(
        "--smoothing",
        type=values.weight,
        default=0.0,
        metavar="W",
        help="smooth each run by a debiased exponential mean with this weight, from 0 to below 1;"
        " a file also shows the values as they are, faint",
    )
    plot.add_argument(
        "--each_run",
        action="store_true",
        help="draw each run; by default runs of one config that differ in their seeds only are"
        " drawn as their mean, with a band in files (the 95%% t interval of the mean, or from the"
        " smallest to the largest of two)",
    )
    _figure(plot, "draw into a file instead of the terminal")


def _compare(compare: argparse.ArgumentParser) -> None:
    """Adds the options of `compare`."""
    for name in ("A", "B"):
        compare.add_argument(
            name.lower(),
            type=values.folder,
            metavar=name,
            help="a config file, or the folder of a run or of a trial",
        )
    compare.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="draw this metric of two runs; may be given several times; by default one or two that"
        " both have",
    )
    compare.add_argument(
        "--no_program", action="store_true", help="do not build and compare the programs"
    )
    compare.add_argument(
        "--lines",
        type=values.positive,
        default=40,
        metavar="N",
        help="show at most N lines of the difference of the programs; default 40",
    )
    compare.add_argument(
        "--diff", metavar="FILE", help="write the whole difference of the programs into a file"
    )


def _sweep(sweep: argparse.ArgumentParser, config: Parser) -> None:
    """Adds the options and actions of `sweep`; `config` has the options of a config."""
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
    # This command also starts itself with --plan_only, to plan a sweep in a process of its own.
    instead.add_argument(
        "--plan_only",
        action="store_true",
        help="write the plan into the folder of the sweep, and start nothing: any number of"
        " `sweep work DIR` compute it",
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
    _watched(sweep)
    actions = sweep.add_subparsers(dest="action", metavar="action", action=Actions)
    work = actions.add_parser("work", help="compute trials of a sweep that was begun")
    _of_sweep(work)
    _workers(work)
    _locks(work)
    _allow_changed(work)
    work.add_argument(
        "--failed",
        action="store_true",
        help="first remove the results of runs that failed, so that they are computed again;"
        " after trials of the search, the winners are chosen again",
    )
    _watched(work)  # for the workers of one command, which shows how far they are
    vocabulary(work)
    extend = actions.add_parser(
        "extend", parents=[config], help="add trials, seeds, arms or a wider space to a sweep"
    )
    _of_sweep(extend)
    _locks(extend)
    _allow_changed(extend)
    extend.add_argument("--dry_run", action="store_true", help="print it, and write nothing")
    status = actions.add_parser("status", help="print what a sweep has computed")
    _of_sweep(status)
    trial = actions.add_parser("show", help="print the config and the result of a trial")
    _of_sweep(trial)
    trial.add_argument(
        "trial", metavar="TRIAL", help="ARM/NUMBER, ARM/NUMBER/SEED, final/ARM or final/ARM/SEED"
    )
    check = actions.add_parser(
        "check",
        help="name the files of a sweep that disagree with its ledger or with each other; the exit"
        " code is 2 if there are any",
    )
    _of_sweep(check)


def _of_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=values.folder, metavar="DIR", help="the folder of the sweep")


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
        choices=("local", "slurm", "ray"),
        default="local",
        help="start the workers on this machine (the default), submit them to Slurm, or run each in"
        " a task of a Ray cluster",
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
    sweep.add_argument(
        "--ray",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --launcher=ray: what each worker is given, such as num_gpus=1, num_cpus=8,"
        " memory=16G, resources.NAME=1 or a variable of its environment, env.NAME=VALUE; or"
        " address=HOST:PORT, the cluster, default that of RAY_ADDRESS, or the one of which this"
        " machine is a node. May be given several times",
    )
    sweep.add_argument(
        "--ray_file",
        metavar="FILE",
        help="with --launcher=ray: a YAML file of such settings, which --ray overrides",
    )


def _watched(parser: argparse.ArgumentParser) -> None:
    """Adds --watched: the process saves and ends when the one that started it has ended."""
    # The process that starts it must give it a pipe as its standard input.
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
