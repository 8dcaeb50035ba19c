"""The command report: writes a report about sweeps, or about single runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import join as quoted

import trainer
from trainer.cli.terminal import show
from trainer.messages import DONE, joined, plural


def run(arguments: argparse.Namespace) -> int:
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
