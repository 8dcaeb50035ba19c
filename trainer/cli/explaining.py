"""The command explain: prints the plan of a config and, on request, compiles its step."""

import argparse
from pathlib import Path

from trainer.cli.resolving import make_program, read_config
from trainer.cli.terminal import show
from trainer.messages import DONE, UserError


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and draws the schedules; compiles the step with --compile."""
    # The data need not be on this machine, if their shapes are known. With --devices, neither need
    # the devices.
    _simulate(arguments)
    from trainer.engine.explanation import explain, to_json, with_compiled
    from trainer.engine.plan_text import compiled_text, explained_text
    from trainer.report.plots import Line, draw_in_terminal, save_figure
    from trainer.train.continuation import begin_with

    config = read_config(arguments)
    program = make_program(config, arguments.vocabulary, declared=True)
    explanation = explain(program, config, arguments.devices, arguments.device_memory)
    # Read the other run's checkpoint now, so that `explain` also finds mistakes in the warm start.
    if program.experiment.warm_start:
        begin_with(program, config, arguments.vocabulary)
    show(explained_text(explanation))
    if arguments.devices_figure:
        from trainer.report.mesh_figure import save_mesh_figure

        save_mesh_figure(explanation.holdings, arguments.device_memory, arguments.devices_figure)
        show(f"What a device holds is drawn in {arguments.devices_figure}.\n")
    schedules = explanation.plan.schedules
    if not schedules:
        show("No group's optimizer takes a learning rate, so there is no schedule to draw.")
    else:
        show(draw_in_terminal(schedules, "learning rate by step"), end="")
        if arguments.figure:
            lines = {name: Line(*curve) for name, curve in schedules.items()}
            save_figure(lines, arguments.figure, "Learning rates", "step", "learning rate")
            show(f"The schedules are drawn in {arguments.figure}.")
    if arguments.compile:
        explanation = with_compiled(explanation, program)
        show("\n" + compiled_text(explanation), end="")
    if arguments.explanation:
        # For `lockstep.explain`.
        Path(arguments.explanation).write_text(to_json(explanation), encoding="utf-8")
    return DONE


def _simulate(arguments: argparse.Namespace) -> None:
    """Simulates the devices of --devices, if given; UserError for an option that needs it."""
    if arguments.devices is None:
        for name in ("device_memory", "devices_figure"):
            if (given := getattr(arguments, name)) is not None:
                what = "SIZE" if name == "device_memory" else given
                raise UserError(
                    f"--{name} is about devices that are not here: write --devices=N --{name}="
                    f"{what}, with the number of devices that the run will have."
                )
        return
    import jax

    if jax.config.values.get("jax_num_cpu_devices") == arguments.devices:
        return  # an earlier call has set both options
    try:
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    except RuntimeError as error:
        raise UserError(
            f"--devices={arguments.devices} needs a process of its own, and in this one jax already"
            f" uses the devices of this machine: start python -m trainer explain."
        ) from error
    jax.config.update("jax_platforms", "cpu")
