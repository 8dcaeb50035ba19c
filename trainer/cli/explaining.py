"""The command explain: prints the plan of a config and, on request, compiles its step."""

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.cli.resolving import make_program, read_config
from trainer.cli.terminal import show
from trainer.messages import DONE

if TYPE_CHECKING:
    from trainer.engine.program import Program


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and draws the schedules; compiles the step with --compile.

    The data need not be on this machine, if their shapes are known.
    """
    from trainer.engine.plan import make_plan
    from trainer.engine.plan_text import render
    from trainer.report.plots import Line, draw_in_terminal, save_figure
    from trainer.train.continuation import begin_with

    config = read_config(arguments)
    program = make_program(config, arguments.vocabulary, declared=True)
    plan = make_plan(program, config)
    # Read the other run's checkpoint now, so that `explain` also finds mistakes in the warm start.
    if program.experiment.warm_start:
        begin_with(program, config, arguments.vocabulary)
    show(render(plan))
    if not plan.schedules:
        show("No group's optimizer takes a learning rate, so there is no schedule to draw.")
    else:
        show(draw_in_terminal(plan.schedules, "learning rate by step"), end="")
        if arguments.figure:
            lines = {name: Line(*curve) for name, curve in plan.schedules.items()}
            save_figure(lines, arguments.figure, "Learning rates", "step", "learning rate")
            show(f"The schedules are drawn in {arguments.figure}.")
    if arguments.compile:
        show("\n".join(_compile(program, plan.devices)))
    return DONE


def _compile(program: "Program", devices: str) -> Iterator[str]:
    """Compiles a step from shapes, without computing parameters, and yields lines about it."""
    from trainer.engine.memory import compiled_memory

    began = time.perf_counter()
    program.compile(program.abstract_state())
    seconds = time.perf_counter() - began
    rule = program.block_rule
    what = f"A block of {rule.steps} steps" if rule.form == "device_loop" else "A step"
    yield ""
    yield f"{what} was compiled for {devices} in {seconds:.1f} s, and not run."
    if (memory := compiled_memory(program.compiled)) is not None:
        yield memory.describe(list(program.mesh.local_devices))
