"""The command explain: prints the plan of a config and, on request, compiles its step."""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.cli.resolving import make_program, read_config
from trainer.cli.terminal import show
from trainer.messages import DONE, UserError, plural, table

if TYPE_CHECKING:
    from trainer.engine.memory import Memory
    from trainer.engine.program import Program


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and draws the schedules; compiles the step with --compile.

    The data need not be on this machine, if their shapes are known. With --devices, neither need
    the devices.
    """
    elsewhere = _simulate(arguments)
    from trainer.engine.memory import memory_of, planned_memory
    from trainer.engine.plan import make_plan
    from trainer.engine.plan_text import render
    from trainer.report.plots import Line, draw_in_terminal, save_figure
    from trainer.train.continuation import begin_with

    config = read_config(arguments)
    program = make_program(config, arguments.vocabulary, declared=True)
    memory = planned_memory(arguments.device_memory) if elsewhere else None
    plan = make_plan(program, config, memory)
    if elsewhere:
        plan = dataclasses.replace(plan, devices=plural(program.mesh.size, "simulated device"))
    # Read the other run's checkpoint now, so that `explain` also finds mistakes in the warm start.
    if program.experiment.warm_start:
        begin_with(program, config, arguments.vocabulary)
    show(render(plan))
    if elsewhere:
        _show_holdings(program, arguments)
    if not plan.schedules:
        show("No group's optimizer takes a learning rate, so there is no schedule to draw.")
    else:
        show(draw_in_terminal(plan.schedules, "learning rate by step"), end="")
        if arguments.figure:
            lines = {name: Line(*curve) for name, curve in plan.schedules.items()}
            save_figure(lines, arguments.figure, "Learning rates", "step", "learning rate")
            show(f"The schedules are drawn in {arguments.figure}.")
    if arguments.compile:
        memory = memory or memory_of(list(program.mesh.local_devices))
        show("\n".join(_compile(program, plan.devices, memory)))
    return DONE


def _simulate(arguments: argparse.Namespace) -> bool:
    """Makes jax simulate the devices of --devices; returns whether it was given.

    Raises UserError for an option that needs it.
    """
    if arguments.devices is None:
        for name in ("device_memory", "devices_figure"):
            if (given := getattr(arguments, name)) is not None:
                what = "SIZE" if name == "device_memory" else given
                raise UserError(
                    f"--{name} is about devices that are not here: write --devices=N --{name}="
                    f"{what}, with the number of devices that the run will have."
                )
        return False
    import jax

    if jax.config.values.get("jax_num_cpu_devices") == arguments.devices:
        return True  # an earlier call has set both options
    try:
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    except RuntimeError as error:
        raise UserError(
            f"--devices={arguments.devices} needs a process of its own, and in this one jax already"
            f" uses the devices of this machine: start python -m trainer explain."
        ) from error
    jax.config.update("jax_platforms", "cpu")
    return True


def _show_holdings(program: "Program", arguments: argparse.Namespace) -> None:
    """Prints what each device holds, and draws it with --devices_figure."""
    from trainer.engine.holdings import find_holdings
    from trainer.engine.plan_text import holdings_text

    used, devices = program.mesh.size, arguments.devices
    if used < devices:
        show(f"The mesh {dict(program.mesh.shape)} uses {used} of the {devices} devices.\n")
    holdings = find_holdings(program)
    show(holdings_text(holdings, arguments.device_memory))
    if arguments.devices_figure:
        from trainer.report.mesh_figure import save_mesh_figure

        save_mesh_figure(holdings, arguments.device_memory, arguments.devices_figure)
        show(f"What a device holds is drawn in {arguments.devices_figure}.\n")


def _compile(program: "Program", devices: str, memory: "Memory") -> Iterator[str]:
    """Compiles a step from shapes, without computing parameters, and yields lines about it."""
    from trainer.engine.memory import compiled_memory

    began = time.perf_counter()
    program.compile(program.abstract_state())
    seconds = time.perf_counter() - began
    rule = program.block_rule
    what = f"A block of {rule.steps} steps" if rule.form == "device_loop" else "A step"
    yield ""
    yield f"{what} was compiled for {devices} in {seconds:.1f} s, and not run."
    if (found := compiled_memory(program.compiled)) is not None:
        yield found.describe(memory)
    if program.mesh.size > 1:
        yield from _traffic(program)


def _traffic(program: "Program") -> Iterator[str]:
    """Yields a table of the collectives of the compiled step."""
    from trainer.engine.collectives import find_traffic
    from trainer.engine.memory import in_words

    found = find_traffic(program.compiled.as_text(), dict(program.mesh.shape))
    if not found:
        yield "The devices exchange nothing in a step."
        return
    yield ""
    yield "What the devices exchange in a step, by the axes of the mesh along which they do:"
    rows = [
        (each.kind, each.axes, f"{each.count:,}", f"{each.size:,}", in_words(each.size))
        for each in found
    ]
    yield from table(
        [("collective", "axes", "count", "bytes of a device", ""), *rows], right=(2, 3, 4)
    )
    platform = program.mesh.devices.flat[0].platform
    if platform == "cpu":
        yield (
            "Bytes are those of the results. Loops are counted as often as they run, one of unknown"
            " length once, and of a condition both branches. This is the program of XLA's compiler"
            " for CPUs, which widens bfloat16 to float32, and does not combine collectives as those"
            " for GPUs and TPUs do."
        )
