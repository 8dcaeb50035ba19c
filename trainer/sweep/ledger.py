"""The ledger of a sweep: what was planned and computed, in an order that nobody can change unseen.

ledger.jsonl has a line for each event, in JSON. Each has the hash of the line before and its own,
so that a line that is changed, removed or moved is found; and the digests of the files that it is
about, so that a file that is changed later is found, too. What it cannot show is that somebody
wrote all of it anew: keep the last hash elsewhere, such as in a paper, to show that as well.

    plan    the last revision of plan.json, the files beside it, and the version of scipy
    code    files of the user's code, and programs of a training step, that are new or were changed:
            their hashes, and those before
    environment  versions, settings, devices and cores of a process that is about to compute trials
    initial the metrics of an arm before its first step: those of its first trial's first state
    trial   a trial that ended: how, and its files; of checkpoints, their manifests
    cut     cuts.json, which names the trials that went on where others were stopped early
    points  points.json, which has the points that were chosen by the results of earlier ones
    final   final.json, which names the winners

The last line about a trial or a file counts. The run.json of a trial says with which code it ran,
and in which environment.
Several workers append under the sweep's lock. A line that a killed worker left torn is removed by
the next one.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.messages import UserError, plural
from trainer.sweep.final import FINAL_FILE
from trainer.sweep.plan import searches_of
from trainer.sweep.spaces import canonical
from trainer.writers.files import (
    after_newline,
    open_regular,
    paths_below,
    read_regular,
    replace_file,
)
from trainer.writers.json_files import as_json
from trainer.writers.summary import SUMMARY_FILE, read_outcome

LEDGER_FILE, CUTS_FILE, POINTS_FILE = "ledger.jsonl", "cuts.json", "points.json"
# By the file of a choice.
CHOICES = {CUTS_FILE: "cut", POINTS_FILE: "points", FINAL_FILE: "final"}
CHECKPOINTS, _MANIFEST = "checkpoints/", "manifest.json"
Kinds = Mapping[str, Mapping[str, type]]  # event -> key of its line -> the type of the value
_EVENTS: Kinds = {
    "plan": {"revision": int, "digest": str, "files": dict},
    "code": {"code": dict, "changed": dict},
    "environment": {"environment": dict},
    "initial": {"trial": str, "arms": list, "values": dict},
    "trial": {"trial": str, "files": dict},
    **{event: {"files": dict} for event in CHOICES.values()},
}
# These tell two computations of a trial apart. run.json has times to the second: a small run that
# failed may be computed again within one. The summary has how long each took.
_COMPUTATION = ("run.json", SUMMARY_FILE)


@dataclass(frozen=True)
class LedgerEntry:
    """A line of the ledger."""

    line: int  # its number, from 1
    event: str  # "plan", "code", "environment", "initial", "trial", "cut" or "final"
    content: Mapping[str, Any]  # all that it says


class KnownFile(NamedTuple):
    """A file of the user's code, as the last line about it has it."""

    hash: str  # of its content
    after: int  # how many trials had ended before that line


class KnownResults(NamedTuple):
    """What had been computed when a revision of the plan was made."""

    finished: frozenset[str]  # the trials of the searches that had ended, such as "adamw/0003/0"
    final: bool  # whether the winners were chosen, or a run of a winner had ended


@dataclass(frozen=True)
class Ledger:
    """The ledger of a sweep."""

    entries: tuple[LedgerEntry, ...] = ()  # its lines that are intact
    damage: str = ""  # what is wrong with the first line that is not intact; "" if all are
    head: str = ""  # the hash of the last intact line; "" of an empty ledger
    torn: bool = False  # whether a last line without its end follows, which a killed worker left
    exists: bool = True  # False for sweeps of earlier versions

    def of(self, event: str) -> list[LedgerEntry]:
        """Returns the entries of an event, in order."""
        return [entry for entry in self.entries if entry.event == event]

    def known_at(self, revision: int) -> KnownResults | None:
        """Returns the results whose line comes before that of a revision of the plan, or None."""
        # They include results whose files were removed since. None for the first revision that the
        # ledger has, and for those before it.
        plans = self.of("plan")
        line = next((x.line for x in plans[1:] if x.content["revision"] == revision), None)
        return None if line is None else known_results(x for x in self.entries if x.line < line)


@contextlib.contextmanager
def refuse_unreadable(folder: Path) -> Iterator[None]:
    """Raises UserError if something in the folder of a sweep cannot be read within."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror}.") from error


def known_results(entries: Iterable[LedgerEntry], others: Iterable[str] = ()) -> KnownResults:
    """Returns the results of which there are lines of a ledger."""
    # `others` are further results, by their folders, of which there may be no line.
    lines = list(entries)
    names = [*others, *(each.content["trial"] for each in lines if each.event == "trial")]
    parts = [name.partition("/") for name in names]
    return KnownResults(
        frozenset(name for folder, _, name in parts if folder == "trials"),
        any(each.event == "final" for each in lines)
        or any(folder != "trials" for folder, _, _ in parts),
    )


def began_late(ledger: Ledger) -> str:
    """Returns what a ledger does not show, as a sentence; "" if it shows all."""
    # It shows all if it began with the plan. Those of earlier versions began when there were
    # results, or do not exist.
    if not ledger.exists:
        return (
            "There is no ledger.jsonl, which would show that no file was changed, and which results"
            " were known before an extension."
        )
    for entry in ledger.of("plan")[:1]:
        revision, found = entry.content["revision"], entry.content.get("found", 0)
        if revision > 1 or found:
            return (
                f"ledger.jsonl began at revision {revision} of the plan, when there were"
                f" {plural(found, 'result')}, and says nothing of what was before it."
            )
    return ""


def compared_known(
    revisions: Sequence[Mapping[str, Any]], in_order: bool, tested: bool = False
) -> bool:
    """Returns whether it was known how arms compare when the last revision was made."""
    # It was if compared runs had ended. In a sweep with `final: null` these are its trials, where
    # they are judged: if each search has one point, or if the metric that is compared is not the
    # one by which points were selected. It also was if the revision adds searches, and trials of
    # two arms had ended: a winner is about as good as its trial.
    # `in_order` says whether a ledger that began with the plan has the results in their order. If
    # not, they may have been removed before an extension, and count as known to it. `tested` says
    # whether trials have the metric on the test split.
    known, before = revisions[-1].get("known"), revisions[:-1]
    if not before or not known:
        return False
    arms = {name.partition("/")[0] for name in known["finished"]}
    more = searches_of(revisions[-1]) > searches_of(before[-1])
    if known["final"] or not in_order or (more and len(arms) > 1):
        return True
    points = {(arm, *search, number) for x in before for arm, number, _, _, *search in x["trials"]}
    one_each = len({point[:-1] for point in points}) == len(points)
    return not before[-1]["final_seeds"] and (tested or one_each) and bool(known["finished"])


def append(folder: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Appends events, each with the key "event", to the ledger; the sweep must be locked."""
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
        file.truncate(end)  # removes a line that a killed worker left torn
        file.seek(end)
        file.write(b"".join(lines))
        file.flush()
        os.fsync(descriptor)


def _line(event: Mapping[str, Any], before: str) -> bytes:
    content = {**event, "before": before}
    return f"{canonical(content | {'hash': sha256(canonical(content).encode())})}\n".encode()


def _hash_of(line: bytes) -> str:
    """Returns the hash that a line has; "" for no line, or a damaged one."""
    try:
        return str(json.loads(line)["hash"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def read_ledger(folder: Path, kinds: Kinds = _EVENTS) -> Ledger:
    """Reads the ledger of a sweep, or one with other events, and checks its lines."""
    try:
        text = read_regular(folder / LEDGER_FILE)
    except FileNotFoundError:
        return Ledger(exists=False)
    lines = text.split(b"\n")
    torn = bool(lines.pop())
    entries: list[LedgerEntry] = []
    head = damage = ""
    for number, line in enumerate(lines, 1):
        if (content := _checked(line, kinds)) is None:
            damage = damage or f"line {number} was changed"
            continue
        if content["before"] != head and not damage:
            damage = f"what stood before line {number} was changed or removed"
        head = content["hash"]
        entries.append(LedgerEntry(number, content["event"], content))
    return Ledger(tuple(entries), damage, head, torn)


def _checked(line: bytes, kinds: Kinds = _EVENTS) -> dict[str, Any] | None:
    """Returns what a line says; None if it is not as it was written."""
    try:
        content = json.loads(line)
        event = {key: value for key, value in content.items() if key not in ("hash", "before")}
        same = _line(event, content["before"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return content if same == line + b"\n" and _is_event(content, kinds) else None


def _is_event(content: Mapping[str, Any], kinds: Kinds) -> bool:
    """Returns whether a line has what its readers need."""
    # A correct hash does not show that: anybody can compute it.
    wanted = kinds.get(str(content.get("event")), {})
    if not wanted or any(type(content.get(k)) is not x for k, x in wanted.items()):
        return False
    if content["event"] == "initial":
        texts, numbers = content["arms"], content["values"].values()
        return all(isinstance(x, float) for x in numbers) and all(isinstance(x, str) for x in texts)
    hashes = [content[name] for name, kind in wanted.items() if kind is dict]
    return all(isinstance(each, str) for of in hashes for each in of.values())


class LedgerWriter:
    """Appends what happens to a sweep's ledger; all methods but `code` need the sweep's lock."""

    # It reads the ledger once, and after that only what other workers appended.

    def __init__(self, folder: Path):
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self._read = 0  # bytes
        self._known: dict[str, list[str | None]] = {}  # trial -> what tells its computation
        # the lines that are not about trials, and how many trials had ended before each
        self._others: list[tuple[dict[str, Any], int]] = []

    def add_plan(self, revision: int, digest: str) -> None:
        """Adds the last revision of the plan and its digest, unless the ledger has it."""
        # The ledger of a sweep computed without one begins with the results that are there.
        if any(x["event"] == "plan" and x["revision"] >= revision for x, _ in self._look()):
            return
        folder = self._folder
        files = [folder / "plan.json", *folder.glob("sweep*.yaml"), *folder.glob("arms/*.yaml")]
        event: dict[str, Any] = {"event": "plan", "revision": revision, "digest": digest}
        event["scipy"] = importlib.metadata.version("scipy")  # which draws points of most methods
        event["files"] = {x.relative_to(folder).as_posix(): file_digest(x) for x in files}
        if self._read:
            return append(folder, [event])
        if found := sorted(results_in(folder)):
            event["found"] = len(found)
        events = [event, *(trial_event(folder / name, name) for name in found)]
        for name in CHOICES:
            with contextlib.suppress(FileNotFoundError):
                events.append(_file_event(name, (folder / name).read_bytes()))
        append(folder, events)

    def code(self) -> Mapping[str, KnownFile]:
        """Returns the files of the user's code that the sweep ran with last, by their names."""
        lines = [(line["code"], after) for line, after in self._look() if line["event"] == "code"]
        return {name: KnownFile(x, after) for files, after in lines for name, x in files.items()}

    def add_environment(self, found: Mapping[str, str]) -> None:
        """Adds the environment of a process that is about to compute, unless the ledger has it."""
        if all(line.get("environment") != found for line, _ in self._look()):
            append(self._folder, [{"event": "environment", "environment": dict(found)}])

    def add_trials(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds events from `trial_event`, but for trials that the ledger has."""
        # A trial that was computed again gets a line that says so.
        self._look()
        new = []
        for event in events:
            if (before := self._known.get(event["trial"])) != _computation(event):
                new.append(event if before is None else {**event, "again": True})
        if new:
            append(self._folder, new)

    def without_initial(self, arms: Iterable[str]) -> list[str]:
        """Returns those of some arms of which the ledger has no metrics before the first step."""
        known = (line["arms"] for line, _ in self._look() if line["event"] == "initial")
        return sorted(set(arms).difference(*known))

    def add_initial(self, trial: str, arms: Iterable[str], values: Mapping[str, float]) -> None:
        """Adds metrics of the first state of a trial, for those arms that have none yet."""
        # `values` is name of a row's metric, such as "validation/loss" -> its finite value.
        if new := self.without_initial(arms):
            event = {"event": "initial", "trial": trial, "arms": new, "values": dict(values)}
            append(self._folder, [event])

    def add_file(self, name: str, content: bytes) -> None:
        """Adds the content that a file of `CHOICES` is about to get."""
        append(self._folder, [_file_event(name, content)])

    def write_choices(self, name: str, choices: Iterable[Any]) -> None:
        """Writes a file of `CHOICES`, a list of dataclasses, whose content is added before."""
        content = ("[\n" + ",\n".join(json.dumps(as_json(x)) for x in choices) + "\n]\n").encode()
        self.add_file(name, content)
        replace_file(self._folder / name, content)

    def _look(self) -> list[tuple[dict[str, Any], int]]:
        """Reads the whole lines that were appended; returns all intact ones but those of trials."""
        text = b""
        try:
            with open_regular(self._folder / LEDGER_FILE) as file:
                if os.fstat(file.fileno()).st_size < self._read:  # it was replaced
                    self._forget()
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            self._forget()
        end = text.rfind(b"\n") + 1
        self._read += end
        for content in filter(None, map(_checked, text[:end].splitlines())):
            if content["event"] == "trial":
                self._known[content["trial"]] = _computation(content)
            else:
                self._others.append((content, len(self._known)))
        return self._others


def _computation(event: Mapping[str, Any]) -> list[str | None]:
    return [event["files"].get(name) for name in _COMPUTATION]


def trial_event(place: Path, name: str) -> dict[str, Any]:
    """Returns the event of a trial that ended."""
    # `place` has its files, and `name` is its folder in that of the sweep.
    event = {"event": "trial", "trial": name, "files": file_digests(place)}
    return event if (outcome := read_outcome(place)) is None else {**event, "end": outcome.end}


def _file_event(name: str, content: bytes) -> dict[str, Any]:
    """Returns the event of a file of `CHOICES`."""
    return {"event": CHOICES[name], "files": {name: sha256(content)}}


def results_in(folder: Path) -> Iterator[str]:
    """Yields the trials that have a result, by their folders, those of earlier winners too."""
    for name in os.listdir(folder):
        if name == "trials" or name.partition(".")[0] == "final" and name != FINAL_FILE:
            yield from paths_below(folder, name, 3 if name == "trials" else 2)


def file_digests(folder: Path) -> dict[str, str]:
    """Returns path -> SHA-256 for the files in a trial's folder that the ledger has, sorted."""
    return {name: file_digest(folder / name) for name in sorted(files_in(folder))}


def files_in(folder: Path, below: str = "") -> Iterator[str]:
    """Yields the paths of files in a trial's folder that the ledger has, below a path in it."""
    # Of a checkpoint these are its manifests, which have the checksums of its arrays.

    # A walk with Path.rglob would take longer than all digests.
    with os.scandir(f"{folder}/{below}") as entries:
        for entry in entries:
            name = below + entry.name
            if entry.is_file():
                if not below.startswith(CHECKPOINTS) or entry.name.startswith(_MANIFEST):
                    yield name
            elif entry.is_dir(follow_symlinks=False):
                yield from files_in(folder, f"{name}/")


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def sha256(content: bytes) -> str:
    """Returns the SHA-256 of a content in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
