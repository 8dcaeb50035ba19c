"""The command explain: prints the plan of a config and, on request, compiles its step."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import config as configs
from trainer.cli.resolving import make_program, read_config
from trainer.cli.terminal import show
from trainer.cli.values import NOT_HERE
from trainer.config import Config
from trainer.messages import DONE, UserError

if TYPE_CHECKING:  # both need jax, which is imported once it is known which devices it simulates
    from trainer.engine.explanation import Elsewhere, Explanation
    from trainer.engine.program import Program


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan and draws the schedules; compiles the step with --compile."""
    # Data of known shapes need not be on this machine, nor the devices of --devices or --target.
    if arguments.target == "list":
        from trainer.engine.targets import listed

        show(listed(), end="")
        return DONE
    elsewhere = _elsewhere(arguments)
    from trainer.engine.explanation import explain, to_json, with_compiled
    from trainer.engine.plan_text import compiled_text, explained_text
    from trainer.report.plots import Line, draw_in_terminal, save_figure
    from trainer.train.continuation import begin_with

    config = read_config(arguments)
    devices = None if elsewhere is None else elsewhere.devices
    program = make_program(config, arguments.vocabulary, declared=True, devices=devices)
    explanation = explain(program, config, elsewhere)
    # Read the other run's checkpoint now, so that `explain` also finds mistakes in the warm start.
    if program.experiment.warm_start:
        begin_with(program, config, arguments.vocabulary)
    show(explained_text(explanation))
    if arguments.devices_figure:
        from trainer.report.mesh_figure import save_mesh_figure

        save_mesh_figure(explanation.holdings, explanation.memory.limit, arguments.devices_figure)
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
        if arguments.target and not explanation.fits:
            said = _what_fits(config, arguments.vocabulary, program, explanation)
            raise UserError(f"The step does not fit. {said}")
    if arguments.explanation:
        # For `lockstep.explain`.
        Path(arguments.explanation).write_text(to_json(explanation), encoding="utf-8")
    return DONE


def _elsewhere(arguments: argparse.Namespace) -> "Elsewhere | None":
    """Returns the devices of --target or --devices; None for those of this machine."""
    # Raises UserError for options that do not belong together.
    count, target, memory = arguments.devices, arguments.target, arguments.device_memory
    if target is not None:
        for name, given in (("devices", count), ("device_memory", memory)):
            if given is not None:
                raise UserError(
                    f"--target has the number of devices, as in h100:8, and their memory: leave out"
                    f" --{name}."
                )
        from trainer.engine.targets import elsewhere_of

        return elsewhere_of(target)
    if count is None:
        for name in ("device_memory", "devices_figure"):
            if (given := getattr(arguments, name)) is not None:
                what = "SIZE" if name == "device_memory" else given
                raise UserError(NOT_HERE.format(f"--{name}", f"--devices=N --{name}={what}"))
        return None
    from trainer.engine.explanation import Elsewhere
    from trainer.engine.memory import planned_memory
    from trainer.engine.mesh import keep_to_cpu

    keep_to_cpu(count, f"--devices={count}")
    return Elsewhere(count, "simulated device", planned_memory(memory))


def _what_fits(
    config: Config, vocabulary: Sequence[str], program: "Program", explanation: "Explanation"
) -> str:
    """Says with how many microbatches the step fits, which is compiled until it does."""
    from trainer.engine.explanation import with_compiled
    from trainer.engine.memory import in_words
    from trainer.engine.mesh import batch_parts

    size, now = program.experiment.data.batch_size, program.experiment.microbatches
    most = size // batch_parts(program.mesh)
    tried = [f"{now}: {in_words(explanation.needed)}"]
    devices = list(program.mesh.devices.flat)
    for count in (n for n in range(now + 1, most + 1) if n % now == 0 and most % n == 0):
        edited = configs.override(config, [f"microbatches={count}"])
        program = make_program(edited, vocabulary, declared=True, devices=devices)
        explanation = with_compiled(explanation, program)
        if explanation.fits:
            return (
                f"With --set microbatches={count} it needs {in_words(explanation.needed)} and fits;"
                " that was compiled, too."
            )
        tried.append(f"{count}: {in_words(explanation.needed)}")
    return (
        f"Nor does it with more microbatches ({', '.join(tried)}). Split the parameters and the"
        " state of the optimizer over more devices with the axis fsdp of mesh, have the backward"
        " pass compute more again with the model's argument remat, or make the model smaller."
    )
