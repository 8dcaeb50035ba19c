"""The options of the command line. It imports nothing that takes long, so that --help is fast.

Commands are paragraphs of a text, whose first row has the name and the help; "checkpoint ls" is the
action `ls` of `checkpoint`. An option is a row: its name, what stands for its value, and, after two
spaces, its help:

    --trace  compute one step at a time, and write the hashes of every batch and of every leaf to
        trace.jsonl
    --seed N:seed = 0  default 0
    --set PATH=VALUE ... = [] as sets  edits one leaf of the resolved config

The first takes no value. That of the second is converted by `values.seed`, and is 0 if none is
given. The third may be given several times, and a command finds it as `arguments.sets`. Choices
stand as `{a,b}` in place of a value; `required` is an option that must be given, and one without
help is for processes of ours. A name without "--" is an argument, which takes `?` if it may be
left out, and `+` if there may be several. Options behind "| " exclude each other. @config and
@vocabulary stand for the options of a config and for --vocabulary; a command with @actions has
those of the paragraphs below.
"""

import argparse
import ast
import os
import re
from typing import Any

from trainer.cli import values
from trainer.parser import Actions, Parser
from trainer.report import FORMATS


def parser() -> Parser:
    """Returns the parser of `python -m trainer`; its commands are functions in commands.py."""
    parser = Parser(
        prog="python -m trainer",
        description="Trains the model that a config file describes. The default command is train.",
        epilog="Exit codes: 0 done; 1 a failed run or disk, or a metrics.jsonl that lost rows; 2 a "
        "mistake in the config or the command line; 75 stopped by a signal after a saved "
        "checkpoint: start the same command again.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    actions: dict[str, argparse._SubParsersAction] = {}  # by the command that they are below
    config = config_parser()
    for text in _COMMANDS.strip().split("\n\n"):
        first, *rows = _rows(text)
        name, said = re.split(r"\s\s+", first, maxsplit=1)
        above, _, name = name.rpartition(" ")
        parents = [config] if "@config" in rows else []
        own = [row for row in rows if row not in ("@config", "@actions")]
        among = actions[above] if above else commands
        added = among.add_parser(name, parents=parents, help=" ".join(said.split()))
        _add(added, own)
        if "@actions" in rows:
            # A command with options of its own does something without an action, too.
            kind: dict[str, Any] = {"action": Actions} if own else {"required": True}
            actions[name] = added.add_subparsers(dest="action", metavar="action", **kind)
    _accept_vocabulary(parser)
    return parser


def config_parser() -> Parser:
    """Returns the options of a config, as the parent of a command's parser."""
    config = Parser(add_help=False)
    _add(config, _rows(_CONFIG))
    return config


_ROW = re.compile(
    r"([\w-]+(?:, [\w-]+)*)"  # the names
    r"(?: ([^\s:]+)(?::(\w+))?)?"  # what stands for the value, and how it is converted
    r"(?: (\.\.\.|[?+]))?"  # how often
    r"(?: = (\S+))?(?: as (\w+))?( required)?"
    r"(?:\s\s+(.+))?",  # the help
    re.DOTALL,
)
_TYPES = {"int": int, **vars(values)}


def _rows(text: str) -> list[str]:
    """Returns the rows of a text: each begins at its line's first column, and may have several."""
    return re.findall(r"^[^\s#].*(?:\n +.*)*", text, re.MULTILINE)


def _add(parser: Parser, rows: list[str]) -> None:
    """Adds the options in rows to a parser."""
    group = None
    for row in rows:
        if row == "@vocabulary":
            parser.add_argument(
                "--vocabulary",
                action="extend",
                type=values.names,
                default=values.names(os.environ.get("LOCKSTEP_VOCABULARY", "")),
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
            "type": _TYPES[kind] if kind else None,
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


# Rows of several commands.

# The process saves and ends with the one that started it, which gives it a pipe as standard input.
_WATCHED = "--watched"
_FOLDER = "folder DIR:folder  the folder of the sweep"
_RUN = "workdir WORKDIR:folder  a run's folder"
_WORKERS = "--workers N:workers = 1  how many processes share the trials; default 1"
_SEARCH_PATHS = """\
--gin_search_paths FOLDER,...:folders ... = [] as search_paths  folders where a config and what it
    includes are looked for, after the folder of the including file and the current one; may be
    given several times"""
_CONFIG = f"""\
--config, --gin_file FILE ... = [] as files  a .gin or .yaml file; may be given several times, later
    files override
{_SEARCH_PATHS}
--gin_bindings, --gin_binding BINDING ... = [] as bindings  Gin statements that override the files,
    such as 'optax.adamw.b2 = 0.95'
--set PATH=VALUE ... = [] as sets  edits one leaf of the resolved config, such as steps=100
@vocabulary
"""
_ON = """\
--on {digits,text} = "text"  a perceptron on the digits, or a small GPT on the works of Shakespeare;
    default text"""
_STEP = """\
--step best|latest|N:checkpoint_step = "latest"  which checkpoint; best by the best_metric of the
    config; default latest"""
_LOCKS = """\
--locks {flock,heartbeat} = "flock"  what keeps two processes from the same trials: locks of the
    file system (flock, the default), or files in which each process counts up (heartbeat), where
    these locks are missing or seen by one machine only; the same for all workers of a sweep
--allow_changed {code,data} ... = []  go on although files of the --vocabulary packages, or the
    data, differ from those with which the sweep ran before; its ledger and its report then say
    which trials ran after the change"""
_REPORT_FILES = f"""\
--output DIR:folder  write a page, tables and pictures into this folder; default none
--formats NAME,...:report_formats  with --output: which files are written: {", ".join(FORMATS)};
    default html,markdown"""

_COMMANDS = f"""\
# With --trace_blocks, for verify, the blocks have several steps, and the leaves are hashed at the
# end of each; with --kill_after the process kills itself in the steps after a checkpoint.
train  train (the default)
@config
--workdir WORKDIR:folder  the run's folder; default runs/<config>-<hash of the config>. If it has a
    run, the run resumes from its newest checkpoint
--allow_changed NAME ... = []  resume in a workdir although this differs, such as steps or data
--take_over  take the workdir from a process whose host has failed
--distributed  this process is one of several of the run, each of which is started by this command
--join_timeout SECONDS:positive  with --distributed: how long to wait for all processes to start;
    default 120
--peer_timeout SECONDS:positive  with --distributed: end if another process has sent no heartbeat
    for this long; default 60
--until STEP:positive  stop after this step as a signal would, and exit 75
--profile STEPS:profiled  write a profile of jax to WORKDIR/profile, and print the ten costliest
    operations: of so many steps after the first ten, as in 20, or of the first to the last, as in
    100-120; it has the whole blocks of these steps
--trace  compute one step at a time, and write the hashes of every batch and of every leaf to
    trace.jsonl
--trace_blocks
--kill_after STEP:positive
{_WATCHED}

config  print the resolved config as YAML
@config
| --full  with every argument of every call, the defaults too, as in config_full.yaml of a run
| --unused  list instead the Gin bindings that change nothing, each with its place: those that
    others override, and those of included files for functions that are never called

explain  print what the config means for every parameter
@config
--figure, --png FILE  also draw the schedules into a file: .png, .pdf or .svg, by its suffix
--compile  also compile the step, which is not run, and print the time and the memory it takes; with
    several devices, also what they send each other
--devices N:devices  plan the run for N devices that are not here, and print what each of them holds
--device_memory SIZE:memory  with --devices: the memory of each, such as 80GB or 79.6GiB; a plan
    whose state and batch are larger is refused
--target TARGET:target  plan the run for GPUs or TPUs that are not here, such as h100:8 or v5e:4x4;
    --compile then compiles the step by their compiler, and ends with 2 if it does not fit into
    their memory; list prints all targets
--devices_figure FILE  with --devices or --target: draw which parameter lies where: .png, .pdf or
    .svg, by its suffix
--explanation FILE
{_WATCHED}

plot  draw a metric of runs, or of a sweep
workdirs WORKDIR:folder +  a run, a folder with runs, or a sweep, of which the best trial of each
    arm is drawn
--metric METRIC = "train/loss"  default train/loss
--x NAME = "step"  what the x axis shows: step (the default), epochs, examples, tokens,
    perf/seconds, or another name in metrics.jsonl
--log_x  draw a logarithmic x axis
--log_y  draw a logarithmic y axis
--smoothing W:weight = 0.0  smooth each run by a debiased exponential mean with this weight, from 0
    to below 1; a file also shows the values as they are, faint
--each_run  draw each run; by default runs of one config that differ in their seeds only are drawn
    as their mean, with a band in files (the 95%% t interval of the mean, or from the smallest to
    the largest of two)
--figure, --png FILE  draw into a file instead of the terminal: .png, .pdf or .svg, by its suffix

report  compare the arms of sweeps, or runs, on one page
folders FOLDER:folder +  sweeps, each of which is a workload; or runs or folders with runs, of which
    those whose configs differ in their seeds only are one arm
--output DIR:folder  the folder of the report; default SWEEP/report for one sweep, or else report
--formats NAME,...:report_formats  which files are written: {", ".join(FORMATS)}; default
    html,markdown
--target VALUE:number  a value of the metric: how many steps and how much time runs need to reach
    it; default that of the sweep's file
--metric NAME  what is compared: of single runs, default loss; of sweeps, a second outcome beside
    that of the goal, by which winners were selected
--mode {{min,max}}  whether small or large values of --metric are better; not needed for loss

challenge  check entries of a race to a target
@actions

challenge check  compute the verdict of an entry from its runs
entry ENTRY  the folder CHALLENGE/entries/NAME
@vocabulary

challenge table  write the history of all entries as a report
folder CHALLENGE  the folder with challenge.yaml
--output DIR:folder  the folder of the report; default CHALLENGE/report
--formats FORMATS:report_formats  as in report
@vocabulary

challenge sigma  print the sigma of a rule, from 20 runs or more
sweep SWEEP  the folder of a sweep of one configuration

claim  write or check what a finished sweep shows
@actions

claim write  write the verdict of a sweep with its hashes
folder SWEEP  the folder of a sweep that has ended
--output FILE  default SWEEP/claim.json

claim verify  compare it with the sweep, and compute runs again
file FILE  the file of the claim
folder SWEEP  the folder of the sweep
--public TEXT required  a number that nobody knew when the claim was written, such as the lottery
    numbers of a later day; it decides what is drawn
| --segments N:positive  how many segments are computed again, from the states that the sweep kept
    for them; whole runs if it kept none; default 3
| --runs N:positive  how many whole runs are computed again instead
--measured N:positive = 7  on how many more it is measured how far results are apart, where another
    environment has other bits; default 7, at least 3
@vocabulary

coordinate_check  compare changes of activations in the first steps over widths of the model
@config
--widths N,...:integers required  the widths, such as 64,128,256,512
--width_path PATH  where the config has the width; default model.width
--scale PATH=POWER:power ... = []  multiplies another number of the config by (width / the config's
    width)^POWER, as in optimizer.groups.matrices.width_scaling=1 or model.num_heads=1; may be given
    several times; by default all but the width stays
--steps N,...:integers = [1,3,10]  after how many steps activations are measured; default 1,3,10
--seeds N:positive = 3  how many runs at each width: the config's seed and those after it; default 3
--keep_schedules  train by the schedules of the config; by default each schedule of a learning rate
    is replaced by its largest value, as a warm-up would begin with a rate of 0
{_REPORT_FILES}

rate_test  raise a learning rate until training diverges, and suggest a range to search
@config
--group NAME  the group whose rate rises; needed if there are several
--rate_path PATH  the learning rate by its path in the config, of a group with several
--low RATE:number = 1e-6  default 1e-6
--high RATE:number = 10.0  default 10
--steps N:positive = 200  the steps in which the rate rises from low to high; default 200
--seeds N:positive = 3  how many runs: the config's seed and those after it; default 3
{_REPORT_FILES}

shadow  compare what another optimizer would do at each point of a run
@config
--shadow FILE ... = []  the config of the other optimizer, which is the same in model and data; may
    be given several times, later files override; default the files of --config. --set edits both
    configs, but what is below `optimizer` that of --config only
--shadow_set PATH=VALUE ... = [] as shadow_sets  edits the optimizer of the other config, such as
    optimizer.learning_rate=0.1
--steps N:positive  the first steps of the run that are computed; default all
--every K:positive  every K-th step is recorded; default a fiftieth of the steps
{_REPORT_FILES}

compare  show how two configs or runs differ
a A:folder  a config file, or the folder of a run or of a trial
b B:folder  a config file, or the folder of a run or of a trial
--metric NAME ...  draw this metric of two runs; may be given several times; by default one or two
    that both have
--no_program  do not build and compare the programs
--lines N:positive = 40  show at most N lines of the difference of the programs; default 40
--diff FILE  write the whole difference of the programs into a file
{_SEARCH_PATHS}
@vocabulary

# The command also starts itself with --plan_only, to plan a sweep in a process of its own, and with
# --timed, if it then computes on the same machine.
sweep  compute many runs from one file
@config
@actions
| --check  check the file, the config of each arm and the values of its space in seconds, and start
    nothing
| --dry_run  print the arms, the programs, the cost and the first runs, and start nothing; compiles
    and times each program, which may take minutes
| --plan_only  write the plan into the folder of the sweep, and start nothing: any number of `sweep
    work DIR` compute it
--workdir WORKDIR:folder  the folder of the sweep; default sweeps/<file>-<hash of the plan>. If it
    has the same sweep, what is missing is computed
--pilot SWEEP:folder  a finished sweep with several searches and the same goal: the plan then says
    in units of the metric which difference it finds
--target TARGET:target  with --dry_run: compile the programs for GPUs or TPUs that are not here,
    such as h100 or v5e:4x4 (`explain --target=list` prints all); it says how many trials fit into
    their memory side by side, and ends with 2 if one does not fit
{_WORKERS}
{_LOCKS}
--launcher {{local,slurm,ray}} = "local"  start the workers on this machine (the default), submit
    them to Slurm, or run each in a task of a Ray cluster
--slurm KEY=VALUE ... = []  with --launcher=slurm: a long option of sbatch, such as partition=gpu,
    or warning=SECONDS, the time before the time limit at which workers save and stop; default 120.
    May be given several times
--slurm_file FILE  with --launcher=slurm: a YAML file of such settings, which --slurm overrides, and
    of setup, lines of bash that run before each worker
--ray KEY=VALUE ... = []  with --launcher=ray: what each worker is given, such as num_gpus=1,
    num_cpus=8, memory=16G, resources.NAME=1 or a variable of its environment, env.NAME=VALUE; or
    address=HOST:PORT, the cluster, default that of RAY_ADDRESS, or the one of which this machine is
    a node. May be given several times
--ray_file FILE  with --launcher=ray: a YAML file of such settings, which --ray overrides
{_WATCHED}
--timed

# The workers of one command are watched, which shows how far they are.
sweep work  compute trials of a sweep that was begun
{_FOLDER}
{_WORKERS}
{_LOCKS}
--failed  first remove the results of runs that failed, so that they are computed again; after
    trials of the search, the winners are chosen again
{_WATCHED}
@vocabulary

sweep extend  add trials, seeds, arms or a wider space to a sweep
@config
{_FOLDER}
{_LOCKS}
--dry_run  print it, and write nothing

sweep status  print what a sweep has computed
{_FOLDER}

sweep show  print the config and the result of a trial
{_FOLDER}
trial TRIAL  ARM/NUMBER, ARM/NUMBER/SEED, final/ARM or final/ARM/SEED

sweep check  name the files of a sweep that disagree with its ledger or with each other; the exit
    code is 2 if there are any
{_FOLDER}

verify  check that a killed and resumed run has the same bits
@config
--steps K:positive  compare 2K single steps with K in blocks, a kill, and K more; default 10, or the
    steps of a block if these are more
--workdir WORKDIR:folder  where the two runs are kept; default a folder that is removed

replay  repeat one step and name the first operation whose result is not finite
{_RUN}
--step N:positive  counted from 1; default the last one in WORKDIR/nonfinite.json
@vocabulary

checkpoint  list, check, compare or export checkpoints
@actions

checkpoint ls  list the checkpoints of a run
{_RUN}

checkpoint check  read every leaf and compare its checksum
--step N:step  only the checkpoint of this step
{_RUN}

checkpoint diff  name the leaves in which two checkpoints differ
{_RUN}
other OTHER:folder ?  default the same WORKDIR
--step N:step  in WORKDIR; default the newest
--other_step N:step  in OTHER; default the newest there, or in WORKDIR the one before

checkpoint export  write parameters as a safetensors file
{_RUN}
file FILE.safetensors  the config becomes FILE.yaml
{_STEP}
--raw  the parameters that are trained, and not their averages, which are evaluated
--force  replace files that exist
@vocabulary

schema  print a JSON schema of YAML configs, for editors
--custom_tags  print instead the tags that a config may have, for yaml.customTags of the editor
@vocabulary

optimizers  list what a config can name as an optimizer, or describe one
name NAME ?  such as optim.muon, muon or parts.floor: print its update rule, arguments, memory and
    FLOPs, paper, a config to paste and a search space; default the list of all
@vocabulary

new  write files to begin with, which run as they are
@actions

new comparison  write the files of a comparison of optimizers
folder FOLDER:folder  a new folder for them
--optimizers NAME,...:names  what is compared, as `optimizers` lists them; if it is not given, a
    terminal is asked for this and the next two; default adamw,muon
--searches N:positive  how many independent searches each has; default 8
--trials N:positive  how many trials a search has; default 4
--relevant X:number  the smallest difference of the loss that matters to you
--base FILE  a config of yours, whose optimizer the arms replace; default one that is written too
--group NAME  the group of the base whose optimizer is compared; default its first
{_ON}
@vocabulary

new run  write the config of a run
folder FOLDER:folder  a new folder for it
{_ON}

new optimizer  write a package with an optimizer of yours, and a config that uses it
folder NAME:folder  the name of the package, a new folder of the current one

new model  write a package with a model of yours, and a config that uses it
folder NAME:folder  the name of the package, a new folder of the current one

new data  write a package that reads data of yours, with some data, and a config that uses it
folder NAME:folder  the name of the package, a new folder of the current one
--kind {{table,images}} = "table"  a table in CSV, or images in folders; default table

sample  continue a text with the model of a run
workdir RUN:folder  a run's folder
| --prompt PROMPT = ""  the beginning of the text; - reads it from stdin, without one newline at its
    end; default ''
| --prompt_file FILE  reads the prompt from a file in UTF-8, without one newline at its end
--length N:int  the most tokens to add; a text may end before; default 200, or as many as fit the
    model and the sequences that it was trained on
--temperature T:number = 0.8  divides the logits; 0 takes the most probable token; default 0.8
--top_k K:int  draw from the K most probable tokens; default all
--seed N:seed = 0  default 0
--num_samples N:positive = 1  how many texts; default 1
{_STEP}
@vocabulary
"""
