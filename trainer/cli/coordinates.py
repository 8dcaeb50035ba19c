"""The command coordinate_check: compares changes of activations over widths."""

import argparse

from trainer.cli.reporting import made_by, write_files
from trainer.cli.resolving import config_options, ignore_optimizer_warnings, read_config
from trainer.cli.terminal import log, show
from trainer.messages import DONE, FAILED


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and draws; 1 unless each change was shown to keep its size."""
    from trainer.train import runtime

    config = read_config(arguments)
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
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
        log=log,
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
        title = f"Coordinate check of {', '.join(arguments.files)}"
        made = made_by("coordinate_check", _words(arguments))
        write_files(make_report(found, title, made), arguments)
    return DONE if passed(found) else FAILED


def _words(arguments: argparse.Namespace) -> list[str]:
    """Returns the options that decide what is measured."""
    return [
        *config_options(arguments),
        f"--widths={','.join(map(str, arguments.widths))}",
        *([f"--width_path={arguments.width_path}"] if arguments.width_path else []),
        *(f"--scale={path}={power:g}" for path, power in arguments.scale),
        f"--steps={','.join(map(str, arguments.steps))}",
        f"--seeds={arguments.seeds}",
        *(["--keep_schedules"] if arguments.keep_schedules else []),
    ]
