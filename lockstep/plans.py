"""`explain`: what a config means for each parameter, and for the devices of a run."""

import argparse
import html
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.configs import Config, Packages, as_config
from lockstep.processes import run_command
from trainer.cli import values
from trainer.messages import UserError

if TYPE_CHECKING:
    from pandas import DataFrame


class Drawable:
    """What can be drawn; a notebook shows it as SVG."""

    def save(self, file: str | PathLike[str]) -> None:
        """Draws into a file, whose name ends in .png, .pdf or .svg; raises UserError."""
        raise NotImplementedError

    def svg(self) -> str:
        """Returns the drawing as SVG."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "drawn.svg"
            self.save(file)
            return file.read_text(encoding="utf-8")

    _repr_svg_ = svg


class Placement(Drawable):
    """What each device of a mesh holds; a notebook shows it as a drawing.

    Args:
        holdings: those of `trainer.engine`.
        memory: the memory of a device in bytes; None if it is not known.

    Attributes:
        mesh: axis -> number of devices.
        memory: the memory of a device in bytes; None if it is not known.
        sizes: what it is, such as "optimizer state" -> bytes of a device.
        parameters: bytes of a device for its part of the parameters.
        state: bytes of a device for the optimizer's state.
        gradients: bytes of a device for the gradients, if they are split as their parameters.
        batch: bytes of a device for its part of a batch.
        total: the sum of all `sizes`.
    """

    def __init__(self, holdings: Any, memory: int | None):
        from trainer.engine.explanation import BATCH, GRADIENTS, ROLES

        self._holdings, self.memory = holdings, memory
        self.mesh: Mapping[str, int] = dict(holdings.mesh)
        self.sizes: Mapping[str, int] = dict(holdings.totals)
        self.parameters: int = self.sizes.get(ROLES["params"], 0)
        self.state: int = self.sizes.get(ROLES["opt_state"], 0)
        self.gradients: int = self.sizes.get(GRADIENTS, 0)
        self.batch: int = self.sizes.get(BATCH, 0)
        self.total: int = sum(self.sizes.values())

    @property
    def leaves(self) -> "DataFrame":
        """A row for each parameter, each state that is split otherwise, and each field of a batch.

        Its columns are `dtype`, `shape`, `sharding` in the grammar of a config, `shard`, the shape
        of a device's part, and the bytes of a device: `bytes`, and of a parameter `state_bytes` and
        `gradient_bytes`.
        """
        from pandas import DataFrame

        parameters = self._holdings.parameters
        others = [(one, 0, 0) for one in (*self._holdings.apart, *self._holdings.batch)]
        rows = [
            (one.path, one.dtype, one.shape, one.split, one.shard, one.size, state, gradient)
            for one, gradient, state in (*parameters, *others)
        ]
        columns = ["leaf", "dtype", "shape", "sharding", "shard", "bytes", "state_bytes"]
        return DataFrame(rows, columns=[*columns, "gradient_bytes"]).set_index("leaf")

    def save(self, file: str | PathLike[str]) -> None:
        """Draws into a file, whose name ends in .png, .pdf or .svg; raises UserError."""
        from trainer.report.mesh_figure import save_mesh_figure

        save_mesh_figure(self._holdings, self.memory, file)

    def __repr__(self) -> str:
        from trainer.engine.plan_text import holdings_text

        return holdings_text(self._holdings, self.memory).rstrip("\n")


class Plan:
    """What a config means, without training it.

    It prints as the command `explain` does, and is a table in a notebook.

    Args:
        explanation: that of `trainer.engine`.

    Attributes:
        parameters: path of a parameter -> a row with `shape`, `dtype`, `group`, `optimizer`,
            `peak_learning_rate`, `weight_decay` and `sharding`.
        groups: name of a group -> number of its parameters, and bytes of its optimizer's state.
        warnings: sentences about what is probably a mistake.
        schedules: name of a group -> (steps, learning rates).
        steps: number of updates.
        flops: floating-point operations of a step.
        state_bytes: bytes of parameters, the state of the optimizer, and all else that is saved.
        placement: what each device holds.
        compiled: the compiled step, with `platform`, whose compiler it was; `seconds`; `memory`,
            which has the bytes of a device: `arguments`, `temporary`, `results` and `total`; and
            `traffic`, rows with `kind`, `axes`, `count` and `size`. None without `compile=True`.
        fits: whether a device has the memory for the compiled step, or, without one, for all that
            `placement` counts; None if its memory is not known.
        text: what the command prints, without the drawing of the schedules.
    """

    def __init__(self, explanation: Any):
        from trainer.engine.plan_text import compiled_text, explained_text

        plan = explanation.plan
        self._plan = plan
        self._simulated = explanation.elsewhere is not None
        self._texts = explained_text(explanation), compiled_text(explanation)
        self.parameters: Mapping[str, Any] = {row.path: row for row in plan.rows}
        self.groups: Mapping[str, tuple[int, int]] = dict(plan.groups)
        self.warnings: Sequence[str] = tuple(plan.warnings)
        self.schedules: Mapping[str, Any] = dict(plan.schedules)
        self.steps: int = plan.steps
        self.flops: int = plan.flops
        self.state_bytes: int = plan.state_bytes
        self.placement = Placement(explanation.holdings, explanation.memory.limit)
        self.compiled: Any = explanation.compiled
        self.fits: bool | None = explanation.fits
        self.text: str = "\n".join(filter(None, self._texts))

    def __repr__(self) -> str:
        from trainer.report.plots import draw_in_terminal

        drawn = ""
        if self.schedules:
            drawn = draw_in_terminal(dict(self.schedules), "learning rate by step")
        planned, compiled = self._texts
        return "\n".join(filter(None, (planned + drawn, compiled))).rstrip("\n")

    def _repr_html_(self) -> str:
        from trainer.engine.plan_text import group_cells, parameter_cells

        tables = html_table(parameter_cells(self._plan)) + html_table(group_cells(self._plan))
        warned = "".join(f"<p><b>warning:</b> {html.escape(each)}</p>" for each in self.warnings)
        drawn = (self.placement.svg() if self._simulated else "").partition("<svg")
        compiled = html.escape(self._texts[1])
        return (
            f"{tables}{warned}<p>{self.steps:,} steps; {self.flops:,} FLOPs a step;"
            f" state {self.state_bytes:,} bytes</p>{''.join(drawn[1:])}"
            f"{f'<pre>{compiled}</pre>' if compiled else ''}"
        )


def explain(
    config: Config | str | PathLike[str],
    *,
    vocabulary: Packages = (),
    devices: int | None = None,
    device_memory: int | str | None = None,
    target: str | None = None,
    compile: bool = False,
) -> Plan:
    """Returns the plan of a config, without training and without its data.

    With `devices` or `target` it is the plan for devices that are not here: the command `explain`
    makes it in a process of its own. This process keeps its devices.

    Args:
        config: the config, or its file.
        vocabulary: further packages whose public functions the config may name.
        devices: the number of devices of another machine; None for those of this one.
        device_memory: with `devices`: the memory of each, in bytes or as text, such as "80GB" or
            "79.6GiB". A plan whose state and batch are larger is refused.
        target: GPUs or TPUs of another machine, such as "h100:8" or "v5e:4x4", whose compilers
            `make targets` installs; None for the devices of this one.
        compile: whether the step is also compiled, from shapes. With `devices` it is compiled for
            CPUs; the temporary memory and the collectives are those of this compiler. With
            `target` it is compiled for these, and refused if it does not fit into their memory.

    Raises:
        UserError: the config has a mistake, its parts do not fit together, or do not fit into the
            memory of the devices.
        RunFailed: the process that plans for other devices was ended, such as for its own memory.

    Example:
        >>> import lockstep as ls
        >>> plan = ls.explain(ls.load_config("configs/muon_vit.yaml"))
        >>> plan.parameters["head/kernel"].group, plan.warnings
        ('rest', ())
    """
    config = as_config(config, vocabulary)
    if devices is not None or target is not None:
        words = ["--compile"] if compile else []
        if target is not None:
            from trainer.engine.targets import parse

            parse(target)  # raises UserError, in fewer words than the command
            words.append(f"--target={target}")
        if devices is not None:
            words.append(f"--devices={_converted('devices', values.devices, devices)}")
        if device_memory is not None:
            limit = _bytes(device_memory)
            # Exact: the option takes a number of MB with up to nine digits after the point.
            words.append(f"--device_memory={limit // 10**6}.{limit % 10**6:06}MB")
        return Plan(_elsewhere(config, words))
    if device_memory is not None:
        written = f"devices=N, device_memory={device_memory!r}"
        raise UserError(values.NOT_HERE.format("device_memory", written))
    from lockstep.programs import loaded_program
    from trainer.engine import explanation as engine
    from trainer.train.continuation import begin_with

    program = loaded_program(config, declared=True)
    found = engine.explain(program, config.resolved)
    if program.experiment.warm_start:
        begin_with(program, config.resolved, config.vocabulary)  # finds the mistakes in it
    return Plan(engine.with_compiled(found, program) if compile else found)


def _elsewhere(config: Config, words: Sequence[str]) -> Any:
    """Returns the explanation of a config for other devices, from a process of its own."""
    from lockstep.runs import file_of
    from trainer.engine.explanation import from_json

    words = ["explain", *words, *(f"--vocabulary={each}" for each in config.vocabulary)]
    with file_of(config) as (file, places):
        result = file.with_name("explanation.json")
        command = [*words, f"--config={file}", f"--explanation={result}"]
        run_command(command, places, quiet=True, on_cpu=True)
        return from_json(result.read_text(encoding="utf-8"))


def _bytes(memory: Any) -> int:
    """Returns the bytes of `device_memory`; raises UserError if it is not the size of a memory."""
    if isinstance(memory, int | float) and memory is not True and 1 <= memory < 10**15:
        return int(memory)
    return _converted("device_memory", values.memory, memory, ", or the number of its bytes")


def _converted(argument: str, convert: Any, given: Any, more: str = "") -> int:
    """Converts an argument as the option of its name; raises UserError with the same words."""
    try:
        return convert(str(given))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{argument}: {error}{more}.") from None


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML; the first row is the heading."""
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    # Notebooks and pages style the class of pandas' tables; the padding is for all other viewers.
    return (
        f'<table class="dataframe" cellpadding="6"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )
