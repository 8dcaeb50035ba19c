"""The command sweep extend: adds a revision to the plan of a sweep."""

import argparse
from pathlib import Path
from shlex import join

from trainer.cli.resolving import (
    allowed_changes,
    ignore_optimizer_warnings,
    read_config,
    search_paths,
)
from trainer.cli.terminal import show
from trainer.config.vocabulary import SWEEP
from trainer.messages import DONE


def run(arguments: argparse.Namespace) -> int:
    """Adds to a plan what a file has beyond it, and prints that."""
    from trainer.report.planned_power import power_of_extension
    from trainer.sweep.code_changes import refuse_changed_code
    from trainer.sweep.extension import make_extension, render_extension, write_extension
    from trainer.sweep.plan import make_plan
    from trainer.sweep.plan_file import check_vocabulary, read_plan, work_command
    from trainer.sweep.plan_text import difference_lines
    from trainer.sweep.programs import find_programs
    from trainer.sweep.reading import read_sweep
    from trainer.workdir import code

    ignore_optimizer_warnings()
    folder = Path(arguments.folder).absolute()
    stored = read_plan(folder)
    check_vocabulary(folder, stored, arguments.vocabulary)
    vocabulary = list(dict.fromkeys([*stored.vocabulary, *arguments.vocabulary]))
    config = read_config(arguments, SWEEP)
    definition = read_sweep(config, vocabulary, search_paths(arguments))
    plan = make_plan(definition)
    if stored.revision > 1 and stored.revisions[-1].get("plan") == plan.content_digest:
        show(f"The sweep in {folder} is already revision {stored.revision}, which this file makes.")
        return DONE
    plan = find_programs(definition, plan, vocabulary)
    found, allowed = code.hashes(vocabulary), arguments.allow_changed
    if arguments.dry_run:
        refuse_changed_code(folder, found, allowed)
        revision = make_extension(folder, stored, definition, plan)
    else:
        stored, revision = write_extension(
            folder, definition, plan, arguments.locks, found, allowed
        )
    power = power_of_extension(folder, stored, revision)
    unlike = difference_lines(plan)
    show(render_extension(folder, stored, revision, power, unlike), end="")
    if arguments.dry_run:
        show("Nothing was written: the same command without --dry_run adds it.")
    else:
        words = work_command(Path(arguments.folder), stored.vocabulary)
        command = join([*words, *allowed_changes(arguments)])
        show(f"Workers of this sweep compute it; to start one: python {command}")
    return DONE
