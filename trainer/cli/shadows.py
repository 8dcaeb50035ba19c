"""The command shadow: compares what another optimizer would do at each point of a run."""

import argparse

from trainer import config as configs
from trainer.cli.reporting import given, made_by, write_files
from trainer.cli.resolving import (
    config_options,
    ignore_optimizer_warnings,
    read_config,
    search_paths,
)
from trainer.cli.terminal import log, show
from trainer.config import Config
from trainer.messages import DONE, FAILED, UserError


def run(arguments: argparse.Namespace) -> int:
    """Trains, compares, prints and draws; 1 if a step was not finite."""
    from trainer.train import runtime

    config, other = read_config(arguments), read_other(arguments)
    runtime.keep_freed_memory()
    runtime.use_openblas_threads()  # as many as a new run has
    runtime.keep_compiled_programs()
    from trainer.studies.shadow import shadow
    from trainer.studies.shadow_report import make_report, notes, printed, sentences

    ignore_optimizer_warnings()
    found = shadow(config, other, arguments.steps, arguments.every, arguments.vocabulary, log=log)
    for line in [*notes(found), "", *printed(found), "", *sentences(found)]:
        show(line)
    if arguments.output:
        named = ", ".join([*arguments.shadow, *arguments.shadow_sets])
        title = f"{named} along the path of {', '.join(arguments.files)}"
        write_files(make_report(found, title, made_by("shadow", _words(arguments))), arguments)
    return FAILED if found.ended else DONE


def read_other(arguments: argparse.Namespace) -> Config:
    """Reads the config of the other optimizer."""
    # The settings of --set are edits of both configs, but for those of the optimizer. Without
    # --shadow it is the config itself, with all of its edits and those of --shadow_set.
    if not arguments.shadow and not arguments.shadow_sets:
        raise UserError(
            "Name the other optimizer: --shadow=FILE with its config, or --shadow_set PATH=VALUE"
            " with what it changes in that of --config."
        )
    for text in arguments.shadow_sets:
        if not _of_optimizer(text):
            raise UserError(
                f"--shadow_set {text}: it edits the optimizer of the other config only, at a path"
                f" such as optimizer.learning_rate. --set {text} edits both configs."
            )
    files, bindings, sets = arguments.files, arguments.bindings, arguments.sets
    if arguments.shadow:
        files, bindings = arguments.shadow, []
        sets = [text for text in sets if not _of_optimizer(text)]
    read = configs.load(files, bindings, sets, search_paths(arguments))
    return configs.override(read, arguments.shadow_sets, "--shadow_set")


def _of_optimizer(text: str) -> bool:
    """Returns whether "path=value" edits the optimizer."""
    return text.partition("=")[0].strip().partition(".")[0] == "optimizer"


def _words(arguments: argparse.Namespace) -> list[str]:
    """Returns the options that decide what is computed."""
    return [
        *config_options(arguments),
        *(f"--shadow={file}" for file in arguments.shadow),
        *(f"--shadow_set={text}" for text in arguments.shadow_sets),
        *given(arguments, "steps", "every"),
    ]
