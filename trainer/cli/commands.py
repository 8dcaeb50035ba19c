"""The commands: each is a function of the parsed options that returns an exit code.

Commands about one run, and the short ones, are here; `find` imports the others from their modules.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import config as configs
from trainer.cli.resolving import config_options, default_workdir, make_program, read_config
from trainer.cli.terminal import log, show
from trainer.config import Config
from trainer.messages import DONE, FAILED, UserError
from trainer.train import runtime

# Modules that import jax are imported by the commands that need them: jax takes long to import, and
# the memory of a process must be configured before.
if TYPE_CHECKING:
    from trainer.train.loop_interface import Observer


def find(command: str) -> Callable[[argparse.Namespace], int]:
    """Returns the function of a command, from its name on the command line."""
    match command:
        case "challenge" | "claim" | "coordinate_check" | "rate_test" | "shadow":
            from trainer.cli import studies

            return getattr(studies, command)
        case "checkpoint":
            from trainer.cli.inspect_checkpoints import run
        case "compare":
            from trainer.cli.comparing import run
        case "explain":
            from trainer.cli.explaining import run
        case "optimizers":
            from trainer.cli.optimizers import run
        case "sample":
            from trainer.cli.sampling import run
        case "plot":
            from trainer.cli.plotting import run
        case "report":
            from trainer.cli.reporting import run
        case "sweep":
            from trainer.cli.sweeps import run
        case _:
            return globals()[command]
    return run


def train(arguments: argparse.Namespace) -> int:
    """Trains, from the newest checkpoint if there is one."""
    began = time.perf_counter()
    config = read_config(arguments)
    workdir = arguments.workdir or default_workdir(arguments.files, config)
    # Call these before jax starts its threads, which would get memory arenas of their own, and
    # before OpenBLAS starts its threads.
    runtime.keep_freed_memory()
    runtime.use_openblas_threads(Path(workdir))
    runtime.keep_compiled_programs()
    if arguments.distributed:
        from trainer.train import multihost

        # Not defaults of the parser: without --distributed, options that were given are refused
        # below.
        join, peer = arguments.join_timeout or 120, arguments.peer_timeout or 60
        if peer < 5:
            raise UserError(f"--peer_timeout must be at least 5 seconds, got {peer}.")
        with multihost.joined(join, peer) as leave:
            code = _train(arguments, config, workdir, began)
            leave(code)
            return code
    if arguments.join_timeout or arguments.peer_timeout:
        raise UserError("--join_timeout and --peer_timeout are read with --distributed only.")
    return _train(arguments, config, workdir, began)


def _train(arguments: argparse.Namespace, config: Config, workdir: str, began: float) -> int:
    from trainer.train import multihost
    from trainer.train.profile import Profile
    from trainer.train.run import Run
    from trainer.train.watchdog import SlowLines
    from trainer.workdir import code

    def build() -> Run:
        one = 1 if arguments.trace else None
        program = make_program(config, arguments.vocabulary, steps_per_call=one)
        if one and program.experiment.steps > 1:
            log("--trace computes one step at a time: steps_per_call is 1.")
        return Run(
            config,
            program,
            arguments.signals,
            log,
            arguments.vocabulary,
            slow_lines=SlowLines(stacks=arguments.trace),
        )

    run = multihost.raise_on_all(build)
    if arguments.distributed:
        multihost.require_same(
            {
                "workdir": str(Path(workdir).absolute()),
                "options": f"--until={arguments.until} --trace={arguments.trace}"
                f" --profile={arguments.profile}",
                "config": configs.dump(config.root),
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
        profile=Profile(arguments.profile, log) if arguments.profile else None,
    )


def _observer(arguments: argparse.Namespace, workdir: str) -> "Observer | None":
    """Returns the function that observes every block for --trace and --kill_after, or None."""
    from trainer.diagnose.verify import KillAfterCheckpoint, Trace

    observers = []
    if arguments.trace or arguments.trace_blocks:
        observers.append(Trace(workdir))
    if arguments.kill_after is not None:
        # Kill it before the last step, after which the run could end first.
        latest = (arguments.until or 2 * arguments.kill_after) - 1
        observers.append(KillAfterCheckpoint(workdir, arguments.kill_after, latest))

    def observe(*block) -> None:
        for observer in observers:
            observer(*block)

    return observe if observers else None


def verify(arguments: argparse.Namespace) -> int:
    """Checks on a config that a killed and restarted run has the same bits."""
    from trainer.diagnose.verify import verify

    config = read_config(arguments)
    program = make_program(config, arguments.vocabulary)
    lines, same = verify(
        program,
        config_options=config_options(arguments),
        half=arguments.steps,
        workdir=arguments.workdir,
        log=log,
    )
    show("\n".join(lines))
    return DONE if same else FAILED


def replay(arguments: argparse.Namespace) -> int:
    """Repeats one step of a run and names the first operation whose result is not finite."""
    runtime.use_openblas_threads(Path(arguments.workdir))
    from trainer.diagnose.replay import replay

    lines, finite = replay(arguments.workdir, arguments.step, arguments.vocabulary)
    show("\n".join(lines))
    return DONE if finite else FAILED


def config(arguments: argparse.Namespace) -> int:
    """Prints the resolved config as canonical YAML, after checking its names and types."""
    config = read_config(arguments)
    configs.Builder(config, arguments.vocabulary).check()
    if arguments.unused:
        for each in config.unused:
            show(f"{each.source}: {each.binding}. {each.why}")
        if not config.unused:
            show("Every binding is used.")
        return DONE
    full = configs.full_text(config, arguments.vocabulary) if arguments.full else None
    show(full or configs.dump(config.root), end="")
    return DONE


def schema(arguments: argparse.Namespace) -> int:
    """Prints the JSON schema of YAML configs, or the list of tags, for editors."""
    from trainer.config.schema import custom_tags, text

    made = custom_tags if arguments.custom_tags else text
    show(made(arguments.vocabulary).rstrip("\n"))
    return DONE
