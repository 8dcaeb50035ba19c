"""The folder of a run: checked, created when the config is known to be valid, and bound to it.

Start with `Workdir`. Its run.json says how the run was made, how each of its processes ended, and
what it left in its folder.
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from trainer import config as configs
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.reading import check_saved_files, home_at, home_of
from trainer.config.wording import listing
from trainer.messages import UserError, refuse_os_errors
from trainer.workdir.fingerprint import (
    Change,
    check_allowed,
    config_changes,
    fingerprint_differences,
    fingerprint_digest,
    refuse_changes,
    refuse_config,
    step_changes,
)
from trainer.writers.base import Log, to_stderr
from trainer.writers.files import (
    make_folder,
    other_kind,
    read_regular,
    remove_temporaries,
    replace_file,
    sync,
)
from trainer.writers.json_files import DamagedFile
from trainer.writers.lines import ROW_FILES, SAMPLES_FILE, sync_rows
from trainer.writers.locks import WorkdirLock, WorkdirTakenOver
from trainer.writers.loggers import ID_FILE
from trainer.writers.run_record import FORMAT, read_record
from trainer.writers.summary import SUMMARY_FILE, read_summary

TOKENIZER_FILE = "tokenizer.json"


class Provenance(NamedTuple):
    """What a run was made from, for its run.json."""

    fingerprint: Mapping[str, Any]
    commits: Mapping[str, Any] = MappingProxyType({})  # of the repositories with the user's code
    # name, path and hash of each file that the config was read from
    files: Sequence[Mapping[str, Any]] = ()
    step_program: str | None = None  # digest of a step's program, which explains changed code


class Workdir:
    """A run's folder, which this process alone may write; UserError if it cannot be used."""

    # The config and the fingerprint of an existing run must be equal, unless it has made no step
    # (see `holds_steps`), or `allow_changed` has the difference: a path of the config, a key of the
    # fingerprint, or "config", "program" or "data" as a whole. Other changes, of "bits", are
    # logged. `texts` has more files to write, by their names; None for no such file. `take_over`
    # takes the folder from a holder on a host that is gone. `checkpoints` is the URL below which a
    # new run saves, and None for its folder; see `checkpoint.reading.home_of`. `changes` are the
    # differences from the previous process.

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: configs.Call,
        provenance: Provenance,
        texts: Mapping[str, str | None] = MappingProxyType({}),
        *,
        allow_changed: Sequence[str] = (),
        take_over: bool = False,
        checkpoints: str | None = None,
        log: Log = to_stderr,
    ) -> None:
        self._log, self._step_program = log, provenance.step_program
        self.path = Path(path).absolute()
        self.config_file = self.path / "config.yaml"
        self.run_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        check_allowed(allow_changed, config, provenance.fingerprint)
        # Before the folder is created, so that a refused run leaves nothing behind.
        self._check(config, provenance.fingerprint, allow_changed)
        place = self._new_place(checkpoints)
        make(self.path)
        try:
            self.lock = WorkdirLock(self.path, take_over=take_over, beat=True)
        except OSError as e:
            raise self._unwritable(e) from e
        try:
            remove_temporaries(self.path)
            # Check again: another process may have written before the lock was taken.
            before, self.changes, begun = self._check(config, provenance.fingerprint, allow_changed)
            if self.changes and not begun:
                # Its tokenizer, and TensorBoard's files, have the values of the old config.
                for file in (self.path / TOKENIZER_FILE, *self.path.glob("events.out.*")):
                    file.unlink(missing_ok=True)
            self._record = self._begin(before, provenance, texts.get(TOKENIZER_FILE))
            self.write("config.yaml", configs.file_text(config))
            for name, text in texts.items():
                if text is not None:
                    self.write(name, text)
            # Last, because a folder with a run.json counts as that of a run.
            self._save_record()
            if place is not None and not self.checkpoints.exists():  # asked again, under the lock
                self.write(self.checkpoints.name, f"{place}\n")
            # Delete the summary of the previous process: the run has not ended.
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        except BaseException as e:
            self.lock.close()
            if isinstance(e, OSError):
                raise self._unwritable(e) from e
            if isinstance(e, WorkdirTakenOver):  # another process took over, and won
                raise UserError(str(e)) from e
            raise
        self._log_changes(begun)

    def _new_place(self, url: str | None) -> str | None:
        """Returns where a new run saves below a URL; UserError if nothing can be saved there."""
        if url is None or self.checkpoints.exists():
            return None
        # A name of its own: no other run must write there, or take these checkpoints for its own.
        name = re.sub(r"[^\w.-]", "_", self.path.name, flags=re.ASCII)
        place = f"{url.rstrip('/')}/{name}-{secrets.token_hex(4)}"
        with refuse_os_errors(f"No checkpoint can be saved in {url}"):
            home_at(place).begin(f"{socket.gethostname()}:{self.path}")
        return place

    def _begin(
        self, before: dict[str, Any] | None, provenance: Provenance, tokenizer: str | None
    ) -> dict[str, Any]:
        """Returns the run's record with an entry for this process at the end of its lineage."""
        # `before` is the record that earlier processes left, and None for the first one.
        lineage = list(before["lineage"]) if before else []
        for entry in lineage:
            # A process that was not killed has recorded its end, in `Workdir.close`.
            if entry.get("exit") is None:
                entry["exit"] = "killed"
        # Carry over the lost rows of a run that was stopped or killed: no exit code tells of them.
        ended = not lineage or lineage[-1].get("exit") not in ("stopped", "killed")
        lost_rows = [] if ended else list(lineage[-1].get("lost_rows", []))
        lineage.append(
            {
                "began": now(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "epoch": self.lock.epoch,
                "command": [sys.executable, *sys.orig_argv[1:]],
                "fingerprint": fingerprint_digest(provenance.fingerprint),
                "changed": [str(change) for change in self.changes],
                "config_files": [dict(file) for file in provenance.files],
                "vocabulary": dict(provenance.commits),
                "restored": None,
                "rows": None,
                "lost_rows": lost_rows,
                "exit": None,
            }
        )
        record = {"format": FORMAT, "fingerprint": dict(provenance.fingerprint), "lineage": lineage}
        if self._step_program is not None:
            record["step_program"] = self._step_program
        if tokenizer is not None:
            record["tokenizer"] = _sha256(tokenizer.encode())
        return record

    def _log_changes(self, begun: bool) -> None:
        for change in self.changes:
            known = "as allowed" if change.kind != "bits" else "bits may differ"
            self._log(
                f"Changed since this run stopped: {change} ({known})."
                if begun
                else f"Changed since this run ended before its first step: {change}."
            )

    def check_fence(self) -> None:
        """Raises WorkdirTakenOver if another process has taken the folder over."""
        self.lock.check_fence()

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder, all of it or nothing; raises WorkdirTakenOver or OSError."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in {self.path}.")
        self.check_fence()
        replace_file(self.path / name, text.encode(), self.check_fence)

    def sync_metrics(self) -> None:
        """Syncs metrics.jsonl and samples.jsonl, which must be on disk before a checkpoint."""
        # nonfinite.json and rollbacks.json are synced as they are written.
        sync_rows(self.path)
        sync(self.path)  # the name of a new metrics.jsonl

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The entries of run.json for the processes so far, oldest first; the last is this one."""
        return self._record["lineage"]

    def record(self, **values: object) -> None:
        """Adds values of JSON to the entry of this process in run.json."""
        self.lineage[-1].update(values)
        try:
            self._save_record()
        except OSError as e:  # the run must not end because of its record
            self._log(f"{self.run_file} could not be written: {e.strerror}.")

    def rows(self) -> list[dict[str, int]]:
        """Returns the recorded rows of the processes of this run, oldest first."""
        return [entry["rows"] for entry in self.lineage if entry.get("rows")]

    @property
    def lost_rows(self) -> list[str]:
        """Sentences about rows lost for good since the run last ended with exit code 1."""
        return self.lineage[-1]["lost_rows"]

    def lose_rows(self, sentence: str, count: int = 0) -> None:
        """Records in run.json that rows of metrics.jsonl are lost for good."""
        # `count` says how many of the recorded rows are among them.
        if rows := self.lineage[-1].get("rows"):
            rows = rows | {"rows": rows["rows"] - count}
        self.record(lost_rows=[*self.lost_rows, sentence], rows=rows)

    def close(self, exit_kind: str, **values: object) -> None:
        """Records in run.json how this process ended, and releases the lock."""
        # The kind is "done", "stopped" or "failed"; or "crashed" for a wave of a sweep that an
        # error ended. The next process records "killed" for one that did not call this.
        if exit_kind in ("done", "failed"):  # a run that diverged has results
            values["results"] = results_of(self.path)
        try:
            self.lineage[-1].update({"exit": exit_kind, "ended": now(), **values})
            self._save_record()
        except (WorkdirTakenOver, OSError):
            pass  # the folder was taken over, or the disk is full: the run's errors matter more
        finally:
            self.lock.close()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"The workdir {self.path} cannot be written: {error.strerror}. "
            "Choose another --workdir, or free space for this one."
        )

    def _check(
        self, config: configs.Call, fingerprint: Mapping[str, Any], allowed: Sequence[str]
    ) -> tuple[dict[str, Any] | None, list[Change], bool]:
        """Returns the content of run.json, what differs from this run, and `holds_steps`."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"The workdir {self.path} is a file. Choose another --workdir.")
        check_files(self.path)
        problem = f"The workdir {self.path} cannot be read"
        with refuse_os_errors(problem, "Choose another --workdir."):
            if not self._holds_results() and self.path.exists():
                check_only_run_files(self.path)
            record = read_record(self.run_file)
            if record is not None and not home_of(self.checkpoints).holds_results():
                refuse_trial(self.path, record)
            changes: list[str] = []
            if self.config_file.exists():
                changes = config_changes(self.config_file, config)
            elif self._holds_results():
                raise UserError(
                    f"The workdir {self.path} has results but no config.yaml, so that the config "
                    "they were made with is unknown. Choose another --workdir."
                )
            begun = holds_steps(self.path)
        if begun:
            refuse_config(self.path, changes, allowed)
        differing = [
            Change("program", path, *map(str.strip, values.split(" -> ", 1)))
            for path, _, values in (line.partition(": ") for line in changes)
            if " -> " in values  # as in "steps: 10 -> 20"
        ]
        if record is not None:
            others = fingerprint_differences(record["fingerprint"], fingerprint)
            steps = record.get("step_program"), self._step_program
            same = steps[0] == steps[1] if all(steps) else None
            if same is False:
                found = [*differing, *others]
                others += step_changes(record["fingerprint"], fingerprint, found, steps)
            if begun:
                refuse_changes(self.path, others, allowed, same)
            differing += [x for x in others if x.key != "config"]  # which was compared above
        return record, differing, begun

    def _holds_results(self) -> bool:
        return self.metrics_file.exists() or home_of(self.checkpoints).holds_results()

    def _save_record(self) -> None:
        self.write("run.json", json.dumps(self._record, indent=1) + "\n")


# The path of the folder.


def check_name(path: str | os.PathLike[str]) -> None:
    """Raises UserError if Python and UTF-8 encode the path of a workdir to different bytes."""
    # The arrays of a checkpoint are written by C++, which encodes every path in UTF-8. They would
    # be written to another folder than the other files, or not at all.
    text = str(Path(path).absolute())
    with contextlib.suppress(UnicodeEncodeError):  # the path has no encoding here
        if os.fsencode(text) == text.encode():
            return
    try:
        shown = os.fsencode(text).decode()
    except UnicodeError:
        shown = text.encode(errors="backslashreplace").decode()
    encoding = sys.getfilesystemencoding()
    why = "this path is not valid UTF-8. Rename the folder"
    if encoding != "utf-8":
        why = f"names of files are read as {encoding} here. Set PYTHONUTF8=1 in the environment"
    raise UserError(
        f"The workdir {shown} cannot hold checkpoints: their arrays are written under names in "
        f"UTF-8, and {why}, or choose another --workdir."
    )


def make(path: Path) -> None:
    """Creates a workdir, which may exist, with permissions 0700; raises UserError if it fails."""
    with refuse_os_errors(f"The workdir {path} cannot be made", "Choose another --workdir."):
        make_folder(path, mode=0o700)


# What the folder has already.

# The files of a run.
NAMES = (
    *("config.yaml", "config_full.yaml", "plan.txt", "run.json", SUMMARY_FILE, *ROW_FILES),
    *("nonfinite.json", "rollbacks.json", "clipped.json", "trace.jsonl", TOKENIZER_FILE, ID_FILE),
    *("lock", "epoch"),
)
# Names that may exist before a run begins: files of a run that was killed at once, hidden files,
# and logs of the run's launcher (Slurm, or `... | tee WORKDIR/log.txt`).
_NO_STRANGER = re.compile(
    r"checkpoints|events\.out\..*|\..*|lost\+found|wandb|.*\.(log|out|err)|log(\W.*)?"
)
_AFTER_CONFIG = {"config_full.yaml", TOKENIZER_FILE}
_AFTER_RECORD = {SUMMARY_FILE, SAMPLES_FILE}
# Files that a run has before its first step.
_BEFORE_STEPS = {"config.yaml", "plan.txt", "run.json", "lock", "epoch", SUMMARY_FILE, ID_FILE}
_BEFORE_STEPS |= _AFTER_CONFIG


def check_files(folder: Path) -> None:
    """Raises DamagedFile if one of a run's files is a folder, a pipe, a socket or a device."""
    # Opening a pipe would block forever.
    for name in NAMES:
        try:
            mode = (folder / name).stat().st_mode
        except OSError:  # absent, or unreadable, which whoever reads the file reports
            continue
        if not stat.S_ISREG(mode):
            raise DamagedFile(
                folder / name,
                f"{folder / name} is {other_kind(mode)}, where a run keeps a file",
                "move it away, or choose another workdir.",
            )


def check_only_run_files(folder: Path) -> None:
    """Raises UserError if an existing folder without results has files that no run writes."""
    # The folder of a run has run.json. If a crash or the user removed that file, a folder counts as
    # one of a run if it has only files that a run writes, and config.yaml is as a run writes it:
    # the user's own config.yaml must not be overwritten. Raises OSError if it is unreadable.
    names = {path.name for path in folder.iterdir()}
    if "run.json" in names:
        return
    strangers = unknown_names(folder, NAMES)
    # A run writes config.yaml before _AFTER_CONFIG, and run.json before _AFTER_RECORD.
    strangers += names & _AFTER_RECORD
    strangers += names & (set() if "config.yaml" in names else _AFTER_CONFIG)
    if "config.yaml" in names and not _is_as_written(folder / "config.yaml"):
        strangers.append("config.yaml")
    if strangers:
        raise UserError(
            f"The workdir {folder} is not the folder of a run: it holds "
            f"{listing(sorted(strangers), 4)}, and no run.json. Nothing was written there. Name a "
            f"folder that is empty or does not exist, such as --workdir={folder / 'run'}."
        )


def holds_steps(folder: Path) -> bool:
    """Returns whether a folder has anything of a step: a checkpoint, a row or another result."""
    # A run that ended before its first step has nothing that another config would contradict. The
    # folder, of a run or a wave, may not exist. Raises OSError if it cannot be read.
    names = unknown_names(folder, _BEFORE_STEPS) if folder.exists() else []
    # An empty file is no result: it was opened, and nothing was written.
    written = [name for name in names if (folder / name).is_dir() or (folder / name).stat().st_size]
    return bool(written) or home_of(folder / "checkpoints").holds_results()


def unknown_names(folder: Path, known: Collection[str]) -> list[str]:
    """Returns the names in a folder that are neither known nor those of logs and hidden files."""
    names = sorted({path.name for path in folder.iterdir()} - set(known))
    unknown = [name for name in names if not _NO_STRANGER.fullmatch(name)]
    return [name for name in unknown if not _is_an_output_of_ours(folder / name)]


def _is_as_written(file: Path) -> bool:
    """Returns whether a config.yaml was written by a run: it is canonical, byte for byte."""
    try:
        return configs.file_text(configs.load([file]).root) == file.read_text(encoding="utf-8")
    except (UserError, UnicodeError):
        return False


def _is_an_output_of_ours(file: Path) -> bool:
    """Returns whether a file is stdout or stderr of this process, as in `> WORKDIR/output`."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            # The shell creates that file before the command starts.
            if os.path.samestat(os.fstat(stream), file.stat()):
                return True
    return False


# Of which run.json has the hashes, besides metrics.jsonl.
_FILES = (SUMMARY_FILE, "config.yaml", "config_full.yaml")


def check_tokenizer(folder: Path) -> None:
    """Raises UserError if tokenizer.json is not the one that the run has written."""
    try:
        known = (read_record(folder / "run.json") or {}).get("tokenizer")
        found = _sha256(read_regular(folder / TOKENIZER_FILE))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from error
    if known not in (None, found):
        raise UserError(
            f"{folder / TOKENIZER_FILE} is not the tokenizer of this run, whose hash is in "
            "run.json: with another one, a text would be nonsense. Put the file back that the run "
            "has written; or remove it, and the data set of the run makes it again."
        )


def refuse_trial(folder: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for the folder of a finished trial, where a run would begin anew."""
    # The folder must have no checkpoints; `record` is the content of its run.json.

    # Without a summary.json, the trial is computed as a run, which was killed before it was moved.
    if "sweep" in record and (folder / SUMMARY_FILE).exists():
        raise UserError(
            f"The workdir {folder} is that of a finished trial of a sweep, which has no checkpoint"
            " to continue from. Choose another --workdir, in which the trial is repeated."
        )


def results_of(folder: Path) -> dict[str, Any] | None:
    """Returns the SHA-256 of files and the steps of the checkpoints, as run.json has them."""
    # None if the disk cannot be read, or there is no metrics.jsonl.
    try:
        rows = _sha256(read_regular(folder / "metrics.jsonl"))
        files = {
            name: _sha256(read_regular(folder / name))
            for name in _FILES
            if (folder / name).exists()
        }
        steps = list(home_of(folder / "checkpoints").steps())
    except (OSError, CheckpointError):
        return None
    return {"metrics_sha256": rows, "files": files, "checkpoints": steps}


def edited_files_of_run(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Returns the files of a run that are not as it left them when it ended."""
    # `record` is the content of its run.json. Trials of sweeps have none, as their ledger has them,
    # nor has a run that goes on; earlier versions recorded no hash but that of metrics.jsonl.
    last = next(reversed(record.get("lineage", ())), {})
    if "sweep" in record or not last.get("results"):
        return []
    then, here = (
        {"metrics.jsonl": each.get("metrics_sha256"), **each.get("files", {})}
        for each in (last["results"], results_of(folder) or {})
    )
    found = [name for name, hash in then.items() if here.get(name) != hash]
    return found + ["run.json"] * (last["fingerprint"] != fingerprint_digest(record["fingerprint"]))


def is_untouched(
    folder: Path, config: configs.Call, fingerprint: Callable[[], Mapping[str, Any]], step: int
) -> bool:
    """Returns whether a run with this config has ended in a folder not changed since."""
    # `step` is the last of the run; `fingerprint` is called for a run that has ended. Nothing is
    # written, and nothing is locked: a process that goes on with the run has removed summary.json.
    try:
        summary, record = read_summary(folder), read_record(folder / "run.json")
        if summary is None or record is None or (summary.end, summary.step) != ("done", step):
            return False
        last = next(reversed(record["lineage"]), {})
        results = last.get("results")
        here = results_of(folder) or {}
        if last.get("exit") != "done" or not results or {**here, **results} != here:
            return False
        if fingerprint_differences(record["fingerprint"], fingerprint()):
            return False
        if read_regular(folder / "config.yaml") != configs.file_text(config).encode():
            return False
        if not all((folder / name).is_file() for name in ("config_full.yaml", "plan.txt")):
            return False
        checkpoints = home_of(folder / "checkpoints").steps()
        if max(checkpoints, default=None) != step:
            return False
        check_saved_files(checkpoints[step])
        if "tokenizer" in record:
            check_tokenizer(folder)
    except (OSError, UserError, CheckpointError):
        return False
    return True


def now() -> str:
    """Returns the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
