"""The command challenge: checks an entry, writes the history, and finds a sigma for the rule."""

import argparse
from pathlib import Path

from trainer.cli.reporting import made_by
from trainer.cli.terminal import show
from trainer.messages import DONE, FAILED, UserError, joined, plural


def run(arguments: argparse.Namespace) -> int:
    """Calls the action of the command."""
    actions = {"check": _check, "table": _table, "sigma": _sigma}
    return actions[arguments.action](arguments)


def _check(arguments: argparse.Namespace) -> int:
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
    from trainer.report import FORMATS
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
    files = write(report, folder, arguments.formats or FORMATS)
    for sentence in report.verdict:
        show(sentence)
    show(f"{folder}: {plural(len(files), 'file')}")
    return DONE


def _sigma(arguments: argparse.Namespace) -> int:
    """Prints a sigma for the rule of a goal, from the runs of one configuration."""
    from trainer.studies.challenge import sigma_of

    show(sigma_of(Path(arguments.sweep)))
    return DONE
