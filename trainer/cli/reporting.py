"""The command report: writes a report about sweeps, or about single runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import join as quoted

from trainer.cli.terminal import show
from trainer.messages import DONE, plural
from trainer.report.wording import joined


def run(arguments: argparse.Namespace) -> int:
    """Writes a report, and prints the verdict and where the files are."""
    import trainer
    from trainer.report import FORMATS
    from trainer.report.comparison import default_folder, make_report, read_workloads
    from trainer.report.write import write

    workloads = read_workloads(
        arguments.folders, arguments.metric, arguments.mode, arguments.target
    )
    folder = Path(arguments.output or default_folder(arguments.folders))
    made = f"Lockstep {trainer.__version__}: {_command(arguments)}"
    made_report = make_report(workloads, folder, made)
    files = write(made_report, folder, arguments.formats or FORMATS)
    for sentence in made_report.verdict:
        show(sentence)
    for warning in made_report.warnings:
        show(f"Note: {warning}")
    show(f"\n{folder}: {_counted(files)}")
    return DONE


def _command(arguments: argparse.Namespace) -> str:
    """Returns the command that computes the same report."""
    words = ["python", "-m", "trainer", "report", *arguments.folders]
    for name in ("metric", "mode", "target"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}={value}"]
    return quoted(words)


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
