"""The command coordinate_check: compares changes of activations over widths."""

import argparse
import shlex
import sys
from pathlib import Path

import trainer
from trainer.cli.resolving import config_options, ignore_optimizer_warnings, read_config
from trainer.cli.terminal import show
from trainer.messages import DONE, FAILED, plural


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and draws; 1 unless each change was shown to keep its size."""
    from trainer.train import runtime

    config = read_config(arguments)
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    from trainer.report import FORMATS
    from trainer.report.write import write
    from trainer.studies.coordinate_check import check
    from trainer.studies.coordinate_report import make_report, notes, passed, printed, verdict
    from trainer.studies.width_series import make_series

    ignore_optimizer_warnings()
    scale = dict(arguments.scale)
    series = make_series(
        config, arguments.widths, arguments.width_path, scale, arguments.vocabulary
    )
    found = check(
        series,
        arguments.seeds,
        arguments.steps,
        arguments.keep_schedules,
        arguments.vocabulary,
        log=lambda line: show(line, sys.stderr),
    )
    for line in notes(found):
        show(line)
    show("")
    show("\n".join(printed(found)))
    show("")
    for line in verdict(found):
        show(line)
    for line in found.warnings:
        show(f"The plan warns at the width {found.widths[-1]}: {line}")
    if arguments.output:
        names = ", ".join(arguments.files)
        report = make_report(found, f"Coordinate check of {names}", _made(arguments))
        files = write(report, Path(arguments.output), arguments.formats or FORMATS)
        show(f"{arguments.output}: {plural(len(files), 'file')}")
    return DONE if passed(found) else FAILED


def _made(arguments: argparse.Namespace) -> str:
    """Returns the version, and the command with the options that decide what is measured."""
    words = [
        *config_options(arguments),
        f"--widths={','.join(map(str, arguments.widths))}",
        *([f"--width_path={arguments.width_path}"] if arguments.width_path else []),
        *(f"--scale={path}={power:g}" for path, power in arguments.scale),
        f"--steps={','.join(map(str, arguments.steps))}",
        f"--seeds={arguments.seeds}",
        *(["--keep_schedules"] if arguments.keep_schedules else []),
    ]
    command = shlex.join(["python", "-m", "trainer", "coordinate_check", *words])
    return f"Lockstep {trainer.__version__}: {command}"
