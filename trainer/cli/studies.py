"""The commands of studies: challenge, claim, coordinate_check, rate_test and shadow."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer import config as configs
from trainer.cli import resolving
from trainer.cli.reporting import given, made_by
from trainer.cli.terminal import log, show
from trainer.config import Config
from trainer.messages import DONE, FAILED, UserError, joined, plural
from trainer.report.document import Report
from trainer.train import runtime


def challenge(arguments: argparse.Namespace) -> int:
    """Checks an entry, writes the history, or finds a sigma for the rule."""
    if arguments.action == "sigma":
        from trainer.studies.challenge import sigma_of

        show(sigma_of(Path(arguments.sweep)))
        return DONE
    return (_check_entry if arguments.action == "check" else _table)(arguments)


def _check_entry(arguments: argparse.Namespace) -> int:
    """Prints the verdict of an entry, computed from its runs; 1 if it is not one of the target."""
    from trainer.report.reaching import sentence_of
    from trainer.studies.challenge import check_entry, read_challenge
    from trainer.studies.challenge_table import confirmation_of, verdict_on

    folder = Path(arguments.entry).absolute()
    rules = read_challenge(folder.parent.parent)
    entry, *doubting = (
        check_entry(rules, each, arguments.vocabulary)
        for each in (folder, *rules.doubting(folder.name))
    )
    show(f"{entry.name}: {entry.text.title}")
    show(f"It changes {joined(entry.changes, 4) or 'nothing'}.")
    for offence in entry.offences:
        show(f"Against the rules: {offence}")
    if entry.packages:
        show(f"It names {joined(entry.packages)}, whose code is not checked.")
    if entry.offences or entry.reached is None:
        return FAILED
    target = f"{rules.challenge.goal.metric} {rules.rule.target:g}"
    show(sentence_of("It", target, rules.rule, entry.reached))
    if entry.text.doubts:
        older = check_entry(rules, folder.parent / entry.text.doubts, arguments.vocabulary)
        show(verdict_on(rules, older, entry).sentence)
    if entry.steps is None:
        return FAILED
    if said := confirmation_of(rules, entry, doubting).sentence:
        show(said)
    show("This compares files with each other; nothing was computed again.")
    return DONE


def _table(arguments: argparse.Namespace) -> int:
    """Writes the history of a challenge, and prints its record."""
    from trainer.report.write import write
    from trainer.studies.challenge import check_entry, read_challenge
    from trainer.studies.challenge_table import make_table

    rules = read_challenge(Path(arguments.folder))
    if not rules.entries:
        raise UserError(
            f"{rules.folder} has no entries: an entry is a folder entries/NAME with entry.yaml and"
            " the folder of a sweep named sweep."
        )
    entries = [check_entry(rules, folder, arguments.vocabulary) for folder in rules.entries]
    report = make_table(rules, entries, made_by("challenge", ["table", arguments.folder]))
    folder = Path(arguments.output or rules.folder / "report")
    files = write(report, folder, arguments.formats)
    for sentence in report.verdict:
        show(sentence)
    show(f"{folder}: {plural(len(files), 'file')}")
    return DONE


def claim(arguments: argparse.Namespace) -> int:
    """Writes what a sweep shows with its hashes, or checks such a file."""
    return {"write": _write_claim, "verify": _verify_claim}[arguments.action](arguments)


def _write_claim(arguments: argparse.Namespace) -> int:
    """Writes a claim about a finished sweep."""
    from trainer.studies.claim import write_claim

    folder = Path(arguments.folder)
    file = Path(arguments.output or folder / "claim.json")
    claim = write_claim(folder, file)
    for sentence in claim.verdict:
        show(sentence)
    show(
        f"{file}: the verdict and the hashes of {plural(len(claim.runs), 'run')}. Publish it, or"
        " its SHA-256, before the number by which others draw runs is known."
    )
    return DONE


def _verify_claim(arguments: argparse.Namespace) -> int:
    """Checks a claim; 1 if it is refuted, or what was drawn is not shown to be as it says."""
    from trainer.studies.claim import Wanted, verify_claim
    from trainer.studies.claim_text import sentences
    from trainer.studies.claim_tolerance import FEWEST

    if arguments.measured < FEWEST:
        raise UserError(
            f"--measured={arguments.measured} is too few to know how far results are apart: it"
            f" takes at least {FEWEST}."
        )
    wanted = Wanted(measured=arguments.measured)
    if arguments.runs is not None:
        wanted = wanted._replace(segments=None, runs=arguments.runs)
    elif arguments.segments is not None:
        wanted = wanted._replace(segments=arguments.segments)
    checked = verify_claim(
        Path(arguments.file),
        Path(arguments.folder),
        arguments.public,
        wanted,
        arguments.vocabulary,
        log,
    )
    for sentence in sentences(checked):
        show(sentence)
    return DONE if checked.verified or checked.alike else FAILED


def coordinate_check(arguments: argparse.Namespace) -> int:
    """Compares changes of activations over widths; 1 unless each was shown to keep its size."""
    config = resolving.read_config(arguments)
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    from trainer.studies.coordinate_check import check, make_series
    from trainer.studies.coordinate_report import make_report, notes, passed, printed, verdict

    resolving.ignore_optimizer_warnings()
    widths, scale = arguments.widths, dict(arguments.scale)
    series = make_series(config, widths, arguments.width_path, scale, arguments.vocabulary)
    found = check(
        series,
        arguments.seeds,
        arguments.steps,
        arguments.keep_schedules,
        arguments.vocabulary,
        log=log,
    )
    for line in [*notes(found), "", *printed(found), "", *verdict(found)]:
        show(line)
    for line in found.warnings:
        show(f"The plan warns at the width {found.widths[-1]}: {line}")
    _write_report(
        arguments,
        lambda: make_report(found, f"Coordinate check of {', '.join(arguments.files)}"),
        f"--widths={','.join(map(str, widths))}",
        *([f"--width_path={arguments.width_path}"] if arguments.width_path else []),
        *(f"--scale={path}={power:g}" for path, power in arguments.scale),
        f"--steps={','.join(map(str, arguments.steps))}",
        f"--seeds={arguments.seeds}",
        *(["--keep_schedules"] if arguments.keep_schedules else []),
    )
    return DONE if passed(found) else FAILED


def rate_test(arguments: argparse.Namespace) -> int:
    """Raises a learning rate until training diverges, and prints and draws what happened."""
    config = resolving.read_config(arguments)
    if arguments.group and arguments.rate_path:
        raise UserError("--group and --rate_path both name the learning rate: write one of them.")
    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    from trainer.studies.rate_report import make_report, notes, sentences, upper_end, yaml
    from trainer.studies.rate_test import Rates, rate_at, rate_of_group, rate_test

    resolving.ignore_optimizer_warnings()
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
    _write_report(
        arguments,
        lambda: make_report(tested, f"Range test of {', '.join(arguments.files)}"),
        f"--rate_path={path}",
        f"--low={arguments.low:g}",
        f"--high={arguments.high:g}",
        *given(arguments, "steps", "seeds"),
    )
    return DONE


def shadow(arguments: argparse.Namespace) -> int:
    """Compares what another optimizer would do at each point; 1 if a step was not finite."""
    config, other = resolving.read_config(arguments), read_other(arguments)
    runtime.keep_freed_memory()
    runtime.use_openblas_threads()  # as many as a new run has
    runtime.keep_compiled_programs()
    from trainer.studies.shadow import shadow
    from trainer.studies.shadow_report import make_report, notes, printed, sentences

    resolving.ignore_optimizer_warnings()
    found = shadow(config, other, arguments.steps, arguments.every, arguments.vocabulary, log=log)
    for line in [*notes(found), "", *printed(found), "", *sentences(found)]:
        show(line)
    named = ", ".join([*arguments.shadow, *arguments.shadow_sets])
    title = f"{named} along the path of {', '.join(arguments.files)}"
    _write_report(
        arguments,
        lambda: make_report(found, title),
        *(f"--shadow={file}" for file in arguments.shadow),
        *(f"--shadow_set={text}" for text in arguments.shadow_sets),
        *given(arguments, "steps", "every"),
    )
    return FAILED if found.ended else DONE


def read_other(arguments: argparse.Namespace) -> Config:
    """Reads the config of the other optimizer of `shadow`."""
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
    read = configs.load(files, bindings, sets, resolving.search_paths(arguments))
    return configs.override(read, arguments.shadow_sets, "--shadow_set")


def _of_optimizer(text: str) -> bool:
    """Returns whether "path=value" edits the optimizer."""
    return text.partition("=")[0].strip().partition(".")[0] == "optimizer"


def _write_report(
    arguments: argparse.Namespace, make_report: Callable[[], Report], *words: str
) -> None:
    """Writes the report of a study into the folder of --output, if there is one."""
    # `words` are the options that decide what is computed, besides those of the config.
    if arguments.output:
        from trainer.report.write import write

        made = made_by(arguments.command, [*resolving.config_options(arguments), *words])
        report = replace(make_report(), made=made)
        files = write(report, Path(arguments.output), arguments.formats)
        show(f"{arguments.output}: {plural(len(files), 'file')}")
