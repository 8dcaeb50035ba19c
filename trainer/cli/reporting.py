"""The commands report and plot: what sweeps and runs show, on a page and in figures."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join as quoted
from typing import TYPE_CHECKING

import trainer
from trainer.cli.terminal import show
from trainer.messages import DONE, UserError, joined, plural

if TYPE_CHECKING:  # it needs NumPy
    from trainer.report.plots import Line


def report(arguments: argparse.Namespace) -> int:
    """Writes a report, and prints the verdict and where the files are."""
    from trainer.report.comparison import default_folder, make_report, read_workloads
    from trainer.report.write import write

    workloads = read_workloads(
        arguments.folders, arguments.metric, arguments.mode, arguments.target
    )
    folder = Path(arguments.output or default_folder(arguments.folders))
    words = [*arguments.folders, *given(arguments, "metric", "mode", "target")]
    made_report = make_report(workloads, folder, made_by("report", words))
    files = write(made_report, folder, arguments.formats)
    for sentence in made_report.verdict:
        show(sentence)
    for warning in made_report.warnings:
        show(f"Note: {warning}")
    show(f"\n{folder}: {_counted(files)}")
    return DONE


def given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Returns options with their values, as they are written, without those that are None."""
    values = {name: getattr(arguments, name) for name in names}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def made_by(command: str, words: Sequence[str]) -> str:
    """Returns how a report was made: the version, and the command that makes it again."""
    return f"Lockstep {trainer.__version__}: {quoted(['python', '-m', 'trainer', command, *words])}"


def _counted(files: Sequence[Path]) -> str:
    """Returns what was written, such as "index.html, report.md and 12 figures as PDF and PNG"."""
    names = [file.name for file in files]
    suffixes = [file.suffix for file in files]
    parts = [name for name in ("index.html", "report.md") if name in names]
    drawn = [suffix for suffix in (".pdf", ".png") if suffix in suffixes]
    if drawn:
        kinds = " and ".join(suffix[1:].upper() for suffix in drawn)
        parts.append(f"{plural(suffixes.count(drawn[0]), 'figure')} as {kinds}")
    if ".csv" in suffixes:
        parts.append(f"{plural(suffixes.count('.csv'), 'table')} as CSV")
    if ".tex" in suffixes:
        parts.append(f"{plural(suffixes.count('.tex'), 'file')} for LaTeX")
    return joined(parts)


def plot(arguments: argparse.Namespace) -> int:
    """Draws a metric of one or more runs, or of the best trials of a sweep."""
    from trainer.report.plots import describe_bands, draw_in_terminal, save_figure
    from trainer.report.run_results import read_lines

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


def _left_out(lines: Mapping[str, "Line"], arguments: argparse.Namespace) -> str:
    """Returns a sentence about points that cannot be drawn, or ""; raises UserError if none can."""
    import numpy as np

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
