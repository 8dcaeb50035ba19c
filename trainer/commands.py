"""What each command does: reads the config, builds, and prints or trains."""

import argparse
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer import options
from trainer.config import Config, ConfigError
from trainer.streams import show


def train(arguments: argparse.Namespace) -> int:
    """Trains, from the newest checkpoint where there is one."""
    from trainer import runtime

    began = time.perf_counter()
    read = _read(arguments)
    workdir = arguments.workdir or _default_workdir(arguments.files, read)
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    if arguments.distributed:
        from trainer import processes

        join, peer = arguments.join_timeout or 120, arguments.peer_timeout or 60
        if peer < 5:
            raise ConfigError(f"--peer_timeout must be at least 5 seconds, got {peer}.")
        with processes.joined(join, peer) as leave:
            code = _train(arguments, read, workdir, began)
            leave(code)
            return code
    if arguments.join_timeout or arguments.peer_timeout:
        raise ConfigError("--join_timeout and --peer_timeout are read with --distributed only.")
    return _train(arguments, read, workdir, began)


def _train(arguments: argparse.Namespace, read: Config, workdir: str, began: float) -> int:
    from trainer import processes
    from trainer.run import Run
    from trainer.workdir import code

    def build() -> Run:
        program = _program(read, arguments.vocabulary)
        return Run(read, program, arguments.signals, _say, arguments.vocabulary)

    run = processes.all_or_none(build)
    if arguments.distributed:
        processes.require_same(
            {
                "workdir": str(Path(workdir).absolute()),
                "options": f"--until={arguments.until} --trace={arguments.trace}",
                "config": configs.dump(read.root),
                "code": str(code.hashes(arguments.vocabulary)),
            }
        )
    return run.start(
        workdir,
        allow_changed=arguments.allow_changed,
        take_over=arguments.take_over,
        until=arguments.until,
        observe=_observer(arguments, workdir),
        began=began,
    )


def _observer(arguments: argparse.Namespace, workdir: str):
    """Puts together what is to be shown every step, or None."""
    from trainer.trace import KillAfterCheckpoint, Trace

    shown = []
    if arguments.trace:
        shown.append(Trace(workdir))
    if arguments.kill_after is not None:
        latest = (arguments.until or 2 * arguments.kill_after) - 1
        shown.append(KillAfterCheckpoint(workdir, arguments.kill_after, latest))

    def observe(*step) -> None:
        for one in shown:
            one(*step)

    return observe if shown else None


def verify(arguments: argparse.Namespace) -> int:
    """Proves on a config that a run that was killed comes to the same bits."""
    from trainer.verify import verify

    read = _read(arguments)
    experiment = _program(read, arguments.vocabulary).experiment
    verdict = verify(
        experiment.steps,
        given=_as_given(arguments),
        half=arguments.steps,
        workdir=arguments.workdir,
        say=_say,
    )
    show("\n".join(verdict.lines))
    return 0 if verdict.same else 1


def replay(arguments: argparse.Namespace) -> int:
    """Makes one step of a run again and names the first operation that is not finite."""
    from trainer.replay import replay

    lines, finite = replay(arguments.workdir, arguments.step, arguments.vocabulary)
    show("\n".join(lines))
    return 0 if finite else 1


def checkpoint(arguments: argparse.Namespace) -> int:
    """Lists, checks or compares the checkpoints of a run."""
    from trainer import inspect_checkpoints

    return inspect_checkpoints.run(arguments)


def _as_given(arguments: argparse.Namespace) -> list[str]:
    """Spells the config's options again, for a process of our own."""
    options = {
        "--gin_file": arguments.files,
        "--gin_search_paths": [",".join(folders) for folders in arguments.search_paths],
        "--gin_bindings": arguments.bindings,
        "--set": arguments.sets,
        "--vocabulary": arguments.vocabulary,
    }
    return [f"{name}={value}" for name, values in options.items() for value in values]


def _default_workdir(files: list[str], read: Config) -> str:
    """Names a folder after the config and what is in it, so that another config is another run."""
    if not options.current_folder_exists():
        raise ConfigError(f"Without --workdir the run's folder is made here, and {options.GONE}.")
    return f"runs/{Path(files[0]).stem}-{configs.digest(read.root)[:8]}"


def _say(line: str) -> None:
    show(line, sys.stderr)


def config(arguments: argparse.Namespace) -> int:
    """Prints the resolved config as canonical YAML, once its names and types are checked.

    With --unused, lists instead the bindings that change nothing.
    """
    read = _read(arguments)
    configs.Builder(read, arguments.vocabulary).check()
    if arguments.unused:
        for each in read.unused:
            show(f"{each.source}: {each.binding}. {each.why}")
        if not read.unused:
            show("Every binding is used.")
        return 0
    show(configs.dump(read.root), end="")
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Prints the plan, and draws the schedules."""
    from trainer import plots
    from trainer.plan import make_plan
    from trainer.plan_text import render
    from trainer.warm_start import WarmStart

    read = _read(arguments)
    program = _program(read, arguments.vocabulary)
    plan = make_plan(program, read)
    if program.experiment.warm_start:
        WarmStart(program, read)
    show(render(plan))
    if not plan.schedules:
        show("No group's optimizer takes a learning rate, so there is no schedule to draw.")
        return 0
    show(plots.draw_in_terminal(plan.schedules, "learning rate by step"), end="")
    if arguments.png:
        _save_png(plan.schedules, arguments.png, "Learning rates", "learning rate")
        show(f"The schedules are drawn in {arguments.png}.")
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Draws a metric of one run or several."""
    from trainer import plots

    try:
        curves = {
            name: plots.read_metric(workdir, arguments.metric)
            for name, workdir in plots.names_of(arguments.workdirs).items()
        }
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if arguments.png:
        _save_png(curves, arguments.png, arguments.metric, arguments.metric)
        show(f"{arguments.metric} is drawn in {arguments.png}.")
    else:
        show(plots.draw_in_terminal(curves, f"{arguments.metric} by step"), end="")
    return 0


def _save_png(curves: Mapping[str, Any], file: str, title: str, y_label: str) -> None:
    from trainer import plots

    try:
        plots.save_png(curves, file, title, y_label)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"--png={file} cannot be written: {reason}.") from error


def _read(arguments: argparse.Namespace) -> Config:
    folders = [folder for each in arguments.search_paths for folder in each]
    return configs.load(arguments.files, arguments.bindings, arguments.sets, folders)


def _program(read: Config, vocabulary: list[str]):
    from optim.declarations import OptimizerWarning
    from trainer.experiment import build_experiment
    from trainer.program import Program

    warnings.simplefilter("ignore", OptimizerWarning)  # the plan tells the same, once
    experiment = build_experiment(read, vocabulary)
    try:
        return Program(experiment)
    except ValueError as error:
        places = [getattr(error, "part", ""), "mesh", "data"]
        place = next((read.sources[path] for path in places if path in read.sources), "")
        raise ConfigError(f"{place}: {error}") from error
