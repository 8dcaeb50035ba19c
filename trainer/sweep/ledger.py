"""The ledger of a sweep: what was planned and computed, in an order that nobody can change unseen.

ledger.jsonl has a line for each event, in JSON. Each has the hash of the line before and its own,
so that a line that is changed, removed or moved is found; and the digests of the files that it is
about, so that a file that is changed later is found, too. What it cannot show is that somebody
wrote all of it anew: keep the last hash elsewhere, such as in a paper, to show that as well.

    plan    a revision of plan.json and the user's code
    code    other code than before, which the user allowed
    trial   a trial that ended: its files
    final   final.json, which names the winners

Several workers append under the sweep's lock. A line that a killed worker left torn is removed by
the next one.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.sweep.encoding import canonical
from trainer.writers.files import after_newline

LEDGER_FILE = "ledger.jsonl"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """A line of the ledger.

    Attributes:
        line: its number, from 1.
        event: "plan", "code", "trial" or "final".
        content: all that it says.
    """

    line: int
    event: str
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Ledger:
    """The ledger of a sweep.

    Attributes:
        entries: its lines as far as they are intact.
        damage: a sentence about the first line that is not; "" if all are.
        head: the hash of the last intact line; "" of an empty ledger.
        torn: whether a last line without its end follows, which a killed worker left.
    """

    entries: tuple[Entry, ...]
    damage: str
    head: str
    torn: bool

    def of(self, event: str) -> list[Entry]:
        """Returns the entries of an event, in order."""
        return [entry for entry in self.entries if entry.event == event]


def append(folder: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Appends events to the ledger; the sweep must be locked.

    Args:
        folder: of the sweep.
        events: what the lines say; each has "event".

    Raises:
        OSError: the file cannot be read or written.
    """
    descriptor = os.open(folder / LEDGER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "r+b") as file:
        end = after_newline(file, os.fstat(descriptor).st_size)
        file.seek(after_newline(file, end - 1) if end else 0)
        before = _hash_of(file.read(end - file.tell()))
        lines = []
        for event in events:
            line = _line(event, before)
            before = _hash_of(line)
            lines.append(line)
        file.truncate(end)  # without a line that a killed worker left torn
        file.seek(end)
        file.write(b"".join(lines))
        file.flush()
        os.fsync(descriptor)


def _line(event: Mapping[str, Any], before: str) -> bytes:
    content = {**event, "before": before}
    return f"{canonical(content | {'hash': _digest(canonical(content).encode())})}\n".encode()


def _hash_of(line: bytes) -> str:
    """Returns the hash that a line has; "" of no line, or of one that is damaged."""
    try:
        return str(json.loads(line)["hash"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def read_ledger(folder: Path) -> Ledger | None:
    """Reads the ledger of a sweep and checks its lines.

    Args:
        folder: of the sweep.

    Returns:
        None if there is no ledger, as of sweeps of earlier versions.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        text = (folder / LEDGER_FILE).read_bytes()
    except FileNotFoundError:
        return None
    lines = text.split(b"\n")
    torn = bool(lines.pop())
    entries: list[Entry] = []
    head = ""
    for number, line in enumerate(lines, 1):
        content = _checked(line)
        if content is None:
            damage = f"line {number} was changed"
        elif content["before"] != head:
            damage = f"what stood before line {number} was changed or removed"
        else:
            head = content["hash"]
            entries.append(Entry(number, str(content.get("event")), content))
            continue
        return Ledger(tuple(entries), damage, head, torn)
    return Ledger(tuple(entries), "", head, torn)


def _checked(line: bytes) -> dict[str, Any] | None:
    """Returns what a line says; None if it is not as it was written."""
    try:
        content = json.loads(line)
        rest = {key: value for key, value in content.items() if key != "hash"}
        same = _line({k: v for k, v in rest.items() if k != "before"}, rest["before"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return content if same == line + b"\n" else None


def trial_event(folder: Path, name: str, end: str, code: str) -> dict[str, Any]:
    """Returns the event of a trial that ended.

    Args:
        folder: of the sweep.
        name: the folder of the trial in it.
        end: "done", "diverged" or "failed".
        code: the digest of the user's code; see `code_digest`.

    Raises:
        OSError: a file of the trial cannot be read.
    """
    return {"event": "trial", "trial": name, "end": end, "code": code} | {
        "files": dict(digests(folder / name))
    }


def digests(folder: Path, without: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields the path and the SHA-256 of each file below a folder, sorted.

    Args:
        folder: the folder.
        without: names of folders that are left out.

    Raises:
        OSError: a file cannot be read.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name.split("/")[0] not in without:
            yield name, file_digest(path)


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_digest(hashes: Mapping[str, str]) -> str:
    """Returns a digest of the user's code; "" if the sweep uses none.

    Args:
        hashes: file -> its hash, from `trainer.workdir.code.hashes`.
    """
    return _digest(canonical(dict(sorted(hashes.items()))).encode())[:16] if hashes else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
