"""The command plot: draws a metric of runs, or of the best trials of a sweep."""

import argparse
from collections.abc import Mapping

import numpy as np

from trainer.cli.terminal import show
from trainer.messages import DONE, UserError
from trainer.report.plots import Line, describe_bands, draw_in_terminal, save_figure
from trainer.report.run_results import read_lines


def run(arguments: argparse.Namespace) -> int:
    """Draws a metric of one or more runs, or of the best trials of a sweep."""
    metric, x = arguments.metric, arguments.x
    lines = read_lines(
        arguments.workdirs, metric, x, arguments.smoothing, each_run=arguments.each_run
    )
    left_out = _left_out(lines, arguments)
    counts = [line.runs for line in lines.values()]
    low, high = min(counts), max(counts)
    many = f"{low} to {high}" if low < high else f"{high}"
    of_what = f", mean of {many} runs" if high > 1 else ""
    of_what += f", smoothed by {arguments.smoothing:g}" if arguments.smoothing else ""
    if arguments.figure:
        band = describe_bands(lines.values())
        title = f"{metric}{of_what}\n{band}" if band else metric + of_what
        save_figure(lines, arguments.figure, title, x, metric, arguments.log_x, arguments.log_y)
        show(f"{metric} is drawn in {arguments.figure}.")
    else:
        drawn = {name: line.curve for name, line in lines.items()}
        axes = {"log_x": arguments.log_x, "log_y": arguments.log_y}
        show(draw_in_terminal(drawn, f"{metric} by {x}{of_what}", **axes), end="")
    if left_out:
        show(left_out)
    return DONE


def _left_out(lines: Mapping[str, Line], arguments: argparse.Namespace) -> str:
    """Returns a sentence about points that cannot be drawn, or ""; raises UserError if none can."""
    finite = positive = total = 0
    for line in lines.values():
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        drawn = np.isfinite(x) & np.isfinite(y)
        total, finite = total + len(x), finite + int(drawn.sum())
        drawn &= (x > 0) | (not arguments.log_x)
        positive += int((drawn & ((y > 0) | (not arguments.log_y))).sum())
    if not total:
        raise UserError(
            f"The runs of each group have no step in common at which both have {arguments.metric}:"
            " draw them one by one with --each_run."
        )
    if not finite:
        raise UserError(f"No value of {arguments.metric} is finite, so nothing can be drawn.")
    if not positive:
        raise UserError(
            f"No point of {arguments.metric} is positive, so a logarithmic axis shows none of them."
        )
    words = []
    if finite < total:
        words.append(f"{total - finite:,} of {total:,} points are not drawn: they are not finite.")
    if positive < finite:
        words.append(
            f"{finite - positive:,} of {total:,} points are not on a logarithmic axis: they are"
            " not positive."
        )
    return " ".join(words)
