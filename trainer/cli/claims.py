"""The command claim: writes what a sweep shows with its hashes, and checks such a file."""

import argparse
import functools
import sys
from pathlib import Path

from trainer.cli.terminal import show
from trainer.messages import DONE, FAILED, UserError, plural


def run(arguments: argparse.Namespace) -> int:
    """Calls the action of the command."""
    return {"write": _write, "verify": _verify}[arguments.action](arguments)


def _write(arguments: argparse.Namespace) -> int:
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


def _verify(arguments: argparse.Namespace) -> int:
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
        functools.partial(print, file=sys.stderr, flush=True),
    )
    for sentence in sentences(checked):
        show(sentence)
    return DONE if checked.verified or checked.alike else FAILED
