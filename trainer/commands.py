"""What each command does: reads the config, builds, and prints or trains."""

import argparse
import sys
import time
from pathlib import Path

from trainer import config as configs
from trainer.config import Config, ConfigError


def train(arguments: argparse.Namespace) -> int:
    """Trains, from the newest checkpoint where there is one."""
    from trainer import runtime
    from trainer.signals import StopSignals

    began = time.perf_counter()
    with StopSignals() as signals:
        read = _read(arguments)
        runtime.keep_freed_memory()
        runtime.keep_compiled_programs()
        from trainer.run import Run

        program = _program(read, arguments.vocabulary)
        run = Run(read, program, signals, _say)
        return run.start(
            arguments.workdir or _default_workdir(arguments.files, read),
            allow_changed=arguments.allow_changed,
            take_over=arguments.take_over,
            began=began,
        )


def _default_workdir(files: list[str], read: Config) -> str:
    """Names a folder after the config and what is in it, so that another config is another run."""
    return f"runs/{Path(files[0]).stem}-{configs.digest(read.root)[:8]}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def config(arguments: argparse.Namespace) -> int:
    """Prints the resolved config as canonical YAML."""
    print(configs.dump(_read(arguments).root), end="")
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Prints the plan, and draws the schedules."""
    from trainer import plots
    from trainer.plan import make_plan, render

    read = _read(arguments)
    plan = make_plan(_program(read, arguments.vocabulary), read)
    print(render(plan))
    print(plots.draw_in_terminal(plan.schedules, "learning rate by step"), end="")
    if arguments.png:
        try:
            plots.save_png(plan.schedules, arguments.png, "Learning rates", "learning rate")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--png={arguments.png} cannot be written: {error}.") from error
        print(f"The schedules are drawn in {arguments.png}.")
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Draws a metric of one run or several."""
    from trainer import plots

    try:
        curves = {
            Path(workdir).name: plots.read_metric(workdir, arguments.metric)
            for workdir in arguments.workdirs
        }
        if arguments.png:
            plots.save_png(curves, arguments.png, arguments.metric, arguments.metric)
            print(f"{arguments.metric} is drawn in {arguments.png}.")
        else:
            print(plots.draw_in_terminal(curves, f"{arguments.metric} by step"), end="")
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return 0


def _read(arguments: argparse.Namespace) -> Config:
    return configs.load(arguments.files, arguments.bindings, arguments.sets)


def _program(read: Config, vocabulary: list[str]):
    from trainer.experiment import build_experiment
    from trainer.program import Program

    experiment = build_experiment(read, vocabulary)
    try:
        return Program(experiment)
    except ValueError as error:
        place = read.sources.get("mesh") or read.sources.get("data")
        raise ConfigError(f"{place}: {error}") from error
