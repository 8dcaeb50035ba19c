"""The user's code and data that a sweep runs with: changes are refused, or noted in the ledger.

Since the planning, the ledger has the hashes of each file of the `--vocabulary` packages that a
process of the sweep has imported. A file that no process had imported before is added, as is one
with other comments; one that differs is refused, unless the user allows it with
`--allow_changed=code`. So are the fingerprints of data, by `--allow_changed=data`.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import Config
from trainer.config.tree import functions
from trainer.config.vocabulary import RUN, Vocabulary
from trainer.config.wording import listing
from trainer.messages import UserError, plural
from trainer.sweep.ledger import Ledger, LedgerWriter, append, refuse_unreadable
from trainer.writers.json_files import DamagedFile
from trainer.writers.run_record import read_record

DATA = "the data"  # begins names that stand for data, with their fingerprint in place of a hash
_SHOWN = 4


def code_or_data(name: str) -> str:
    """Returns "code" or "data": what a name in the ledger's lines about code stands for."""
    return "data" if name.startswith(DATA) else "code"


class CodeChanged(UserError):
    """Raised if a process would compute trials with other code or data than the trials before."""


class CodeChange(NamedTuple):
    """A change of the user's code or data that was allowed."""

    files: Mapping[str, str]  # file, function, class or data -> its hash from then on
    after: int  # how many trials had ended before it


def import_code(configs: Iterable[Config], vocabulary: Sequence[str]) -> None:
    """Imports modules of the user's packages that configs name; ConfigError if one has a fault."""
    # Nothing is built. A module has a fault if it cannot be imported, or lacks a function.
    known = Vocabulary(vocabulary)
    for config in configs:
        for name in dict.fromkeys(functions(config.root)):
            if not RUN.has(name):
                known.function(name)


def changed_hashes(
    folder: Path, ledger: LedgerWriter, found: Mapping[str, str], allowed: Sequence[str]
) -> dict[str, str]:
    """Returns the old hashes of what differs from the code with which the sweep ran before."""
    # Raises CodeChanged if there are any, unless `allowed` has "code"; OSError if the ledger cannot
    # be read. `found` is the code of this process, from `trainer.workdir.code.hashes`, or data of
    # which `allowed` must have "data". What only one of the two has is not compared: a process may
    # not have imported it.
    # They import jax, which a sweep's status does without.
    from trainer.workdir import code
    from trainer.workdir.fingerprint import NOT_SEEDED

    known = ledger.code()
    names = code.differing_files({name: file.hash for name, file in known.items()}, found)
    changed = {name: known[name] for name in names if name in known and name in found}
    for kind in ("data", "code"):
        refused = {name: old for name, old in changed.items() if code_or_data(name) == kind}
        if not refused or kind in allowed:
            continue
        lines = []
        for name, (_, after) in refused.items():
            since = f"{plural(after, 'trial')} had ended" if after else "the sweep was begun"
            lines.append(f"  {name} (since {since})\n")
        if len(lines) > _SHOWN:
            lines[_SHOWN - 1 :] = [f"  and {len(lines) - _SHOWN + 1} more\n"]
        raise CodeChanged(
            f"The {kind} of the sweep in {folder} changed, so that its trials would not be"
            f" compared under equal conditions:\n{''.join(lines)}"
            f"{code.STEP_ALONE * code.are_steps(refused)}{NOT_SEEDED * (kind == 'data')}"
            f"Restore the {kind}, or start another sweep in another --workdir; or go on with"
            f" --allow_changed={kind}: the ledger and the report say what changed."
        )
    return {name: file.hash for name, file in changed.items()}


def refuse_changed_code(folder: Path, found: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raises UserError for changed code before anything is done in the folder of a sweep."""
    # It does so as well if the ledger cannot be read. For the arguments, see `changed_hashes`.
    with refuse_unreadable(folder):
        changed_hashes(folder, LedgerWriter(folder), found, allowed)


def note_code(
    folder: Path, ledger: LedgerWriter, found: Mapping[str, str], allowed: Sequence[str]
) -> list[str]:
    """Adds new code of this process to the ledger; returns the names of what was changed."""
    # The sweep must be locked. For arguments and exceptions, see `changed_hashes`.
    changed = changed_hashes(folder, ledger, found, allowed)
    known = ledger.code()
    if new := {x: hash for x, hash in found.items() if x not in known or known[x].hash != hash}:
        append(folder, [{"event": "code", "code": new, "changed": changed}])
    return list(changed)


def changes_in(ledger: Ledger) -> Iterator[CodeChange]:
    """Yields the allowed changes of the code from a ledger, in order."""
    ended = set[str]()
    for entry in ledger.entries:
        content = entry.content
        if entry.event == "trial":
            ended.add(content["trial"])
        elif entry.event == "code" and content["changed"]:
            files = {name: x for name, x in content["code"].items() if name in content["changed"]}
            yield CodeChange(files, len(ended))


def versions_in(ledger: Ledger) -> dict[str, tuple[str, ...]]:
    """Returns name -> the hashes that it had, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in ledger.of("code"):
        for name, hash in entry.content["code"].items():
            found[name] = tuple(dict.fromkeys([*found.get(name, ()), hash]))
    return found


def fingerprint_of(trial: Path) -> Mapping[str, Any]:
    """Returns the fingerprint with which a trial ran; empty if that is not known."""
    with contextlib.suppress(DamagedFile, OSError):
        return {} if (record := read_record(trial / "run.json")) is None else record["fingerprint"]
    return {}


def change_sentences(changes: Sequence[CodeChange]) -> list[str]:
    """Returns a sentence about each change.

    Example:
        >>> change_sentences([CodeChange({"lab/nets.py": "0f"}, 12)])
        ['The code changed after 12 trials had ended, as was allowed: lab/nets.py.']
    """
    lines = []
    for files, after in changes:
        when = f"after {plural(after, 'trial')}" if after else "before a trial"
        kind = code_or_data(next(iter(files)))  # a line of the ledger has one
        lines.append(f"The {kind} changed {when} had ended, as was allowed: {listing([*files])}.")
    return lines
