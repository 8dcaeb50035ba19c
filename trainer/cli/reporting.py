"""The command report: writes a report about sweeps, or about single runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import join as quoted
from typing import TYPE_CHECKING

from trainer.cli.terminal import show
from trainer.messages import DONE, UserError, plural
from trainer.report.wording import joined

if TYPE_CHECKING:
    from trainer.report.results import Workload


def run(arguments: argparse.Namespace) -> int:
    """Writes a report, and prints the verdict and where the files are.

    Args:
        arguments: the parsed options of the command.

    Returns:
        DONE.

    Raises:
        UserError: a folder is not that of a sweep or run, or the report cannot be written.
    """
    import trainer
    from trainer.report import FORMATS
    from trainer.report.comparison import make_report
    from trainer.report.write import write

    workloads = _read(arguments)
    folder = _folder(arguments)
    made = f"Lockstep {trainer.__version__}: {_command(arguments)}"
    made_report = make_report(workloads, folder, made)
    files = write(made_report, folder, arguments.formats or FORMATS)
    for sentence in made_report.verdict:
        show(sentence)
    for panel in made_report.panels[:1]:
        for block in panel.blocks:
            for warning in block.warnings:
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


def _read(arguments: argparse.Namespace) -> "list[Workload]":
    from trainer.report.comparison import check_different
    from trainer.report.run_results import read_runs
    from trainer.report.sweep_results import read_sweep

    folders = list(dict.fromkeys(arguments.folders))
    sweeps = [each for each in folders if (Path(each) / "plan.json").exists()]
    better = arguments.mode or ("min" if arguments.metric in (None, "loss") else None)
    if better is None:
        raise UserError(
            f"--mode is missing for the metric {arguments.metric!r}: write --mode=max if larger"
            " values are better, or else --mode=min."
        )
    if not sweeps:
        return [read_runs(folders, arguments.metric or "loss", better, arguments.target)]
    if len(sweeps) < len(folders):
        run = next(each for each in folders if each not in sweeps)
        raise UserError(
            f"{run} is not the folder of a sweep, and {sweeps[0]} is: a report is about sweeps or"
            " about runs. Report them apart."
        )
    if arguments.mode and not arguments.metric:
        raise UserError(
            "--mode goes with --metric, which reports a second outcome: whether small or large"
            " values of a sweep's goal are better is in its file."
        )
    workloads = [
        read_sweep(Path(each), arguments.target, arguments.metric, better) for each in folders
    ]
    check_different(workloads)
    return workloads


def _folder(arguments: argparse.Namespace) -> Path:
    """Returns where the report goes: into the sweep, or the folder `report` for several."""
    if arguments.output:
        return Path(arguments.output)
    only = arguments.folders[0] if len(set(arguments.folders)) == 1 else None
    if only and (Path(only) / "plan.json").exists():
        return Path(only) / "report"
    return Path("report")


def _counted(files: Sequence[Path]) -> str:
    """Returns what was written, such as "index.html, report.md and 12 figures (PDF, PNG)"."""
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
