"""`explain`: what a config means for each parameter."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.configs import Config


class Plan:
    """What a config means, without training it.

    It prints as the command `explain` does, and is a table in a notebook.

    Attributes:
        parameters: path of a parameter -> a row with `shape`, `dtype`, `group`, `optimizer`,
            `peak_learning_rate`, `weight_decay` and `sharding`.
        groups: name of a group -> number of its parameters, and bytes of its optimizer's state.
        warnings: sentences about what is probably a mistake.
        schedules: name of a group -> (steps, learning rates).
        steps: number of updates.
        flops: floating-point operations of a step.
        state_bytes: bytes of parameters, the state of the optimizer, and all else that is saved.
        text: what the command prints, without the drawing of the schedules.
    """

    def __init__(self, plan: Any):
        from trainer.engine.plan_text import render

        self._plan = plan
        self.parameters: Mapping[str, Any] = {row.path: row for row in plan.rows}
        self.groups: Mapping[str, tuple[int, int]] = dict(plan.groups)
        self.warnings: Sequence[str] = tuple(plan.warnings)
        self.schedules: Mapping[str, Any] = dict(plan.schedules)
        self.steps: int = plan.steps
        self.flops: int = plan.flops
        self.state_bytes: int = plan.state_bytes
        self.text: str = render(plan)

    def __repr__(self) -> str:
        from trainer.report.plots import draw_in_terminal

        drawn = ""
        if self.schedules:
            drawn = draw_in_terminal(dict(self.schedules), "learning rate by step")
        return f"{self.text}{drawn}".rstrip("\n")

    def _repr_html_(self) -> str:
        from trainer.engine.plan_text import group_cells, parameter_cells

        tables = html_table(parameter_cells(self._plan)) + html_table(group_cells(self._plan))
        warned = "".join(f"<p><b>warning:</b> {html.escape(each)}</p>" for each in self.warnings)
        return (
            f"{tables}{warned}<p>{self.steps:,} steps; {self.flops:,} FLOPs a step;"
            f" state {self.state_bytes:,} bytes</p>"
        )


def explain(config: Config, *, vocabulary: Sequence[str] = ()) -> Plan:
    """Returns the plan of a config, without training and without its data.

    Args:
        config: the config.
        vocabulary: further packages whose public functions the config may name.

    Raises:
        UserError: the config has a mistake, or its parts do not fit together.

    Example:
        >>> import lockstep as ls
        >>> plan = ls.explain(ls.load_config("configs/muon_vit.yaml"))
        >>> plan.parameters["head/kernel"].group, plan.warnings
        ('rest', ())
    """
    from lockstep.programs import load_program
    from trainer.engine.plan import make_plan
    from trainer.train.warm_start import WarmStart

    program = load_program(config, vocabulary, declared=True)
    plan = make_plan(program, config.resolved)
    if program.experiment.warm_start:
        WarmStart(program, config.resolved)  # finds the mistakes in it
    return Plan(plan)


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
