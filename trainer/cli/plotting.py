"""The command plot: draws a metric of runs, or of the best trials of a sweep."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.cli.terminal import show
from trainer.messages import DONE, UserError
from trainer.report import plots
from trainer.report.plots import Curve


def plot(arguments: argparse.Namespace) -> int:
    """Draws a metric of one or more runs, or of the best trials of a sweep.

    Args:
        arguments: the parsed options of the command.

    Returns:
        DONE.

    Raises:
        UserError: a run does not have the metric, or the PNG cannot be written.
    """
    metric = arguments.metric
    try:
        several = {
            name: [plots.read_metric(run, metric) for run in runs]
            for name, runs in _runs(arguments.workdirs, metric).items()
        }
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    curves = {name: plots.mean(each) for name, each in several.items()}
    counts = {len(each) for each in several.values()}
    seeds = f", mean of {'several' if len(counts) > 1 else max(counts)} seeds"
    seeds = seeds if max(counts) > 1 else ""
    if arguments.png:
        save_png(curves, arguments.png, metric + seeds, metric, several)
        show(f"{metric} is drawn in {arguments.png}.")
    else:
        show(plots.draw_in_terminal(curves, f"{metric} by step{seeds}"), end="")
    return DONE


def _runs(workdirs: Sequence[str], metric: str) -> dict[str, list[Path]]:
    """Returns the runs to draw: name -> the runs whose mean is drawn, most often one."""
    from trainer.sweep.curves import best_runs

    found: dict[str, list[Path]] = {}
    plain: list[str] = []
    for workdir in dict.fromkeys(workdirs):
        folder = Path(workdir)
        if (folder / "plan.json").exists():
            prefix = f"{folder.absolute().name} " if len(workdirs) > 1 else ""
            found |= {f"{prefix}{name}": runs for name, runs in best_runs(folder).items()}
        else:
            plain += plots.runs_in(folder, metric) or [workdir]
    return found | {name: [Path(run)] for name, run in plots.names_of(plain).items()}


def save_png(
    curves: Mapping[str, Curve],
    file: str,
    title: str,
    y_label: str,
    members: Mapping[str, Sequence[Curve]] | None = None,
) -> None:
    """Draws curves into a PNG for the option --png; see `plots.save_png`.

    Args:
        curves: name -> (steps, values).
        file: path of the PNG.
        title: the text above the drawing.
        y_label: the label of the y axis.
        members: name -> the curves of which that of this name is the mean.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        plots.save_png(curves, file, title, y_label, members)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"--png={file} cannot be written: {reason}.") from error
