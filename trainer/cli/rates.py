"""The command rate_test: raises a learning rate until training diverges."""

import argparse

from trainer.cli.reporting import made_by, write_files
from trainer.cli.resolving import config_options, ignore_optimizer_warnings, read_config
from trainer.cli.terminal import log, show
from trainer.messages import DONE, UserError


def run(arguments: argparse.Namespace) -> int:
    """Trains with the rising rate, and prints and draws what happened; it changes no file."""
    from trainer.train import runtime

    config = read_config(arguments)
    if arguments.group and arguments.rate_path:
        raise UserError("--group and --rate_path both name the learning rate: write one of them.")
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    from trainer.studies.rate_paths import rate_at, rate_of_group
    from trainer.studies.rate_report import make_report, notes, sentences, upper_end, yaml
    from trainer.studies.rate_test import Rates, rate_test

    ignore_optimizer_warnings()
    if arguments.rate_path:
        path = rate_at(config, arguments.rate_path, arguments.vocabulary)
    else:
        path = rate_of_group(config, arguments.group, arguments.vocabulary)
    rates = Rates(path, arguments.low, arguments.high, arguments.steps)
    tested = rate_test(config, rates, arguments.seeds, arguments.vocabulary, log=log)
    for line in [*notes(tested), "", *sentences(tested)]:
        show(line)
    if pasted := yaml(tested):
        show(
            "\nA space to paste into an arm of a sweep, from the rate from which on a tenth of the"
        )
        show(f"largest gain is reached to {upper_end(tested)}:\n")
        show("\n".join(pasted))
    if arguments.output:
        title = f"Range test of {', '.join(arguments.files)}"
        made = made_by("rate_test", _words(arguments, path))
        write_files(make_report(tested, title, made), arguments)
    return DONE


def _words(arguments: argparse.Namespace, path: str) -> list[str]:
    """Returns the options that decide what is computed."""
    return [
        *config_options(arguments),
        f"--rate_path={path}",
        f"--low={arguments.low:g}",
        f"--high={arguments.high:g}",
        f"--steps={arguments.steps}",
        f"--seeds={arguments.seeds}",
    ]
